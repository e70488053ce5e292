"""A step on some of many classes decides nearly as a step on all of them; a decision is built quickly."""

import time

import numpy as np
import pytest

from conftest import random_stream
from protodcs import ProtoDCS, ProtoDCSConfig, StreamDCS
from protodcs.core.protodcs.temporary import candidates

FIELDS = ("known", "index", "p_unknown", "openness", "openness_first", "score", "aleatoric", "epistemic", "cached")


def test_as_many_candidates_as_classes_are_the_exact_step():
    prototypes, features, _ = random_stream(classes=30, samples=300, seed=1)
    exact = ProtoDCS(prototypes, config=ProtoDCSConfig())
    some = ProtoDCS(prototypes, config=ProtoDCSConfig(candidates=30, candidates_above=1))
    for name in FIELDS:
        np.testing.assert_array_equal(
            getattr(some.observe_many(features), name), getattr(exact.observe_many(features), name)
        )
        exact.reset()
        some.reset()


@pytest.mark.parametrize("options", [{}, {"evidence_logits": "fused"}, {"prediction_scale": "logit"}])
def test_a_third_of_the_classes_decides_nearly_always_as_all_of_them(options):
    prototypes, features, _ = random_stream(classes=60, samples=500, seed=5)
    few = {"candidates": 20, "candidates_above": 1}
    exact = ProtoDCS(prototypes, config=ProtoDCSConfig(**options)).observe_many(features)
    some = ProtoDCS(prototypes, config=ProtoDCSConfig(**options, **few)).observe_many(features)
    assert ((some.known == exact.known) & (some.index == exact.index)).mean() > 0.98
    assert (some.aleatoric != exact.aleatoric).any(), "nothing was left out"


def test_candidates_hold_the_best_class_of_every_sample():
    prototypes, features, _ = random_stream(classes=50, samples=200, seed=3)
    config = ProtoDCSConfig.preset("paper", candidates=3, candidates_above=10)
    engine = ProtoDCS(prototypes, config=config)
    for feature in features:
        engine.observe(feature)
        rows = candidates(config, engine.initial_cosines())
        assert len(rows) == 3
        assert engine.initial_cosines().argmax() in rows


def test_classes_that_a_step_leaves_out_move_as_the_others_do():
    prototypes, features, _ = random_stream(classes=60, samples=300, seed=4)

    def uncertainty(**options):
        engine = ProtoDCS(prototypes, config=ProtoDCSConfig.preset("paper", **options))
        decisions = engine.observe_many(features)
        return decisions.aleatoric[decisions.trusted]

    exact, still = uncertainty(), uncertainty(text_rate=0.0)
    some = uncertainty(candidates=20, candidates_above=1)
    assert np.abs(some - exact).mean() < 0.2 * np.abs(still - exact).mean()


@pytest.mark.parametrize("laid_out", ["read only", "spread", "half"])
def test_a_feature_that_is_laid_out_otherwise_is_the_same_feature_at_about_the_same_cost(laid_out):
    prototypes, features, _ = random_stream(classes=20, width=128, samples=400, seed=4)
    plain = features.astype(np.float16).astype(np.float32)
    others = {"spread": np.asfortranarray(plain), "half": plain.astype(np.float16), "read only": plain.copy()}[laid_out]
    others.setflags(write=laid_out != "read only")
    one, other = StreamDCS(prototypes), StreamDCS(prototypes)
    spent = []
    for usual, unusual in zip(plain, others, strict=True):
        start = time.thread_time()
        expected = one.observe(usual)
        middle = time.thread_time()
        found = other.observe(unusual)
        spent.append((middle - start, time.thread_time() - middle))
        for name in FIELDS:
            assert getattr(found, name) == getattr(expected, name), name
    usually, otherwise = np.median(spent, axis=0)
    assert otherwise < 2 * usually
