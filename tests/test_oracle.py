"""The engine against the oracle: on a real CLIP stream and on random ones, under many readings of the method."""

from contextlib import suppress
from typing import Literal, get_args, get_origin

import numpy as np
import pytest
import torch

from conftest import random_stream
from oracle import Oracle
from protodcs import ProtoDCS, ProtoDCSConfig
from protodcs.core.protodcs.cache import offer
from protodcs.core.protodcs.first_check import check_openness
from protodcs.core.protodcs.residual import text_gradient
from protodcs.core.protodcs.temporary import step_of
from protodcs.errors import ConfigError

torch.set_num_threads(1)

# The letter, with the gate of DPE.
EVOLVING = {"preset": "paper", "evolution_gate": "entropy", "mixture_period": 50}
OPTIONS = {
    "working": {"preset": "working"},
    "paper": {"preset": "paper"},
    "verified, entropy gate": {"cache_admission": "verified", **EVOLVING},
    "buffered, entropy gate, DPE's prior": {"cache_admission": "buffered", "evolution_prior": 1, **EVOLVING},
    "logit": {"prediction_scale": "logit", "affinity_weight": 5.0, **EVOLVING},
    "fused": {"evidence_logits": "fused", **EVOLVING},
    "raw": {"evolution_norm": "raw", "evolution_count": "confirmed", **EVOLVING},
    "scaled step": {"step_epsilon": 1e-3, **EVOLVING},
    "refit every sample": {"preset": "paper", "mixture_period": 1},
    "quantile gate, entropy quality": {"evolution_gate": "quantile", "cache_quality": "entropy"},
    "score of equation 9": {"score": "prediction"},
    "posterior as score": {"score": "posterior"},
    "openness by softmax": {"openness": "softmax"},
    "openness by MCM": {"openness": "mcm"},
    "openness by softmax, first score": {"openness": "softmax", "preset": "paper", "score": "openness_first"},
    "evidence x 100": {"evidence_scale": 100.0},
    "like DPE": {
        "evidence_scale": 100.0,
        "evidence_logits": "fused",
        "step_epsilon": 1e-3,
        "prediction_scale": "logit",
        "affinity_weight": 6.0,
        "affinity_sharpness": 5.0,
        "score": "prediction",
    },
    "gated buffer": {"cache_admission": "gated", "mixture_period": 50},
    "gated buffer, quantile gate": {"cache_admission": "gated", "evolution_gate": "quantile", "mixture_period": 30},
    "no evolution": {"evolution_gate": "off"},
    "entropy loss, all keys": {"uncertainty": "entropy", "alignment_keys": "all"},
    "fused entropy loss": {"uncertainty": "entropy", "evidence_logits": "fused"},
    "text to visual": {"alignment_direction": "text-to-visual"},
    "no alignment, no AU": {"alignment_weight": 0.0, "aleatoric_weight": 0.0},
    "no EU": {"epistemic_weight": 0.0},
    "no first check": {"first_check": False},
    "no verification": {"verification": False},
    "no visual": {"visual_prototypes": False},
    "no text": {"text_prototypes": False},
    "target": {"target_false_reject": 0.05, "mixture_period": 30},
    "first update replaces": {"evolution_prior": 0},
    "other numbers": {
        "gate_window": 60,
        "cache_quantile": 0.2,
        "trust_quantile": 0.7,
        "cache_size": 2,
        "cache_similarity": 0.6,
        "aleatoric_weight": 0.5,
        "epistemic_weight": 2.0,
        "alignment_weight": 0.7,
        "alignment_temperature": 0.05,
        "text_rate": 1e-3,
        "visual_rate": 2e-3,
        "mixture_window": 40,
        "mixture_start": 30,
        "mixture_period": 20,
        "mixture_tolerance": 1e-4,
        "unknown_threshold": 0.4,
        "cold_threshold": 0.5,
        "temperature": 0.02,
        "affinity_weight": 1.0,
        "affinity_sharpness": 4.0,
        "evolution_threshold": 0.3,
        "evolution_momentum": 0.1,
        "evolution_prior": 3,
    },
}
ON_REAL_DATA = (
    "working",
    "paper",
    "verified, entropy gate",
    "buffered, entropy gate, DPE's prior",
    "logit",
    "fused",
    "raw",
    "scaled step",
    "openness by softmax",
    "openness by MCM",
    "evidence x 100",
    "like DPE",
    "gated buffer",
    "refit every sample",
    "quantile gate, entropy quality",
)
TIE = 1e-6


class Report:
    """Counts what was compared and what lay too close to call."""

    def __init__(self):
        self.samples = self.elements = self.differing = 0
        self.ties: list[str] = []
        self.evolved = self.cached = 0

    def prototypes(self, got, wanted, gradient):
        """Within 1e-5 wherever the gradient has a sign to speak of; the rest may differ by a step, and is counted."""
        off = np.abs(got - wanted) >= 1e-5
        # With few classes the gradient is large, and float32 has fewer decimals to give.
        assert not off[np.abs(gradient) > max(1e-6, 1e-5 * np.abs(gradient).max())].any()
        self.elements += off.size
        self.differing += int(off.sum())

    def check(self, share=0.001):
        assert len(self.ties) <= 0.001 * self.samples, self.ties
        assert self.differing <= share * self.elements, (self.differing, self.elements)


def engine_gradient(engine, feature):
    """The gradient that the engine steps along, P'_v of its open classes, and those classes."""
    state, config = engine._memory.fork(), engine.config
    unit = engine._checked(feature).copy()
    first = check_openness(state, unit)
    if first.confident and config.cache_admission == "immediate":
        offer(state, first.nearest, unit, first.quality)
    opened = state.opened
    slopes, visual = step_of(state, unit, first)
    gradient = text_gradient(state.text, state.inverse_norms, first.cosines, slopes, unit, state.text_alignment)
    return unit, gradient, visual, opened


def compare(engine, oracle, feature, report):
    """One sample, teacher-forced."""
    oracle.take_over(engine)
    unit, gradient, visual, opened = engine_gradient(engine, feature)
    expected = oracle.step(unit)
    got = engine.observe(feature)
    report.samples += 1
    discrete = ("trusted", "known", "index", "cached", "evolved")
    differing = [name for name in discrete if getattr(got, name) != getattr(expected, name)]
    if differing:
        tied = sorted(name for name, margin in expected.margins.items() if margin < TIE)
        assert tied, f"sample {got.sequence}: {differing} differ: {got} against {expected}"
        report.ties.append(f"sample {got.sequence}: {differing} differ where {tied} are too close to call")
        return
    assert got.openness_first == pytest.approx(expected.openness_first, abs=1e-5)
    assert got.openness == pytest.approx(expected.openness, abs=1e-5)
    # Fused evidence contains the step of the visual prototypes, whose signs may differ where the gradient is small.
    tolerance = 1e-5 if engine.config.evidence_logits == "fused" else 1e-6
    assert got.aleatoric == pytest.approx(expected.aleatoric, abs=tolerance)
    assert got.epistemic == pytest.approx(expected.epistemic, abs=tolerance)
    assert got.p_unknown == pytest.approx(expected.p_unknown, abs=1e-3)
    assert got.score == pytest.approx(expected.score, abs=1e-3)
    report.evolved += got.evolved
    report.cached += got.cached
    if got.cached:
        compare_queues(engine._memory, oracle, 1e-6 if engine.config.cache_quality == "aleatoric" else 1e-4)
    after = expected.text_after.numpy()
    if expected.trusted:
        wanted = expected.text_gradient.numpy()
        error = np.abs(gradient - wanted) - 1e-4 * np.abs(wanted)
        assert error.max() <= tolerance_for(engine.config, wanted), (
            f"sample {got.sequence}: gradient off by {error.max()}"
        )
        report.prototypes(engine._memory.text, after, wanted)
        if len(opened):
            wanted = torch.stack([expected.visual_gradient[k] for k in opened]).numpy()
            report.prototypes(visual, torch.stack([expected.visual_after[k] for k in opened]).numpy(), wanted)
    else:
        assert np.abs(engine._memory.text - after).max() < 1e-5


def tolerance_for(config, gradient):
    """1e-9, except where a switch makes the gradient itself so large that float32 has fewer decimals to give."""
    if (
        config.uncertainty == "entropy"
    ):  # A softmax at temperature 0.01 magnifies the rounding of a cosine a hundredfold.
        return 1e-5 * np.abs(gradient).max()
    if not config.first_check:  # Queues open by the first few samples, and each of few classes pulls hard.
        return 1e-6 * np.abs(gradient).max()
    # With two classes, each queue pulls hard.
    return max(1e-9, 1e-6 * np.abs(gradient).max())


def compare_queues(memory, oracle, tolerance):
    queues = {k: queue for k, queue in sorted(oracle.queues.items()) if queue}
    assert [int(n) for n in memory.counts[list(queues)]] == [len(queue) for queue in queues.values()]
    for k, queue in queues.items():
        assert np.abs(memory.quality[k, : len(queue)] - [quality for _, quality in queue]).max() < tolerance
        assert np.abs(memory.cache[k, : len(queue)] - torch.stack([f for f, _ in queue]).numpy()).max() < 1e-7


def teacher_forced(prototypes, features, options):
    config = ProtoDCSConfig(**options)
    engine, report = ProtoDCS(prototypes, config=config), Report()
    oracle = Oracle(engine._memory.text, config)
    for feature in features:
        compare(engine, oracle, feature, report)
    return report


# Both presets; the other options in the long tests. Drawn options are below.
ON_RANDOM_DATA = [
    pytest.param(name, classes, marks=[] if name in ("working", "paper") else [pytest.mark.long])
    for classes in (2, 10, 100)
    for name in OPTIONS
]


@pytest.mark.parametrize(("name", "classes"), ON_RANDOM_DATA)
def test_engine_follows_the_oracle_on_a_random_stream(name, classes):
    prototypes, features, _ = random_stream(classes=classes, width=48, samples=160, seed=3)
    report = teacher_forced(prototypes, features, OPTIONS[name])
    assert report.samples == 160
    # Two classes far apart leave hardly a gradient by their visual prototypes, so more signs are open.
    report.check(share=0.01 if classes == 2 else 0.001)


def drawn(seed):
    """Return a choice for each option that has some, so that options meet each other."""
    rng = np.random.default_rng(seed)
    choices = {
        name: get_args(field.annotation) if get_origin(field.annotation) is Literal else (True, False)
        for name, field in ProtoDCSConfig.model_fields.items()
        if get_origin(field.annotation) is Literal or field.annotation is bool
    }
    while True:
        # Parts are seldom left out: without them, most choices say nothing.
        options = {
            name: bool(rng.random() < 0.9) if values == (True, False) else str(rng.choice(values))
            for name, values in choices.items()
        }
        options |= {"mixture_period": 30, "evidence_scale": float(rng.choice([1.0, 100.0]))}
        with suppress(ConfigError):
            ProtoDCSConfig(**options)
            return options


@pytest.mark.parametrize("seed", range(12))
def test_engine_follows_the_oracle_under_options_that_meet(seed):
    options = drawn(seed)
    prototypes, features, _ = random_stream(classes=10, width=48, samples=160, seed=seed)
    print(options)
    teacher_forced(prototypes, features, options).check()


def test_every_reading_is_drawn():
    drawings = [drawn(seed) for seed in range(12)]
    for name, field in ProtoDCSConfig.model_fields.items():
        if get_origin(field.annotation) is Literal:
            assert {options[name] for options in drawings} == set(get_args(field.annotation)), name


@pytest.mark.parametrize("name", ["working", "paper"])
def test_engine_follows_the_oracle_on_a_real_stream(name, clip_stream):
    # The long test below takes the whole stream, and other options.
    prototypes, features, _ = clip_stream("dtd")
    report = teacher_forced(prototypes, features[:400], OPTIONS[name])
    report.check()
    assert report.samples == 400


@pytest.mark.long
@pytest.mark.parametrize("name", ON_REAL_DATA)
def test_engine_follows_the_oracle_on_the_whole_dtd_stream(name, clip_stream):
    prototypes, features, _ = clip_stream("dtd")
    report = teacher_forced(prototypes, features, OPTIONS[name])
    report.check()
    assert report.samples == len(features)
    if ProtoDCSConfig(**OPTIONS[name]).evolution_gate == "entropy":
        assert report.evolved > 50
    share = report.differing / report.elements
    print(
        f"{name}: {report.samples} samples, {report.evolved} evolved, {report.cached} cached, {share:.6%} differ, "
        f"too close to call: {report.ties or 'none'}"
    )


@pytest.mark.parametrize("samples", [100, pytest.param(300, marks=pytest.mark.long)])
@pytest.mark.parametrize("name", ["working", "paper"])
def test_engine_follows_the_oracle_with_a_thousand_classes(name, samples, clip_stream):
    prototypes, features, _ = clip_stream("big")
    teacher_forced(prototypes, features[:samples], OPTIONS[name]).check()


@pytest.mark.parametrize("samples", [400, pytest.param(None, marks=pytest.mark.long, id="all")])
@pytest.mark.parametrize("name", ["working", "paper"])
def test_free_running_decisions_agree(name, samples, clip_stream):
    prototypes, features, _ = clip_stream("dtd")
    features = features[:samples]
    config = ProtoDCSConfig(**OPTIONS[name])
    engine = ProtoDCS(prototypes, config=config)
    oracle = Oracle(engine._memory.text, config)
    agreed = 0
    for feature in features:
        unit = engine._checked(feature).copy()
        expected, got = oracle.step(unit), engine.observe(feature)
        agreed += (got.known, got.index) == (expected.known, expected.index)
    assert agreed >= 0.995 * len(features)
