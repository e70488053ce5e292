"""Records, decisions and snapshots come back from their bytes as they were, and damaged bytes are an error."""

import struct
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from made_service import FEATURES, PROTOTYPES
from protodcs import ProtoDCS, StreamDCS
from protodcs.core.decision import REASONS, Decision
from protodcs.errors import StateVersionError, StoreError
from protodcs.serve.stream import snapshots
from protodcs.serve.stream.answers import pack_decision, unpack_decision
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
    digest=st.binary(min_size=16, max_size=16),
    row=st.integers(0, 2**32 - 1),
)
SNAPSHOTS = st.builds(Snapshot, NUMBERS, *[st.binary(max_size=300)] * 3)
RECORD = Record(Kind.OBSERVE, 7, 3, 1_700_000_000_000, "caf\u00e9/7", b"\x00\x00\x80?" * 4, b"answer", b"d" * 16, 2)
SNAPSHOT = Snapshot(8, b"a state", b"a guard", b"requests")


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
    with pytest.raises(StateVersionError, match=rf"it has version {newest + 1}, and this one reads {newest}"):
        unpack(sealed(bytes([newest + 1]) + data[1:-4]))


def test_a_record_of_a_kind_from_the_future_is_refused_in_words():
    data = bytearray(RECORD.pack()[:-4])
    data[1] = 99
    with pytest.raises(StoreError, match=r"another version .* kind 99"):
        Record.unpack(sealed(bytes(data)))


def test_a_record_says_what_is_wrong_with_it():
    data = RECORD.pack()
    with pytest.raises(StoreError, match="cut off"):
        Record.unpack(data[:10])
    with pytest.raises(StoreError, match="announces another length"):
        Record.unpack(sealed(data[:-4] + b"x"))
    with pytest.raises(StoreError, match="checksum"):
        Record.unpack(data[:-1] + bytes([data[-1] ^ 1]))


# Snapshots.


@given(SNAPSHOTS)
def test_a_snapshot_comes_back_as_it_was(snapshot):
    assert snapshots.unpack(snapshots.pack(snapshot)) == snapshot


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
    decision = Decision(
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
        data.draw(st.sampled_from((None, *REASONS))),
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
    whole = pack_decision(StreamDCS(PROTOTYPES).observe(FEATURES[0]))
    for answer in (b"", whole[:20], b"\x01" + whole[1:] + b"\xff", b"\xf0" + whole[1:]):
        with pytest.raises(StoreError, match="cannot be read"):
            unpack_decision(answer)
