"""Many streams in one process: they share prototypes, do not influence each other, and survive unloading and kills."""

import signal
import sqlite3
import subprocess
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from conftest import random_stream
from protodcs import ProtoDCS, Prototypes, StreamDCS, StreamDCSConfig, StreamPool, methods
from protodcs.errors import ConfigError, InputError, StateError, UsageError

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
    found = {"initial_prototypes": engine._initial_prototypes(memory), "inverse_norms": memory.inverse_norms}
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
            return thing.nbytes if fresh else 0
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


def open_pool(folder, rows, kind="streamdcs", **options):
    """A pool, and a function that makes a plain engine like those in it."""
    method, settings = POOLS[kind]
    prototypes = Prototypes(rows)
    config = methods.create(method, prototypes, **settings).config
    return StreamPool(prototypes, config=config, method=method, folder=folder, **options)


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
def test_twenty_interleaved_streams_of_which_two_are_loaded_continue_bit_equal(tmp_path, kind):
    rows, features, _ = random_stream(classes=8, samples=600, seed=5)
    engines = [plain(rows, kind) for _ in range(20)]
    rng = np.random.default_rng(0)
    with open_pool(tmp_path / "pool", rows, kind, max_loaded=2) as pool:
        for feature in features:
            at = int(rng.integers(20)) if rng.random() < 0.7 else 3
            same(pool.observe(f"stream {at}", feature), engines[at].observe(feature))
            same(pool.peek(f"stream {at}", feature), engines[at].peek(feature))
            assert len(pool._streams) <= 2
        assert len(pool) == 20
    with open_pool(tmp_path / "pool", rows, kind, max_loaded=2) as pool:
        assert sorted(pool) == sorted(f"stream {at}" for at in range(20))
        for at, engine in enumerate(engines):
            assert pool.stats(f"stream {at}") == engine.stats()
            with pool.engine(f"stream {at}") as loaded:
                assert loaded.snapshot() == engine.snapshot()


def test_a_stream_that_is_unloaded_after_every_sample_decides_the_same(tmp_path, clip_stream):
    rows, features, _ = clip_stream("dtd")
    engine = plain(rows)
    with open_pool(tmp_path / "pool", rows, max_loaded=1) as pool:
        for number, feature in enumerate(features[:250]):
            same(pool.observe("camera", feature), engine.observe(feature))
            pool.unload("camera")
            if number % 50 == 0:
                with pool.engine("camera") as loaded:
                    assert loaded.snapshot() == engine.snapshot()


def test_edited_classes_frozen_streams_and_resets_survive_unloading(tmp_path):
    rows, features, _ = random_stream(samples=120, seed=6)
    engine = plain(rows)
    with open_pool(tmp_path / "pool", rows, max_loaded=1) as pool:
        for change in (
            lambda e: e.observe_many(features[:60]),
            lambda e: e.add_class("more", features[3]),
            lambda e: e.remove_class("2"),
            lambda e: e.observe_many(features[60:]),
            lambda e: e.freeze(),
            lambda e: e.unfreeze(),
            lambda e: e.reset(),
        ):
            with pool.engine("a") as loaded:
                change(loaded)
            change(engine)
            pool.unload("a")
            with pool.engine("a") as loaded:
                assert loaded.snapshot() == engine.snapshot()
            same(pool.observe("a", features[0]), engine.observe(features[0]))


def test_an_engine_that_was_kept_after_its_with_cannot_change_another_stream(tmp_path):
    rows, features, _ = random_stream(samples=40, seed=7)
    with open_pool(tmp_path / "pool", rows, max_loaded=1) as pool:
        with pool.engine("a") as kept:
            kept.observe_many(features[:20])
        pool.unload("a")
        pool.observe("b", features[0])
        kept.observe_many(features[20:])
        assert pool.stats("b")["sequence"] == 1


def test_a_stream_that_is_stored_again_after_one_sample_writes_only_what_changed(tmp_path, clip_stream):
    rows, features, _ = clip_stream("dtd")
    with open_pool(tmp_path / "pool", rows) as pool:
        with pool.engine("a") as engine:
            engine.observe_many(features[:200])
        log = tmp_path / "pool" / "streams.sqlite-wal"
        before = log.stat().st_size
        pool.unload("a")
        first = log.stat().st_size
        for feature in features[200:210]:
            pool.observe("a", feature)
            pool.unload("a")
        assert (log.stat().st_size - first) / 10 < 0.7 * (first - before)


def test_a_state_of_another_arrangement_is_an_error(tmp_path):
    rows, features, _ = random_stream(samples=2)
    with open_pool(tmp_path / "pool", rows) as pool:
        pool.observe("a", features[0])
        pool.unload("a")
        pool._states._arena_headers = [b"another", b"arrangement"]
        with pytest.raises(StateError, match="arranges states differently"):
            pool.observe("a", features[1])


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
    with open_pool(tmp_path / "pool", rows, max_loaded=2) as pool:
        for number, feature in enumerate(features):
            name = NAMES[number % len(NAMES)]
            same(pool.observe(name, feature), engines[name].observe(feature))
    with open_pool(tmp_path / "pool", rows) as pool:
        assert set(pool) == set(NAMES)
    assert [path.name for path in tmp_path.iterdir()] == ["pool"]
    for bad in ("", "x" * 1001, 7, None, b"bytes", "\ud800"):
        with open_pool(tmp_path / "pool", rows) as pool, pytest.raises(InputError, match="The id of a stream"):
            pool.observe(bad, features[0])


def test_a_stream_begins_with_its_first_feature_and_can_be_deleted(tmp_path):
    rows, features, _ = random_stream(samples=30)
    with open_pool(tmp_path / "pool", rows, max_loaded=1) as pool:
        same(pool.peek("a", features[0]), plain(rows).observe(features[0]))
        assert "a" not in pool
        assert len(pool) == 0
        with pytest.raises(InputError, match="There is no stream 'a'"):
            pool.stats("a")
        for name in "abc":
            pool.observe(name, features[0])
        assert len(pool) == len(list(pool)) == 3
        pool.delete("a")
        pool.delete("c")
        assert len(pool) == 1
        assert list(pool) == ["b"]
        assert pool.observe("a", features[1]).sequence == 0
    with open_pool(tmp_path / "pool", rows) as pool:
        assert sorted(pool) == ["a", "b"]


def test_a_pool_cannot_be_opened_twice_or_used_after_it_was_closed(tmp_path):
    rows, features, _ = random_stream(samples=5)
    pool = open_pool(tmp_path / "pool", rows)
    with pytest.raises(UsageError, match="in use by another pool"):
        open_pool(tmp_path / "pool", rows)
    pool.close()
    pool.close()
    with pytest.raises(UsageError, match="closed"):
        pool.observe("a", features[0])


def test_different_streams_run_in_different_threads(tmp_path):
    rows, features, _ = random_stream(samples=200, seed=9)
    engines = [plain(rows) for _ in range(8)]
    for engine in engines:
        engine.observe_many(features)
    problems = []

    def work(at):
        try:
            for feature in features:
                pool.observe(f"stream {at}", feature)
        except Exception as problem:
            problems.append(problem)

    with open_pool(tmp_path / "pool", rows, max_loaded=3) as pool:
        threads = [threading.Thread(target=work, args=(at,)) for at in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not problems
        for at, engine in enumerate(engines):
            with pool.engine(f"stream {at}") as loaded:
                assert loaded.snapshot() == engine.snapshot()


def test_threads_on_one_stream_take_turns_and_a_nested_call_is_an_error(tmp_path):
    rows, features, _ = random_stream(samples=200)
    with open_pool(tmp_path / "pool", rows, max_loaded=1) as pool:

        def work():
            for feature in features[:50]:
                pool.observe("a", feature)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert pool.stats("a")["sequence"] == 200
        with pool.engine("a"):
            pool.observe("b", features[0])
            with pytest.raises(UsageError, match="already open in this call"):
                pool.observe("a", features[0])


def test_an_interrupted_stream_continues_from_its_stored_state(tmp_path, monkeypatch):
    rows, features, _ = random_stream(samples=20)
    with open_pool(tmp_path / "pool", rows) as pool:
        pool.observe("a", features[0])
        pool.unload("a")
        pool.observe("a", features[1])
        with monkeypatch.context() as patch:
            patch.setattr(StreamDCS, "_advance", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
            with pytest.raises(KeyboardInterrupt):
                pool.observe("a", features[2])
        assert pool.observe("a", features[3]).sequence == 1


def stored_state(folder, stream):
    with closing(sqlite3.connect(folder / "streams.sqlite")) as database:
        return database.execute("SELECT state FROM streams WHERE id = ?", (stream,)).fetchone()[0]


def test_a_stream_that_did_not_change_is_not_written_again(tmp_path, monkeypatch):
    rows, features, _ = random_stream(samples=20)
    with open_pool(tmp_path, rows) as pool:
        pool.observe("a", features[0])
        pool.unload("a")
        written = []
        monkeypatch.setattr(pool._store, "write", lambda *given: written.append(given))
        pool.peek("a", features[1])
        pool.stats("a")
        pool.unload("a")
        assert not written


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prototypes": np.eye(7, 16)[::-1]}, "another prototypes"),
        ({"config": StreamDCSConfig(history=100)}, "another config.history: 2048; given: 100"),
        ({"method": "tda"}, "another method: streamdcs; given: tda"),
        ({"classes": list("abcdefg")}, "another classes"),
        ({"encoder": "clip"}, "another encoder: None; given: clip"),
    ],
)
def test_a_pool_with_other_prototypes_settings_or_methods_is_an_error(tmp_path, options, message):
    with StreamPool(np.eye(7, 16), folder=tmp_path) as pool:
        pool.observe("a", np.ones(16))
    with pytest.raises(StateError, match=message):
        StreamPool(**{"prototypes": np.eye(7, 16), **options}, folder=tmp_path)
    with StreamPool(np.eye(7, 16), folder=tmp_path) as pool:
        assert list(pool) == ["a"]


def test_a_damaged_state_is_an_error_that_names_its_stream_and_leaves_others_alone(tmp_path):
    rows, features, _ = random_stream(samples=40)
    with open_pool(tmp_path, rows) as pool:
        for number, feature in enumerate(features[:20]):
            pool.observe("ab"[number % 2], feature)
        expected = pool.peek("b", features[20])
    whole = stored_state(tmp_path, "a")
    rng = np.random.default_rng(0)
    for _ in range(30):
        spoiled = bytearray(whole)
        at = int(rng.integers(len(spoiled)))
        spoiled[at] ^= 1 + int(rng.integers(255))
        cut = int(rng.integers(len(spoiled))) if rng.random() < 0.3 else len(spoiled)
        with closing(sqlite3.connect(tmp_path / "streams.sqlite", isolation_level=None)) as database:
            database.execute("UPDATE streams SET state = ? WHERE id = 'a'", (bytes(spoiled[:cut]),))
        with open_pool(tmp_path, rows) as pool:
            with pytest.raises(StateError, match=r"stream 'a'.*damaged"):
                pool.observe("a", features[20])
            same(pool.peek("b", features[20]), expected)
    with open_pool(tmp_path, rows) as pool:
        pool.delete("a")
        assert pool.observe("a", features[20]).sequence == 0


def test_a_file_that_is_no_database_is_an_error(tmp_path):
    (tmp_path / "streams.sqlite").write_bytes(b"something else" * 1000)
    with pytest.raises(StateError, match=r"streams\.sqlite"):
        open_pool(tmp_path, np.eye(3, 8))


def test_a_full_disk_is_an_error_and_nothing_is_lost(tmp_path):
    rows, features, _ = random_stream(samples=600)
    with open_pool(tmp_path, rows, max_loaded=1) as pool:
        with pool.engine("a") as engine:
            engine.observe_many(features)
        # SQLite reports a full disk in the same way if the database may have no more pages.
        pages = pool._store._run("PRAGMA page_count").fetchone()[0]
        pool._store._run(f"PRAGMA max_page_count = {pages}")
        with pytest.raises(StateError, match=r"Cannot store the stream 'a'.*full.*It stays loaded"):
            pool.observe("b", features[0])
        with pytest.raises(StateError, match="full"):
            pool.close()
        pool._store._run("PRAGMA max_page_count = 1000000")
        assert "b" not in pool
        assert pool.observe("a", features[1]).sequence == 600
        assert pool.observe("b", features[0]).sequence == 0


@pytest.mark.parametrize("bad", [0, -1, 1.5, True, "8"])
def test_max_loaded_must_be_a_positive_integer(tmp_path, bad):
    with pytest.raises(ConfigError, match="`max_loaded` must be an integer of at least 1"):
        StreamPool(np.eye(3, 8), folder=tmp_path, max_loaded=bad)


WORKER = """
import sys
sys.path.insert(0, sys.argv[2])
from conftest import random_stream
from protodcs import StreamPool
rows, features, _ = random_stream(samples=400, seed=8)
pool = StreamPool(rows, folder=sys.argv[1], max_loaded=3)
print("ready", flush=True)
turn = 0
while True:
    pool.observe(f"stream {turn % 10}", features[turn % 400])
    turn += 1
    if turn % 97 == 0:
        pool.save()
        print(turn, flush=True)
"""


def test_after_a_kill_each_stream_is_where_it_was_last_unloaded_or_saved(tmp_path):
    rows, features, _ = random_stream(samples=400, seed=8)
    rng = np.random.default_rng(0)
    for _ in range(3):
        command = [sys.executable, "-W", "ignore", "-c", WORKER, str(tmp_path), str(Path(__file__).parent)]
        worker = subprocess.Popen(command, stdout=subprocess.PIPE)
        worker.stdout.readline()
        with pytest.raises(UsageError, match="in use by another pool"):
            open_pool(tmp_path, rows)
        saved = [int(worker.stdout.readline()) for _ in range(3)][-1]
        time.sleep(rng.uniform(0.0, 0.3))
        worker.send_signal(signal.SIGKILL)
        worker.wait()
        worker.stdout.close()
        with open_pool(tmp_path, rows, max_loaded=20) as pool:
            assert len(pool) == 10
            for at in range(10):
                sequence = pool.stats(f"stream {at}")["sequence"]
                assert sequence >= len(range(at, saved, 10))
                engine = plain(rows)
                engine.observe_many(np.stack([features[(at + 10 * turn) % 400] for turn in range(sequence)]))
                with pool.engine(f"stream {at}") as loaded:
                    assert loaded.snapshot() == engine.snapshot()
                # The next run begins again with the first feature.
                pool.delete(f"stream {at}")
