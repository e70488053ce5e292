"""What is written down: records, decisions, snapshots, and the answers that are remembered."""

import struct
import zlib
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from made_service import FEATURES, PROTOTYPES
from protodcs import ProtoDCS
from protodcs.core.decision import decided
from protodcs.errors import StoreError
from protodcs.serve.stream import snapshots
from protodcs.serve.stream.answers import Remembered, fingerprint, pack_decision, unpack_decision
from protodcs.serve.stream.records import Kind, Record
from protodcs.serve.stream.snapshots import Snapshot

NUMBERS = st.integers(0, 2**64 - 1)
KEYS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=50)
RECORDS = st.builds(
    Record,
    kind=st.sampled_from(Kind),
    position=NUMBERS,
    epoch=NUMBERS,
    time=NUMBERS,
    key=KEYS,
    payload=st.binary(max_size=300),
    answer=st.binary(max_size=100),
)
SNAPSHOTS = st.builds(Snapshot, NUMBERS, st.binary(max_size=300), st.lists(RECORDS, max_size=4), st.binary(max_size=99))
RECORD = Record(Kind.OBSERVE, 7, 3, 1_700_000_000_000, "caf\u00e9/7", b"\x00\x00\x80?" * 4, b"answer")
SNAPSHOT = Snapshot(8, b"a state", [RECORD, replace(RECORD, position=6, key="6")])


of_both = pytest.mark.parametrize(
    ("unpack", "data"),
    [(Record.unpack, RECORD.pack()), (snapshots.unpack, snapshots.pack(SNAPSHOT))],
    ids=["record", "snapshot"],
)


def sealed(body):
    """A body under a checksum that fits it, as only a writer of our own would make it."""
    return body + struct.pack("<I", zlib.crc32(body))


# Records.


@given(RECORDS)
def test_a_record_comes_back_as_it_was(record):
    assert Record.unpack(record.pack()) == record


@given(st.binary(max_size=200))
def test_bytes_that_are_no_record_are_refused(data):
    with pytest.raises(StoreError):
        Record.unpack(data)


@of_both
def test_every_flipped_bit_cut_and_extension_is_refused(unpack, data):
    unpack(data)
    for place in range(len(data)):
        for bit in range(8):
            damaged = bytearray(data)
            damaged[place] ^= 1 << bit
            with pytest.raises(StoreError):
                unpack(bytes(damaged))
        for damaged in (data[:place], data[place + 1 :], data[:place] + data[place + 1 :]):
            with pytest.raises(StoreError):
                unpack(damaged)
    with pytest.raises(StoreError):
        unpack(data + b"\0")


@of_both
def test_a_newer_version_is_refused_in_words(unpack, data):
    newest = data[0]
    with pytest.raises(StoreError, match=rf"of version {newest + 1}, this protodcs reads {newest}: upgrade protodcs"):
        unpack(sealed(bytes([newest + 1]) + data[1:-4]))


def test_a_record_of_a_kind_from_the_future_is_refused_in_words():
    data = bytearray(RECORD.pack()[:-4])
    data[1] = 99
    with pytest.raises(StoreError, match=r"of kind 99.*upgrade"):
        Record.unpack(sealed(bytes(data)))


def test_a_record_says_what_is_wrong_with_it():
    data = RECORD.pack()
    with pytest.raises(StoreError, match="cut off"):
        Record.unpack(data[:10])
    with pytest.raises(StoreError, match="announces another length"):
        Record.unpack(data[:-1])
    with pytest.raises(StoreError, match="checksum"):
        Record.unpack(data[:-1] + bytes([data[-1] ^ 1]))


# Snapshots.


@given(SNAPSHOTS)
def test_a_snapshot_comes_back_as_it_was(snapshot):
    assert snapshots.unpack(snapshots.pack(snapshot)) == snapshot


@given(NUMBERS, st.binary(max_size=300), st.lists(RECORDS, max_size=4))
def test_a_snapshot_of_before_there_were_guards_is_read_without_one(position, state, records):
    body = struct.pack("<BQQI", 1, position, len(state), len(records)) + state
    for record in records:
        body += struct.pack("<I", len(record.pack())) + record.pack()
    assert snapshots.unpack(sealed(body)) == Snapshot(position, state, records, b"")


@given(st.binary(max_size=200))
def test_bytes_that_are_no_snapshot_are_refused(data):
    with pytest.raises(StoreError):
        snapshots.unpack(data)


@pytest.mark.parametrize(
    "head",
    [
        struct.pack("<BQQI", 1, 0, 8, 0),
        struct.pack("<BQQI", 1, 0, 6, 0),
        struct.pack("<BQQI", 1, 0, 2**60, 0),
        struct.pack("<BQQI", 1, 0, 7, 1),
        struct.pack("<BQQI", 1, 0, 0, 2**32 - 1),
        struct.pack("<BQQQI", 2, 0, 7, 1, 0),
        struct.pack("<BQQQI", 2, 0, 3, 3, 0),
        struct.pack("<BQQQI", 2, 0, 3, 2**60, 0),
        struct.pack("<BQQQI", 2, 0, 3, 4, 1),
    ],
)
def test_a_snapshot_whose_lengths_do_not_add_up_is_refused_though_its_checksum_fits(head):
    with pytest.raises(StoreError):
        snapshots.unpack(sealed(head + b"7 bytes"))


# Decisions.

FLOATS = st.floats(allow_nan=True, allow_infinity=True)


def bits(decision):
    """A decision so that NaN equals itself and minus zero does not equal zero."""
    said = decision.to_dict()
    return {name: struct.pack("<d", value) if isinstance(value, float) else value for name, value in said.items()}


@given(st.data())
def test_a_decision_comes_back_to_the_bit(data):
    known, trusted, cached, evolved = (data.draw(st.booleans()) for _ in range(4))
    label = data.draw(KEYS) if known else None
    numbers = [data.draw(FLOATS) for _ in range(4)]
    decision = decided(
        known,
        data.draw(st.integers(0, 2**32 - 1)),
        label,
        *numbers,
        None,
        data.draw(FLOATS),
        data.draw(FLOATS),
        trusted,
        cached,
        evolved,
        data.draw(NUMBERS),
    )
    assert bits(unpack_decision(pack_decision(decision))) == bits(decision)


def test_decisions_of_an_engine_come_back_to_the_bit_without_their_scores():
    engine = ProtoDCS(PROTOTYPES)
    kinds = set()
    for sample in FEATURES:
        decision = engine.observe(sample)
        expected = {**bits(decision), "scores": None}
        assert bits(unpack_decision(pack_decision(decision))) == expected
        kinds.add((decision.known, decision.trusted, decision.cached, decision.evolved))
    assert len(kinds) > 3


def test_a_damaged_answer_is_refused():
    whole = pack_decision(ProtoDCS(PROTOTYPES).observe(FEATURES[0]))
    for answer in (b"", whole[:20], b"\x01" + whole[1:] + b"\xff"):
        with pytest.raises(StoreError, match="damaged"):
            unpack_decision(answer)


# What is remembered.


def noted(position, time=0, key=None):
    return Record(Kind.OBSERVE, position, 1, time, f"{position}" if key is None else key, b"payload", b"answer")


def remembered(records, most=3, seconds=10.0):
    memory = Remembered(most, seconds)
    for record in records:
        memory.add(record)
    return memory


def positions(memory):
    return [record.position for record in memory]


def test_the_newest_are_kept_by_number():
    memory = remembered(noted(position) for position in range(10))
    memory.forget(10)
    assert positions(memory) == [7, 8, 9]
    assert memory.find("6") is None
    assert memory.find("7").position == 7
    assert len(memory) == 3


def test_what_is_old_goes_however_few_there_are():
    memory = remembered([noted(0, 0), noted(1, 4_999), noted(2, 5_000), noted(3, 15_000)], most=100)
    memory.forget(4)
    assert positions(memory) == [2, 3]


def test_what_the_journal_still_holds_is_kept_whatever_its_age_and_number():
    memory = remembered(noted(position, 100_000 * position) for position in range(10))
    memory.forget(4)
    assert positions(memory) == [4, 5, 6, 7, 8, 9]


def test_nothing_is_forgotten_before_a_snapshot():
    assert positions(remembered(noted(position, 100_000 * position) for position in range(50))) == list(range(50))


@pytest.mark.parametrize("records", [0, 1, 5])
def test_a_stream_may_remember_nothing_at_all(records):
    memory = remembered((noted(position) for position in range(records)), most=0)
    memory.forget(records)
    assert positions(memory) == []


def test_a_clock_that_was_set_back_makes_nobody_old():
    memory = remembered([noted(0, 1_000_000), noted(1, 5)])
    memory.forget(2)
    assert positions(memory) == [0, 1]


def test_a_fingerprint_stands_for_the_payload():
    found = remembered([noted(0)]).find("0")
    assert found.payload == fingerprint(b"payload") != fingerprint(b"another")
    assert replace(found, payload=b"payload") == noted(0)


@given(
    most=st.integers(0, 6),
    seconds=st.sampled_from([0.0, 0.002, 3.0]),
    steps=st.lists(st.tuples(st.integers(-2, 1500), st.booleans(), st.booleans()), max_size=40),
)
@example(most=2, seconds=0.002, steps=[(1, True, True)] * 9)
@settings(max_examples=200)
def test_who_slept_remembers_the_same_as_who_did_not(most, seconds, steps):
    """At any step a snapshot may be written, and one of the two may sleep and wake from snapshot and journal."""
    never_slept, sleeper = Remembered(most, seconds), Remembered(most, seconds)
    snapshot, tail, time = [], [], 10_000
    for position, (later, writes, sleeps) in enumerate(steps):
        time += later
        record = noted(position, time)
        never_slept.add(record)
        sleeper.add(record)
        tail.append(record)
        if writes:
            never_slept.forget(position + 1)
            sleeper.forget(position + 1)
            packed = snapshots.pack(Snapshot(position + 1, b"", list(sleeper)))
            snapshot, tail = snapshots.unpack(packed).remembered, []
        if sleeps:
            sleeper = Remembered(most, seconds)
            for kept in snapshot:
                sleeper.put_back(kept)
            for kept in tail:
                sleeper.add(Record.unpack(kept.pack()))
        assert list(sleeper) == list(never_slept)
        assert {record.key for record in tail} <= {record.key for record in sleeper}
        if writes:
            assert len(sleeper) <= most
