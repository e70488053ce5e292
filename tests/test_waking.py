"""Loading and unloading of streams in a pool: nothing is lost, and as many stay loaded as memory holds."""

import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from conftest import random_stream
from protodcs import StreamDCS, Streams
from protodcs.core import parcel
from protodcs.errors import ConfigError
from test_many_streams import resident, same


def engine_of(streams, name):
    return streams._streams[name].engine


def test_streams_that_are_unloaded_and_loaded_again_decide_like_plain_engines(tmp_path, clip_stream):
    rows, features, _ = clip_stream("dtd")
    plain = {name: StreamDCS(rows) for name in "abc"}
    for name, samples in (("a", 130), ("b", 90), ("c", 30)):
        plain[name].observe_many(features[: samples + ord(name)])
    rng = np.random.default_rng(0)
    with Streams(rows, folder=tmp_path / "pool", awake=1) as streams:
        for name, samples in (("a", 130), ("b", 90), ("c", 30)):
            for feature in features[: samples + ord(name)]:
                streams.observe(name, feature)
        for feature in features[300:500]:
            name = "abc"[rng.integers(3)]
            same(streams.observe(name, feature), plain[name].observe(feature))
            same(streams.peek(name, feature), plain[name].peek(feature))
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


# Images and records.


def test_a_block_outside_the_image_is_refused():
    words, digests = np.zeros((3, 32), dtype=np.uint64), np.zeros(3, dtype=np.uint64)
    block = np.ones((1, 32), dtype=np.uint64)
    assert parcel.lay(np.array([2], dtype=np.uint32), block, words, parcel._weights(), digests)[0]
    assert not parcel.lay(np.array([3], dtype=np.uint32), block, words, parcel._weights(), digests)[0]


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
