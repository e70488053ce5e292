"""One stream loaded: it loads bit-exact from snapshot and journal, and an error changes nothing."""

from dataclasses import replace

import numpy as np
import pytest

from made_service import FEATURES, LIMITS, PROTOTYPES, ROWS, SPEC, acquired, feature, spec_of
from protodcs import StreamDCS
from protodcs.core.prototypes import Prototypes
from protodcs.errors import DamagedDataError, InputError, ProtoDCSError, StateVersionError, StoreError, UsageError
from protodcs.serve.guard import GuardSettings
from protodcs.serve.stream.answers import pack_decision, unpack_decision
from protodcs.serve.stream.feedback import Feedback, pack_feedback
from protodcs.serve.stream.idempotency import digest_of
from protodcs.serve.stream.live_stream import LiveStream, StreamSpec, pack_class
from protodcs.serve.stream.records import LONGEST_KEY, Kind, Record

NOW = 1_700_000_000.0


def loaded(snapshot=None, start=0, tail=(), epoch=1, spec=SPEC, limits=LIMITS):
    return LiveStream(acquired(spec, snapshot, start, tail, epoch), PROTOTYPES, limits)


def found(live, kind, key, payload):
    """Return the answer to a retry whose content is one payload."""
    return live.applied(kind, key, digest_of(payload))


def same(one, other):
    """Whether two streams are the same to the bit, in what they learned and in what they remember."""
    return (
        one.engine.snapshot() == other.engine.snapshot()
        and one.position == other.position
        and one._applied.pack() == other._applied.pack()
    )


def eventful(live):
    """What to do to a stream, step by step: everything that can be written down stands among the observes."""
    kept = []
    for number in range(24):
        yield Kind.OBSERVE, feature(number)
        if number == 5:
            yield Kind.FREEZE, b""
        if number == 8:
            yield Kind.UNFREEZE, b""
        if number == 9:
            yield Kind.OBSERVE_ROWS, feature(40) + feature(41) + feature(42)
        if number == 10:
            yield Kind.ACKNOWLEDGE, b""
        if number == 11:
            kept.append(live.state())
            yield Kind.SAVE_SNAPSHOT, b"before the reset"
            yield Kind.DELETE_SNAPSHOT, b"an older one"
        if number == 13:
            yield Kind.RESET, b""
        if number == 17:
            yield Kind.RESTORE, kept[0]
        if number == 20:
            yield Kind.ADD_CLASS, pack_class(feature(3), "owl")
            yield Kind.REMOVE_CLASS, b"1"
        if number == 21:
            yield Kind.FEEDBACK, pack_feedback(Feedback("owl", feature=feature(30)))
            yield Kind.FEEDBACK, pack_feedback(Feedback(None, feature=feature(31)))
        if number == 22:
            yield Kind.FREEZE, b""


def lived():
    """A stream through the events, its journal, and a snapshot before each record and at the end; else None.

    Both have one item for each position.
    """
    live = loaded()
    journal, snapshots = [], [live.checkpoint("s")]
    for kind, payload in eventful(live):
        record = live.change(kind, f"key-{live.position}", payload, NOW + live.position)
        covered = len(record.answers) - 1
        journal += [record.pack(), *[None] * covered]
        snapshots += [*[None] * covered, live.checkpoint("s")]
    return live, journal, snapshots


def cuts(snapshots):
    """Where the journal may end: records are whole in it."""
    return [position for position, snapshot in enumerate(snapshots) if snapshot is not None]


def test_a_stream_answers_and_learns_as_the_engine_alone():
    engine, live = StreamDCS(PROTOTYPES), loaded()
    for number in range(40):
        assert live.peek(feature(number)) == pack_decision(engine.peek(FEATURES[number]))
        record = live.change(Kind.OBSERVE, f"{number}", feature(number), NOW)
        assert record.answer == pack_decision(engine.observe(FEATURES[number]))
        assert (record.position, record.epoch, record.time) == (number, 1, 1_700_000_000_000)
    assert live.engine.snapshot() == engine.snapshot()
    assert live.different == 0


def test_rows_that_are_observed_together_are_decided_as_one_by_one():
    spec = spec_of().model_copy(update={"guard": GuardSettings(window=32)}).pack()
    alone, together = loaded(spec=spec), loaded(spec=spec)
    rows = [feature(number) for number in range(100)]
    digest = digest_of(*rows)
    records = [alone.change(Kind.OBSERVE, "k", row, NOW, digest, number) for number, row in enumerate(rows)]
    for first, last in ((0, 1), (1, 20), (20, 100)):
        record = together.change(Kind.OBSERVE_ROWS, "k", b"".join(rows[first:last]), NOW, digest, first)
        assert Record.unpack(record.pack()) == record
        assert record.answers == [one.answer for one in records[first:last]]
    assert together.position == alone.position == 100
    assert together.engine.snapshot() == alone.engine.snapshot()
    assert together._applied.pack() == alone._applied.pack()
    assert together.summary() == alone.summary()
    assert together.guard.windows == alone.guard.windows == 3
    assert together.guard.pack() == alone.guard.pack()
    assert together._latest.pack() == alone._latest.pack()
    for number, one in enumerate(records):
        found = together.applied(Kind.OBSERVE, "k", digest, number)
        assert (found.position, found.answer) == (number, one.answer)


@pytest.mark.parametrize("wrong", [np.nan, 0.0])
def test_nothing_is_observed_if_one_of_the_rows_cannot_be_used(wrong):
    live = loaded()
    before = live.engine.snapshot()
    bad = np.full(len(feature(0)) // 4, wrong, dtype="<f4").tobytes()
    with pytest.raises(InputError):
        live.change(Kind.OBSERVE_ROWS, "k", feature(0) + bad + feature(1), NOW)
    assert (live.position, live.engine.snapshot()) == (0, before)


@pytest.mark.parametrize("follows", [0, 1, 2, 4])
def test_a_record_that_does_not_follow_the_rows_of_the_one_before_is_damage(follows):
    rows = loaded().change(Kind.OBSERVE_ROWS, "k", feature(0) + feature(1) + feature(2), NOW)
    next_record = replace(loaded().change(Kind.OBSERVE, "l", feature(3), NOW), position=follows)
    with pytest.raises(DamagedDataError, match=f"record {follows} where 3 is due"):
        loaded(None, 0, [rows.pack(), next_record.pack()])


@pytest.mark.parametrize("with_snapshot", [False, True])
def test_a_stream_wakes_to_the_bit_at_every_cut_and_goes_on_so(with_snapshot):
    """Cut anywhere: it loads from the journal alone, or from a snapshot a few records before the cut."""
    final, journal, snapshots = lived()
    # Streams with clusters have tests of their own.
    assert {Record.unpack(data).kind for data in journal if data is not None} == {*Kind} - {Kind.EDIT_CLUSTERS}
    for cut in cuts(snapshots):
        start = max(start for start in cuts(snapshots) if start <= max(0, cut - 4)) if with_snapshot else 0
        live = loaded(snapshots[start] if with_snapshot else None, start, journal[start:cut], epoch=2)
        assert live.position == cut
        assert live.different == 0
        assert loaded(snapshots[cut], cut).engine.snapshot() == live.engine.snapshot()
        for data in journal[cut:]:
            if data is None:
                continue
            record = Record.unpack(data)
            again = live.change(record.kind, record.key, record.payload, record.time / 1000)
            assert replace(again, epoch=record.epoch) == record
        assert live.engine.snapshot() == final.engine.snapshot()


def test_waking_from_journal_and_from_snapshot_remembers_the_same():
    final, journal, snapshots = lived()
    for start in cuts(snapshots):
        assert same(loaded(snapshots[start], start, journal[start:]), final)
    assert same(loaded(None, 0, journal), final)


def test_a_rollback_goes_back_in_what_was_learned_and_on_in_the_journal():
    live = loaded()
    live.change(Kind.OBSERVE, "a", feature(0), NOW)
    state, before = live.state(), live.engine.snapshot()
    live.change(Kind.OBSERVE, "b", feature(1), NOW)
    record = live.change(Kind.RESTORE, "c", state, NOW)
    assert (record.position, live.position, live.engine.snapshot()) == (2, 3, before)


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
    live, _, _ = lived()
    live.change(Kind.UNFREEZE, "learn again", b"", NOW)
    before, engine = live.checkpoint("s"), live.engine.snapshot()
    with pytest.raises(error):
        live.change(kind, key, payload, NOW)
    assert (live.checkpoint("s"), live.engine.snapshot()) == (before, engine)
    assert found(live, kind, "k", payload) is None


@pytest.mark.parametrize("payload", [b"", feature(0)[:-1], feature(0) * 2, bytes(128)])
def test_a_peek_at_a_bad_feature_is_refused_in_words(payload):
    live = loaded()
    before = live.checkpoint("s")
    with pytest.raises(InputError, match="feature"):
        live.peek(payload)
    assert live.checkpoint("s") == before


def test_the_longest_key_is_taken():
    live = loaded()
    live.change(Kind.OBSERVE, "k" * LONGEST_KEY, feature(0), NOW)
    assert found(live, Kind.OBSERVE, "k" * LONGEST_KEY, feature(0)).position == 0


def test_a_repeated_key_finds_what_was_answered_before_and_after_an_unload():
    final, journal, snapshots = lived()
    for live in (
        final,
        loaded(None, 0, journal),
        loaded(snapshots[-1], len(journal)),
        loaded(snapshots[9], 9, journal[9:]),
    ):
        for data in journal:
            if data is None:
                continue
            record = Record.unpack(data)
            answer = found(live, record.request_kind, record.key, record.payload)
            assert (answer.position, answer.epoch, answer.answer) == (record.position, record.epoch, record.answers[0])
        assert found(live, Kind.OBSERVE, "never used", feature(0)) is None


def test_a_key_that_was_used_for_another_request_is_an_error():
    live = loaded()
    live.change(Kind.OBSERVE, "mine", feature(0), NOW)
    live.change(Kind.SAVE_SNAPSHOT, "kept", b"name", NOW)
    before = live.checkpoint("s")
    for kind, key, payload in (
        (Kind.OBSERVE, "mine", feature(1)),
        (Kind.FREEZE, "mine", b""),
        (Kind.RESTORE, "mine", b"name"),
        (Kind.SAVE_SNAPSHOT, "kept", b"another name"),
    ):
        with pytest.raises(UsageError, match=f"key '{key}' was used for a request with other content.*Use a new key"):
            found(live, kind, key, payload)
    assert live.checkpoint("s") == before


def test_an_answer_that_was_tampered_with_is_counted_when_it_is_replayed_and_still_told():
    _, journal, _ = lived()
    tampered = list(journal)
    for place in (0, 3):
        record = Record.unpack(journal[place])
        said = replace(unpack_decision(record.answer), p_unknown=0.123)
        tampered[place] = replace(record, answer=pack_decision(said)).pack()
    live = loaded(None, 0, tampered)
    assert live.different == 2
    assert live.engine.snapshot() == loaded(None, 0, journal).engine.snapshot()
    # What a caller was told stays what it was.
    assert unpack_decision(found(live, Kind.OBSERVE, "key-0", feature(0)).answer).p_unknown == 0.123


def test_a_journal_with_a_record_missing_doubled_or_damaged_is_refused():
    _, journal, snapshots = lived()
    for tail, words in (
        (journal[:3] + journal[4:], "record 4 where 3 is due"),
        (journal[:3] + journal[2:], "record 2 where 3 is due"),
        (journal[1:], "record 1 where 0 is due"),
        ([*journal[:3], journal[3][:-1]], "damaged"),
    ):
        with pytest.raises(StoreError, match=words):
            loaded(None, 0, tail)
    with pytest.raises(StoreError, match="covers 5 records and 4 are gone"):
        loaded(snapshots[5], 4, journal[4:])


# StreamSpec.


def test_a_spec_comes_back_and_the_same_one_gives_the_same_bytes():
    assert StreamSpec.unpack(SPEC) == spec_of()
    assert StreamSpec.unpack(SPEC).pack() == SPEC
    assert spec_of(target_false_reject=0.1).pack() != SPEC


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", SPEC[:-1], SPEC.replace(b'"classes"', b'"klasses"')])
def test_a_damaged_spec_is_refused_in_words(data):
    with pytest.raises(StoreError, match="cannot be read"):
        StreamSpec.unpack(data)


def test_a_spec_from_the_future_is_refused_in_words():
    with pytest.raises(StateVersionError, match="it has version 4, and this one reads 3"):
        StreamSpec.unpack(SPEC.replace(b'"schema_version":3', b'"schema_version":4'))


def test_a_stream_beside_other_prototypes_is_refused():
    live = loaded()
    live.change(Kind.OBSERVE, "k", feature(0), NOW)
    held = acquired(SPEC, live.checkpoint("s"), 1, epoch=2)
    with pytest.raises(ProtoDCSError):
        LiveStream(held, Prototypes(ROWS[::-1]), LIMITS)


def test_a_guard_goes_on_over_the_classes_that_there_are_now():
    guarded = spec_of().model_copy(update={"guard": GuardSettings(window=32, keep_windows=1)}).pack()
    live = LiveStream(acquired(guarded), PROTOTYPES, LIMITS)
    journal = []

    def change(kind, payload):
        journal.append(live.change(kind, f"key-{live.position}", payload, NOW).pack())

    change(Kind.ADD_CLASS, pack_class(feature(3), "owl"))
    for number in range(150):
        change(Kind.OBSERVE, feature(number))
        if number == 75:
            change(Kind.REMOVE_CLASS, b"1")
        if number == 110:
            snapshot, start = live.checkpoint("s"), live.position
    assert live.guard.windows == 2
    for held in (
        acquired(guarded, tail=journal),
        acquired(guarded, snapshot, start, journal[start:]),
    ):
        again = LiveStream(held, PROTOTYPES, LIMITS)
        assert again.engine.snapshot() == live.engine.snapshot()
        assert again.guard.pack() == live.guard.pack()


def test_a_stream_that_goes_on_and_on_stops_growing():
    guarded = spec_of().model_copy(update={"guard": GuardSettings(window=32, keep_windows=1)}).pack()
    live = loaded(spec=guarded, limits=LIMITS._replace(seconds=600.0))
    sizes = []
    for number in range(6000):
        live.change(Kind.OBSERVE, f"key-{number:09}", feature(number % len(FEATURES)), NOW + number)
        if number % 100 == 99:
            checkpoint = live.checkpoint("s")
            sizes.append(len(checkpoint.snapshot) + len(checkpoint.keys))
    early, full = sizes[4], sizes[30:]
    assert live.guard.counts.total() == 0
    assert early < min(full) / 2
    # Counters get more digits, and a sample more or less may have moved into a memory.
    assert max(full) < 1.01 * min(full)


def test_many_unknown_samples_are_told_once_and_shown_also_after_an_unload():
    live, journal, begun = loaded(), [], []
    far, rng = np.linalg.svd(ROWS)[2][len(ROWS) :], np.random.default_rng(0)
    for number in range(640):
        sample = rng.normal(size=len(far)) @ far if number > 500 and number % 2 else ROWS[number % 7]
        journal.append(live.change(Kind.OBSERVE, f"key-{number}", sample.astype("<f4").tobytes(), NOW).pack())
        begun += live.warnings()
        if number == 520:
            early = live.checkpoint("s")
    ((position, told),) = begun
    assert 500 < position < 640
    usual = told["usual_unknown_rate"]
    assert (told["warning"], usual < 0.2 < told["unknown_rate"] < 0.6) == ("many_unknown", True)
    for again in (live, loaded(live.checkpoint("s"), 640), loaded(early, 521, journal[521:])):
        shown = again.summary()
        assert (shown.warning, shown.unknown_rate, shown.usual_unknown_rate) == ("many_unknown", 0.52, usual)
        assert again.warnings() == []
        again.change(Kind.ACKNOWLEDGE, "acknowledge", b"", NOW)
        assert again.summary().warning is None
