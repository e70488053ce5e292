"""How streams wake up: in the engine of one that fell asleep, and as many as memory holds."""

import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import random_stream
from protodcs import ProtoDCS, Prototypes, StreamDCS, StreamDCSConfig, Streams
from protodcs.core import parcel
from protodcs.core.base import own_state
from protodcs.core.streamdcs.engine_slot import EngineSlot, all_within, fits_slot
from protodcs.errors import ConfigError, StateError
from test_many_streams import resident, same


def engine_of(streams, name):
    return streams._streams[name].engine


def test_a_stream_wakes_up_in_the_engine_of_the_one_that_fell_asleep_and_notices_nothing(tmp_path, clip_stream):
    rows, features, _ = clip_stream("dtd")
    plain = {name: StreamDCS(rows) for name in "abc"}
    # Of different ages, so that what is left of one in the arrays would show in another.
    for name, samples in (("a", 130), ("b", 90), ("c", 30)):
        plain[name].observe_many(features[: samples + ord(name)])
    rng = np.random.default_rng(0)
    engines = set()
    with Streams(rows, folder=tmp_path / "pool", awake=1) as streams:
        for name, samples in (("a", 130), ("b", 90), ("c", 30)):
            for feature in features[: samples + ord(name)]:
                streams.observe(name, feature)
        for feature in features[300:500]:
            name = "abc"[rng.integers(3)]
            same(streams.observe(name, feature), plain[name].observe(feature))
            same(streams.peek(name, feature), plain[name].peek(feature))
            engines.add(id(engine_of(streams, name)))
        assert len(engines) < 10
        for name, engine in plain.items():
            with streams.engine(name) as woken:
                assert woken.snapshot() == engine.snapshot()


def test_a_new_stream_begins_with_nothing_of_those_before_it(tmp_path):
    rows, features, _ = random_stream(samples=120, seed=2)
    with Streams(rows, folder=tmp_path / "pool", awake=1) as streams:
        for name in "abcd":
            plain = StreamDCS(rows)
            for feature in features:
                same(streams.observe(name, feature), plain.observe(feature))


def test_an_engine_that_a_caller_had_in_hand_becomes_no_other_stream(tmp_path):
    rows, features, _ = random_stream(samples=60, seed=3)
    with Streams(rows, folder=tmp_path / "pool", awake=1) as streams:
        streams.observe("b", features[0])
        with streams.engine("a") as kept:
            kept.observe_many(features[:40])
        before = kept.snapshot()
        for _ in range(3):
            for feature in features[:20]:
                streams.observe("b", feature)
            streams.observe("c", features[1])
        assert kept.snapshot() == before


def test_a_frozen_stream_hands_nothing_on_to_the_next(tmp_path):
    rows, features, _ = random_stream(samples=60, seed=4)
    with Streams(rows, folder=tmp_path / "pool", awake=1) as streams:
        for name in "ab":
            for feature in features[:30]:
                streams.observe(name, feature)
        with streams.engine("a") as woken:
            woken.freeze()
        streams.peek("b", features[0])
        streams.peek("a", features[0])
        streams.peek("b", features[0])
        assert not engine_of(streams, "b").frozen
        streams.peek("a", features[0])
        assert engine_of(streams, "a").frozen


def test_a_small_stream_does_not_keep_the_room_of_a_large_one(tmp_path):
    rows, features, _ = random_stream(samples=1500, seed=5)
    with Streams(rows, folder=tmp_path / "pool", awake=1) as streams:
        for feature in features:
            streams.observe("large", feature)
        for feature in features[:20]:
            streams.observe("small", feature)
        streams.peek("large", features[0])
        large = resident(engine_of(streams, "large"))
        streams.peek("small", features[0])
        assert resident(engine_of(streams, "small")) < 0.7 * large


# What cannot be taken over.


HEADER = {"frozen": False}


def exported(engine):
    counters, arrays = engine._memory.export()
    arrays.pop("entry")
    return counters, {name: array.copy() for name, array in arrays.items()}


def taken_over(engine, counters, arrays):
    """Whether an engine takes over what was exported, once it is laid out."""
    blocks = parcel.image(HEADER, counters, arrays).blocks
    with own_state():
        return EngineSlot(engine._memory).take(parcel.front_of(blocks), blocks)


@pytest.fixture(scope="module")
def two():
    rows, features, _ = random_stream(samples=200, seed=6)
    prototypes = Prototypes(rows)
    engines = [StreamDCS(prototypes) for _ in range(2)]
    engines[0].observe_many(features)
    engines[1].observe_many(features[:150])
    return engines


def test_an_engine_takes_over_what_another_exported(two):
    there, here = StreamDCS.restore(two[0].snapshot()), StreamDCS.restore(two[1].snapshot())
    assert taken_over(there, *exported(here))
    assert there.snapshot() == here.snapshot()


SPOILERS = {
    "a counter that is missing": lambda counters, arrays: counters.pop("sequence"),
    "a counter too many": lambda counters, arrays: counters.update(more=1),
    "counters that contradict each other": lambda counters, arrays: counters.update(known=10**6),
    "a number that is no number": lambda counters, arrays: counters.update(passes=True),
    "a truth that is a number": lambda counters, arrays: counters.update(refitted=1),
    "memory ready after the last sample": lambda counters, arrays: counters.update(memory_ready_at=10**6),
    "an array that is missing": lambda counters, arrays: arrays.pop("feature_mean"),
    "an array too many": lambda counters, arrays: arrays.update(more=np.zeros(3)),
    "another type": lambda counters, arrays: arrays.update(feature_mean=arrays["feature_mean"].astype(np.float32)),
    "another shape": lambda counters, arrays: arrays.update(baseline_moments=arrays["baseline_moments"][:4]),
    "a class that is not there": lambda counters, arrays: arrays["predicted"].__setitem__(3, 7),
    "a class below all": lambda counters, arrays: arrays["top_class"].__setitem__(3, -2),
    "more unknown samples than seen": lambda counters, arrays: arrays["memory_added"].__setitem__(0, 10**6),
    "rings with more than seen": lambda counters, arrays: arrays["signal_added"].__setitem__(0, 10**6),
    "a mixture that was not fitted": lambda counters, arrays: arrays["mixture"].__setitem__(0, 0.5),
    "another noise floor": lambda counters, arrays: arrays["noise_maxima"].__setitem__(0, 0.1),
    "a history of another length": lambda counters, arrays: arrays.update(history=arrays["history"][:-1]),
}


@pytest.mark.parametrize("what", SPOILERS)
def test_what_cannot_be_is_not_taken_over_and_does_no_harm(two, what):
    there, here = StreamDCS.restore(two[0].snapshot()), two[1]
    counters, arrays = exported(here)
    SPOILERS[what](counters, arrays)
    with suppress(StateError):
        assert not taken_over(there, counters, arrays)
    assert taken_over(there, *exported(here))
    assert there.snapshot() == here.snapshot()


def test_a_slot_needs_a_class_bias_and_an_even_dimension():
    rows, _, _ = random_stream(samples=1, seed=6)
    assert fits_slot(StreamDCS(rows)._memory)
    assert not fits_slot(StreamDCS(rows, config=StreamDCSConfig(class_bias=False))._memory)
    assert not fits_slot(StreamDCS(rows[:, :-1].copy())._memory)
    assert not fits_slot(ProtoDCS(rows)._memory)


@pytest.mark.parametrize("samples", [0, 1, 19, 120, 700])
def test_an_engine_is_laid_out_as_what_it_exports(samples):
    rows, features, _ = random_stream(samples=700, seed=9)
    engine = StreamDCS(rows)
    engine.observe_many(features[:samples])
    used = np.full((2000, parcel.BLOCK), 7, dtype=np.uint8)
    got = EngineSlot(engine._memory).image(HEADER, lambda blocks: used[:blocks])
    wanted = parcel.image(HEADER, *exported(engine))
    np.testing.assert_array_equal(got.blocks, wanted.blocks)
    np.testing.assert_array_equal(got.digests, wanted.digests)


# Images and records.


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 2**32 - 1), st.integers(1, 30))
def test_kernels_over_blocks_agree_with_their_numpy_twins(seed, total):
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**64, size=(total, 32), dtype=np.uint64)
    words[rng.random(total) < 0.3] = 0
    digests = parcel.digests_of(words.view(np.uint8))
    old = np.where(rng.random(total) < 0.5, digests, digests + np.uint64(1))
    for whole, before in ((False, old), (True, np.zeros_like(old))):
        got, twin = np.zeros((2, total), dtype=np.uint32)
        assert parcel.differ(words, digests, before, whole, got) == parcel.differ_twin(
            words, digests, before, whole, twin
        )
        np.testing.assert_array_equal(got, twin)
    places = rng.permutation(total).astype(np.uint32)[: rng.integers(total + 1)]
    rows = words[::-1][: len(places)].copy()
    laid, plain = (words.copy(), np.zeros_like(digests)), (words.copy(), np.zeros_like(digests))
    first = parcel.lay(places, rows, laid[0], parcel._weights(), laid[1])
    assert first == parcel.lay_twin(places, rows, plain[0], parcel._weights(), plain[1])
    np.testing.assert_array_equal(laid[0], plain[0])
    np.testing.assert_array_equal(laid[1], plain[1])
    outside = np.array([total], dtype=np.uint32)
    assert not parcel.lay(outside, rows[:1], laid[0], parcel._weights(), laid[1])[0] or not len(rows)


def test_an_image_gives_back_what_was_laid_out():
    arrays = {
        "b": np.arange(6.0).reshape(2, 3),
        "a": np.arange(5),
        "none": np.zeros((0, 4), dtype=np.float32),
        "c": np.arange(700, dtype=np.float32),
    }
    counters = {"whole": 2**62, "real": 0.1, "yes": True, "nothing": None, "no": False}
    header, numbers, found = parcel.contents(parcel.image({"classes": ["x"]}, counters, arrays).blocks)
    assert header == {"classes": ["x"]}
    assert numbers == counters
    assert {name: type(value) for name, value in numbers.items()} == {n: type(v) for n, v in counters.items()}
    assert set(found) == set(arrays)
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)


def test_whole_numbers_outside_a_range_are_found_wherever_they_stand():
    values = np.arange(-3, 9)
    assert all_within(values, -3, 8)
    assert not all_within(values, -2, 8)
    assert not all_within(values, -3, 7)
    assert all_within(values[:0], 5, 4)


# Memory.


def test_more_streams_stay_awake_while_memory_lasts(tmp_path):
    rows, features, _ = random_stream(samples=60, seed=7)
    plain = {f"stream {at}": StreamDCS(rows) for at in range(30)}
    rng = np.random.default_rng(0)
    with Streams(rows, folder=tmp_path / "pool", awake=2, memory=10**6) as streams:
        for turn in range(1500):
            name = f"stream {rng.integers(30)}"
            same(streams.observe(name, features[turn % 60]), plain[name].observe(features[turn % 60]))
            heaviest = max(entry.weight for entry in streams._streams.values())
            assert streams._weight == sum(entry.weight for entry in streams._streams.values())
            assert streams._weight < 10**6 + 2 * heaviest
        assert 5 < len(streams._streams) < 25
        streams.memory = 0
        streams.observe("stream 0", features[0])
        streams.observe("another", features[0])
        assert len(streams._streams) <= 2
        assert len(streams) == 31


def test_what_a_stream_is_thought_to_take_up_is_about_what_it_does(tmp_path, clip_stream):
    rows, features, _ = clip_stream("dtd")
    with Streams(rows, folder=tmp_path / "pool", awake=2) as streams:
        for samples in (20, 200, 800):
            with streams.engine("a") as engine:
                engine.observe_many(features[:samples])
            assert 0.7 < streams._streams["a"].weight / resident(engine_of(streams, "a")) < 1.5
        fresh = streams._streams["a"].weight
        streams.sleep("a")
        streams.peek("a", features[0])
        assert streams._streams["a"].weight == fresh
        streams.delete("a")
        assert streams._weight == 0


@pytest.mark.parametrize("bad", [-1, 1.5, True, "8 GB"])
def test_memory_is_a_whole_number_of_bytes(tmp_path, bad):
    with pytest.raises(ConfigError, match="memory must be a whole number of bytes"):
        Streams(np.eye(3, 8), folder=tmp_path / "pool", memory=bad)


WORKER = """
import sys
sys.path.insert(0, sys.argv[2])
from conftest import random_stream
from protodcs import Streams
rows, features, _ = random_stream(samples=400, seed=8)
streams = Streams(rows, folder=sys.argv[1], awake=1, memory=250_000)
turn = 0
while True:
    streams.observe(f"stream {turn % 10}", features[turn % 400])
    turn += 1
    if turn % 97 == 0:
        streams.save()
        print(turn, flush=True)
"""


def test_after_a_kill_every_stream_is_where_it_last_slept_or_was_saved(tmp_path):
    rows, features, _ = random_stream(samples=400, seed=8)
    command = [sys.executable, "-W", "ignore", "-c", WORKER, str(tmp_path / "pool"), str(Path(__file__).parent)]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE)
    saved = [int(worker.stdout.readline()) for _ in range(4)][-1]
    time.sleep(0.05)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    worker.stdout.close()
    with Streams(rows, folder=tmp_path / "pool", awake=3) as streams:
        assert len(streams) == 10
        for at in range(10):
            engine = StreamDCS(rows)
            sequence = streams.stats(f"stream {at}")["sequence"]
            assert sequence >= len(range(at, saved, 10))
            engine.observe_many(np.stack([features[(at + 10 * turn) % 400] for turn in range(sequence)]))
            with streams.engine(f"stream {at}") as woken:
                assert woken.snapshot() == engine.snapshot()
