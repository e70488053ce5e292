"""What every registered feature method must do, selected by what it says of itself."""

import gc
import os
import threading

import numpy as np
import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conftest import random_stream
from protodcs import methods
from protodcs.core.base import FeatureMethod
from protodcs.errors import InputError, UnknownMethodError, UsageError

FEATURE_METHODS = [name for name in methods.names() if issubclass(methods.REGISTER[name], FeatureMethod)]
# Settings that keep more state than the defaults do.
VARIANTS = {name: (name, {}) for name in FEATURE_METHODS} | {
    "protodcs, evolving": (
        "protodcs",
        {"evolution_gate": "entropy", "cache_admission": "verified", "evolution_prior": 1},
    ),
    "protodcs, buffered": (
        "protodcs",
        {"cache_admission": "buffered", "evolution_gate": "quantile", "mixture_period": 30},
    ),
    "protodcs, fused": ("protodcs", {"evidence_logits": "fused", "mixture_start": 20, "mixture_period": 7}),
    "protodcs, paper": ("protodcs", {"preset": "paper"}),
    "protodcs, gated by softmax": (
        "protodcs",
        {"openness": "softmax", "cache_admission": "gated", "mixture_start": 20, "mixture_period": 7},
    ),
    "protodcs, much evidence": (
        "protodcs",
        {"openness": "mcm", "evidence_scale": 100.0, "score": "prediction", "mixture_start": 20},
    ),
    "protodcs, raw": (
        "protodcs",
        {"evolution_norm": "raw", "evolution_gate": "entropy", "alignment_keys": "all"},
    ),
    "streamdcs, short history": ("streamdcs", {"target_false_reject": 0.2, "history": 64, "linear_head": False}),
    "streamdcs, reviewed": ("streamdcs", {"review_rate": 0.2}),
    "zero_shot, energy": ("zero_shot", {"score": "energy", "threshold": 20.0}),
    "tda, warm": ("tda", {"temperature": 0.05, "entropy_base": "published"}),
    "adand, early": ("adand", {"queue_length": 16, "warmup": 3}),
}
FIELDS = (
    "known", "index", "p_unknown", "openness", "openness_first", "score",
    "aleatoric", "epistemic", "trusted", "cached", "evolved", "sequence", "reason", "unsure",
)  # fmt: skip

every_method = pytest.mark.parametrize("variant", VARIANTS)


def make(variant, prototypes, classes=None):
    name, options = VARIANTS[variant]
    return methods.create(name, prototypes, classes, **options)


def same(first, second):
    """Equal to the last bit, scores included."""
    np.testing.assert_array_equal(first.scores, second.scores)
    assert [getattr(first, name) for name in FIELDS] == [getattr(second, name) for name in FIELDS]
    assert first.label == second.label


@every_method
def test_peek_is_pure_and_tells_what_observe_then_says(variant):
    prototypes, features, _ = random_stream(samples=220)
    engine = make(variant, prototypes)
    for i, feature in enumerate(features):
        before = engine.snapshot() if i % 20 == 0 else None
        told = engine.peek(feature)
        if before is not None:
            assert engine.snapshot() == before
        same(told, engine.observe(feature))


@every_method
def test_observe_many_equals_one_by_one(variant):
    prototypes, features, _ = random_stream(samples=230, seed=1)
    single, many = make(variant, prototypes), make(variant, prototypes)
    decisions = many.observe_many(features, scores=True)
    for i, feature in enumerate(features):
        same(single.observe(feature), decisions[i])
    assert single.snapshot() == many.snapshot()
    assert many.observe_many(features[:3]).scores is None


@every_method
def test_decisions_of_two_passes_do_not_depend_on_the_order(variant):
    prototypes, features, _ = random_stream(samples=230, seed=1)
    order = np.random.default_rng(0).permutation(230)
    first, second = make(variant, prototypes), make(variant, prototypes)
    decisions = first.observe_many(features, scores=True, two_pass=True)
    permuted = second.observe_many(features[order], scores=True, two_pass=True)
    for name in FIELDS:
        if name != "sequence":
            np.testing.assert_array_equal(np.array(getattr(decisions, name))[order], getattr(permuted, name))
    np.testing.assert_array_equal(decisions.scores[order], permuted.scores)
    assert decisions.sequence.tolist() == list(range(230))
    assert first.snapshot() == second.snapshot()
    assert type(first).restore(first.snapshot()).observe(features[0]).sequence == 230


@every_method
def test_two_passes_decide_as_peek_does_afterwards(variant):
    prototypes, features, _ = random_stream(samples=120, seed=1)
    engine = make(variant, prototypes)
    decisions = engine.observe_many(features, two_pass=True)
    for decision, feature in zip(decisions, features, strict=True):
        later = engine.peek(feature)
        assert (decision.known, decision.index, decision.score) == (later.known, later.index, later.score)


@every_method
def test_two_passes_of_a_frozen_engine_teach_it_nothing(variant):
    prototypes, features, _ = random_stream(samples=120, seed=1)
    engine = make(variant, prototypes)
    engine.observe_many(features[:60])
    engine.freeze()
    frozen = type(engine).restore(engine.snapshot())
    decisions, expected = engine.observe_many(features[60:], two_pass=True), frozen.observe_many(features[60:])
    assert decisions.score.tolist() == expected.score.tolist()
    assert engine.snapshot() == frozen.snapshot()


@every_method
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_stats_count_what_two_passes_decided(variant, classes):
    prototypes, features, _ = random_stream(classes=classes, samples=250, seed=2)
    engine = make(variant, prototypes)
    before = engine.observe_many(features[:100])
    decisions = engine.observe_many(features[100:], two_pass=True)
    stats, known = engine.stats(), int(before.known.sum() + decisions.known.sum())
    assert (stats["known"], stats["unknown"]) == (known, 250 - known)
    assert engine.quick_stats().items() <= stats.items()
    if "trusted" in stats:
        assert stats["trusted"] == before.trusted.sum() + decisions.trusted.sum()
    assert methods.restore(engine.snapshot()).snapshot() == engine.snapshot()


@every_method
@pytest.mark.parametrize("two_pass", [False, True])
def test_stats_count_the_samples_of_a_frozen_engine_as_decided_or_not_at_all(variant, two_pass):
    prototypes, features, _ = random_stream(samples=120, seed=1)
    engine = make(variant, prototypes)
    engine.observe_many(features[:60])
    engine.freeze()
    before = engine.stats()
    decisions = engine.observe_many(features[60:], two_pass=two_pass)
    counted = [engine.stats()[name] - before[name] for name in ("known", "unknown")]
    assert counted in ([0, 0], [decisions.known.sum(), (~decisions.known).sum()])


@every_method
def test_reset_equals_new(variant):
    prototypes, features, _ = random_stream(samples=150, seed=2)
    engine = make(variant, prototypes)
    fresh = engine.snapshot()
    engine.observe_many(features)
    engine.freeze()
    assert engine.snapshot() != fresh
    engine.reset()
    assert engine.snapshot() == fresh


@every_method
@settings(max_examples=5)
@given(cut=st.integers(0, 160), seed=st.integers(0, 3))
def test_save_load_continue_is_bit_equal_at_any_cut(variant, tmp_path_factory, cut, seed):
    prototypes, features, _ = random_stream(samples=170, seed=seed)
    engine = make(variant, prototypes)
    engine.observe_many(features[:cut])
    path = tmp_path_factory.mktemp("state") / "engine.safetensors"
    engine.save(path)
    loaded = type(engine).load(path)
    assert loaded.snapshot() == engine.snapshot()
    for feature in features[cut:]:
        same(engine.observe(feature), loaded.observe(feature))
    assert loaded.snapshot() == engine.snapshot()


@every_method
def test_the_same_stream_twice_gives_the_same_bytes_also_from_shifted_memory(variant):
    prototypes, features, _ = random_stream(samples=200, seed=4)
    first, second = make(variant, prototypes), make(variant, shifted(prototypes, 3))
    first.observe_many(features)
    for i, feature in enumerate(features):
        second.observe(shifted(feature, i % 16 + 1))
    assert first.snapshot() == second.snapshot()


def shifted(array, elements):
    """The same numbers at another alignment."""
    room = np.empty(array.size + elements, dtype=array.dtype)
    view = room[elements:].reshape(array.shape)
    view[...] = array
    return view


@every_method
def test_permuting_the_classes_permutes_the_answers(variant):
    prototypes, features, _ = random_stream(classes=12, samples=200, seed=5)
    order = np.random.default_rng(0).permutation(12)
    names = [f"class {k}" for k in range(12)]
    plain = make(variant, prototypes, names)
    permuted = make(variant, prototypes[order], [names[k] for k in order])
    for feature in features:
        first, second = plain.observe(feature), permuted.observe(feature)
        close(first, second)
        np.testing.assert_allclose(first.scores[order], second.scores, atol=1e-5 * max(1, np.abs(first.scores).max()))
        assert names[first.index] == names[order[second.index]]


@every_method
def test_a_signed_permutation_of_the_coordinates_changes_nothing(variant):
    prototypes, features, _ = random_stream(width=48, samples=200, seed=6)
    rng = np.random.default_rng(1)
    order, signs = rng.permutation(48), rng.choice([-1.0, 1.0], 48).astype(np.float32)
    plain, turned = make(variant, prototypes), make(variant, (prototypes * signs)[:, order])
    for feature in features:
        first, second = plain.observe(feature), turned.observe((feature * signs)[order])
        assert abs(first.openness - second.openness) <= 1e-5


@every_method
def test_a_rotation_leaves_the_first_check_and_the_initial_uncertainty_alone(variant):
    prototypes, features, _ = random_stream(width=40, samples=120, seed=7)
    rotation, _ = np.linalg.qr(np.random.default_rng(2).normal(size=(40, 40)))
    plain, turned = make(variant, prototypes), make(variant, prototypes @ rotation)
    invariant = plain.capabilities.rotation_invariant
    for feature in features:
        # A method whose step is not invariant is asked anew each time: its first stage must be.
        if not invariant:
            plain.reset()
            turned.reset()
        first, second = plain.observe(feature), turned.observe(feature @ rotation)
        assert abs(first.openness_first - second.openness_first) <= 1e-5
        assert abs(first.aleatoric - second.aleatoric) <= 1e-5
        assert abs(first.epistemic - second.epistemic) <= 1e-5
        if invariant:
            close(first, second)
            assert first.index == second.index


def close(first, second):
    for name in ("openness", "openness_first", "p_unknown", "aleatoric", "epistemic"):
        assert abs(getattr(first, name) - getattr(second, name)) <= 1e-5, name
    assert first.score == pytest.approx(second.score, abs=1e-5, rel=1e-5)


@pytest.mark.parametrize("samples", [4_000, pytest.param(200_000, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "variant", [pytest.param(name, marks=[] if name in FEATURE_METHODS else [pytest.mark.long]) for name in VARIANTS]
)
def test_memory_stays_bounded_however_long_the_stream_is(variant, samples):
    prototypes, features, _ = random_stream(classes=4, width=8, samples=1_000, seed=8)
    engine = make(variant, prototypes)
    process = psutil.Process(os.getpid())
    sizes = []
    # By default, the longest windows of dde and tanl have 5,000 samples, and those of all others less than 3,000.
    samples = max(samples, 8_000) if variant in ("dde", "tanl") else samples
    full = 6_000 if samples > 6_000 else 3_000
    for _ in range(samples // len(features)):
        engine.observe_many(features)
        if engine.sequence in (full, samples):
            gc.collect()
            sizes.append((process.memory_info().rss, len(engine.snapshot())))
    assert engine.sequence == samples
    assert sizes[1][0] - sizes[0][0] < 8 * 2**20
    # Only counters may have grown, by their digits.
    assert sizes[1][1] - sizes[0][1] < 2_000


@every_method
@pytest.mark.parametrize("classes", [1, 2, 10, 1_000, pytest.param(20_000, marks=pytest.mark.long)])
def test_sound_at_any_number_of_classes(variant, classes):
    width = 16 if classes == 20_000 else 24
    prototypes, features, _ = random_stream(classes=classes, width=width, samples=100, seed=9)
    engine = make(variant, prototypes)
    for feature in features:
        sound(engine.observe(feature), classes)
    restored = methods.restore(engine.snapshot())
    same(engine.observe(features[0]), restored.observe(features[0]))


@every_method
@pytest.mark.parametrize("kind", ["constant", "duplicates", "all known", "all unknown", "opposite", "orthogonal"])
def test_sound_on_degenerate_streams(variant, kind):
    prototypes, features, _ = random_stream(
        samples=250, seed=10, unknown={"all known": 0.0, "all unknown": 1.0}.get(kind, 0.4)
    )
    if kind == "constant":
        features[:] = features[0]
    elif kind == "duplicates":
        features = np.repeat(features[:50], 5, axis=0)
    elif kind == "opposite":
        features[1::2] = -features[::2]
    elif kind == "orthogonal":
        _, _, rows = np.linalg.svd(prototypes, full_matrices=True)
        features[:] = rows[-1]
    engine = make(variant, prototypes)
    for feature in features:
        sound(engine.observe(feature), len(prototypes))
    assert methods.restore(engine.snapshot()).snapshot() == engine.snapshot()


def sound(decision, classes):
    assert 0 <= decision.index < classes
    assert 0.0 <= decision.p_unknown <= 1.0
    # One minus a cosine, or minus the log of the largest of K probabilities.
    largest = max(2.0, np.log(classes)) + 1e-5
    assert -1e-5 <= decision.openness <= largest
    assert -1e-5 <= decision.openness_first <= largest
    assert np.isfinite([decision.score, decision.aleatoric, decision.epistemic]).all()
    assert 0.0 < decision.epistemic <= 1.0
    assert decision.aleatoric > -1e-12
    assert decision.scores.shape == (classes,)
    assert decision.scores.dtype == np.float32
    assert np.isfinite(decision.scores).all()
    assert (decision.label is not None) == decision.known


@every_method
@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_takes_every_float_type_and_any_layout(variant, dtype):
    prototypes, features, _ = random_stream(samples=30)
    features = features.astype(np.float16)
    exact, other = make(variant, prototypes), make(variant, prototypes.astype(np.float64))
    strided = np.zeros((30, 2 * features.shape[1]), dtype=dtype)
    strided[:, ::2] = features * dtype(4)
    for feature, spread in zip(features, strided, strict=True):
        same(exact.observe(feature), other.observe(spread[::2]))


@every_method
def test_a_decision_owns_its_scores(variant):
    prototypes, features, _ = random_stream(samples=3)
    engine = make(variant, prototypes)
    first = engine.observe(features[0])
    kept = first.scores.copy()
    engine.observe(features[1])
    np.testing.assert_array_equal(first.scores, kept)
    first.scores[:] = 7.0
    assert engine.peek(features[0]).scores.max() != 7.0 or variant.startswith("zero_shot")


@every_method
def test_inputs_are_neither_changed_nor_kept(variant):
    prototypes, features, _ = random_stream(samples=40)
    original, feature = prototypes.copy(), features[0].copy()
    engine = make(variant, prototypes)
    expected = make(variant, prototypes).peek(features[1])
    engine.peek(feature)
    np.testing.assert_array_equal(prototypes, original)
    np.testing.assert_array_equal(feature, features[0])
    prototypes[:] = 1.0
    same(expected, engine.peek(features[1]))


@every_method
def test_a_frozen_engine_answers_and_keeps_nothing(variant):
    prototypes, features, _ = random_stream(samples=200, seed=11)
    engine = make(variant, prototypes)
    engine.observe_many(features[:150])
    twin = methods.restore(engine.snapshot())
    engine.freeze()
    for feature in features[150:]:
        told = engine.peek(feature)
        decision = engine.observe(feature)
        same(told, decision)
        assert not decision.cached
        assert not decision.evolved
    assert engine.sequence == 200
    assert methods.restore(engine.snapshot()).frozen
    engine.unfreeze()
    first, second = engine.observe(features[0]), twin.observe(features[0])
    np.testing.assert_array_equal(first.scores, second.scores)
    assert first.openness == second.openness


@pytest.mark.parametrize(
    ("variant", "at"),
    [
        *((variant, 99) for variant in VARIANTS),
        *((name, at) for name in ("streamdcs", "protodcs") for at in (0, 7, 130)),
    ],
)
def test_a_state_with_a_frozen_stretch_continues_bit_equal(variant, at):
    prototypes, features, _ = random_stream(samples=200, seed=14)
    engine, never = make(variant, prototypes), make(variant, prototypes)
    engine.observe_many(features[:at])
    never.observe_many(features[:at])
    engine.freeze()
    engine.observe_many(features[:110])
    restored = methods.restore(engine.snapshot())
    engine.unfreeze()
    restored.unfreeze()
    for feature in features[at:]:
        decision, other = engine.observe(feature), never.observe(feature)
        same(decision, restored.observe(feature))
        assert decision.sequence == other.sequence + 110
        assert (decision.openness, decision.known) == (other.openness, other.known)
    assert engine.snapshot() == restored.snapshot()


@every_method
def test_a_second_thread_inside_one_engine_is_refused(variant):
    prototypes, features, _ = random_stream(samples=2)
    engine = make(variant, prototypes)
    inside, release, told = threading.Event(), threading.Event(), []
    original = engine._advance

    def slow(*arguments):
        inside.set()
        release.wait(300)
        return original(*arguments)

    engine._advance = slow
    worker = threading.Thread(target=lambda: told.append(engine.observe(features[0])))
    worker.start()
    assert inside.wait(300)
    with pytest.raises(UsageError, match="Another thread"):
        engine.observe(features[1])
    with pytest.raises(UsageError, match="Another thread"):
        engine.snapshot()
    release.set()
    worker.join()
    assert told[0].sequence == 0
    del engine._advance
    assert engine.observe(features[1]).sequence == 1


@every_method
def test_classes_can_be_added_and_removed_while_the_stream_runs(variant):
    prototypes, features, _ = random_stream(classes=6, samples=200, seed=12)
    engine = make(variant, prototypes[:5], list("abcde"))
    if not engine.capabilities.editable_classes:
        with pytest.raises(UsageError):
            engine.add_class("f", prototypes[5])
        return
    engine.observe_many(features[:120])
    before = engine.snapshot()
    engine.add_class("f", prototypes[5])
    assert engine.classes == tuple("abcdef")
    sound(engine.observe(features[120]), 6)
    same(engine.peek(features[121]), methods.restore(engine.snapshot()).peek(features[121]))
    engine.remove_class("b")
    engine.remove_class("f")
    assert engine.classes == tuple("acde")
    for feature in features[130:]:
        sound(engine.observe(feature), 4)
    with pytest.raises(InputError, match="no class 'b'"):
        engine.remove_class("b")
    with pytest.raises(InputError, match="unique"):
        engine.add_class("a", prototypes[0])
    for name in "acd":
        engine.remove_class(name)
    with pytest.raises(UsageError, match="last class"):
        engine.remove_class("e")
    engine.reset()
    fresh = make(variant, prototypes[4:5], ["e"])
    assert engine.snapshot() == fresh.snapshot()
    assert methods.restore(before).classes == tuple("abcde")


def test_adding_and_removing_a_class_keeps_what_the_others_learned():
    prototypes, features, _ = random_stream(classes=6, samples=250, seed=13)
    plain = methods.create("streamdcs", prototypes)
    edited = methods.create("streamdcs", prototypes)
    plain.observe_many(features[:200])
    edited.observe_many(features[:200])
    edited.add_class("other", -prototypes[0])
    edited.remove_class("other")
    first, second = plain.observe_many(features[200:]), edited.observe_many(features[200:])
    np.testing.assert_allclose(first.openness, second.openness, atol=1e-5)
    # After a class was added, the linear head learns again, so a few decisions differ.
    assert (first.index == second.index).mean() > 0.9
    assert (first.known == second.known).mean() > 0.9


@pytest.mark.parametrize("stream", ["random", "clip"])
def test_protodcs_with_everything_switched_off_is_zero_shot(stream, request):
    if stream == "clip":
        prototypes, features, _ = request.getfixturevalue("clip_stream")("dtd")
        features = features[:500]
    else:
        prototypes, features, _ = random_stream(classes=30, samples=300)
    off = methods.create(
        "protodcs",
        prototypes,
        text_rate=0.0,
        visual_rate=0.0,
        evolution_gate="off",
        affinity_weight=0.0,
    )
    plain = methods.create("zero_shot", prototypes, score="max")
    first, second = off.observe_many(features), plain.observe_many(features)
    np.testing.assert_array_equal(first.index, second.index)
    np.testing.assert_allclose(first.score, second.score, rtol=0, atol=1e-12)


@pytest.mark.parametrize("score", ["max", "softmax", "mcm", "energy"])
def test_zero_shot_scores_equal_their_closed_forms(score):
    prototypes, features, _ = random_stream(classes=9, samples=50)
    engine = methods.create("zero_shot", prototypes, score=score)
    unit = [rows / np.linalg.norm(rows.astype(float), axis=1, keepdims=True) for rows in (prototypes, features)]
    z = unit[1] @ unit[0].T
    forms = {
        "max": z.max(1),
        "softmax": (np.exp(100 * z) / np.exp(100 * z).sum(1, keepdims=True)).max(1),
        "mcm": (np.exp(z) / np.exp(z).sum(1, keepdims=True)).max(1),
        "energy": np.log(np.exp(100 * z).sum(1)),
    }
    decisions = engine.observe_many(features)
    np.testing.assert_allclose(decisions.score, forms[score], rtol=1e-5)
    np.testing.assert_array_equal(decisions.index, z.argmax(1))


def test_an_unknown_method_is_named_with_the_known_ones():
    with pytest.raises(UnknownMethodError, match="streamdcs, protodcs, zero_shot"):
        methods.create("nonsense", np.eye(2, 4))
