"""The compiled backend: the same answers as numpy, and the same bytes with every instruction set."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from conftest import random_stream, unit
from protodcs import StreamDCS, StreamDCSConfig
from protodcs.core import _native, vectors
from protodcs.core.prototypes import Prototypes
from protodcs.core.streamdcs.state import StreamState

WIDTHS = (1, 2, 15, 16, 17, 31, 33, 512)
CLASSES = (1, 2, 3, 4, 5, 9, 100)


def built(name):
    return _native._import("baseline").supports(name) and _native._import(name) is not None


INSTRUCTIONS = [name for name in _native.INSTRUCTIONS if built(name)]


def run(code, **environment):
    """Run code in a new process."""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, **environment}, cwd=Path(__file__).parent, capture_output=True, text=True,
    )  # fmt: skip


def random_rows(classes, width, seed=0):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(classes, width)).astype(np.float32), rng.normal(size=width).astype(np.float32)


def test_the_compiled_backend_is_installed_and_used():
    assert os.environ.get("PROTODCS_BACKEND", "native") == _native.BACKEND
    assert _native._import("baseline") is not None


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_cosines_agree_with_numpy_and_do_not_depend_on_the_instruction_set(name, width):
    module, first = _native._import(name), _native._import("baseline")
    for classes in CLASSES:
        rows, feature = random_rows(classes, width)
        norms = vectors.inverse_norms_numpy(rows)
        expected, same, found = np.empty((3, classes))
        best = vectors.cosines_numpy(rows, norms, feature, expected)
        assert module.cosines(rows, norms, feature, found) == best
        np.testing.assert_allclose(found, expected, atol=1e-13)
        first.cosines(rows, norms, feature, same)
        assert found.tobytes() == same.tobytes()
        module.invert_norms(rows, found)
        np.testing.assert_allclose(found, norms, rtol=1e-14)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_the_first_of_equal_prototypes_is_the_largest(name):
    rows = np.eye(1, 20, dtype=np.float32).repeat(7, axis=0)
    assert _native._import(name).cosines(rows, np.ones(7), rows[0], np.empty(7)) == 0


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_denormal_numbers_are_not_lost(name):
    rows, feature = random_rows(5, 37)
    rows *= np.float32(1e-42)
    found = np.empty(5)
    _native._import(name).cosines(rows, np.ones(5), feature, found)
    np.testing.assert_allclose(found, rows.astype(np.float64) @ feature.astype(np.float64), rtol=1e-12)
    assert found.all()


@pytest.mark.parametrize("name", INSTRUCTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_features_may_begin_at_any_address(name, dtype):
    module = _native._import(name)
    _, feature = random_rows(1, 45)
    feature = feature.astype(dtype)
    expected, found = np.empty((2, 45), dtype=np.float32)
    assert vectors.to_unit_numpy(feature, expected)
    for offset in range(8):
        room = np.zeros(feature.nbytes + 8, dtype=np.uint8)
        shifted = room[offset : offset + feature.nbytes].view(dtype)
        shifted[:] = feature
        assert module.to_unit(shifted, found)
        np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_feature_may_be_strided(name):
    rows, feature = random_rows(5, 19)
    plain, strided = np.empty((2, 5))
    _native._import(name).cosines(rows, np.ones(5), feature, plain)
    _native._import(name).cosines(rows, np.ones(5), feature.repeat(3)[::3], strided)
    assert plain.tobytes() == strided.tobytes()


@pytest.mark.parametrize("to_unit", [vectors.to_unit_numpy, *(_native._import(name).to_unit for name in INSTRUCTIONS)])
@pytest.mark.parametrize(
    ("values", "accepted"),
    [
        ([3.0, 4.0], True),
        ([1e300, 1e300], True),
        ([1e-5, 0.0], True),
        ([1e-7, 0.0], False),
        ([0.0, 0.0], False),
        ([np.nan, 1.0], False),
        ([np.inf, 1.0], False),
        ([-np.inf, np.inf], False),
    ],
)
def test_only_finite_features_that_are_long_enough_are_accepted(to_unit, values, accepted):
    out = np.zeros(2, dtype=np.float32)
    assert to_unit(np.array(values), out) == accepted
    if accepted:
        assert np.linalg.norm(out) == pytest.approx(1.0)


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_many_features_become_unit_features_as_one_by_one(name):
    module, (rows, _) = _native._import(name), random_rows(9, 45)
    expected, found = np.empty((2, 9, 45), dtype=np.float32)
    assert all(module.to_unit(row, out) for row, out in zip(rows, expected, strict=True))
    assert module.to_unit_rows(rows, found) == vectors.to_unit_rows_numpy(rows, np.empty_like(rows)) == 9
    assert found.tobytes() == expected.tobytes()
    rows[4] = 0.0
    assert module.to_unit_rows(rows, found) == vectors.to_unit_rows_numpy(rows, np.empty_like(rows)) == 4
    assert module.to_unit_rows(rows[:0], found[:0]) == 0


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_a_mean_moves_as_with_numpy_to_the_bit(name):
    rows, mean = random_rows(9, 45)
    rates = np.array([1, 0, 0.5, 0.25, 0, 0.01, 0.01, 0.01, 0], dtype=np.float32)
    expected, found = mean.copy(), mean.copy()
    vectors.move_towards_numpy(expected, rows, rates)
    _native._import(name).move_towards(found[:], rows[:4], rates[:4])
    _native._import(name).move_towards(found[:], rows[4:], rates[4:])
    assert found.tobytes() == expected.tobytes()


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_lengths_are_checked(name):
    rows, feature = random_rows(3, 8)
    module = _native._import(name)
    with pytest.raises(ValueError, match="`out` has length 2; it must have 3"):
        module.cosines(rows, np.ones(3), feature, np.empty(2))
    with pytest.raises(ValueError, match="`feature` has length 7; it must have 8"):
        module.cosines(rows, np.ones(3), feature[1:], np.empty(3))
    with pytest.raises(ValueError, match="`values` has length 7"):
        module.to_unit(feature[1:], np.empty(8, dtype=np.float32))


# StreamDCS.


@pytest.mark.parametrize(
    ("classes", "unknown", "options"),
    [
        (12, 0.4, {}),
        (12, 0.0, {}),
        (40, 0.1, {"target_false_reject": 0.2, "temperature": 0.05}),
        (3, 0.3, {"history": 64}),
        (2, 0.5, {"linear_head": False}),
        (1, 0.3, {}),
    ],
)
def test_a_step_agrees_with_numpy_from_the_same_state(classes, unknown, options):
    prototypes, features, _ = random_stream(classes=classes, samples=700, seed=classes, unknown=unknown)
    state = StreamState(Prototypes(prototypes), StreamDCSConfig(**options))
    assert state.native is not None
    for feature in features:
        in_numpy = state.fork()
        found, expected = state.step(feature, True), in_numpy.reference_step(feature, True)
        assert (found.known, found.best, found.reason) == (expected.known, expected.best, expected.reason)
        np.testing.assert_allclose(found[2:7], expected[2:7], atol=1e-9)
        np.testing.assert_allclose(state.logits, in_numpy.logits, atol=1e-9)
        for name, array in state.arena.items():
            np.testing.assert_allclose(array, in_numpy.arena[name], rtol=1e-8, atol=1e-9, err_msg=name)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("in_numpy", [False, True])
def test_many_samples_give_what_one_by_one_gives(frozen, in_numpy):
    prototypes, features, _ = random_stream(classes=9, samples=300, seed=2, unknown=0.3)
    engines = [StreamDCS(prototypes), StreamDCS(prototypes)]
    for engine in engines:
        if in_numpy:
            engine._memory.native = None
        engine.observe_many(features[:100])
        if frozen:
            engine.freeze()
    together = engines[0].observe_many(features[100:], scores=True)
    for decision, feature in zip(together, features[100:], strict=True):
        alone, many = engines[1].observe(feature).to_dict(), decision.to_dict()
        assert many == alone
    assert engines[0].snapshot() == engines[1].snapshot()


def test_a_restored_engine_continues_to_the_bit_with_a_class_bias():
    rng = np.random.default_rng(0)
    prototypes = unit(rng.normal(size=(10, 64)))
    shift = 0.6 * unit(prototypes[0] - prototypes[1])
    features = prototypes[rng.integers(10, size=600)] + 0.2 * rng.normal(size=(600, 64)) + shift
    engine = StreamDCS(prototypes)
    for start in range(0, 600, 50):
        copied = StreamDCS.restore(engine.snapshot())
        copied.add_class("new", features[0])
        copied.remove_class("3")
        again = StreamDCS.restore(copied.snapshot())
        engine = StreamDCS.restore(engine.snapshot())
        plain = engine.observe_many(features[start : start + 50], scores=True)
        edited, twice = (one.observe_many(features[start : start + 50], scores=True) for one in (copied, again))
        assert edited.scores.tobytes() == twice.scores.tobytes()
    straight = StreamDCS(prototypes)
    expected = straight.observe_many(features, scores=True)
    assert engine.stats()["class_bias_max"] > 0
    assert plain.scores.tobytes() == expected.scores[-50:].tobytes()
    assert engine.snapshot() == straight.snapshot()


DIGEST = """
import hashlib
from conftest import random_stream
from protodcs import StreamDCS
digest = hashlib.sha256()
for classes, width in ((1, 7), (3, 33), (17, 64), (40, 512)):
    prototypes, features, _ = random_stream(classes=classes, width=width, samples=500, seed=classes, unknown=0.3)
    features[:, ::3] *= 1e-40
    engine = StreamDCS(prototypes)
    decisions = engine.observe_many(features, scores=True)
    for name in ("score", "p_unknown", "openness", "aleatoric", "epistemic", "scores"):
        digest.update(getattr(decisions, name).tobytes())
    digest.update(engine.snapshot())
print(digest.hexdigest())
"""


def test_every_instruction_set_gives_the_same_bytes():
    digests = {name: run(DIGEST, PROTODCS_BACKEND="native", PROTODCS_INSTRUCTIONS=name).stdout for name in INSTRUCTIONS}
    assert len(set(digests.values())) == 1, digests
    assert len(digests["baseline"]) > 60


# Choosing a backend.

SHOW = "from protodcs.core import _native; print(_native.BACKEND, getattr(_native.native, '__name__', None))"


@pytest.mark.parametrize("name", INSTRUCTIONS)
def test_an_instruction_set_can_be_forced(name):
    shown = run(SHOW, PROTODCS_BACKEND="native", PROTODCS_INSTRUCTIONS=name)
    assert shown.stdout.split() == ["native", f"protodcs.core._native.{name}"]


def test_numpy_can_be_forced():
    assert run(SHOW, PROTODCS_BACKEND="numpy").stdout.split() == ["numpy", "None"]


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"PROTODCS_BACKEND": "numba"}, "PROTODCS_BACKEND is 'numba'. Set it to 'numpy' or 'native'"),
        ({"PROTODCS_BACKEND": "", "PROTODCS_INSTRUCTIONS": "sse9"}, "PROTODCS_INSTRUCTIONS is 'sse9', which this CPU"),
    ],
)
def test_an_unknown_choice_is_an_error(environment, message):
    assert message in run(SHOW, **environment).stderr


# Hide the extension, as in a package that was installed without a compiler.
HIDDEN = """
import importlib.abc, sys
class Hide(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.startswith("protodcs.core._native.") and not name.endswith("interface"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hide())
import numpy as np
from protodcs import StreamDCS
for _ in range(2):
    print(StreamDCS(np.eye(3, 8)).observe(np.eye(3, 8)[1]).index)
"""


def test_without_the_extension_numpy_computes_and_says_so_once():
    result = run(HIDDEN, PROTODCS_BACKEND="")
    assert result.stdout.split() == ["1", "1"]
    assert result.stderr.count("installed without its compiled step, so numpy computes") == 1


def test_without_the_extension_a_forced_native_backend_is_an_error():
    assert "PROTODCS_BACKEND is 'native', but protodcs was installed without" in run(
        HIDDEN, PROTODCS_BACKEND="native"
    ).stderr  # fmt: skip
