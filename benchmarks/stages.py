"""Where the time of a step goes: `python -m benchmarks stages`.

The parts of an engine in the steady state of a real stream, each over the bare `prototypes @ feature`, in turns: the
passes over the prototypes, the refit, snapshot and restore.
"""

from benchmarks.timing import clip_stream, in_turns, one_thread, ratio, spread, table

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first

from protodcs import ProtoDCS, StreamDCS  # noqa: E402
from protodcs.core import evidence  # noqa: E402
from protodcs.core.protodcs.cache import queue_mean  # noqa: E402
from protodcs.core.protodcs.prediction import affinities, conclude  # noqa: E402
from protodcs.core.protodcs.residual import rescore  # noqa: E402
from protodcs.core.vectors import similarities  # noqa: E402

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
    memory, scratch, config = engine._memory, engine._scratch, engine.config
    unit = engine._checked(feature).copy()
    return {
        "first check: cosines": lambda: similarities(memory.text, memory.inverse_norms, unit, scratch.before),
        "alignment after a queue change": queue_change(engine),
        "loss and its slopes": lambda: evidence.uncertainty_gradient(
            scratch.before, config.aleatoric_weight, config.epistemic_weight, scratch.slopes
        ),
        "step and re-scoring": lambda: rescore(
            scratch.every, memory.text, memory.inverse_norms, memory.pull, memory.pull_scale, unit, scratch.before,
            scratch.slopes, config.text_rate, config.step_epsilon, scratch.after,
        ),
        "visual affinities": lambda: affinities(
            memory.opened, memory.adapted, unit, config.affinity_weight, config.affinity_sharpness, scratch.visual,
            scratch.affinity,
        ),
        "prediction": lambda: conclude(
            scratch.after, scratch.after, scratch.affinity, config.temperature, scratch.logits, scratch.probabilities,
            scratch.scores,
        ),
    }  # fmt: skip


def queue_change(engine):
    """The alignment's part of a queue change, on a copy: a queue that changes to what it is costs as much as any."""
    copied, direction = engine._memory.fork(), np.empty(engine.dimension)
    copied.own(*copied._CACHED)
    k = int(copied.opened[0])
    queue_mean(copied.cache[k], copied.counts[k], direction)
    return lambda: copied._change(k, False, direction, direction)


def of_streamdcs(engine, feature):
    """The passes of any sample."""
    memory, verification = engine._memory, engine._memory.verification
    unit = engine._checked(feature).copy()
    similarities(memory.prototypes, memory.inverse_norms, unit, engine._cosines)
    cosines = engine._cosines.copy()
    signals, baseline, head = (
        verification.signals(unit, cosines),
        verification.baseline.fork(),
        verification.head.fork(),
    )
    return {
        "cosines": lambda: similarities(memory.prototypes, memory.inverse_norms, unit, engine._cosines),
        "signals": lambda: verification.signals(unit, cosines),
        "decision": lambda: verification.decide(signals, cosines),
        "class baseline": lambda: baseline.learn(cosines, 1.0),
        "linear head": lambda: head.learn(0, unit),
    }


def rare(engine):
    """What does not happen with every sample: once in 100 (ProtoDCS) or 32 (StreamDCS) samples, or on request."""
    memory = engine._memory
    state = engine.snapshot()
    fit = memory.verification._refit if isinstance(engine, StreamDCS) else lambda: engine._refit(memory)
    return {
        "refit": fit,
        "snapshot": engine.snapshot,
        "restore": lambda: type(engine).restore(state),
    }


def as_markdown(rows):
    lines = [
        "Real CLIP ViT-B/32 features, d = 512, one thread, after half of the stream or 2,000 samples; each part over "
        "the bare `prototypes @ feature` in turns, median and quartiles. A refit happens once in 100 samples "
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
