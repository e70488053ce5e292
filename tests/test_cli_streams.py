"""`protodcs streams` against the real application over real HTTP."""

import base64
import json

import numpy as np
import pytest
from pyarrow import parquet
from typer.testing import CliRunner

from made_service import FEATURES, ROWS, engine_of, learned
from ports import free_port
from protodcs import Client
from protodcs.cli import app
from served_over_http import Faulty, serving
from test_client import PixelEncoding, png


@pytest.fixture(scope="module")
def service():
    with serving(PixelEncoding()) as inside:
        yield inside


@pytest.fixture
def run(service, monkeypatch):
    """Run a command against the service: what it printed."""
    monkeypatch.setenv("PROTODCS_URL", service[0])

    def running(*words, code=0, command="streams", stdin=None):
        result = CliRunner().invoke(app, [command, *map(str, words)], input=stdin, env={"COLUMNS": "200"})
        assert result.exit_code == code, result.output
        return result.stdout if code == 0 else result.stderr

    return running


@pytest.fixture
def rows(tmp_path):
    np.save(tmp_path / "rows.npy", ROWS)
    return tmp_path / "rows.npy"


def test_a_stream_from_its_creation_to_its_end(run, rows, service, tmp_path):
    created = json.loads(run("create", "c", "--prototypes", rows, "--option", "history=100", "--json"))
    assert (created["id"], created["config"]["history"]) == ("c", 100)
    np.save(tmp_path / "one.npy", FEATURES[0])
    np.save(tmp_path / "many.npy", FEATURES[1:4])
    (tmp_path / "image.png").write_bytes(png(4))
    files = [tmp_path / name for name in ("one.npy", "many.npy", "image.png")]
    lines = [json.loads(line) for line in run("observe", "c", *files, "--json").splitlines()]
    assert [line["position"] for line in lines] == [line["sequence"] for line in lines] == list(range(5))
    assert [line["file"].rpartition("/")[2] for line in lines] == [
        "one.npy", "many.npy[0]", "many.npy[1]", "many.npy[2]", "image.png"
    ]  # fmt: skip
    assert {"label", "p_unknown", "epoch", "repeated"} <= set(lines[0])
    assert json.loads(run("snapshot", "c", "five", "--json")) == {
        "saved": "five", "position": 5, "epoch": 1, "repeated": False
    }  # fmt: skip
    assert run("snapshots", "c") == "five\n"
    assert json.loads(run("snapshots", "c", "--json")) == {"snapshots": ["five"]}
    assert "frozen: c" in run("freeze", "c")
    assert json.loads(run("show", "c", "--json"))["frozen"]
    assert "unfrozen: c" in run("unfreeze", "c")
    assert "acknowledged: c" in run("acknowledge", "c")
    assert "reset: c" in run("reset", "c")
    assert json.loads(run("show", "c", "--json"))["sequence"] == 0
    assert "restored: five" in run("rollback", "c", "five")
    assert "sequence: 5" in run("show", "c")
    assert json.loads(run("log", "c", "--last", "1", "--json"))["position"] == 4
    assert run("log", "c").startswith("4  ")
    assert run("log", "c", "--oldest").startswith("0  ")
    assert "exported: c" in run("export-log", "c", tmp_path / "log.parquet")
    assert parquet.read_table(tmp_path / "log.parquet").num_rows == 5
    assert ".parquet" in run("export-log", "c", tmp_path / "log.csv", code=1)
    assert "--all" in run("purge-log", "c", code=1)
    assert json.loads(run("purge-log", "c", "--until", "2000-01-01", "--json")) == {"deleted": 0}
    assert json.loads(run("purge-log", "c", "--all", "--json")) == {"deleted": 5}
    state = tmp_path / "c.safetensors"
    assert json.loads(run("export", "c", state, "--json"))["bytes"] == len(state.read_bytes())
    assert "added: owl" in run("add-class", "c", "owl", "--prototype", tmp_path / "one.npy")
    assert "removed: owl" in run("remove-class", "c", "owl")
    assert "imported" in run("import", "c", state)
    assert "deleted: five" in run("delete-snapshot", "c", "five")
    assert run("snapshots", "c") == ""
    run("create", "d", "--like", "c")
    assert run("list").split() == ["c", "d", "s"]
    assert "deleted: d" in run("delete", "d")
    assert json.loads(run("list", "--json")) == {"streams": ["c", "s"]}


def test_clusters_of_unknown_samples_are_printed_and_named(run, rows, service, tmp_path):
    rng = np.random.default_rng(0)
    concepts = rng.normal(size=(15, 256)) / 16
    texts, images = rng.normal(size=(2, 256)) / 16
    truth = rng.integers(15, size=900)
    features = images + 0.5 * concepts[truth] + 0.03 * rng.normal(size=(900, 256))
    np.save(tmp_path / "classes.npy", texts + 0.5 * concepts[:12])
    np.save(tmp_path / "features.npy", features)
    run("create", "grouped", "--prototypes", tmp_path / "classes.npy", "--discovery")
    run("observe", "grouped", tmp_path / "features.npy")
    found = [json.loads(line) for line in run("clusters", "grouped", "--json").splitlines()]
    assert len(found) >= 3
    for cluster in found[:3]:
        assert len({int(truth[position]) for position in cluster["positions"]} - {12, 13, 14}) == 0
    first = found[0]["id"]
    lines = run("clusters", "grouped", "--name", f"{first}=canoe").splitlines()
    assert lines[0].startswith(f"cluster {first} 'canoe': {found[0]['size']} samples, similarity ")
    kind = int(truth[found[0]["positions"][0]])
    np.save(tmp_path / "one.npy", images + 0.5 * concepts[kind])
    assert json.loads(run("observe", "grouped", tmp_path / "one.npy", "--json"))["cluster_name"] == "canoe"
    assert "such as 0=monarch" in run("clusters", "grouped", "--name", "canoe", code=1)
    run("create", "plain", "--prototypes", rows, "--no-discovery")
    assert "stores no samples" in run("clusters", "plain", code=1)


def test_a_person_reads_what_was_decided(run, rows, service, tmp_path):
    names = ",".join("abcdefg")
    assert "classes: 7" in run("create", "p", "--prototypes", rows, "--classes", names)
    np.save(tmp_path / "many.npy", FEATURES[:60])
    told = run("observe", "p", tmp_path / "many.npy").splitlines()
    assert len(told) == 60
    assert any(": unknown, p_unknown" in line for line in told)
    assert any(f": {name}, p_unknown" in line for name in "abcdefg" for line in told)
    run("create", "q", "--prototypes", rows)
    run("observe", "q", tmp_path / "many.npy")
    assert engine_of(service[1].worker, "q") == learned(60)


def test_names_cannot_send_commands_to_the_terminal(run, service, tmp_path):
    """A name with escape sequences could change the title of the window, hide lines, or forge them."""
    names = [f"\x1b]0;title\x07\x1b[31m{number}\x9b2J\u202e" for number in range(len(ROWS))]
    with Client(service[0]) as client:
        client.create("escapes", classes=names, prototypes=ROWS)
    np.save(tmp_path / "many.npy", FEATURES[:30])
    printed = [
        run("observe", "escapes", tmp_path / "many.npy"),
        run("peek", "escapes", tmp_path / "many.npy"),
        run("snapshot", "escapes", "\x1b[2Jsaved"),
        run("snapshots", "escapes"),
        run("log", "escapes"),
        run("show", "escapes"),
        run("follow", "escapes", "--after", "0", "--count", 20),
        run("rollback", "escapes", "\x1b[2Jnone", code=1),
    ]
    for text in printed:
        assert text
        assert all(letter == "\n" or letter.isprintable() for letter in text), repr(text)
    assert "\\x1b[2Jsaved" in printed[3]
    assert any("\\x1b[31m" in line for line in printed[4].splitlines())


def test_the_key_comes_from_a_file_or_the_environment(run, service, tmp_path, monkeypatch):
    faulty = service[2]
    run("list")
    assert faulty.authorization is None
    monkeypatch.setenv("PROTODCS_KEY", "pdcs_one")
    run("list")
    assert faulty.authorization == b"Bearer pdcs_one"
    (tmp_path / "key").write_text("pdcs_two\n")
    run("list", "--key-file", tmp_path / "key")
    assert faulty.authorization == b"Bearer pdcs_two"


def test_a_key_that_is_missing_is_told_in_the_words_of_the_command_line(run, service):
    service[2].plan = [Faulty.want_a_key]
    assert run("list", code=1) == "error: The service needs a key. Set PROTODCS_KEY, or give --key-file.\n"


def test_a_key_that_is_wrong_does_not_read_like_a_missing_one(run, service, monkeypatch, tmp_path):
    message = "error: The service does not accept the key in {}: it is unknown, expired or revoked.\n"
    monkeypatch.setenv("PROTODCS_KEY", "pdcs_wrong")
    service[2].plan = [Faulty.want_a_key]
    assert run("list", code=1) == message.format("PROTODCS_KEY")
    (tmp_path / "key").write_text("pdcs_other")
    service[2].plan = [Faulty.want_a_key]
    assert run("list", "--key-file", tmp_path / "key", code=1) == message.format(tmp_path / "key")


def test_mistakes_are_told_in_a_line(run, rows, tmp_path):
    (tmp_path / "no.npy").write_bytes(b"nonsense")
    for words, problem in (
        (("show", "nobody"), "no stream 'nobody'"),
        (("delete", "nobody"), "no stream 'nobody'"),
        (("rollback", "s", "never"), "'never'"),
        (("create", "t"), "Send `classes`"),
        (("create", "t", "--prototypes", tmp_path / "no.npy"), "not a .npy file"),
        (("create", "t", "--prototypes", tmp_path / "none.npy"), "No such file"),
        (("create", "t", "--prototypes", rows, "--option", "nonsense"), "name=value"),
        (("create", "t", "--prototypes", rows, "--option", "history=many"), "history"),
        (("observe", "s", tmp_path / "none.png"), "No such file"),
        (("list", "--url", "nowhere"), "an address such as"),
        (("list", "--key-file", tmp_path / "none"), "No such file"),
    ):
        told = run(*words, code=1)
        assert told.startswith("error: ")
        assert problem in told
        assert len(told.splitlines()) == 1


def test_a_service_that_is_away_is_told_in_a_line(run, monkeypatch):
    monkeypatch.setattr("protodcs.cli.streams._GIVE_UP", 0.2)
    url = f"http://127.0.0.1:{free_port()}"
    message = f"error: No service answers at {url}. Start one with `protodcs serve`, or give another --url.\n"
    assert run("list", "--url", url, code=1) == message


def test_streams_are_created_from_a_file_listed_peeked_at_and_explained(run, rows, tmp_path):
    run("create", "m", "--prototypes", rows)
    (tmp_path / "streams.jsonl").write_text('{"id": "n", "like": "m"}\n\n{"id": "o", "like": "none"}\n')
    lines = [json.loads(line) for line in run("create-many", tmp_path / "streams.jsonl").splitlines()]
    assert [(line["id"], line["status"]) for line in lines] == [("n", 201), ("o", 404)]
    run("freeze", "n")
    assert run("list", "--frozen").split() == ["n"]
    assert run("list", "--learning", "--sort", "-created").split()[0] == "m"
    np.save(tmp_path / "rows.npy", FEATURES[:2])
    np.save(tmp_path / "row.npy", FEATURES[0])
    assert len(run("peek", "m", tmp_path / "rows.npy", tmp_path / "row.npy").splitlines()) == 3
    assert json.loads(run("explain", "m", tmp_path / "row.npy"))
    assert json.loads(run("show", "m", "--json"))["sequence"] == 0
    for name in "mn":
        run("delete", name)


def test_the_service_tells_of_its_health_and_workers(run):
    assert json.loads(run("health", "--json"))["ready"]
    assert run("workers").split() == ["worker-0"]


def test_rows_come_from_a_file_or_from_standard_input(run, rows, service, tmp_path):
    run("create", "r", "--prototypes", rows)
    packed = [base64.b64encode(feature.astype("<f4").tobytes()).decode() for feature in FEATURES[:60]]
    lines = [json.dumps({"feature": row}) for row in packed[:40]]
    lines += [json.dumps({"feature": FEATURES[40].astype(float).tolist()}), ""]
    lines += [json.dumps({"image": base64.b64encode(png(41)).decode()})]
    (tmp_path / "rows.ndjson").write_text("\n".join(lines))
    found = [json.loads(line) for line in run("observe", "r", tmp_path / "rows.ndjson", "--json").splitlines()]
    assert [line["position"] for line in found] == list(range(42))
    assert found[41]["file"].endswith("rows.ndjson[41]")
    rest = "".join(json.dumps({"feature": row}) + "\n" for row in packed[42:])
    found = [json.loads(line) for line in run("observe", "r", "-", "--json", stdin=rest).splitlines()]
    assert [line["position"] for line in found] == list(range(42, 60))
    assert [line["file"] for line in found[:2]] == ["-[0]", "-[1]"]
    assert engine_of(service[1].worker, "r") == learned(60)
    for wrong in ("nonsense", "[1, 2]", "{}", '{"feature": "?"}', '{"image": 3}', '{"feature": [1.0], "key": 3}'):
        assert "Row 0 of -" in run("observe", "r", "-", stdin=wrong, code=1)


def test_rows_with_keys_are_applied_once_and_have_their_image_references(run, rows, service):
    run("create", "k", "--prototypes", rows)
    packed = [base64.b64encode(feature.astype("<f4").tobytes()).decode() for feature in FEATURES[:9]]
    sent = [{"feature": row, "key": f'frame "{n}"', "image_ref": f"{n}.jpg"} for n, row in enumerate(packed)]
    sent.append({"image": base64.b64encode(png(9)).decode(), "key": "frame 9", "image_ref": "9.jpg"})
    lines = "".join(json.dumps(row) + "\n" for row in sent)
    for repeated in (False, True):
        found = [json.loads(line) for line in run("observe", "k", "-", "--json", stdin=lines).splitlines()]
        assert [(line["position"], line["repeated"]) for line in found] == [(n, repeated) for n in range(10)]
    assert engine_of(service[1].worker, "k") == learned(10)
    logged = [json.loads(line) for line in run("log", "k", "--json").splitlines()]
    assert [line["image_ref"] for line in logged] == [f"{n}.jpg" for n in reversed(range(10))]


def test_events_are_printed_as_they_happen(run, rows, tmp_path):
    run("create", "f", "--prototypes", rows)
    np.save(tmp_path / "some.npy", FEATURES[:5])
    run("observe", "f", tmp_path / "some.npy")
    found = [json.loads(line) for line in run("follow", "f", "--after", "1", "--count", "3", "--json").splitlines()]
    assert [(line["event"], line["id"], line["stream"]) for line in found] == [
        ("decision", "2", "f"), ("decision", "3", "f"), ("decision", "4", "f"),
    ]  # fmt: skip
    assert run("follow", "f", "--after", "3", "--count", "1").startswith("f  decision  position 4")
    assert "'nobody'" in run("follow", "nobody", "--count", "1", code=1)


def test_webhooks_are_created_listed_and_deleted(run):
    created = json.loads(run("create", "http://8.8.8.8/hook", "--event", "guard", "--json", command="webhooks"))
    secret = created.pop("secret")
    assert json.loads(run("list", command="webhooks")) == created
    assert (created["events"], created["streams"]) == (["guard"], None)
    assert run("dead-letters", created["id"], command="webhooks") == ""
    run("delete", created["id"], command="webhooks")
    printed = run("list", command="webhooks")
    assert printed == ""
    assert secret not in printed
    assert "no webhook" in run("delete", created["id"], command="webhooks", code=1)
    assert "private" in run("create", "http://127.0.0.1/", command="webhooks", code=1)
