"""Many streams in one process: what they share, what each of them costs, and that none of them notices the others."""

import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import random_stream
from protodcs import ProtoDCS, Prototypes, StreamDCS, StreamDCSConfig, Streams, methods
from protodcs.errors import InputError, StateError, UsageError

EVOLVING = {"evolution_gate": "entropy", "cache_admission": "verified", "evolution_prior": 1}
# Method and options.
POOLS = {
    "streamdcs": ("streamdcs", {}),
    "protodcs": ("protodcs", {}),
    "evolving": ("protodcs", EVOLVING),
    "tda": ("tda", {}),
    "dpe": ("dpe", {}),
}
ours = pytest.mark.parametrize("kind", ["streamdcs", "protodcs", "evolving"])


def shared_arrays(engine):
    """The arrays of an engine that follow from its prototypes alone."""
    memory = engine._memory
    found = {"entry": engine._entry(memory), "inverse_norms": memory.inverse_norms}
    if isinstance(engine, ProtoDCS) and not memory.evolved:
        found["unit_text"] = memory.unit_text
    if isinstance(engine, StreamDCS):
        found["likeness"] = memory.class_bias.likeness
    return found


@ours
def test_engines_share_what_follows_from_their_prototypes_and_never_write_to_it(kind):
    rows, features, _ = random_stream(classes=9, samples=300, seed=3)
    prototypes = Prototypes(rows)
    engines = [plain(prototypes, kind) for _ in range(5)]
    before = {name: array.copy() for name, array in shared_arrays(engines[0]).items()}
    for name in before:
        assert all(np.shares_memory(shared_arrays(e)[name], shared_arrays(engines[0])[name]) for e in engines)
    for number, engine in enumerate(engines):
        engine.observe_many(features[number * 20 :])
        engine.peek(features[0])
        engine.explain(features[0])
    engines[3].add_class("more", features[0])
    engines[3].observe_many(features[:50])
    engines[4].remove_class("0")
    engines[4].observe_many(features[:50])
    for name, array in shared_arrays(plain(prototypes, kind)).items():
        np.testing.assert_array_equal(array, before[name])


@ours
def test_an_engine_with_shared_prototypes_answers_as_one_with_its_own(kind):
    rows, features, _ = random_stream(classes=9, samples=300, seed=4)
    shared = Prototypes(rows)
    first, second = plain(rows, kind), plain(shared, kind)
    plain(shared, kind).observe_many(features[::-1].copy())
    for feature in features:
        assert first.observe(feature).openness == second.observe(feature).openness
    assert first.snapshot() == second.snapshot()


def test_shared_prototypes_cannot_be_written_to_from_outside():
    prototypes = Prototypes(np.eye(3, 8))
    with pytest.raises(ValueError, match="read-only"):
        prototypes.rows[0, 0] = 2.0


def test_prototypes_have_one_fingerprint_whatever_their_number_type_and_length():
    rows = random_stream(classes=5)[0]
    assert Prototypes(rows).fingerprint == Prototypes(np.asfortranarray(rows * 2.0)).fingerprint
    assert Prototypes(rows).fingerprint != Prototypes(rows[::-1].copy()).fingerprint
    assert Prototypes(np.eye(2, 6)).fingerprint != Prototypes(np.eye(3, 4)).fingerprint


@pytest.mark.parametrize("name", methods.names())
def test_every_method_over_features_takes_shared_prototypes(name):
    rows, features, _ = random_stream(samples=60)
    first, second = (methods.create(name, prototypes) for prototypes in (rows, Prototypes(rows)))
    first.observe_many(features)
    second.observe_many(features)
    assert first.snapshot() == second.snapshot()


def resident(engine):
    """Bytes of all arrays that are this engine's own."""
    seen = {id(array) for array in shared_arrays(engine).values()}

    def weigh(thing):
        if isinstance(thing, np.ndarray):
            owner = thing if thing.base is None or not isinstance(thing.base, np.ndarray) else thing.base
            fresh = id(owner) not in seen and id(thing) not in seen
            seen.update((id(owner), id(thing)))
            return owner.nbytes if fresh else 0
        if type(thing).__module__.startswith("protodcs") and hasattr(thing, "__dict__") and id(thing) not in seen:
            seen.add(id(thing))
            return sum(weigh(part) for name, part in vars(thing).items() if name not in ("config", "_prototypes"))
        return 0

    return weigh(engine)


def test_a_stream_with_a_full_history_costs_little_more_than_its_state(clip_stream):
    rows, features, _ = clip_stream("dtd")
    engine = StreamDCS(Prototypes(rows), config=StreamDCSConfig(history=200))
    engine.observe_many(features[:200])
    state_without_prototypes = len(engine.snapshot()) - rows.size * 4
    assert resident(engine) < 1.4 * state_without_prototypes


# The pool.


def pool(folder, rows, kind="streamdcs", **options):
    """A pool, and a function that makes a plain engine like those in it."""
    method, settings = POOLS[kind]
    prototypes = Prototypes(rows)
    config = methods.create(method, prototypes, **settings).config
    return Streams(prototypes, config=config, method=method, folder=folder, **options)


def plain(rows, kind="streamdcs"):
    method, settings = POOLS[kind]
    return methods.create(method, rows, **settings)


def same(first, second):
    np.testing.assert_array_equal(first.scores, second.scores)
    for name in (
        "known",
        "index",
        "label",
        "p_unknown",
        "openness",
        "score",
        "cached",
        "evolved",
        "sequence",
        "reason",
    ):
        assert getattr(first, name) == getattr(second, name)


@pytest.mark.parametrize("kind", POOLS)
def test_twenty_interleaved_streams_of_which_two_are_awake_continue_bit_equal(tmp_path, kind):
    rows, features, _ = random_stream(classes=8, samples=600, seed=5)
    engines = [plain(rows, kind) for _ in range(20)]
    rng = np.random.default_rng(0)
    with pool(tmp_path / "pool", rows, kind, awake=2) as streams:
        for feature in features:
            at = int(rng.integers(20)) if rng.random() < 0.7 else 3
            same(streams.observe(f"stream {at}", feature), engines[at].observe(feature))
            same(streams.peek(f"stream {at}", feature), engines[at].peek(feature))
            assert len(streams._streams) <= 2
        assert len(streams) == 20
    with pool(tmp_path / "pool", rows, kind, awake=2) as streams:
        assert sorted(streams) == sorted(f"stream {at}" for at in range(20))
        for at, engine in enumerate(engines):
            assert streams.stats(f"stream {at}") == engine.stats()
            with streams.engine(f"stream {at}") as woken:
                assert woken.snapshot() == engine.snapshot()


def test_a_real_stream_sleeps_after_every_sample_and_notices_nothing(tmp_path, clip_stream):
    rows, features, _ = clip_stream("dtd")
    engine = plain(rows)
    with pool(tmp_path / "pool", rows, awake=1) as streams:
        for number, feature in enumerate(features[:250]):
            same(streams.observe("camera", feature), engine.observe(feature))
            streams.sleep("camera")
            if number % 50 == 0:
                with streams.engine("camera") as woken:
                    assert woken.snapshot() == engine.snapshot()


def test_edited_classes_frozen_streams_and_resets_survive_the_night(tmp_path):
    rows, features, _ = random_stream(samples=120, seed=6)
    engine = plain(rows)
    with pool(tmp_path / "pool", rows, awake=1) as streams:
        for change in (
            lambda e: e.observe_many(features[:60]),
            lambda e: e.add_class("more", features[3]),
            lambda e: e.remove_class("2"),
            lambda e: e.observe_many(features[60:]),
            lambda e: e.freeze(),
            lambda e: e.unfreeze(),
            lambda e: e.reset(),
        ):
            with streams.engine("a") as woken:
                change(woken)
            change(engine)
            streams.sleep("a")
            with streams.engine("a") as woken:
                assert woken.snapshot() == engine.snapshot()
            same(streams.observe("a", features[0]), engine.observe(features[0]))


def test_a_stream_that_did_not_change_is_not_written_again(tmp_path):
    rows, features, _ = random_stream(samples=20)
    with pool(tmp_path / "pool", rows) as streams:
        streams.observe("a", features[0])
        streams.sleep("a")
        path = Path(streams._path("a"))
        before = path.stat().st_mtime_ns, path.read_bytes()
        streams.peek("a", features[1])
        streams.stats("a")
        with streams.engine("a") as woken:
            woken.explain(features[2])
        streams.sleep("a")
        assert (path.stat().st_mtime_ns, path.read_bytes()) == before


def test_a_file_stays_small_however_often_its_stream_sleeps(tmp_path):
    rows, features, _ = random_stream(samples=300)
    with pool(tmp_path / "pool", rows, awake=1) as streams:
        for feature in features:
            streams.observe("a", feature)
            streams.sleep("a")
        size = Path(streams._path("a")).stat().st_size
        with streams.engine("a") as woken:
            assert size < 1.6 * len(woken.difference()) + 10_000


NAMES = [
    "a/b",
    "../../etc/passwd",
    ".",
    "..",
    "a\x00b",
    "猫 🐈",
    "x" * 1000,
    "𐍈" * 1000,
    " ",
    "\n",
    "CON",
    "a" * 255 + "/",
]


def test_any_text_is_an_id_and_stays_inside_the_folder(tmp_path):
    rows, features, _ = random_stream(samples=60)
    engines = {name: plain(rows) for name in NAMES}
    with pool(tmp_path / "pool", rows, awake=2) as streams:
        for number, feature in enumerate(features):
            name = NAMES[number % len(NAMES)]
            same(streams.observe(name, feature), engines[name].observe(feature))
    with pool(tmp_path / "pool", rows) as streams:
        assert set(streams) == set(NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]
    for bad in ("", "x" * 1001, 7, None, b"bytes", "\ud800"):
        with pool(tmp_path / "pool", rows) as streams, pytest.raises(InputError, match="id of a stream"):
            streams.observe(bad, features[0])


def test_a_stream_begins_with_its_first_feature_and_can_be_forgotten(tmp_path):
    rows, features, _ = random_stream(samples=30)
    with pool(tmp_path / "pool", rows, awake=1) as streams:
        same(streams.peek("a", features[0]), plain(rows).observe(features[0]))
        assert "a" not in streams
        assert len(streams) == 0
        with pytest.raises(InputError, match="there is no stream 'a'"):
            streams.stats("a")
        for name in "abc":
            streams.observe(name, features[0])
        assert len(streams) == len(list(streams)) == 3
        streams.delete("a")
        streams.delete("c")
        assert len(streams) == 1
        assert list(streams) == ["b"]
        assert streams.observe("a", features[1]).sequence == 0
    with pool(tmp_path / "pool", rows) as streams:
        assert sorted(streams) == ["a", "b"]


def test_the_folder_of_other_prototypes_settings_or_methods_is_refused_in_words(tmp_path):
    rows, features, _ = random_stream(samples=5)
    with pool(tmp_path / "pool", rows) as streams:
        streams.observe("a", features[0])
    for options, words in (
        ({"prototypes": rows[::-1].copy()}, "another prototypes"),
        ({"prototypes": rows, "config": StreamDCSConfig(history=100)}, "config.history: 2048, and this is 100"),
        ({"prototypes": rows, "method": "tda"}, "another method: streamdcs, and this is tda"),
        ({"prototypes": rows, "classes": list("abcdefg")}, "another classes"),
        ({"prototypes": rows, "encoder": "clip"}, "another encoder: None, and this is clip"),
    ):
        with pytest.raises(StateError, match=words):
            Streams(**options, folder=tmp_path / "pool")
    (tmp_path / "pool" / "streams.json").write_text("{}")
    with pytest.raises(StateError, match=r"streams\.json is not of a pool"):
        pool(tmp_path / "pool", rows)


def test_a_damaged_file_is_refused_by_name_and_harms_no_other_stream(tmp_path):
    rows, features, _ = random_stream(samples=40)
    with pool(tmp_path / "pool", rows, awake=1) as streams:
        for number, feature in enumerate(features[:20]):
            streams.observe("ab"[number % 2], feature)
    path = Path(streams._path("a"))
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    with pool(tmp_path / "pool", rows, awake=1) as streams:
        expected = streams.peek("b", features[20])
        for _ in range(200):
            at, size = int(rng.integers(len(whole))), int(rng.integers(1, 40))
            spoiled = bytearray(whole)
            spoiled[at : at + size] = rng.bytes(len(spoiled[at : at + size]))
            if spoiled == whole:
                continue
            path.write_bytes(spoiled)
            with pytest.raises(StateError, match=path.name):
                streams.peek("a", features[20])
            assert path.read_bytes() == spoiled
        same(streams.peek("b", features[20]), expected)
        path.write_bytes(whole)
        assert streams.observe("a", features[20]).sequence == 10


def test_a_damaged_length_does_not_pass_for_a_record_that_was_cut_off(tmp_path):
    rows, features, _ = random_stream(width=256, samples=140)
    with pool(tmp_path / "pool", rows) as streams:
        with streams.engine("a") as woken:
            woken.observe_many(features[:120])
        streams.sleep("a")
        path = Path(streams._path("a"))
        end = path.stat().st_size
        streams.observe("a", features[120])
        streams.sleep("a")
        data = bytearray(path.read_bytes())
        assert len(data) > end
        data[end + 6] ^= 1  # The last record now says that it has 65,536 blocks more.
        path.write_bytes(data)
        with pytest.raises(StateError, match="damaged"):
            streams.observe("a", features[121])


def test_swapped_files_are_refused(tmp_path):
    rows, features, _ = random_stream(samples=5)
    with pool(tmp_path / "pool", rows) as streams:
        streams.observe("a", features[0])
        streams.observe("b", features[1])
    Path(streams._path("a")).write_bytes(Path(streams._path("b")).read_bytes())
    with pool(tmp_path / "pool", rows) as streams, pytest.raises(StateError, match="'a' holds the stream 'b'"):
        streams.observe("a", features[0])


def test_a_file_cut_anywhere_is_refused_or_is_an_earlier_sleep_of_its_stream(tmp_path):
    """As a killed writer leaves it: the record that was being written counts as never written."""
    rows, features, _ = random_stream(samples=1020)
    snapshots, ends = [], []
    with pool(tmp_path / "pool", rows) as streams:
        with streams.engine("a") as woken:
            woken.observe_many(features[:1000])
        path = Path(streams._path("a"))
        for feature in features[1000:]:
            streams.sleep("a")
            if ends and path.stat().st_size < ends[-1]:  # It was written whole.
                snapshots, ends = [], []
            ends.append(path.stat().st_size)
            with streams.engine("a") as woken:
                snapshots.append(woken.snapshot())
            if len(ends) == 4:
                break
            streams.observe("a", feature)
    whole = path.read_bytes()
    assert len(whole) == ends[3] > ends[2] > ends[1] > ends[0]
    for cut in [*range(0, len(whole), 2999), *ends, *(end - 1 for end in ends), *(end + 3 for end in ends)]:
        path.write_bytes(whole[:cut])
        with pool(tmp_path / "pool", rows) as streams:
            kept = sum(end <= cut for end in ends)
            if not kept:
                with pytest.raises(StateError, match="cut off"):
                    streams.peek("a", features[0])
                continue
            with streams.engine("a") as woken:
                assert woken.snapshot() == snapshots[kept - 1]
            number = streams.observe("a", features[9]).sequence
            streams.sleep("a")
            assert streams.observe("a", features[9]).sequence == number + 1


WORKER = """
import sys
import numpy as np
sys.path.insert(0, sys.argv[2])
from conftest import random_stream
from protodcs import Streams
rows, features, _ = random_stream(samples=400, seed=8)
streams = Streams(rows, folder=sys.argv[1], awake=3)
print("ready", flush=True)
turn = 0
while True:
    streams.observe(f"stream {turn % 10}", features[turn % 400])
    turn += 1
    if turn == 150:
        print("busy", flush=True)
"""


def test_a_process_killed_in_mid_work_leaves_every_file_readable_and_the_folder_free(tmp_path):
    rows, features, _ = random_stream(samples=400, seed=8)
    rng = np.random.default_rng(0)
    reached = 0
    for _ in range(4):
        command = [sys.executable, "-W", "ignore", "-c", WORKER, str(tmp_path / "pool"), str(Path(__file__).parent)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE)
        worker.stdout.readline()
        if not reached:
            with pytest.raises(UsageError, match=f"in use by process {worker.pid}"):
                pool(tmp_path / "pool", rows)
        worker.stdout.readline()
        time.sleep(rng.uniform(0.0, 0.5))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        with pool(tmp_path / "pool", rows, awake=20) as streams:
            seen = {name: streams.stats(name)["sequence"] for name in streams}
            reached = max(reached, *seen.values())
            assert not list((tmp_path / "pool").rglob("*.tmp"))
            # Each run begins again with the first feature, and continues streams of the one before: forget them.
            for name, sequence in seen.items():
                at = int(name.split()[1])
                engine = plain(rows)
                engine.observe_many(np.stack([features[(at + 10 * turn) % 400] for turn in range(sequence)]))
                with streams.engine(name) as woken:
                    assert woken.snapshot() == engine.snapshot()
                streams.delete(name)
    assert reached > 10


def test_a_pool_cannot_be_opened_twice_or_used_after_it_was_closed(tmp_path):
    rows, features, _ = random_stream(samples=5)
    streams = pool(tmp_path / "pool", rows)
    with pytest.raises(UsageError, match="in use by process"):
        pool(tmp_path / "pool", rows)
    streams.close()
    streams.close()
    with pytest.raises(UsageError, match="closed"):
        streams.observe("a", features[0])


def test_different_streams_run_in_different_threads(tmp_path):
    rows, features, _ = random_stream(samples=200, seed=9)
    engines = [plain(rows) for _ in range(8)]
    for engine in engines:
        engine.observe_many(features)
    problems = []

    def work(at):
        try:
            for feature in features:
                streams.observe(f"stream {at}", feature)
        except Exception as problem:
            problems.append(problem)

    with pool(tmp_path / "pool", rows, awake=3) as streams:
        threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        for at, engine in enumerate(engines):
            with streams.engine(f"stream {at}") as woken:
                assert woken.snapshot() == engine.snapshot()


def test_threads_on_one_stream_take_turns_and_a_nested_call_is_refused(tmp_path):
    rows, features, _ = random_stream(samples=200)
    with pool(tmp_path / "pool", rows, awake=1) as streams:

        def work():
            for feature in features[:50]:
                streams.observe("a", feature)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert streams.stats("a")["sequence"] == 200
        with streams.engine("a"):
            streams.observe("b", features[0])
            with pytest.raises(UsageError, match="in use by this very call"):
                streams.observe("a", features[0])


def test_an_interrupted_stream_falls_back_to_where_it_last_slept(tmp_path, monkeypatch):
    rows, features, _ = random_stream(samples=20)
    with pool(tmp_path / "pool", rows) as streams:
        streams.observe("a", features[0])
        streams.sleep("a")
        streams.observe("a", features[1])
        with monkeypatch.context() as patch:
            patch.setattr(StreamDCS, "_advance", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                streams.observe("a", features[2])
        assert streams.observe("a", features[3]).sequence == 1


def test_a_full_disk_is_told_in_words_and_nothing_is_lost(tmp_path, monkeypatch):
    rows, features, _ = random_stream(samples=20)
    with pool(tmp_path / "pool", rows, awake=1) as streams:
        streams.observe("a", features[0])

        def fails(*_):
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr("protodcs.streams.put_file", fails)
            with pytest.raises(StateError, match=r"cannot write the stream 'a'.*No space"):
                streams.observe("b", features[0])
            with pytest.raises(StateError, match="No space"):
                streams.close()
        assert "b" not in streams
        assert streams.observe("a", features[1]).sequence == 1
        assert streams.observe("b", features[0]).sequence == 0


def test_what_was_saved_is_there_after_the_process_is_gone(tmp_path):
    rows, features, _ = random_stream(samples=20)
    streams = pool(tmp_path / "pool", rows)
    streams.observe("a", features[0])
    streams.save()
    streams.observe("a", features[1])
    streams._let_go()  # As if it had been killed.
    with pool(tmp_path / "pool", rows) as streams:
        assert streams.observe("a", features[1]).sequence == 1
