"""Many streams in one process: what they share, what each of them costs, and that none of them notices the others."""

import numpy as np
import pytest

from conftest import random_stream
from protodcs import Config, ProtoDCS, Prototypes, methods
from protodcs.core.memory import _empty

EVOLVING = {"evolution_gate": "entropy", "cache_admission": "verified", "evolution_prior": 1}
PRESETS = {
    "default": Config.preset("default"),
    "paper": Config.preset("paper"),
    "evolving": Config.preset("paper", **EVOLVING),
    "everything": Config.preset("default", text_rate=2.5e-4, visual_prototypes=True, **EVOLVING),
}
every_preset = pytest.mark.parametrize("preset", PRESETS)


def shared_arrays(engine):
    """The arrays of an engine that follow from its prototypes alone."""
    memory = engine._memory
    found = {"entry": memory.entry, "inverse_norms": memory.inverse_norms}
    if memory.bias is not None:
        found["likeness"] = memory.bias.likeness
    if memory.verification is not None:
        found["chance"] = memory.verification.background.chance
    return found


@every_preset
def test_engines_share_what_follows_from_their_prototypes_and_never_write_to_it(preset):
    rows, features, _ = random_stream(classes=9, samples=300, seed=3)
    prototypes, config = Prototypes(rows), PRESETS[preset]
    engines = [ProtoDCS(prototypes, config=config) for _ in range(5)]
    before = {name: array.copy() for name, array in shared_arrays(engines[0]).items()}
    for name in before:
        assert all(np.shares_memory(shared_arrays(e)[name], shared_arrays(engines[0])[name]) for e in engines)
    for number, engine in enumerate(engines):
        engine.observe_many(features[number * 20 :])
        engine.peek(features[0])
        engine.explain(features[0])
    engines[3].add_class("more", features[0])
    engines[3].observe_many(features[:50])
    engines[4].remove_class("0")
    engines[4].observe_many(features[:50])
    for name, array in shared_arrays(ProtoDCS(prototypes, config=config)).items():
        np.testing.assert_array_equal(array, before[name])
    for name, array in _empty(*rows.shape, config.cache_size).items():
        assert (array == (name in ("lengths", "normaliser", "applied"))).all()


@every_preset
def test_an_engine_with_shared_prototypes_answers_as_one_with_its_own(preset):
    rows, features, _ = random_stream(classes=9, samples=300, seed=4)
    shared = Prototypes(rows)
    first, second = ProtoDCS(rows, config=PRESETS[preset]), ProtoDCS(shared, config=PRESETS[preset])
    ProtoDCS(shared, config=PRESETS[preset]).observe_many(features[::-1].copy())
    for feature in features:
        assert first.observe(feature).openness == second.observe(feature).openness
    assert first.snapshot() == second.snapshot()


def test_shared_prototypes_cannot_be_written_to_from_outside():
    prototypes = Prototypes(np.eye(3, 8))
    with pytest.raises(ValueError, match="read-only"):
        prototypes.rows[0, 0] = 2.0


def test_prototypes_have_one_fingerprint_whatever_their_number_type_and_length():
    rows = random_stream(classes=5)[0]
    assert Prototypes(rows).fingerprint == Prototypes(np.asfortranarray(rows * 2.0)).fingerprint
    assert Prototypes(rows).fingerprint != Prototypes(rows[::-1].copy()).fingerprint
    assert Prototypes(np.eye(2, 6)).fingerprint != Prototypes(np.eye(3, 4)).fingerprint


@pytest.mark.parametrize("name", methods.names())
def test_every_method_over_features_takes_shared_prototypes(name):
    rows, features, _ = random_stream(samples=60)
    first, second = (methods.create(name, prototypes) for prototypes in (rows, Prototypes(rows)))
    first.observe_many(features)
    second.observe_many(features)
    assert first.snapshot() == second.snapshot()


def resident(engine):
    """Bytes of all arrays that are this engine's own."""
    seen = {id(array) for array in shared_arrays(engine).values()}
    seen |= {id(array) for array in _empty(*engine._memory.entry.shape, engine.config.cache_size).values()}

    def weigh(thing):
        if isinstance(thing, np.ndarray):
            owner = thing if thing.base is None or not isinstance(thing.base, np.ndarray) else thing.base
            fresh = id(owner) not in seen and id(thing) not in seen
            seen.update((id(owner), id(thing)))
            return thing.nbytes if fresh else 0
        if type(thing).__module__.startswith("protodcs") and hasattr(thing, "__dict__") and id(thing) not in seen:
            seen.add(id(thing))
            return sum(weigh(part) for name, part in vars(thing).items() if name not in ("config", "_prototypes"))
        return 0

    return weigh(engine)


def test_a_young_stream_costs_little_more_than_its_state(clip_stream):
    rows, features, _ = clip_stream("dtd")
    engine = ProtoDCS(Prototypes(rows))
    engine.observe_many(features[:200])
    state_without_prototypes = len(engine.snapshot()) - rows.size * 4
    assert resident(engine) < 1.4 * state_without_prototypes
