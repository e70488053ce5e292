"""The ring of workers: fair, steady, and the same for everybody."""

import os
import subprocess
import sys
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from protodcs.serve.workers.ring import Ring

STREAMS = [f"camera-{number}" for number in range(4000)]
OWNERS = [f"worker-{number}" for number in range(8)]
NAMES = st.lists(st.text(max_size=20), min_size=1, max_size=6, unique=True)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_streams_are_spread_fairly(count):
    ring = Ring(OWNERS[:count])
    shares = Counter(ring.first(stream) for stream in STREAMS)
    fair = len(STREAMS) / count
    assert set(shares) == set(OWNERS[:count])
    assert 0.6 * fair <= min(shares.values())
    assert max(shares.values()) <= 1.5 * fair


@pytest.mark.parametrize("count", [1, 3, 7])
def test_one_worker_more_takes_its_share_and_moves_nothing_else(count):
    fewer, more = Ring(OWNERS[:count]), Ring(OWNERS[: count + 1])
    moved = [stream for stream in STREAMS if fewer.first(stream) != more.first(stream)]
    assert {more.first(stream) for stream in moved} == {OWNERS[count]}
    assert 0.5 < len(moved) / (len(STREAMS) / (count + 1)) < 1.6


def test_when_a_worker_goes_each_of_its_streams_goes_to_the_one_who_stood_in():
    whole, left = Ring(OWNERS), Ring(OWNERS[:-1])
    heirs = set()
    for stream in STREAMS:
        order = whole.order(stream)
        if order[0] == OWNERS[-1]:
            assert left.first(stream) == order[1]
            heirs.add(order[1])
        assert left.order(stream) == [worker for worker in order if worker != OWNERS[-1]]
    # Not all on one neighbour, who would break down next.
    assert heirs == set(OWNERS[:-1])


@given(workers=NAMES, stream=st.text(max_size=30), data=st.data())
def test_everybody_computes_alike_in_whatever_order_the_workers_are_told(workers, stream, data):
    told = data.draw(st.permutations(workers)) + data.draw(st.lists(st.sampled_from(workers)))
    one, other = Ring(workers), Ring(told)
    assert one.order(stream) == other.order(stream)
    assert sorted(one.order(stream)) == sorted(workers)
    assert one.first(stream) == one.order(stream)[0]
    assert one.workers == other.workers


def test_another_process_computes_alike():
    code = (
        "from protodcs.serve.workers.ring import Ring\n"
        f"ring = Ring({OWNERS!r})\n"
        "print(*(ring.first(f'camera-{number}') for number in range(50)))"
    )
    told = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    ring = Ring(OWNERS)
    assert told == [ring.first(stream) for stream in STREAMS[:50]]
