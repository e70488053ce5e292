"""Feedback, review and clusters in the service: journaled, replayed and in snapshots like an observe."""

import asyncio
import json
import threading
from functools import partial

import numpy as np
import pytest

from conftest import unit
from made_service import LIMITS, PROTOTYPES, acquired
from protodcs import methods
from protodcs.diagnosis import diagnose
from protodcs.discovery import DiscoveryConfig, clustering
from protodcs.errors import InputError, StoreError, UnknownClusterError, UnknownSampleError, UsageError
from protodcs.serve.stream.answers import unpack_decision
from protodcs.serve.stream.feedback import Feedback, pack_feedback, unpack_feedback
from protodcs.serve.stream.live_stream import LiveStream, StreamSpec
from protodcs.serve.stream.records import Kind
from protodcs.serve.workers import worker
from test_access import guarded
from test_service_app import ROWS, served

NOW = 1_700_000_000.0
DIMENSION = ROWS.shape[1]


def kinds(seed=0):
    """Features of three unknown kinds of images, orthogonal to the classes, and as many known ones, shuffled."""
    rng = np.random.default_rng(seed)
    directions = np.linalg.qr(np.concatenate([ROWS.T, rng.normal(size=(DIMENSION, 3))], axis=1))[0]
    unknown = directions[:, len(ROWS) :].T
    rows = np.concatenate([np.repeat(unknown, 40, axis=0), ROWS[rng.integers(len(ROWS), size=120)]])
    rows = rows + 0.1 * rng.normal(size=rows.shape)
    return unit(rows[rng.permutation(len(rows))]).astype("<f4")


FEATURES = kinds()
STORING = DiscoveryConfig()


def loaded(snapshot=None, start=0, tail=(), config=STORING):
    spec = StreamSpec(
        method="streamdcs",
        config={},
        classes=[str(number) for number in range(len(ROWS))],
        prototypes=PROTOTYPES.fingerprint,
        discovery=config,
    )
    return LiveStream(acquired(spec.pack(), snapshot, start, tail), PROTOTYPES, LIMITS)


def same(one, other):
    return one.checkpoint("s").snapshot == other.checkpoint("s").snapshot and one.position == other.position


def edit(live, **said):
    return live.change(Kind.EDIT_CLUSTERS, f"edit-{live.position}", json.dumps(said).encode(), NOW)


def events(live):
    """Yield what happens to a stream, one change after another."""
    for number, feature in enumerate(FEATURES):
        yield Kind.OBSERVE, feature.tobytes()
        if number == 190:
            yield Kind.EDIT_CLUSTERS, b'{"action": "update"}'
            first, second, *_ = [cluster["id"] for cluster in live.clusters()["clusters"]]
            yield Kind.EDIT_CLUSTERS, json.dumps({"action": "name", "cluster": first, "name": "canoe"}).encode()
            yield Kind.EDIT_CLUSTERS, json.dumps({"action": "merge", "clusters": [first, second]}).encode()
            yield Kind.EDIT_CLUSTERS, json.dumps({"action": "split", "cluster": first}).encode()
            yield Kind.FEEDBACK, pack_feedback(Feedback("2", 5))
        if number == 200:
            yield Kind.EDIT_CLUSTERS, b'{"action": "update"}'
            biggest = live.clusters()["clusters"][0]["id"]
            yield Kind.EDIT_CLUSTERS, json.dumps({"action": "assign", "cluster": biggest, "label": "1"}).encode()


def test_a_stream_is_the_same_from_its_journal_and_from_any_snapshot():
    live, journal, snapshots = loaded(), [], []
    for kind, payload in events(live):
        snapshots.append(live.checkpoint("s"))
        journal.append(live.change(kind, f"key-{live.position}", payload, NOW).pack())
    assert len(live.engine._memory.corrections) > 1
    replayed = loaded(tail=journal)
    assert replayed.different == 0
    assert same(live, replayed)
    for cut in (0, 1, 60, 192, 194, 196, 207, len(journal) - 1):
        restored = loaded(snapshots[cut], cut, journal[cut:])
        assert restored.different == 0
        assert same(live, restored), cut


def test_loading_a_stream_repeats_no_clustering_pass(monkeypatch):
    passes = []
    find_groups = clustering.find_groups
    monkeypatch.setattr(clustering, "find_groups", lambda *given: passes.append(1) or find_groups(*given))
    live, journal = loaded(), []
    for number, feature in enumerate(FEATURES):
        journal.append(live.change(Kind.OBSERVE, str(number), feature.tobytes(), NOW).pack())
        if number >= 100 and number % 10 == 0:
            journal.append(edit(live, action="update").pack())
    assert len(passes) == 14
    replayed = loaded(tail=journal)
    assert len(passes) == 14
    assert replayed.different == 0
    assert replayed.clusters()["clusters"]
    assert same(live, replayed)
    assert same(live, loaded(live.checkpoint("s"), live.position))


def test_groups_that_another_processor_found_are_replayed_as_they_are(monkeypatch):
    live, journal = loaded(), []
    for number, feature in enumerate(FEATURES):
        journal.append(live.change(Kind.OBSERVE, str(number), feature.tobytes(), NOW).pack())
    with monkeypatch.context() as patched:
        patched.setattr(clustering, "find_groups", lambda rows, _: np.arange(len(rows)) // 7)
        journal.append(edit(live, action="update").pack())
    replayed = loaded(tail=journal)
    assert replayed.different == 0
    assert same(live, replayed)


def clustered():
    live = loaded()
    for number, feature in enumerate(FEATURES):
        live.change(Kind.OBSERVE, str(number), feature.tobytes(), NOW)
    assert live.clusters()["due"]
    edit(live, action="update")
    assert not live.clusters()["due"]
    return live


def test_clusters_name_the_positions_of_their_samples():
    live = clustered()
    facts = live.clusters()
    assert facts["stored"] - facts["unassigned"] == sum(cluster["size"] for cluster in facts["clusters"])
    for cluster in facts["clusters"]:
        rows = FEATURES[cluster["positions"]]
        assert (rows @ rows.T).mean() > 0.5


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ({"action": "name", "cluster": 999, "name": "x"}, UnknownClusterError),
        ({"action": "name", "cluster": 0, "name": ""}, InputError),
        ({"action": "merge", "clusters": [0, 1, 1]}, InputError),
        ({"action": "merge", "clusters": [0, 999]}, UnknownClusterError),
        ({"action": "assign", "cluster": 0, "label": "no such class"}, InputError),
        ({"action": "explode"}, InputError),
    ],
)
def test_a_wrong_edit_changes_nothing(said, error):
    live = clustered()
    before = live.checkpoint("s")
    with pytest.raises(error):
        edit(live, **said)
    assert live.checkpoint("s") == before


def test_a_replayed_edit_of_a_cluster_that_is_missing_is_counted_and_ignored():
    """If a decision differs on replay, the clusters may differ."""
    live = clustered()
    record = edit(live, action="name", cluster=live.clusters()["clusters"][0]["id"], name="canoe")
    other = loaded()
    other.position = record.position
    other.replay(record.pack())
    assert other.different == 1
    assert other.position == live.position


def test_feedback_by_position_corrects_the_sample_at_once():
    live = clustered()
    position = next(number for number in range(200) if not unpack_decision(live.peek(FEATURES[number].tobytes())).known)
    live.change(Kind.FEEDBACK, "feedback", pack_feedback(Feedback("2", position)), NOW)
    assert unpack_decision(live.peek(FEATURES[position].tobytes())).label == "2"


def test_feedback_on_a_position_without_a_sample_is_an_error():
    live = clustered()
    before = live.checkpoint("s")
    with pytest.raises(UnknownSampleError, match="Send the feature instead"):
        live.change(Kind.FEEDBACK, "feedback", pack_feedback(Feedback("2", 10_000)), NOW)
    assert live.checkpoint("s") == before


def test_a_corrected_sample_leaves_the_review_queue():
    live = clustered()
    queue = live.review(500)
    assert sorted(queue["positions"]) == [*range(len(FEATURES))]
    assert queue["corrected"] == []
    first = queue["positions"][0]
    live.change(Kind.FEEDBACK, "feedback", pack_feedback(Feedback(None, first)), NOW)
    after = live.review(500)
    assert after["corrected"] == [first]
    assert first not in after["positions"]
    live.change(Kind.FEEDBACK, "withdrawn", pack_feedback(Feedback(None, first, withdrawn=True)), NOW)
    assert live.review(500) == queue


def test_similar_samples_come_with_an_explanation_the_nearest_first():
    live = clustered()
    similar = live.explain_sample(7)["similar"]
    assert similar[0] == 7
    assert all(FEATURES[place] @ FEATURES[7] > 0.5 for place in similar[:5])


def test_a_stream_without_discovery_stores_no_samples():
    live = loaded(config=None)
    live.change(Kind.OBSERVE, "0", FEATURES[0].tobytes(), NOW)
    for ask in (live.clusters, lambda: live.review(5)):
        with pytest.raises(UsageError, match="Create it with `discovery`"):
            ask()
    live.change(Kind.FEEDBACK, "1", pack_feedback(Feedback("2", feature=FEATURES[0].tobytes())), NOW)
    assert unpack_decision(live.peek(FEATURES[0].tobytes())).label == "2"


def test_damaged_samples_in_a_snapshot_are_a_store_error():
    packed = clustered().samples.pack()
    for data in (b"", packed[:10], packed[:-3], b"x" + packed):
        with pytest.raises(StoreError):
            loaded().samples.load(data)


@pytest.mark.parametrize("feedback", [Feedback(None, 7), Feedback("a class", feature=b"1234"), Feedback("ä", 0)])
def test_feedback_unpacks_to_what_was_packed(feedback):
    assert unpack_feedback(pack_feedback(feedback)) == feedback


# Over HTTP.


@pytest.mark.usefixtures("virtual_time")
async def test_a_read_key_lists_clusters_and_writes_nothing(tmp_path):
    async with guarded(tmp_path, discovery=True) as service:
        body = {"prototypes": ROWS.tolist(), "id": "camera"}
        created = await service.ask("acme admin", "POST", "/v1/streams", json=body)
        assert created.status_code == 201, created.text
        for rows in np.split(FEATURES, 4):
            path, features = "/v1/streams/camera/observe", {"features": rows.tolist()}
            assert (await service.ask("acme observe", "POST", path, json=features)).status_code == 200

        async def listed(who):
            found = await service.ask(who, "GET", "/v1/streams/camera/clusters")
            status = await service.ask("acme read", "GET", "/v1/streams/camera")
            return bool(found.json()["clusters"]), status.json()["position"]

        assert await listed("acme read") == (False, len(FEATURES))
        assert await listed("acme observe") == (True, len(FEATURES) + 1)
        assert await listed("acme read") == (True, len(FEATURES) + 1)


@pytest.mark.usefixtures("virtual_time")
async def test_a_list_of_clusters_need_not_wait_for_a_pass():
    async with served(discovery=True) as service:
        for rows in np.split(FEATURES, 4):
            await service.post("s/observe", json={"features": rows.tolist()})
        lists = [(await service.client.get("/v1/streams/s/clusters?wait=false")).json() for _ in range(2)]
        assert [(bool(found["clusters"]), found["updating"]) for found in lists] == [(False, True), (True, False)]
        assert lists[0]["stored"] == lists[1]["stored"] > 0


@pytest.mark.usefixtures("virtual_time")
async def test_people_review_and_correct_a_stream_over_http():
    async with served(discovery=True) as service:
        for rows in np.split(FEATURES, 4):
            observed = await service.post("s/observe", json={"features": rows.tolist()})
            assert observed.status_code == 200, observed.text
        found = (await service.client.get("/v1/streams/s/clusters")).json()
        first, second, *_ = [cluster["id"] for cluster in found["clusters"]]
        assert not any("cluster" in decision for decision in observed.json()["decisions"])
        named = await service.post(f"s/clusters/{first}:name", json={"name": "canoe"})
        assert named.json()["cluster"] == first
        typical = [FEATURES[cluster["positions"][0]].tolist() for cluster in found["clusters"][:2]]
        joined = (await service.post("s/observe", json={"features": typical})).json()["decisions"]
        assert [(seen["cluster"], seen["cluster_name"]) for seen in joined] == [(first, "canoe"), (second, None)]
        merged = await service.post("s/clusters:merge", json={"clusters": [first, second]})
        assert merged.json()["cluster"] == first
        split = (await service.post(f"s/clusters/{first}:split", json={})).json()["cluster"]
        assert (await service.post(f"s/clusters/{split}:dismiss", json={})).status_code == 200
        assert (await service.post(f"s/clusters/{first}:assign", json={"label": "3"})).status_code == 200
        assert (await service.post(f"s/clusters/{first}:name", json={"name": "x"})).status_code == 404
        queue = (await service.client.get("/v1/streams/s/review?limit=5")).json()["items"]
        assert len(queue) == 5
        position = next(item["position"] for item in queue if item["position"] < len(FEATURES))
        unseen = (await service.observe(FEATURES[position].tobytes(), path="s/peek")).json()["decisions"][0]
        for body, status in (
            ({"position": position, "label": "1"}, 200),
            ({"position": 10**6, "label": "1"}, 404),
            ({"position": position, "label": "zebra"}, 404),
            ({"label": "1"}, 422),
        ):
            assert (await service.post("s/feedback", json=body)).status_code == status
        peek = partial(service.observe, FEATURES[position].tobytes(), path="s/peek")
        assert (await peek()).json()["decisions"][0]["label"] == "1"
        assert (await service.client.delete(f"/v1/streams/s/feedback/{position}")).status_code == 200
        assert (await peek()).json()["decisions"][0] == unseen


async def observe_all(service):
    for rows in np.split(FEATURES, 4):
        assert (await service.post("s/observe", json={"features": rows.tolist()})).status_code == 200


@pytest.mark.usefixtures("virtual_time")
async def test_a_cluster_becomes_a_class_as_its_preview_says():
    async with served(discovery=True) as service:
        await observe_all(service)
        cluster = (await service.client.get("/v1/streams/s/clusters")).json()["clusters"][0]
        path = f"s/clusters/{cluster['id']}"
        before = (await service.client.get("/v1/streams/s/state")).content
        preview = (await service.client.get(f"/v1/streams/{path}/preview?name=canoe")).json()
        assert (await service.client.get("/v1/streams/s/state")).content == before
        assert preview["samples"] == len(FEATURES)
        assert len({*cluster["positions"]} & {*preview["positions"]}) >= 0.6 * cluster["size"]
        assert (preview["would_change"], preview["known_today"]) == (len(preview["positions"]), 0)
        key = {"Idempotency-Key": "once"}
        added, again = [await service.post(f"{path}:add-class", json={"name": "canoe"}, headers=key) for _ in range(2)]
        assert (added.status_code, again.status_code) == (201, 201)
        assert again.json() == {**added.json(), "repeated": True}
        engine = methods.restore((await service.client.get("/v1/streams/s/state")).content)
        became = [place for place, feature in enumerate(FEATURES) if engine.peek(feature).label == "canoe"]
        assert became == sorted(preview["positions"])
        taken = await service.client.get(f"/v1/streams/{path}/preview?name=canoe")
        assert (taken.status_code, "already" in taken.json()["detail"]) == (422, True)
        assert (await service.client.delete("/v1/streams/s/classes/canoe")).status_code == 200
        left = (await service.client.get("/v1/streams/s/clusters")).json()["clusters"]
        assert [one["name"] for one in left if one["id"] == cluster["id"]] == ["canoe"]
        assert (await service.client.get("/v1/streams/s/clusters/99/preview?name=x")).status_code == 404


@pytest.mark.usefixtures("virtual_time")
async def test_a_stream_is_diagnosed_over_http_and_does_not_change():
    async with served(discovery=True) as service:
        await observe_all(service)
        before = (await service.client.get("/v1/streams/s/state")).content
        answer = (await service.client.get("/v1/streams/s/diagnosis")).json()
        assert (await service.client.get("/v1/streams/s/state")).content == before
        engine = methods.restore(before)
        stored = FEATURES.astype(np.float16).astype(np.float32)
        assert answer == json.loads(json.dumps(diagnose(engine, stored).to_dict()))
        assert answer["images"] == len(FEATURES)
        assert answer["two_groups"] is True
        assert answer["missing_class"] is not None


async def test_a_diagnosis_does_not_delay_samples_of_its_stream(monkeypatch):
    asked, answered = threading.Event(), threading.Event()

    def waiting(engine, features):
        asked.set()
        assert answered.wait(300)
        return diagnose(engine, features)

    monkeypatch.setattr(worker, "diagnose", waiting)
    async with served(discovery=True) as service:
        await observe_all(service)
        question = asyncio.create_task(service.client.get("/v1/streams/s/diagnosis"))
        assert await asyncio.to_thread(asked.wait, 300)
        later = await service.post("s/observe", json={"features": FEATURES[:1].tolist()})
        assert later.status_code == 200
        answered.set()
        found = await question
        assert found.status_code == 200
        # It is about the samples before.
        assert found.json()["images"] == len(FEATURES)


@pytest.mark.usefixtures("virtual_time")
async def test_a_stream_without_samples_is_diagnosed_by_its_scores_alone():
    async with served() as service:
        await observe_all(service)
        answer = (await service.client.get("/v1/streams/s/diagnosis")).json()
        assert (answer["two_groups"], answer["missing_class"], answer["classes"]) == (True, None, [])
        assert any("stores no samples" in sentence for sentence in answer["sentences"])
        assert (await service.client.get("/v1/streams/none/diagnosis")).status_code == 404
