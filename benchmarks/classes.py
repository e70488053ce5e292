"""How the cost grows with the number of classes: `python -m benchmarks classes`.

The thousand ImageNet prototypes of the CLIP feature pack, cut off or widened with distractors - mixtures of two of them
with noise, which lie where real class names lie - under the stream `big`. Each method takes turns with the bare
`prototypes @ feature`. With very many classes a step works on the candidates; what that changes is counted against the
exact step on the same samples.
"""

from benchmarks.timing import clip_stream, in_turns, one_thread, ratio, spread, table

one_thread()

import numpy as np  # noqa: E402 - the thread limits above must come first

from protodcs import ProtoDCS, ProtoDCSConfig, methods  # noqa: E402

NAME = "classes"
SIZES = (10, 30, 100, 300, 1000, 3000, 10_000, 30_000, 100_000)
CANDIDATES = 1024
# Samples before anything is timed, timed ones, and those on which candidates are compared with all classes.
WARM, TIMED, COMPARED = 300, 60, 2000
# How much of a distractor is noise of its own: real class names are about as far from each other.
_NOISE = 0.5
EXACT = 10_000_000


def widened(prototypes, classes, seed=0):
    """So many prototypes: the real ones first, then distractors."""
    if classes <= len(prototypes):
        return np.ascontiguousarray(prototypes[:classes])
    chance = np.random.default_rng(seed)
    count = classes - len(prototypes)
    one, two = chance.integers(len(prototypes), size=(2, count))
    share = chance.uniform(0.3, 0.7, size=(count, 1)).astype(np.float32)
    rows = share * prototypes[one] + (1 - share) * prototypes[two]
    length = np.linalg.norm(rows, axis=1, keepdims=True)
    noise = chance.standard_normal(rows.shape, dtype=np.float32) / np.float32(np.sqrt(rows.shape[1]))
    rows += _NOISE * length * noise
    return np.concatenate([prototypes, rows / np.linalg.norm(rows, axis=1, keepdims=True)]).astype(np.float32)


def measure(quick=False):
    prototypes, features = clip_stream("big")
    sizes = SIZES[:5] if quick else SIZES
    rows = []
    for classes in sizes:
        wide = widened(prototypes, classes)
        rows += [one(method, wide, features) for method in ("protodcs", "streamdcs")]
    if not quick:
        rows.append(agreement(widened(prototypes, SIZES[-1]), features))
    return rows


def one(method, prototypes, features):
    """A method on so many classes, over the bare scoring."""
    options = {"preset": "paper", "candidates": CANDIDATES} if method == "protodcs" else {}
    engine = methods.create(method, prototypes, **options)
    engine.observe_many(features[:WARM])
    rest = iter(features[WARM:])
    times = in_turns({"observe": lambda: engine.observe(next(rest)), "bare": lambda: prototypes @ features[0]}, TIMED)
    return {
        "classes": len(prototypes),
        "method": method,
        "bare_us": 1e6 * float(np.median(times["bare"])),
        "observe_us": 1e6 * float(np.median(times["observe"])),
        **ratio(times["observe"], times["bare"]),
    }


def agreement(prototypes, features):
    """On how many samples the candidates decide as all classes would, beside a stream that is long enough to adapt."""
    configs = [ProtoDCSConfig.preset("paper", candidates=candidates) for candidates in (CANDIDATES, EXACT)]
    engines = [ProtoDCS(prototypes, config=config) for config in configs]
    some, every = (engine.observe_many(features[:COMPARED]) for engine in engines)
    same = (some.known == every.known) & (some.index == every.index)
    return {
        "classes": len(prototypes),
        "method": "protodcs",
        "samples": len(same),
        "same_decision": float(same.mean()),
        "largest_openness_error": float(np.abs(some.openness - every.openness).max()),
        "largest_p_unknown_error": float(np.abs(some.p_unknown - every.p_unknown).max()),
    }


def as_markdown(rows):
    lines = [
        "The prototypes are the thousand of ImageNet in the CLIP feature pack, cut off or widened with distractors. "
        f"The stream is `big`. After {WARM} samples, {TIMED} turns of one sample and one bare `prototypes @ feature` "
        f"are timed, on one thread. Above 10,000 classes a step works on the {CANDIDATES:,} most similar ones. "
        "`protodcs` is the preset `paper`.",
        "",
        "![Cost against the number of classes](classes.png)",
        "",
    ]
    timed = [row for row in rows if "ratio" in row]
    lines += table(
        ("K", "method", "bare", "observe", "ratio (quartiles)"),
        (
            (
                f"{row['classes']:,}",
                f"`{row['method']}`",
                f"{row['bare_us']:,.1f} us",
                f"{row['observe_us']:,.1f} us",
                spread(row),
            )
            for row in timed
        ),
    )
    for row in rows:
        if "same_decision" in row:
            lines += [
                "",
                f"At {row['classes']:,} classes, a step with {CANDIDATES:,} candidates decides like the exact step in "
                f"{row['same_decision']:.2%} of the first {row['samples']:,} samples. "
                f"Openness differs by at most {row['largest_openness_error']:.1e}, P(unknown) by at most "
                f"{row['largest_p_unknown_error']:.1e}.",
            ]
    return "\n".join(lines) + "\n"


def plot(rows, file):
    """Time against the number of classes, with the bare scoring beside it."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 4.2), layout="constrained")
    for method, colour in (("protodcs", "#c05a1c"), ("streamdcs", "#1c6fc0")):
        own = [row for row in rows if row["method"] == method and "ratio" in row]
        axes.plot(
            [r["classes"] for r in own], [r["observe_us"] for r in own], "o-", color=colour, label=f"observe, {method}"
        )
    axes.plot(
        [r["classes"] for r in own], [r["bare_us"] for r in own], "--", color="#555555", label="prototypes @ feature"
    )
    axes.set(xscale="log", yscale="log", xlabel="classes", ylabel="microseconds a sample")
    axes.grid(alpha=0.3, which="both", linewidth=0.5)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=150)
    plt.close(figure)
