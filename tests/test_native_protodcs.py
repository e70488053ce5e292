"""The compiled step of ProtoDCS: the answers of the numpy code, and the same bytes with every instruction set."""

import numpy as np
import pytest

from conftest import random_stream
from protodcs import ProtoDCS, ProtoDCSConfig
from protodcs.core import _native
from protodcs.core.protodcs import compiled
from test_native import INSTRUCTIONS

OPTIONS = {
    "working": {"preset": "working"},
    "paper": {"preset": "paper"},
    "all keys": {"alignment_keys": "all"},
    "verified, entropy gate": {"cache_admission": "verified", "evolution_gate": "entropy", "mixture_period": 50},
    "buffered, raw": {"cache_admission": "buffered", "evolution_gate": "entropy", "evolution_norm": "raw"},
    "quantile gate, scaled step": {"evolution_gate": "quantile", "step_epsilon": 1e-3},
    "text to visual": {"alignment_direction": "text-to-visual"},
    "gated": {"cache_admission": "gated", "mixture_period": 30},
    "score of equation 9": {"score": "prediction"},
    "no first check": {"first_check": False},
    "no verification": {"verification": False},
    "no visual": {"visual_prototypes": False},
    "no step": {"text_rate": 0.0},
    "tail": {"target_false_reject": 0.05},
    "short windows": {"gate_window": 7, "mixture_window": 9, "mixture_start": 9, "mixture_period": 9},
}
CONTINUOUS = ("openness_first", "openness", "score", "scores", "p_unknown", "aleatoric", "epistemic")
DISCRETE = ("known", "index", "trusted", "cached", "evolved", "sequence")
ARRAYS = ("cache", "quality", "visual", "lengths", "adapted", "text_sum", "visual_sum", "text_alignment")
# Settings that only the numpy code has.
NUMPY_ONLY = (
    {"uncertainty": "entropy"},
    {"evidence_logits": "fused"},
    {"cache_quality": "entropy"},
    {"prediction_scale": "logit"},
    {"openness": "softmax"},
    {"evidence_scale": 2.0},
    {"text_prototypes": False},
    {"candidates": 3, "candidates_above": 3},
)


@pytest.fixture
def module(instructions, monkeypatch):
    """The compiled module of an instruction set, which engines then use."""
    found = _native._import(instructions)
    monkeypatch.setattr(compiled, "native", found)
    return found


# The instruction sets give the same bytes, so one of them takes all options.
STEPS = [(INSTRUCTIONS[-1], name) for name in OPTIONS] + [(each, "working") for each in INSTRUCTIONS[:-1]]


def on_numpy(engine, state, feature):
    engine._compiled = False
    decision = engine._advance(state, feature, True)
    engine._compiled = True
    return decision


# The presets with all sizes; the other options with the smaller ones in the long tests.
SIZED_STEPS = [
    pytest.param(*step, *size, marks=[] if size == (24, 64) or step[1] in ("working", "paper") else [pytest.mark.long])
    for step in STEPS
    for size in ((24, 64), (5, 33), (1, 16))
]


@pytest.mark.parametrize(("instructions", "name", "classes", "width"), SIZED_STEPS)
def test_each_step_agrees_with_numpy_from_the_same_state(module, name, classes, width):
    prototypes, features, _ = random_stream(classes=classes, width=width, samples=200, seed=3)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig(**OPTIONS[name]))
    assert engine._compiled
    for feature in features:
        unit, copied = engine._checked(feature).copy(), engine._memory.fork()
        copied.own()
        wanted, got = on_numpy(engine, copied, unit), engine._advance(engine._memory, unit, True)
        assert [getattr(got, field) for field in DISCRETE] == [getattr(wanted, field) for field in DISCRETE]
        for field in CONTINUOUS:
            np.testing.assert_allclose(getattr(got, field), getattr(wanted, field), rtol=0, atol=1e-6, err_msg=field)
        for array in ARRAYS:
            np.testing.assert_allclose(getattr(engine._memory, array), getattr(copied, array), atol=1e-6, err_msg=array)
        same = {number: value for number, value in copied.counters().items() if not isinstance(value, float)}
        assert same.items() <= engine._memory.counters().items()


@pytest.mark.parametrize("name", OPTIONS)
def test_every_instruction_set_gives_the_same_bytes(name, monkeypatch):
    prototypes, features, _ = random_stream(classes=19, width=45, samples=400, seed=8)
    states = set()
    for instructions in INSTRUCTIONS:
        monkeypatch.setattr(compiled, "native", _native._import(instructions))
        engine = ProtoDCS(prototypes, config=ProtoDCSConfig(**OPTIONS[name]))
        decisions = engine.observe_many(features, scores=True)
        states.add((engine.snapshot(), decisions.scores.tobytes(), decisions.p_unknown.tobytes()))
    assert len(states) == 1


@pytest.mark.parametrize("options", NUMPY_ONLY)
def test_other_settings_run_in_numpy(options):
    prototypes, features, _ = random_stream(classes=9, samples=50)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig(**options))
    assert not engine._compiled
    engine.observe_many(features)
    assert engine._memory.step is None


@pytest.mark.parametrize("instructions", INSTRUCTIONS)
def test_a_step_with_too_little_work_space_is_an_error(module):
    state = ProtoDCS(random_stream(classes=9)[0])._memory
    for work in (np.zeros((9, 32)), np.zeros((10, 31))):
        with pytest.raises(ValueError, match="work"):
            module.ProtoDCSStep(state, work)
