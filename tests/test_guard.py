"""Guards: when they fire, what they say, that they load bit-exact, and what they hold against streams that poison."""

import itertools
import math
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import clusters, random_stream, unit
from made_service import LIMITS, PROTOTYPES, acquired, ask, create, done, spec_of, started
from protodcs import ProtoDCS, ProtoDCSConfig, Prototypes, StreamDCS, StreamDCSConfig
from protodcs.core.decision import Decision
from protodcs.core.validation import check_features
from protodcs.errors import ConfigError, StateVersionError, StoreError
from protodcs.serve.guard import Guard, GuardAction, GuardSettings
from protodcs.serve.messages import Action as Ask
from protodcs.serve.settings import ServeConfig
from protodcs.serve.stream.answers import unpack_decision
from protodcs.serve.stream.live_stream import LiveStream, StreamSpec
from protodcs.serve.stream.records import Kind, Record
from script_modules import load_file

WINDOW = 32
CLASSES, WIDTH = 4, 16
ENTRY = Prototypes(np.eye(CLASSES, WIDTH, dtype=np.float32))
SMALL = {"window": WINDOW, "keep_windows": 1, "recovery_windows": 1, "freeze_windows": 4}
SPARE = CLASSES  # the first of the directions that no class has


class Engine:
    """Stands for an engine: it says of itself what a test wants."""

    def __init__(self):
        self.frozen = False
        self.numbers = {}
        self.learned = 0
        self.seen = 0

    def initial_cosines(self):
        return None

    def quick_stats(self):
        return self.numbers

    def difference(self):
        return b"after %d" % self.learned


def guard(**changes):
    return Guard(GuardSettings(**{**SMALL, **changes}), ENTRY, 0.01)


def sample(k, near=0.5, turn=0):
    """A unit feature with the cosine `near` to class k; other turns leave it otherwise unlike the first."""
    feature = np.zeros(WIDTH, dtype=np.float32)
    feature[k], feature[SPARE + turn % (WIDTH - SPARE)] = near, math.sqrt(1.0 - near * near)
    return feature


def said(index, known=True, p_unknown=0.1, score=1.0):
    return Decision(known, index, None, p_unknown, 0.5, 0.5, score, None, 0.5, 0.5, False, False, False, 0)


def window(watcher, engine, answer=lambda k, number: said(k), near=lambda number: 0.5 + 0.01 * (number % 8)):
    """Let a guard watch one window; the event at its end. No other sample of it may bring one."""
    for number in range(WINDOW):
        k = number % CLASSES
        engine.learned += not engine.frozen
        event = watcher.watch(sample(k, near(number), number), answer(k, number), engine, engine.seen)
        engine.seen += 1
        assert event is None or number == WINDOW - 1
    if event is not None:
        engine.frozen = event.action != GuardAction.UNFREEZE
    return event


def accused(watcher, engine):
    """A window in which every answer is another than the shadow's."""
    return window(watcher, engine, lambda k, _: said((k + 1) % CLASSES))


def test_a_guard_says_nothing_while_all_is_well():
    watcher, engine = guard(), Engine()
    assert [window(watcher, engine) for _ in range(20)] == [None] * 20
    assert (watcher.windows, watcher.counts, watcher.events) == (20, {}, [])


def test_sure_answers_of_the_shadow_that_are_overruled_fire_at_the_end_of_the_window():
    watcher, engine = guard(), Engine()
    window(watcher, engine)
    event = accused(watcher, engine)
    assert (event.guard, event.action, event.window, event.threshold) == (
        "disagreement",
        GuardAction.ROLL_BACK,
        2,
        0.05,
    )
    assert event.value == pytest.approx(1.0)
    assert watcher.counts == {"disagreement": 1}


def test_answers_that_the_shadow_was_not_sure_of_may_be_others():
    """Two classes as likely as each other: whichever is answered, the shadow loses nothing by it."""
    watcher, engine = guard(), Engine()
    for number in range(WINDOW):
        feature = unit(sample(0, 0.5, number) + sample(1, 0.5, number)).astype(np.float32)
        assert watcher.watch(feature, said(number % 2), engine, number) is None
    assert watcher.status()["last_window"]["differing"] == 0.5


@pytest.mark.parametrize(("classes", "width"), [(7, 32), (40, 70), (3, 1)])
@pytest.mark.parametrize("method", [StreamDCS, ProtoDCS])
def test_samples_are_watched_together_as_one_by_one_to_the_bit(method, classes, width):
    prototypes, features, _ = random_stream(classes, width, samples=400)
    never = {"disagreement": 1, "rejection": 1, "duplicate_threshold": 1, "mixture_separation": 1e6, "text_drift": 2}
    alone, together = (Guard(GuardSettings(window=40, **never), Prototypes(prototypes), 0.01) for _ in range(2))
    single, many = method(prototypes), method(prototypes)
    sizes, seen = itertools.cycle([1, 2, 7, 16, 40]), 0
    while seen < len(features):
        rows = check_features(features[seen : seen + min(next(sizes), together.room)], width)
        for position, feature in enumerate(features[seen : seen + len(rows)], seen):
            decision = single.observe(feature)
            assert alone.watch(single.latest, decision, single, position) is None
        decisions, cosines = many.observe_unit(rows)
        seen += len(rows)
        assert together.watch_many(rows, decisions, cosines, many, seen - 1) is None
        assert together.pack() == alone.pack()
    assert together.windows == 10


def test_the_status_shows_the_warning_of_the_engine_and_no_guard_fires_for_it():
    watcher, engine = guard(), Engine()
    for reason in ("few samples", None, "possible shift"):
        engine.numbers = {"reason": reason}
        assert window(watcher, engine) is None
        assert watcher.status()["last_window"]["reason"] == reason
        resumed = guard()
        resumed.resume(watcher.pack())
        assert resumed.status() == watcher.status()


def test_a_stream_with_far_apart_groups_is_left_alone():
    """The groups of this stream are about as far apart as StreamDCS can report."""
    prototypes, features, _ = clusters(samples=1000, noise=0.03)
    engine, watcher = StreamDCS(prototypes), Guard(GuardSettings(), Prototypes(prototypes), 0.01)
    for position, feature in enumerate(features.astype(np.float32)):
        assert watcher.watch(feature, engine.observe(feature), engine, position) is None
    assert engine.stats()["mixture"]["separation"] > 5.0
    assert watcher.windows > 5


def test_answers_on_rejected_samples_do_not_count():
    watcher, engine = guard(rejection=1.0), Engine()
    assert window(watcher, engine, lambda k, _: said((k + 1) % CLASSES, known=False)) is None


def test_familiar_samples_that_are_suddenly_rejected_fire():
    watcher, engine = guard(), Engine()
    for _ in range(3):
        assert window(watcher, engine) is None
    event = window(watcher, engine, lambda k, _: said(k, known=False))
    assert (event.guard, event.value) == ("rejection", 1.0)


def test_strange_samples_that_are_suddenly_accepted_fire():
    watcher, engine = guard(), Engine()
    for _ in range(3):
        assert window(watcher, engine, lambda k, number: said(k, known=number % 8 > 1)) is None
    assert window(watcher, engine).guard == "rejection"


def test_a_burst_of_strangers_that_look_strange_to_the_shadow_too_does_not_fire():
    watcher, engine = guard(), Engine()
    for _ in range(3):
        window(watcher, engine)
    for _ in range(5):
        assert window(watcher, engine, lambda k, _: said(k, known=False), lambda number: 0.2) is None


def test_a_flood_of_near_duplicates_fires():
    watcher, engine = guard(), Engine()
    events = [watcher.watch(sample(0, 0.5), said(0), engine, number) for number in range(WINDOW)]
    assert (events[-1].guard, set(events[:-1])) == ("duplicates", {None})


@pytest.mark.parametrize(
    ("numbers", "name"),
    [
        ({"mixture": {"known": {}, "unknown": {}, "separation": 100.0}}, "mixture"),
        ({"text_drift_max": 0.2, "mixture": None}, "drift"),
        ({"level": float("nan")}, "numbers"),
        ({"mixture": {"separation": float("inf")}}, "numbers"),
    ],
)
def test_an_engine_that_degenerated_fires(numbers, name):
    watcher, engine = guard(), Engine()
    assert window(watcher, engine) is None
    engine.numbers = numbers
    assert window(watcher, engine).guard == name


@pytest.mark.parametrize("answer", [said(0, p_unknown=math.nan), said(0, p_unknown=1.5), said(0, score=math.inf)])
def test_a_number_that_is_none_fires_at_once(answer):
    watcher, engine = guard(), Engine()
    assert watcher.watch(sample(0), said(0), engine, 0) is None
    assert watcher.watch(sample(1), answer, engine, 1).guard == "numbers"


def test_a_state_gone_back_to_that_still_gives_no_number_is_given_up():
    watcher, engine = guard(), Engine()
    for _ in range(3):
        window(watcher, engine)
    for kept in (True, False):
        assert watcher.watch(sample(0), said(0, score=math.nan), engine, 0).action == GuardAction.ROLL_BACK
        engine.frozen = True
        assert (watcher.good_state is not None) == kept


# Where it goes back to.


def test_the_older_of_two_kept_states_is_gone_back_to_and_the_beginning_where_none_is_kept():
    watcher, engine = guard(), Engine()
    assert watcher.good_state is None
    for _ in range(5):
        window(watcher, engine)
    accused(watcher, engine)
    assert watcher.good_state == b"after %d" % (4 * WINDOW)


def test_a_state_gone_back_to_that_is_no_better_is_given_up_for_the_beginning():
    watcher, engine = guard(recovery_windows=3), Engine()
    for _ in range(3):
        window(watcher, engine)
    assert accused(watcher, engine).action == GuardAction.ROLL_BACK
    assert watcher.good_state is not None
    assert accused(watcher, engine).action == GuardAction.ROLL_BACK
    assert watcher.good_state is None
    assert accused(watcher, engine) is None  # There is nothing farther to go back to.


def test_the_position_of_the_good_state_is_where_that_state_was_saved():
    """Also after a second roll-back while it is frozen, which discards what was saved before."""
    watcher, engine = guard(freeze_windows=0), Engine()
    for _ in range(3):
        window(watcher, engine)
    for position in (2 * WINDOW, 0):
        assert accused(watcher, engine).action == GuardAction.ROLL_BACK
        assert watcher.good_position == position
    assert window(watcher, engine).action == GuardAction.UNFREEZE
    for saved in range(1, 4):
        start = engine.seen
        assert window(watcher, engine) is None
        assert watcher.good_position == (start if saved > 1 else engine.seen)
        resumed = guard()
        resumed.resume(watcher.pack())
        assert (resumed.good_state, resumed.good_position) == (watcher.good_state, watcher.good_position)


def test_a_guard_that_only_freezes_keeps_no_state():
    watcher, engine = guard(action="freeze"), Engine()
    for _ in range(5):
        window(watcher, engine)
    assert accused(watcher, engine).action == GuardAction.FREEZE
    assert watcher.good_state is None


# Unfreezing.


def test_a_frozen_stream_is_unfrozen_when_it_is_calm_and_waits_twice_as_long_after_each_relapse():
    watcher, engine = guard(freeze_windows=0), Engine()
    for waiting in (1, 2, 4):
        window(watcher, engine)
        accused(watcher, engine)
        events = [window(watcher, engine) for _ in range(waiting)]
        assert [event and (event.guard, event.action) for event in events] == [None] * (waiting - 1) + [
            ("recovered", GuardAction.UNFREEZE)
        ]
    for _ in range(16):
        window(watcher, engine)
    accused(watcher, engine)
    assert window(watcher, engine).guard == "recovered"


def test_a_stream_that_stays_another_is_unfrozen_by_the_timeout_and_is_taken_as_it_is():
    watcher, engine = guard(), Engine()
    for _ in range(3):
        window(watcher, engine)
    accused(watcher, engine)
    events = [window(watcher, engine, near=lambda number: 0.2) for _ in range(4)]
    assert [event and event.guard for event in events] == [None, None, None, "timeout"]
    assert not watcher.frozen


def test_without_a_timeout_it_stays_frozen_until_it_is_told_otherwise():
    watcher, engine = guard(freeze_windows=0), Engine()
    for _ in range(3):
        window(watcher, engine)
    accused(watcher, engine)
    assert [window(watcher, engine, near=lambda number: 0.2) for _ in range(30)] == [None] * 30
    watcher.overruled()
    engine.frozen = False
    assert watcher.status()["state"] == "watching"


def test_what_a_person_froze_is_not_watched_and_not_unfrozen():
    watcher, engine = guard(), Engine()
    engine.frozen = True
    assert [accused(watcher, engine) for _ in range(10)] == [None] * 10
    assert watcher.windows == 0


# At rest.


@settings(max_examples=40)
@given(st.data())
def test_a_guard_goes_on_to_the_bit_from_wherever_it_was_packed(data):
    """Windows of every mood, a rest anywhere among them: both guards say the same and are the same."""
    moods = data.draw(st.lists(st.sampled_from(["well", "others", "rejected", "same", "broken"]), max_size=8))
    rest = data.draw(st.integers(0, WINDOW * max(len(moods), 1)))
    one, engine = guard(), Engine()
    two = one
    for number in range(WINDOW * len(moods)):
        mood, k = moods[number // WINDOW], number % CLASSES
        if number == rest:
            two = guard()
            two.resume(one.pack())
        feature = sample(0 if mood == "same" else k, 0.5 + 0.01 * (number % 8), 0 if mood == "same" else number)
        broken = mood == "broken" and number % 7 == 0
        answer = said((k + (mood == "others")) % CLASSES, mood != "rejected", math.nan if broken else 0.1)
        events = {id(who): who.watch(feature, answer, engine, number) for who in (one, two)}
        assert len(set(events.values())) == 1
        event = events[id(one)]
        if event is not None:
            engine.frozen = event.action != GuardAction.UNFREEZE
    assert one.pack() == two.pack()


def test_a_damaged_guard_is_refused_in_words():
    watcher, engine = guard(), Engine()
    for _ in range(3):
        window(watcher, engine)
    data = watcher.pack()
    for damaged in (b"", data[:3], data[:-1], data + b"\0", data.replace(b'"_seen"', b'"_sean"')):
        with pytest.raises(StoreError, match="cannot be read"):
            guard().resume(damaged)
    with pytest.raises(StateVersionError, match="it has version 2, and this one reads 1"):
        guard().resume(b"\x02" + data[1:])


# In a stream of the service.

# These settings move the text prototypes far faster than the paper's.
RECKLESS = {"evolution_gate": "quantile", "evolution_quantile": 1.0, "text_rate": 0.05}
ROWS, FEATURES, _ = random_stream(classes=7, width=32, samples=700, seed=3, unknown=0.2)
SHARED = Prototypes(ROWS)


def reckless_spec(**changes):
    config = ProtoDCSConfig(**RECKLESS)
    chosen = GuardSettings(**{**SMALL, "disagreement": 0.02, "rejection": 0.5, **changes})
    names = [str(k) for k in range(len(ROWS))]
    spec = StreamSpec(
        method="protodcs",
        config=config.model_dump(),
        classes=names,
        prototypes=SHARED.fingerprint,
        guard=chosen,
    )
    return spec.pack()


def loaded(snapshot=None, start=0, tail=(), epoch=1):
    return LiveStream(acquired(reckless_spec(), snapshot, start, tail, epoch), SHARED, LIMITS)


@pytest.fixture(scope="module")
def lived():
    """A guarded stream through many samples and a person's doings: it, its journal, snapshots and events by place."""
    live = loaded()
    journal, snapshots, events = [], [live.checkpoint("s")], []
    for number, feature in enumerate(FEATURES):
        kinds = {200: Kind.FREEZE, 240: Kind.UNFREEZE, 500: Kind.RESET}
        kind = kinds.get(number, Kind.OBSERVE)
        payload = feature.astype("<f4").tobytes() if kind == Kind.OBSERVE else b""
        journal.append(live.change(kind, f"{number}", payload, 0.0).pack())
        snapshots.append(live.checkpoint("s") if number % 5 == 0 else None)
        events += live.events()
    return live, journal, snapshots, events


def test_a_stream_freezes_goes_back_and_is_unfrozen_while_it_answers_every_sample(lived):
    live, journal, _, events = lived
    assert {event.action for event in events} == {GuardAction.ROLL_BACK, GuardAction.UNFREEZE}
    assert live.guard.status()["events"][-1]["position"] == events[-1].position
    assert sum(live.guard.counts.values()) == sum(event.action != GuardAction.UNFREEZE for event in events)
    for data in journal:
        record = Record.unpack(data)
        if record.kind == Kind.OBSERVE:
            assert math.isfinite(unpack_decision(record.answer).p_unknown)


def test_a_guarded_stream_wakes_to_the_bit_from_any_snapshot_and_goes_on_so(lived):
    final, journal, snapshots, events = lived
    whole = loaded(None, 0, journal)
    assert (whole.different, whole.events()) == (0, [])
    assert whole.checkpoint("s") == final.checkpoint("s")
    for start in range(1, len(journal), 60):
        cut = min(start + 25, len(journal))
        live = loaded(snapshots[start], start, journal[start:cut], epoch=2)
        assert (live.different, live.events()) == (0, [])
        for data in journal[cut:]:
            record = Record.unpack(data)
            assert live.change(record.kind, record.key, record.payload, 0.0).answer == record.answer
        assert live.events() == [event for event in events if event.position >= cut]
        assert live.guard.pack() == final.guard.pack()
        assert live.state() == final.state()


def test_a_snapshot_without_a_guard_wakes_with_a_new_one():
    plain = LiveStream(acquired(spec_of().pack()), PROTOTYPES, LIMITS)
    assert plain.guard is None
    spec = spec_of().model_copy(update={"guard": GuardSettings()}).pack()
    assert LiveStream(acquired(spec, plain.checkpoint("s")), PROTOTYPES, LIMITS).guard.windows == 0


def test_a_spec_without_a_guard_is_written_as_before_there_were_guards():
    assert b"guard" not in spec_of().pack()
    assert StreamSpec.unpack(spec_of().pack()).guard is None
    guarded = spec_of().model_copy(update={"guard": GuardSettings(window=64)})
    assert StreamSpec.unpack(guarded.pack()) == guarded


def test_a_guard_that_is_switched_off_watches_nothing():
    spec = spec_of().model_copy(update={"guard": GuardSettings(enabled=False)}).pack()
    assert LiveStream(acquired(spec), PROTOTYPES, LIMITS).guard is None


def test_settings_of_the_service_hold_those_of_guards_and_say_what_is_wrong_with_them():
    config = ServeConfig(guard={"window": 64, "action": "freeze"})
    assert ServeConfig(**config.model_dump()) == config
    assert config.guard == GuardSettings(window=64, action="freeze")
    with pytest.raises(ConfigError, match=r"guard.*window.*32"):
        ServeConfig(guard={"window": 3})


async def test_the_status_of_a_stream_tells_of_its_guard():
    async with started() as worker:
        (reply,) = await done(worker, ask(Ask.STATUS))
        assert reply.facts["guard"] == {"state": "off"}
        spec = spec_of().model_copy(update={"guard": GuardSettings()}).pack()
        await done(worker, create("g", spec))
        (reply,) = await done(worker, ask(Ask.STATUS, stream="g"))
        assert reply.facts["guard"]["state"] == "watching"


# Beside the engine.


def test_the_engines_own_cosines_are_those_of_the_shadow_until_a_text_prototype_moves():
    engine = StreamDCS(SHARED)
    for feature in FEATURES[:50]:
        engine.observe(feature)
        np.testing.assert_allclose(engine.initial_cosines(), SHARED.unit @ unit(feature), atol=1e-6)
        np.testing.assert_allclose(engine.latest, unit(feature), atol=1e-6)
    moved = ProtoDCS(SHARED, config=ProtoDCSConfig(**RECKLESS))
    moved.observe_many(FEATURES[:200])
    assert moved.stats()["evolved"] > 0
    assert moved.initial_cosines() is None


# On real features.


def _attacks():
    file = Path(__file__).parent.parent / "benchmarks" / "attacks.py"
    return load_file(file)


ATTACKS = _attacks()


def guarded(prototypes, config, chosen):
    shared = Prototypes(prototypes)
    names = [str(k) for k in range(len(shared))]
    method = "streamdcs" if isinstance(config, StreamDCSConfig) else "protodcs"
    spec = StreamSpec(
        method=method, config=config.model_dump(), classes=names, prototypes=shared.fingerprint, guard=chosen
    )
    return LiveStream(acquired(spec.pack()), shared, LIMITS)


def answers(live, features):
    """The best class of each sample."""
    payloads = (feature.astype("<f4").tobytes() for feature in features)
    records = (live.change(Kind.OBSERVE, f"key {at}", data, 0.0) for at, data in enumerate(payloads))
    return np.array([unpack_decision(record.answer).index for record in records])


def behind(live, prototypes, attack):
    """Accuracy on known samples behind an attack: of the stream, and of the frozen shadow."""
    places = np.arange(len(attack.labels))
    known = (places >= attack.end) & (attack.labels >= 0)
    found = answers(live, attack.features)[known]
    shadow = (attack.features[known] @ prototypes.T).argmax(axis=1)
    truth = attack.labels[known]
    return (found == truth).mean(), (shadow == truth).mean()


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *((name, StreamDCSConfig) for name in ATTACKS.ATTACKS),
        *(pytest.param(name, ProtoDCSConfig, marks=pytest.mark.long) for name in ATTACKS.ATTACKS),
    ],
)
def test_an_attack_costs_known_samples_less_than_a_point(clip_stream, name, settings):
    adapted, frozen = [], []
    for recipe in ("dtd", "near"):
        prototypes, features, labels = clip_stream(recipe, seed=10, split="judge")
        attack = ATTACKS.attacked(name, prototypes, features, labels)
        live = guarded(prototypes, settings(), GuardSettings())
        one, other = behind(live, prototypes, attack)
        adapted.append(one)
        frozen.append(other)
    assert np.mean(adapted) >= np.mean(frozen) - 0.01


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if n else []) for n, name in enumerate(ATTACKS.ATTACKS)]
)
def test_an_engine_that_goes_astray_is_held_by_its_guard(clip_stream, name):
    prototypes, features, labels = clip_stream("dtd", seed=10, split="judge")
    attack = ATTACKS.attacked(name, prototypes, features, labels)
    config = ProtoDCSConfig(evolution_gate="quantile", evolution_quantile=1.0, text_rate=0.02)
    poisoned, frozen = behind(guarded(prototypes, config, None), prototypes, attack)
    live = guarded(prototypes, config, GuardSettings())
    held, _ = behind(live, prototypes, attack)
    assert poisoned < frozen - 0.1  # Else there is nothing to be held.
    assert live.guard.counts
    assert frozen - held < 0.25 * (frozen - poisoned)


@pytest.mark.parametrize("settings", [StreamDCSConfig, pytest.param(ProtoDCSConfig, marks=pytest.mark.long)])
def test_honest_streams_are_left_alone(clip_stream, settings):
    fired = windows = 0
    for recipe in ("dtd", "ucf", "flowers", "sun", "near"):
        prototypes, features, _ = clip_stream(recipe, seed=11, split="judge")
        live = guarded(prototypes, settings(), GuardSettings())
        answers(live, features)
        windows += live.guard.windows
        fired += sum(live.guard.counts.values())
    assert windows > 50
    assert fired < 0.01 * windows
