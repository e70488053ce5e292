"""Bad input: refused in words, and nothing has changed."""

import numpy as np
import pytest

from conftest import random_stream
from protodcs import ProtoDCS, ProtoDCSConfig, StreamDCS, StreamDCSConfig, methods
from protodcs.core.protodcs.config import DEFAULT_PRESET, PRESETS
from protodcs.errors import ConfigError, InputError, ProtoDCSError, UsageError

WIDTH = 32
GOOD = np.ones(WIDTH, dtype=np.float32)


def broken(value, at=3):
    row = GOOD.copy()
    row[at] = value
    return row


BAD_FEATURES = {
    "NaN": (broken(np.nan), "1 of 32 values are NaN or infinite"),
    "infinity": (broken(np.inf), "NaN or infinite"),
    "minus infinity": (broken(-np.inf), "NaN or infinite"),
    "zero": (np.zeros(WIDTH), "longer than 1e-6"),
    "tiny": (np.full(WIDTH, 1e-9), "longer than 1e-6"),
    "short": (GOOD[:-1], r"shape \(32,\); given: an array of shape \(31,\)"),
    "long": (np.ones(WIDTH + 1), r"shape \(32,\)"),
    "empty": (np.empty(0), r"shape \(32,\)"),
    "matrix": (GOOD[None], r"shape \(32,\); given: an array of shape \(1, 32\)"),
    "scalar": (np.float32(1), r"shape \(32,\)"),
    "integers": (np.ones(WIDTH, dtype=int), "float16, float32 or float64; given: an array of shape .* type int64"),
    "booleans": (np.ones(WIDTH, dtype=bool), "float16"),
    "complex": (np.ones(WIDTH, dtype=complex), "float16"),
    "longdouble": (np.ones(WIDTH, dtype=np.longdouble), "float16"),
    "objects": (np.array(["a"] * WIDTH, dtype=object), "float16"),
    "strings": (np.array(["a"] * WIDTH), "float16"),
    "string": ("a photo of a cat", "numpy array"),
    "list": ([1.0] * WIDTH, "numpy array"),
    "None": (None, "numpy array"),
    "bytes": (b"\x00" * 128, "numpy array"),
}


@pytest.mark.parametrize("name", methods.names())
@pytest.mark.parametrize("kind", BAD_FEATURES)
def test_a_bad_feature_is_refused_in_words_and_changes_nothing(name, kind):
    prototypes, features, _ = random_stream(width=WIDTH, samples=130)
    engine = methods.create(name, prototypes)
    engine.observe_many(features)
    before = engine.snapshot()
    feature, message = BAD_FEATURES[kind]
    calls = [engine.observe, engine.peek] + ([engine.explain] if name in ("streamdcs", "protodcs") else [])
    for call in calls:
        with pytest.raises(InputError, match=message):
            call(feature)
    assert engine.snapshot() == before
    engine.observe(features[0])


@pytest.mark.parametrize("name", methods.names())
def test_observe_many_takes_all_or_nothing(name):
    prototypes, features, _ = random_stream(width=WIDTH, samples=50)
    engine = methods.create(name, prototypes)
    before = engine.snapshot()
    spoiled = features.copy()
    spoiled[47, 5] = np.nan
    with pytest.raises(InputError, match="row 47"):
        engine.observe_many(spoiled)
    for wrong in (features[0], features[:, 1:], features.astype(int), features.tolist(), "features", None):
        with pytest.raises(InputError):
            engine.observe_many(wrong)
    assert engine.snapshot() == before
    assert len(engine.observe_many(features[:0])) == 0


@pytest.mark.parametrize(
    ("prototypes", "classes", "message"),
    [
        (np.ones(4), None, "shape"),
        (np.ones((0, 4)), None, "at least 1 row"),
        (np.ones((3, 0)), None, "shape"),
        (np.ones((2, 2, 2)), None, "shape"),
        (np.zeros((2, 4)), None, "row 0 of prototypes"),
        (np.full((2, 4), np.nan), None, "NaN"),
        (np.ones((2, 4), dtype=int), None, "float"),
        ("prototypes", None, "numpy array"),
        (np.eye(2, 4), ["a"], "2 prototypes and 1 class names"),
        (np.eye(2, 4), ["a", "a"], "unique; 'a' occurs 2 times"),
        (np.eye(2, 4), ["a", ""], "non-empty"),
        (np.eye(2, 4), ["a", 3], "non-empty string"),
        (np.eye(2, 4), "ab", "list of names"),
    ],
)
@pytest.mark.parametrize("name", methods.names())
def test_bad_prototypes_and_names_are_refused(name, prototypes, classes, message):
    with pytest.raises(InputError, match=message):
        methods.create(name, prototypes, classes)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"trust_quantile": 1.5}, "trust_quantile: .*less than or equal to 1.*1.5"),
        ({"cache_size": 0}, "cache_size"),
        ({"cache_size": 2.5}, "cache_size"),
        ({"cache_admission": "never"}, "cache_admission.*'immediate'"),
        ({"temperatur": 0.1}, "temperatur"),
        ({"temperature": float("nan")}, "temperature"),
        ({"cache_quantile": 0.7}, "what is cached must also be trusted"),
        ({"alignment_keys": "all", "alignment_direction": "text-to-visual"}, "no visual prototype"),
        ({"target_false_reject": 1.0}, "target_false_reject"),
        ({"openness": "energy"}, "openness.*'mcm'"),
        ({"score": "max"}, "score.*'prediction'"),
        ({"evidence_scale": 0.0}, "evidence_scale"),
        ({"mixture_relative_floor": 0.0}, "mixture_relative_floor"),
        ({"cache_admission": "gated", "evolution_gate": "off"}, "needs the quality gate"),
        ({"cache_admission": "gated", "text_prototypes": False}, "needs the quality gate"),
    ],
)
def test_a_bad_option_of_protodcs_is_an_error_that_names_it(options, message):
    with pytest.raises(ConfigError, match=message):
        ProtoDCSConfig(**options)
    with pytest.raises(ConfigError, match=message):
        methods.create("protodcs", np.eye(2, 4), **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"class_bias_limit": 2.5}, "class_bias_limit"),
        ({"linear_head": 2}, "linear_head"),
        ({"temperature": float("nan")}, "temperature"),
        ({"target_false_reject": 1.0}, "target_false_reject"),
        ({"verify_by": "openness"}, "verify_by"),
        ({"target_false_reject": None}, "target_false_reject"),
        ({"history": 63}, "history"),
        ({"mixture_window": 512}, "mixture_window"),
    ],
)
def test_a_bad_option_of_streamdcs_is_an_error_that_names_it(options, message):
    with pytest.raises(ConfigError, match=message):
        StreamDCSConfig(**options)
    with pytest.raises(ConfigError, match=message):
        methods.create("streamdcs", np.eye(2, 4), **options)


def test_the_defaults_of_protodcs_are_those_of_the_default_preset():
    assert ProtoDCSConfig() == ProtoDCSConfig.preset() == ProtoDCSConfig.preset(DEFAULT_PRESET)
    assert {name for name in PRESETS if ProtoDCSConfig.preset(name) == ProtoDCSConfig()} == {DEFAULT_PRESET}


def test_a_preset_can_be_named_wherever_options_are_given():
    wanted = ProtoDCSConfig(evolution_gate="aleatoric", evolution_prior=0, cache_size=7)
    assert ProtoDCSConfig.preset("paper", cache_size=7) == wanted
    assert methods.create("protodcs", np.eye(2, 4), preset="paper", cache_size=7).config == wanted
    assert ProtoDCSConfig.preset("working", cache_size=7).replace(preset="paper") == wanted
    assert ProtoDCSConfig.preset("paper", evolution_gate="off").evolution_gate == "off"
    for name in ("best", None, ["paper"]):
        with pytest.raises(ConfigError, match=r"^there is no preset .*: choose one of working, paper$"):
            methods.create("protodcs", np.eye(2, 4), preset=name)
        with pytest.raises(ConfigError, match="there is no preset"):
            ProtoDCSConfig().replace(preset=name)


def test_a_config_is_frozen_and_replaceable():
    config = ProtoDCSConfig()
    with pytest.raises(ValueError, match="frozen"):
        config.cache_size = 7
    assert config.replace(cache_size=7).cache_size == 7
    assert config.cache_size == 5
    with pytest.raises(ConfigError, match="config must be a ProtoDCSConfig; given: StreamDCSConfig"):
        ProtoDCS(np.eye(2, 4), config=StreamDCSConfig())
    with pytest.raises(ConfigError, match="config must be a StreamDCSConfig; given: dict"):
        StreamDCS(np.eye(2, 4), config={"history": 3000})


@pytest.mark.parametrize("config", [StreamDCSConfig, ProtoDCSConfig])
def test_every_option_says_what_it_is(config):
    for name, field in config.model_fields.items():
        assert field.description, name
        assert field.description.endswith("."), name


@pytest.mark.parametrize("name", methods.names())
def test_any_layout_and_any_finite_size_is_taken(name, tmp_path):
    prototypes, features, _ = random_stream(width=WIDTH, samples=20)
    frozen = features.copy()
    frozen.flags.writeable = False
    np.save(tmp_path / "features.npy", features)
    mapped = np.load(tmp_path / "features.npy", mmap_mode="r")
    bytewise = np.frombuffer(b"\0" + features.tobytes(), dtype=np.uint8)[1:].view(np.float32).reshape(features.shape)
    huge = features.astype(np.float64) * 1e300
    wanted = methods.create(name, prototypes).observe_many(features)
    prototypes.flags.writeable = False
    for other in (frozen, mapped, bytewise, np.asfortranarray(features), huge):
        got = methods.create(name, prototypes).observe_many(other)
        np.testing.assert_allclose(got.openness, wanted.openness, atol=1e-6)
        engine = methods.create(name, prototypes)
        assert engine.observe(other[0]).openness == pytest.approx(wanted.openness[0], abs=1e-6)
    with pytest.raises(InputError):
        engine.observe(np.ma.masked_array(features[0], mask=features[0] > 0))
    with pytest.raises(InputError, match="fingerprint"):
        methods.create(name, prototypes, encoder=5)


@pytest.mark.parametrize("name", methods.names())
def test_an_interrupted_engine_says_so_until_it_is_reset(name, monkeypatch):
    prototypes, features, _ = random_stream(width=WIDTH, samples=20)
    engine = methods.create(name, prototypes)
    engine.observe_many(features)
    kept = engine.snapshot()
    part = "_advance" if name in ("protodcs", "streamdcs") else "_score"

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(engine, part, interrupted)
        with pytest.raises(KeyboardInterrupt):
            engine.observe(features[0])
    for call in (engine.snapshot, lambda: engine.observe(features[0]), lambda: engine.peek(features[0])):
        with pytest.raises(UsageError, match="interrupted"):
            call()
    engine.reset()
    assert engine.observe(features[0]).sequence == 0
    assert methods.restore(kept).sequence == 20


def test_errors_are_also_the_builtin_ones():
    assert issubclass(InputError, ValueError)
    assert issubclass(InputError, ProtoDCSError)


def test_calibration_sets_the_cold_threshold_and_nothing_else():
    prototypes, features, labels = random_stream(width=WIDTH, samples=600, unknown=0.5, seed=1)
    paper = ProtoDCSConfig.preset("paper")
    engine = ProtoDCS(prototypes, config=paper)
    cold = ProtoDCS(prototypes, config=paper).observe_many(features[:90])
    assert engine.calibrate(features[100:])
    assert engine.stats()["cold_threshold"] != 0.7
    warm = engine.observe_many(features[:90])
    np.testing.assert_array_equal(cold.openness_first, warm.openness_first)

    def right(decisions):
        return np.mean(decisions.known == (labels[:90] >= 0))

    assert right(warm) > right(cold)
    with pytest.raises(InputError, match="at least 4"):
        engine.calibrate(features[:3])
    same = np.repeat(features[:1], 100, axis=0)
    before = engine.snapshot()
    assert not engine.calibrate(same)
    assert engine.snapshot() == before


def test_target_false_reject_moves_the_operating_point():
    prototypes, features, labels = random_stream(width=64, samples=2000, unknown=0.5, seed=2)
    rejected = []
    for target in (0.01, 0.1, 0.4):
        engine = ProtoDCS(prototypes, config=ProtoDCSConfig(target_false_reject=target))
        decisions = engine.observe_many(features)
        rejected.append(np.mean(~decisions.known[labels >= 0]))
    assert rejected[0] < rejected[1] < rejected[2]
