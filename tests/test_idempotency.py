"""A retry is recognised by its key, gets the first answer, and is never applied again."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from protodcs.errors import AnswerExpiredError, StoreError, UsageError
from protodcs.serve.store.values import Checkpoint, Fence, KeySegment
from protodcs.serve.stream.idempotency import IdempotencyCache, IdempotencyLimits, digest_of
from protodcs.serve.stream.records import Kind, Record

CONTENT = digest_of(b"content")


def record(position, time=0, key=None, row=0, kind=Kind.OBSERVE):
    key = f"key-{position}" if key is None else key
    return Record(kind, position, 1, time, key, b"payload", b"answer %d" % position, CONTENT, row)


def cache_of(records, answers=3, entries=3, seconds=10.0):
    cache = IdempotencyCache(IdempotencyLimits(answers, entries, seconds))
    for one in records:
        cache.add(one)
    return cache


def found(cache, key, row=0, content=CONTENT):
    """Return the position of a retry, "expired", or None if the cache does not know it."""
    try:
        answer = cache.find(Kind.OBSERVE, key, content, row)
    except AnswerExpiredError:
        return "expired"
    return None if answer is None else answer.position


def test_a_retry_gets_the_position_epoch_and_answer_of_the_first_time():
    cache = cache_of(record(position) for position in range(5))
    answer = cache.find(Kind.OBSERVE, "key-3", CONTENT)
    assert (answer.position, answer.epoch, answer.answer) == (3, 1, b"answer 3")
    assert cache.find(Kind.OBSERVE, "key-5", CONTENT) is None


def test_all_rows_of_a_large_request_are_found_by_one_key():
    cache = cache_of(record(100 + row, key="k", row=row) for row in range(1024))
    assert [found(cache, "k", row) for row in range(1025)] == [*range(100, 1124), None]
    assert len(cache._entries) == 1


def test_rows_that_other_requests_were_applied_between_are_found():
    order = [("a", 0), ("a", 1), ("b", 0), ("a", 2), ("b", 1), ("a", 3)]
    cache = cache_of(record(position, key=key, row=row) for position, (key, row) in enumerate(order))
    for position, (key, row) in enumerate(order):
        assert found(cache, key, row) == position
    assert found(cache, "b", 2) is None


def test_the_same_key_with_other_content_or_another_verb_is_an_error():
    cache = cache_of([record(0, key="k")])
    with pytest.raises(UsageError, match="'k' was used for a request with other content"):
        cache.find(Kind.OBSERVE, "k", digest_of(b"other"))
    with pytest.raises(UsageError, match="'k' was used for a request with other content"):
        cache.find(Kind.FREEZE, "k", CONTENT)


def test_a_key_outlives_its_answer_and_then_says_so():
    cache = cache_of((record(position, time=position) for position in range(10)), answers=2, entries=6, seconds=0)
    cache.trim()
    expected = [None] * 4 + ["expired"] * 4 + [8, 9]
    assert [found(cache, f"key-{position}") for position in range(10)] == expected


def test_a_key_is_dropped_only_if_it_is_too_old_by_position_and_by_time():
    old = [record(position, time=1000 * position) for position in range(10)]
    by_position = cache_of(old, answers=10, entries=2, seconds=100.0)
    by_position.trim()
    assert [found(by_position, f"key-{position}") for position in range(10)] == list(range(10))
    by_time = cache_of(old, answers=10, entries=100, seconds=2.0)
    by_time.trim()
    assert [found(by_time, f"key-{position}") for position in range(10)] == list(range(10))
    by_both = cache_of(old, answers=10, entries=2, seconds=4.0)
    by_both.trim()
    assert [found(by_both, f"key-{position}") for position in range(10)] == [None] * 5 + [5, 6, 7, 8, 9]


def test_a_request_whose_rows_still_arrive_keeps_its_key():
    rows = [record(0, key="large", row=0)]
    rows += [record(position, time=1000 * position) for position in range(1, 9)]
    rows.append(record(9, time=9000, key="large", row=1))
    cache = cache_of(rows, answers=10, entries=1, seconds=1.0)
    cache.trim()
    assert [found(cache, "large", row) for row in range(3)] == [0, 9, None]


def test_nothing_is_dropped_before_a_snapshot():
    cache = cache_of(record(position, time=100_000 * position) for position in range(50))
    assert [found(cache, f"key-{position}") for position in range(50)] == list(range(50))


def test_the_newest_answers_come_first():
    cache = cache_of([*(record(position) for position in range(4)), record(4, kind=Kind.FREEZE), record(5)])
    assert [answer.position for answer in cache.newest(Kind.OBSERVE)] == [5, 3, 2, 1, 0]


def test_a_digest_depends_on_where_the_content_is_split():
    assert digest_of(b"ab", b"c") != digest_of(b"a", b"bc") != digest_of(b"abc")


@pytest.mark.parametrize("cut", [0, 3, 20, -1])
def test_damaged_bytes_are_an_error(cut):
    cache = cache_of(record(position) for position in range(3))
    packed, (keys, _) = cache.pack(), cache.unstored_keys()
    with pytest.raises(StoreError, match="cannot be read"):
        cache_of([]).load(packed[:cut])
    with pytest.raises(StoreError, match="damaged"):
        cache_of([]).load(packed, [KeySegment(3, keys[:cut])])


class Disk:
    """What a store has of a stream: its newest snapshot and the segments of keys."""

    def __init__(self):
        self.snapshot, self.segments, self.start = None, {}, 0
        # Of each checkpoint, the bytes of its keys.
        self.written = []

    def store(self, checkpoint):
        first, last = checkpoint.kept_keys
        self.segments = {at: data for at, data in self.segments.items() if first <= at <= last}
        if checkpoint.keys:
            self.segments[checkpoint.position] = checkpoint.keys
        self.snapshot, self.start = checkpoint.snapshot, checkpoint.position
        self.written.append(len(checkpoint.keys))

    def load(self, limits):
        cache = IdempotencyCache(limits)
        if self.snapshot is not None:
            cache.load(self.snapshot, [KeySegment(*item) for item in sorted(self.segments.items())])
        return cache


def checkpoint_of(cache, position):
    cache.trim()
    return Checkpoint("s", Fence(1), position, cache.pack(), *cache.unstored_keys())


@given(
    limits=st.builds(IdempotencyLimits, st.integers(0, 6), st.integers(0, 6), st.sampled_from([0.0, 0.002, 3.0])),
    steps=st.lists(
        st.tuples(st.integers(0, 1500), st.sampled_from("abcdef"), st.booleans(), st.booleans(), st.booleans()),
        max_size=40,
    ),
)
@example(limits=IdempotencyLimits(2, 2, 0.002), steps=[(1, "a", True, True, True)] * 9)
@settings(max_examples=300)
def test_a_stream_that_was_unloaded_recognises_the_same_requests(limits, steps):
    """One of two caches is loaded again from its checkpoints and journal. A checkpoint may be durable late."""
    never, unloaded, disk = IdempotencyCache(limits), IdempotencyCache(limits), Disk()
    journal, time, rows, under_way, covered = [], 10_000, dict.fromkeys("abcdef", 0), [], 0
    for position, (later, key, is_made, is_durable, is_unloaded) in enumerate(steps):
        time += later
        one = record(position, time, key, rows[key])
        rows[key] += 1
        never.add(one)
        unloaded.add(one)
        journal.append(one)
        if is_made:
            never.trim()
            covered = position + 1
            under_way.append(checkpoint_of(unloaded, covered))
        if is_durable or is_unloaded:
            for checkpoint in under_way:
                disk.store(checkpoint)
                unloaded.stored(checkpoint)
            under_way = []
        if is_unloaded:
            unloaded = disk.load(limits)
            for kept in journal[disk.start :]:
                unloaded.add(Record.unpack(kept.pack()))
        assert unloaded.pack() == never.pack()
        assert unloaded._entries == never._entries
        assert list(unloaded._entries) == list(never._entries)
        assert unloaded.time == time
        assert all(found(unloaded, kept.key, kept.row) == kept.position for kept in journal[covered:])


@pytest.mark.parametrize(("each", "seconds"), [(1, 300.0), (100, 3.0), (1_000, 30.0)])
def test_a_long_stream_writes_few_keys_at_a_time_and_has_few_segments(each, seconds):
    """`each` records follow one another in a checkpoint, a millisecond apart."""
    limits, disk = IdempotencyLimits(10, 10, seconds), Disk()
    cache, count = IdempotencyCache(limits), 100 * each if each > 1 else 3_000
    for position in range(count):
        cache.add(record(position, time=position))
        if (position + 1) % each == 0:
            checkpoint = checkpoint_of(cache, position + 1)
            disk.store(checkpoint)
            cache.stored(checkpoint)
    one = (disk.written[0] - 4) / each
    # Keys of the time that they are kept for, and as many that were merged with newer ones.
    kept = min(1000 * seconds, count)
    assert kept * one <= sum(map(len, disk.segments.values())) <= 2 * (kept + each) * one + (1 << 19)
    assert len(disk.segments) <= 12 + kept * one / (1 << 18)
    # A segment is merged with others at most once for each doubling of its size.
    assert sum(disk.written) <= 13 * count * one
    again = disk.load(limits)
    assert list(again._entries.items()) == list(cache._entries.items())
    assert len(again._entries) == min(1000 * seconds + 1, count)
