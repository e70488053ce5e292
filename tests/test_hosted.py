"""One stream awake: it wakes to the bit from snapshot and journal, and an error changes nothing."""

from dataclasses import replace

import numpy as np
import pytest

from made_service import BIRTH, FEATURES, LIMITS, PROTOTYPES, ROWS, birth_of, feature
from protodcs import StreamDCS
from protodcs.core.prototypes import Prototypes
from protodcs.errors import InputError, ProtoDCSError, StoreError, UsageError
from protodcs.serve.guard import GuardSettings
from protodcs.serve.store.base import Fence, Held
from protodcs.serve.stream.answers import pack_decision, unpack_decision
from protodcs.serve.stream.hosted import Birth, Hosted, pack_class
from protodcs.serve.stream.idempotency import digest_of
from protodcs.serve.stream.records import LONGEST_KEY, Kind, Record

NOW = 1_700_000_000.0


def woken(snapshot=None, start=0, tail=(), epoch=1, birth=BIRTH, limits=LIMITS):
    return Hosted(Held(Fence(epoch), birth, snapshot, start, list(tail)), PROTOTYPES, limits)


def found(hosted, kind, key, payload):
    """Return the answer to a retry whose content is one payload."""
    return hosted.applied(kind, key, digest_of(payload))


def same(one, other):
    """Whether two streams are the same to the bit, in what they learned and in what they remember."""
    return (
        one.engine.snapshot() == other.engine.snapshot()
        and one.position == other.position
        and one._applied.pack() == other._applied.pack()
    )


def eventful(hosted):
    """What to do to a stream, step by step: everything that can be written down stands among the observes."""
    kept = []
    for number in range(24):
        yield Kind.OBSERVE, feature(number)
        if number == 5:
            yield Kind.FREEZE, b""
        if number == 8:
            yield Kind.UNFREEZE, b""
        if number == 11:
            kept.append(hosted.state())
            yield Kind.KEEP, b"before the reset"
            yield Kind.DELETE_SNAPSHOT, b"an older one"
        if number == 13:
            yield Kind.RESET, b""
        if number == 17:
            yield Kind.RESTORE, kept[0]
        if number == 20:
            yield Kind.ADD_CLASS, pack_class(feature(3), "owl")
            yield Kind.REMOVE_CLASS, b"1"
        if number == 22:
            yield Kind.FREEZE, b""


def lived():
    """A stream through the events, its packed records, and a snapshot before each of them and at the end."""
    hosted = woken()
    journal, snapshots = [], [hosted.snapshot()]
    for kind, payload in eventful(hosted):
        record = hosted.change(kind, f"key-{hosted.position}", payload, NOW + hosted.position)
        journal.append(record.pack())
        snapshots.append(hosted.snapshot())
    return hosted, journal, snapshots


def test_a_stream_answers_and_learns_as_the_engine_alone():
    engine, hosted = StreamDCS(PROTOTYPES), woken()
    for number in range(40):
        assert hosted.peek(feature(number)) == pack_decision(engine.peek(FEATURES[number]))
        record = hosted.change(Kind.OBSERVE, f"{number}", feature(number), NOW)
        assert record.answer == pack_decision(engine.observe(FEATURES[number]))
        assert (record.position, record.epoch, record.time) == (number, 1, 1_700_000_000_000)
    assert hosted.engine.snapshot() == engine.snapshot()
    assert hosted.different == 0


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_stream_wakes_to_the_bit_at_every_cut_and_goes_on_so(with_snapshot):
    """Cut anywhere: it wakes from the journal alone, or from a snapshot a few records before the cut."""
    final, journal, snapshots = lived()
    assert {Record.unpack(data).kind for data in journal} == set(Kind)
    for cut in range(len(journal) + 1):
        start = max(0, cut - 4) if with_snapshot else 0
        hosted = woken(snapshots[start] if with_snapshot else None, start, journal[start:cut], epoch=2)
        assert hosted.position == cut
        assert hosted.different == 0
        assert woken(snapshots[cut], cut).engine.snapshot() == hosted.engine.snapshot()
        for data in journal[cut:]:
            record = Record.unpack(data)
            again = hosted.change(record.kind, record.key, record.payload, record.time / 1000)
            assert replace(again, epoch=record.epoch) == record
        assert hosted.engine.snapshot() == final.engine.snapshot()


def test_waking_from_journal_and_from_snapshot_remembers_the_same():
    final, journal, snapshots = lived()
    for start in range(len(journal) + 1):
        assert same(woken(snapshots[start], start, journal[start:]), final)
    assert same(woken(None, 0, journal), final)


def test_a_rollback_goes_back_in_what_was_learned_and_on_in_the_journal():
    hosted = woken()
    hosted.change(Kind.OBSERVE, "a", feature(0), NOW)
    state, before = hosted.state(), hosted.engine.snapshot()
    hosted.change(Kind.OBSERVE, "b", feature(1), NOW)
    record = hosted.change(Kind.RESTORE, "c", state, NOW)
    assert (record.position, hosted.position, hosted.engine.snapshot()) == (2, 3, before)


@pytest.mark.parametrize(
    ("kind", "key", "payload", "error"),
    [
        (Kind.OBSERVE, "k", b"", InputError),
        (Kind.OBSERVE, "k", feature(0)[:-1], InputError),
        (Kind.OBSERVE, "k", feature(0)[:-4], InputError),
        (Kind.OBSERVE, "k", feature(0) * 2, InputError),
        (Kind.OBSERVE, "k", np.full(32, np.nan, dtype="<f4").tobytes(), InputError),
        (Kind.OBSERVE, "k", bytes(128), InputError),
        (Kind.OBSERVE, "", feature(0), InputError),
        (Kind.OBSERVE, "k" * (LONGEST_KEY + 1), feature(0), InputError),
        (Kind.OBSERVE, "\u00e9" * (LONGEST_KEY // 2 + 1), feature(0), InputError),
        (Kind.FREEZE, "", b"", InputError),
        (Kind.RESTORE, "k", b"no state", ProtoDCSError),
        (Kind.RESTORE, "k", StreamDCS(ROWS[:3]).difference(), ProtoDCSError),
    ],
)
def test_an_error_changes_nothing(kind, key, payload, error):
    hosted, _, _ = lived()
    hosted.change(Kind.UNFREEZE, "learn again", b"", NOW)
    before, engine = hosted.snapshot(), hosted.engine.snapshot()
    with pytest.raises(error):
        hosted.change(kind, key, payload, NOW)
    assert (hosted.snapshot(), hosted.engine.snapshot()) == (before, engine)
    assert found(hosted, kind, "k", payload) is None


@pytest.mark.parametrize("payload", [b"", feature(0)[:-1], feature(0) * 2, bytes(128)])
def test_a_peek_at_a_bad_feature_is_refused_in_words(payload):
    hosted = woken()
    before = hosted.snapshot()
    with pytest.raises(InputError, match="feature"):
        hosted.peek(payload)
    assert hosted.snapshot() == before


def test_the_longest_key_is_taken():
    hosted = woken()
    hosted.change(Kind.OBSERVE, "k" * LONGEST_KEY, feature(0), NOW)
    assert found(hosted, Kind.OBSERVE, "k" * LONGEST_KEY, feature(0)).position == 0


def test_a_repeated_key_finds_what_was_answered_before_and_after_a_sleep():
    final, journal, snapshots = lived()
    for hosted in (
        final,
        woken(None, 0, journal),
        woken(snapshots[-1], len(journal)),
        woken(snapshots[9], 9, journal[9:]),
    ):
        for data in journal:
            record = Record.unpack(data)
            answer = found(hosted, record.kind, record.key, record.payload)
            assert (answer.position, answer.epoch, answer.answer) == (record.position, record.epoch, record.answer)
        assert found(hosted, Kind.OBSERVE, "never used", feature(0)) is None


def test_a_key_that_was_used_for_another_request_is_an_error():
    hosted = woken()
    hosted.change(Kind.OBSERVE, "mine", feature(0), NOW)
    hosted.change(Kind.KEEP, "kept", b"name", NOW)
    before = hosted.snapshot()
    for kind, key, payload in (
        (Kind.OBSERVE, "mine", feature(1)),
        (Kind.FREEZE, "mine", b""),
        (Kind.RESTORE, "mine", b"name"),
        (Kind.KEEP, "kept", b"another name"),
    ):
        with pytest.raises(UsageError, match=f"key '{key}' was used for a request with other content.*Use a new key"):
            found(hosted, kind, key, payload)
    assert hosted.snapshot() == before


def test_an_answer_that_was_tampered_with_is_counted_when_it_is_replayed_and_still_told():
    _, journal, _ = lived()
    tampered = list(journal)
    for place in (0, 3):
        record = Record.unpack(journal[place])
        said = replace(unpack_decision(record.answer), p_unknown=0.123)
        tampered[place] = replace(record, answer=pack_decision(said)).pack()
    hosted = woken(None, 0, tampered)
    assert hosted.different == 2
    assert hosted.engine.snapshot() == woken(None, 0, journal).engine.snapshot()
    # What a caller was told stays what it was.
    assert unpack_decision(found(hosted, Kind.OBSERVE, "key-0", feature(0)).answer).p_unknown == 0.123


def test_a_journal_with_a_record_missing_doubled_or_damaged_is_refused():
    _, journal, snapshots = lived()
    for tail, words in (
        (journal[:3] + journal[4:], "record 4 where 3 is due"),
        (journal[:3] + journal[2:], "record 2 where 3 is due"),
        (journal[1:], "record 1 where 0 is due"),
        ([*journal[:3], journal[3][:-1]], "damaged"),
    ):
        with pytest.raises(StoreError, match=words):
            woken(None, 0, tail)
    with pytest.raises(StoreError, match="covers 5 records and 4 are gone"):
        woken(snapshots[5], 4, journal[4:])


# Birth.


def test_a_birth_comes_back_and_the_same_one_gives_the_same_bytes():
    assert Birth.unpack(BIRTH) == birth_of()
    assert Birth.unpack(BIRTH).pack() == BIRTH
    assert birth_of(target_false_reject=0.1).pack() != BIRTH


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", BIRTH[:-1], BIRTH.replace(b'"classes"', b'"klasses"')])
def test_a_damaged_birth_is_refused_in_words(data):
    with pytest.raises(StoreError, match="cannot be read"):
        Birth.unpack(data)


def test_a_birth_from_the_future_is_refused_in_words():
    with pytest.raises(StoreError, match=r"schema 2, this protodcs reads 1: upgrade"):
        Birth.unpack(BIRTH.replace(b'"schema_version":1', b'"schema_version":2'))


def test_a_stream_beside_other_prototypes_is_refused():
    hosted = woken()
    hosted.change(Kind.OBSERVE, "k", feature(0), NOW)
    held = Held(Fence(2), BIRTH, hosted.snapshot(), 1, [])
    with pytest.raises(ProtoDCSError):
        Hosted(held, Prototypes(ROWS[::-1]), LIMITS)


def test_a_guard_goes_on_over_the_classes_that_there_are_now():
    guarded = birth_of().model_copy(update={"guard": GuardSettings(window=32, keep_windows=1)}).pack()
    hosted = Hosted(Held(Fence(1), guarded, None, 0, []), PROTOTYPES, LIMITS)
    journal = []

    def change(kind, payload):
        journal.append(hosted.change(kind, f"key-{hosted.position}", payload, NOW).pack())

    change(Kind.ADD_CLASS, pack_class(feature(3), "owl"))
    for number in range(150):
        change(Kind.OBSERVE, feature(number))
        if number == 75:
            change(Kind.REMOVE_CLASS, b"1")
        if number == 110:
            snapshot, start = hosted.snapshot(), hosted.position
    assert hosted.guard.windows == 2
    for held in (Held(Fence(1), guarded, None, 0, journal), Held(Fence(1), guarded, snapshot, start, journal[start:])):
        again = Hosted(held, PROTOTYPES, LIMITS)
        assert again.engine.snapshot() == hosted.engine.snapshot()
        assert again.guard.pack() == hosted.guard.pack()


def test_a_stream_that_goes_on_and_on_stops_growing():
    guarded = birth_of().model_copy(update={"guard": GuardSettings(window=32, keep_windows=1)}).pack()
    hosted = woken(birth=guarded, limits=LIMITS._replace(seconds=600.0))
    sizes = []
    for number in range(6000):
        hosted.change(Kind.OBSERVE, f"key-{number:09}", feature(number % len(FEATURES)), NOW + number)
        if number % 100 == 99:
            sizes.append(len(hosted.snapshot()))
    early, full = sizes[4], sizes[30:]
    assert hosted.guard.counts.total() == 0
    assert early < min(full) / 2
    # Counters get more digits, and a sample more or less may have moved into a memory.
    assert max(full) < 1.01 * min(full)
