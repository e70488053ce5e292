"""Kernels find the arrays an engine has now, whatever has replaced them since the last sample."""

import copy

import numpy as np
import pytest

from conftest import random_stream
from protodcs import ProtoDCS, ProtoDCSConfig
from protodcs.core.book import Booked, Layout
from protodcs.core.compiled import KERNEL


def owners(engine):
    """All that has a book in an engine."""
    return [engine._memory, engine._scratch]


def stands_for_its_owner(owner):
    """Whether the book holds the very arrays that its owner has, once it is asked for its table."""
    table, fresh = owner.table, owner.layout.bind(owner)
    held = all(one is other for one, other in zip(owner._book.arrays, fresh.arrays, strict=True))
    return held and (KERNEL == "numpy" or np.array_equal(table, fresh.table))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"evolution_gate": "entropy", "evolution_threshold": 0.9},
        {"cache_admission": "buffered", "alignment_keys": "all"},
    ],
)
def test_a_book_follows_queues_evolution_forks_and_classes(options):
    prototypes, features, _ = random_stream(classes=24, samples=700, seed=7)
    engine = ProtoDCS(prototypes, config=ProtoDCSConfig(**options))
    evolved = False
    for step, feature in enumerate(features):
        expected, decision = engine.peek(feature), engine.observe(feature)
        assert expected.score == decision.score
        evolved |= decision.evolved
        assert all(map(stands_for_its_owner, owners(engine))), step
        if step == 300:
            engine.add_class("new", prototypes[0] + prototypes[1])
        if step == 400:
            engine.remove_class("3")
        if step == 500:
            engine = ProtoDCS.restore(engine.snapshot())
        if step == 650:
            engine.reset()
    assert evolved == ("evolution_gate" in options)


def test_a_copy_of_a_memory_has_a_book_of_its_own():
    prototypes, features, _ = random_stream(classes=10, samples=200, seed=1)
    engine = ProtoDCS(prototypes)
    engine.observe_many(features)
    for owner in owners(engine):
        twin = copy.deepcopy(owner)
        twin.table  # noqa: B018 - asking for it is what binds the book
        assert stands_for_its_owner(twin)
        assert not any(one is other for one, other in zip(twin._book.arrays, owner._book.arrays, strict=True))


class Kept(Booked):
    layout = Layout(values="vector", others="numbers")

    def __init__(self, values):
        self.values, self.others = values, np.arange(3)


@pytest.mark.skipif(KERNEL == "numpy", reason="without numba kernels see the arrays themselves")
@pytest.mark.parametrize("values", [np.zeros(3, np.float32), np.zeros((3, 3)), np.zeros(6)[::2]])
def test_an_array_of_another_kind_has_no_place_in_a_book(values):
    with pytest.raises(TypeError):
        Kept(values).table  # noqa: B018 - asking for it is what binds the book
