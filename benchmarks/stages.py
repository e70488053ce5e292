"""Where the time of a step goes: `python -m benchmarks stages`.

The parts of an engine in the steady state of a real stream, each over the bare `prototypes @ feature`, in turns: the
passes over the prototypes, the refit, snapshot and restore.
"""

from benchmarks.timing import clip_stream, in_turns, one_thread, ratio, spread, table

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first

from protodcs import ProtoDCS, StreamDCS  # noqa: E402
from protodcs.core.numerics.evidence import uncertainty_gradient  # noqa: E402
from protodcs.core.numerics.linalg import cosines as row_cosines  # noqa: E402
from protodcs.core.numerics.linalg import products  # noqa: E402
from protodcs.core.protodcs import alignment  # noqa: E402
from protodcs.core.protodcs.prediction import affinities, predict  # noqa: E402
from protodcs.core.protodcs.residual import queue_means  # noqa: E402
from protodcs.core.protodcs.temporary import moved_text  # noqa: E402
from protodcs.core.protodcs.verification import refit  # noqa: E402
from protodcs.core.vectors import cosines as all_cosines  # noqa: E402

NAME = "stages"
STREAMS = {100: "dtd", 200: "flowers", 1000: "big"}
ROUNDS, REPEATS = 40, 10


def measure(quick=False):
    rows = []
    for classes in (100,) if quick else STREAMS:
        prototypes, features = clip_stream(STREAMS[classes], classes)
        warm = features[: min(len(features) // 2, 2000)]
        for kind, stages in ((ProtoDCS, of_protodcs), (StreamDCS, of_streamdcs)):
            engine = kind(prototypes)
            engine.observe_many(warm)
            feature = features[len(warm)]
            tasks = {"bare": lambda p=prototypes, f=feature: p @ f, **stages(engine, feature)}
            rounds = 5 if quick else ROUNDS
            times = in_turns(tasks, rounds, REPEATS) | in_turns(rare(engine), rounds)
            rows += [
                {"classes": classes, "method": kind.name, "stage": stage, "us": 1e6 * float(np.median(seconds))}
                | ratio(seconds, times["bare"])
                for stage, seconds in times.items()
                if stage != "bare"
            ]
    return rows


def of_protodcs(engine, feature):
    """The passes of a trusted sample."""
    state, config = engine._memory, engine.config
    unit = engine._checked(feature).copy()
    cosines = products(state.unit_text, unit)
    slopes = uncertainty_gradient(cosines, config.aleatoric_weight, config.epistemic_weight)
    affinity, every = affinities(state, state.adapted[state.opened], unit), np.arange(len(cosines))
    return {
        "first check: cosines": lambda: products(state.unit_text, unit),
        "alignment after a queue change": queue_change(engine),
        "loss and its slopes": lambda: uncertainty_gradient(cosines, config.aleatoric_weight, config.epistemic_weight),
        "step and re-scoring": lambda: row_cosines(moved_text(state, unit, cosines, slopes, every), unit),
        "visual affinities": lambda: affinities(state, state.adapted[state.opened], unit),
        "prediction": lambda: predict(state, cosines, affinity),
    }


def queue_change(engine):
    """The alignment's part of a queue change, on a copy: a queue that changes to what it is costs as much as any."""
    copied = engine._memory.fork()
    copied.own()
    k = int(copied.opened[0])
    directions, _ = queue_means(copied.cache[k : k + 1], copied.counts[k : k + 1])
    return lambda: alignment.follow(copied, k, directions[0], directions[0])


def of_streamdcs(engine, feature):
    """The passes of any sample."""
    memory = engine._memory.fork()
    verification, unit = memory.verification, engine._checked(feature).copy()
    all_cosines(memory.prototypes, memory.inverse_norms, unit, memory.cosines)
    cosines = memory.cosines.copy()
    signals = verification.signals(unit, cosines)
    return {
        "cosines": lambda: all_cosines(memory.prototypes, memory.inverse_norms, unit, memory.cosines),
        "signals": lambda: verification.signals(unit, cosines),
        "decision": lambda: verification.decide(signals),
        "class baseline": lambda: verification.baseline.learn(cosines, 1.0),
        "linear head": lambda: verification.head.learn(0, unit),
    }


def rare(engine):
    """What does not happen with every sample: once in 100 (ProtoDCS) or 32 (StreamDCS) samples, or on request."""
    memory = engine._memory
    state = engine.snapshot()
    fit = memory.verification._refit if isinstance(engine, StreamDCS) else lambda: refit(memory)
    return {
        "refit": fit,
        "snapshot": engine.snapshot,
        "restore": lambda: type(engine).restore(state),
    }


def as_markdown(rows):
    lines = [
        "Real CLIP ViT-B/32 features, d = 512, one thread, after half of the stream or 2,000 samples. Each part and "
        "the bare `prototypes @ feature` take turns. Ratios are medians, with quartiles. A refit happens once in 100 "
        "samples "
        "(`protodcs`) or in 32 (`streamdcs`); snapshot and restore on request.",
        "",
    ]
    return (
        "\n".join(
            lines
            + table(
                ("K", "method", "part", "time", "over bare scoring"),
                (
                    (row["classes"], f"`{row['method']}`", row["stage"], f"{row['us']:,.1f} us", spread(row))
                    for row in rows
                ),
            )
        )
        + "\n"
    )
