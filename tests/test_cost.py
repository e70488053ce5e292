"""The cost of a stream: the estimate follows what engines do, and no settings get past the limits."""

from pathlib import Path

import numpy as np
import pytest
import yaml

from made_service import FEATURES, PROTOTYPES, ask, create, done, engine_of, observe, one, spec_of, started
from memory_store import MemoryStore, stored_ids
from protodcs import ProtoDCSConfig, StreamDCS, StreamDCSConfig, methods
from protodcs.core.prototypes import Prototypes
from protodcs.errors import ConfigError
from protodcs.serve.guard import GuardSettings
from protodcs.serve.messages import Action, ReplyStatus, Request
from protodcs.serve.settings import ServeConfig, TenantLimits
from protodcs.serve.stream.cost import check_cost, estimate, total
from protodcs.serve.stream.live_stream import StreamSpec, pack_class
from protodcs.serve.stream.shared import pack_prototypes

GUARD = GuardSettings()
GRIDS = Path(__file__).parent.parent / "grids"
# More than a millisecond on average.
EXPENSIVE = {"history": 100_000}


def settings(method, **options):
    return methods.REGISTER[method].config_type(**options)


def check(classes, dimension, method="streamdcs", guard=GUARD, limits=None, **options):
    allowed = ServeConfig(store="postgresql://nowhere/none", **(limits or {}))
    check_cost(settings(method, **options), classes, dimension, guard, allowed)


# The estimate.


@pytest.mark.parametrize(
    ("classes", "dimension", "samples", "options"),
    [
        (100, 64, 3000, {"method": "streamdcs"}),
        (10, 64, 3000, {"method": "streamdcs", "history": 3000, "class_bias": False}),
        (200, 32, 1000, {"method": "streamdcs", "class_bias_limit": 300}),
        (20, 64, 1000, {"method": "protodcs"}),
        (20, 64, 1000, {"method": "protodcs", "cache_size": 20, "gate_window": 1000}),
    ],
)
def test_the_estimated_snapshot_is_as_large_as_that_of_a_stream_whose_memories_are_full(
    classes, dimension, samples, options
):
    rng = np.random.default_rng(0)
    prototypes = Prototypes(rng.standard_normal((classes, dimension)))
    engine = methods.create(options.pop("method"), prototypes, **options)
    noise = rng.standard_normal((samples, dimension)) / np.sqrt(dimension)
    features = prototypes.unit[rng.integers(classes, size=samples)] * (rng.random(samples) < 0.5)[:, None] + noise
    engine.observe_many(features.astype(np.float32))
    found = total(estimate(engine.config, classes, dimension, None))
    size = len(engine.snapshot())
    assert size / 2 < found.snapshot < 3 * size
    assert found.memory >= found.snapshot


# The limits.


@pytest.mark.parametrize(
    ("method", "classes"),
    [("streamdcs", 1), ("streamdcs", 100), ("streamdcs", 10_000), ("protodcs", 1), ("protodcs", 150)],
)
def test_both_methods_are_within_the_default_limits(method, classes):
    check(classes, 1024, method)


def test_the_letter_of_the_paper_is_cheaper_because_its_text_prototypes_never_move():
    check(1000, 1024, "protodcs", preset="paper")
    with pytest.raises(ConfigError, match=r"the limit `max_mean_step_cost`.*`evolution_gate`=entropy"):
        check(1000, 1024, "protodcs", preset="working")


def test_the_paper_with_ten_thousand_classes_is_above_the_default_limits():
    with pytest.raises(ConfigError, match="the limit `max_stream_bytes`"):
        check(10_000, 512, "protodcs")


def grid_options():
    """Return method and settings of our methods in the grids that the documentation describes."""
    for path in sorted(GRIDS.glob("*.yaml")):
        for entry in yaml.safe_load(path.read_text())["methods"]:
            if isinstance(entry, dict) and entry["method"] in ("streamdcs", "protodcs"):
                yield {"method": entry["method"], **entry.get("options", {})}


def test_documented_settings_are_within_the_default_limits():
    grids = list(grid_options())
    assert len(grids) > 30
    for options in (
        {"method": "protodcs"},
        {"method": "protodcs", "mixture_period": 1},
        {"method": "protodcs", "cache_admission": "buffered"},
        {"method": "protodcs", "evidence_logits": "fused"},
        {"history": 100_000},
        *grids,
    ):
        check(100, 512, **options)


@pytest.mark.parametrize(
    ("classes", "options", "limit", "named"),
    [
        (10, {**EXPENSIVE, "limits": {"max_mean_step_cost": 1.0}}, "max_mean_step_cost", "`history`=100000"),
        (10, {**EXPENSIVE, "limits": {"max_step_cost": 20.0}}, "max_step_cost", "`history`=100000"),
        (
            10,
            {**EXPENSIVE, "guard": None, "limits": {"max_stream_bytes": 10**6}},
            "max_stream_bytes",
            "`history`=100000",
        ),
        (
            10,
            {"method": "protodcs", "mixture_window": 100_000, "mixture_period": 1},
            "max_mean_step_cost",
            "`mixture_iterations`=100, `mixture_period`=1",
        ),
        (
            10,
            {"method": "protodcs", "mixture_window": 100_000, "mixture_iterations": 10_000, "mixture_period": 100_000},
            "max_step_cost",
            "`mixture_iterations`=10000",
        ),
        (5000, {"class_bias_limit": 10_000}, "max_stream_bytes", "`class_bias_limit`=10000"),
        (5000, {"method": "protodcs", "cache_size": 64}, "max_stream_bytes", "`cache_size`=64"),
        (1000, {"method": "protodcs", "evolution_gate": "quantile"}, "max_mean_step_cost", "`evolution_gate`=quantile"),
        (
            1000,
            {
                "method": "protodcs",
                "preset": "paper",
                "guard": GuardSettings(window=32, keep_windows=1),
                "limits": {"max_mean_step_cost": 8.0},
            },
            "max_mean_step_cost",
            "`guard.keep_windows`=1",
        ),
        (
            100,
            {
                "method": "protodcs",
                "cache_admission": "buffered",
                "mixture_period": 100_000,
                "guard": None,
                "limits": {"max_step_cost": 250.0},
            },
            "max_step_cost",
            "`cache_admission`=buffered",
        ),
    ],
)
def test_expensive_settings_are_an_error_that_names_them(classes, options, limit, named):
    with pytest.raises(ConfigError, match=f"the limit `{limit}`") as problem:
        check(classes, 512, **options)
    assert named in str(problem.value)
    assert "Choose less expensive values, or ask the operator to raise the limit" in str(problem.value)


def test_a_tenant_can_have_limits_of_its_own():
    config = ServeConfig(
        store="postgresql://nowhere/none",
        max_step_cost=300.0,
        tenants={"lab": TenantLimits(max_step_cost=9e9, classes=7)},
    )
    assert config.of_tenant("lab").max_step_cost == 9e9
    assert config.of_tenant("lab").max_stream_bytes == config.max_stream_bytes
    assert config.of_tenant("other").max_step_cost == 300.0
    assert config.of_tenant("lab").classes == 7


# Every way in.


def rejected(reply):
    assert reply.status is ReplyStatus.WRONG
    assert "`history`=100000" in reply.message
    assert "`max_mean_step_cost` is 1." in reply.message
    return True


def expensive_state():
    engine = StreamDCS(PROTOTYPES, config=StreamDCSConfig(**EXPENSIVE))
    engine.observe_many(FEATURES[:3])
    return engine.snapshot()


async def test_an_expensive_stream_is_not_created():
    async with started(streams=(), max_mean_step_cost=1.0) as worker:
        assert rejected(await one(worker, create(spec=spec_of(**EXPENSIVE).pack())))
        assert await stored_ids(worker._store) == []


async def test_limits_hold_for_a_stream_that_is_created_like_another_one():
    store = MemoryStore()
    async with started(store, streams=(), max_mean_step_cost=1000.0) as worker:
        await done(worker, create(spec=spec_of(**EXPENSIVE).pack()))
    async with started(store, streams=(), max_mean_step_cost=1.0) as worker:
        assert rejected(await one(worker, Request("t", Action.CREATE_LIKE, "k", b"s")))
        # One that exists goes on, though the limit is lower now.
        await done(worker, observe(0))


async def test_an_imported_state_cannot_bring_expensive_settings():
    async with started(max_mean_step_cost=1.0) as worker:
        await done(worker, observe(0))
        before = engine_of(worker)
        assert rejected(await one(worker, ask(Action.IMPORT, payload=expensive_state())))
        assert engine_of(worker) == before


async def test_a_roll_back_cannot_bring_expensive_settings():
    store = MemoryStore()
    async with started(store, max_mean_step_cost=1000.0) as worker:
        await done(worker, ask(Action.IMPORT, "a", expensive_state()), ask(Action.SAVE_SNAPSHOT, "b", b"dear"))
        await done(worker, ask(Action.RESET, "c"))
    async with started(store, streams=(), max_mean_step_cost=1.0) as worker:
        await done(worker, ask(Action.STATUS))
        before = engine_of(worker)
        assert rejected(await one(worker, ask(Action.ROLLBACK, "d", b"dear")))
        assert engine_of(worker) == before


async def test_a_class_that_makes_a_stream_too_expensive_is_not_added():
    rows = np.random.default_rng(0).standard_normal((300, 16))
    prototypes = Prototypes(rows)
    config = ProtoDCSConfig(evolution_gate="quantile")
    spec = StreamSpec(
        method="protodcs",
        config=config.model_dump(),
        classes=[str(k) for k in range(300)],
        prototypes=prototypes.fingerprint,
    )
    limit = total(estimate(config, 300, 16, None)).mean / 1e6 + 1e-6
    async with started(streams=(), max_mean_step_cost=limit) as worker:
        await done(worker, Request("s", Action.CREATE, "k", spec.pack(), pack_prototypes(prototypes)))
        added = pack_class(rows[0].astype("<f4").tobytes(), "one more")
        reply = await one(worker, ask(Action.ADD_CLASS, payload=added))
        assert reply.status is ReplyStatus.WRONG
        assert "`evolution_gate`=quantile" in reply.message
