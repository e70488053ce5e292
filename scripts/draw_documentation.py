"""Draw the pictures of the documentation from the demo: `python scripts/draw_documentation.py`. Takes a minute."""

import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from protodcs import OpenSetClassifier, ProtoDCS, encoders, plot
from protodcs.demo import KNOWN, DemoStream

ASSETS = Path(__file__).parent.parent / "docs" / "assets"
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"
SAMPLES, SEED = 600, 3
# Top of a contact sheet: its title and four rows.
SHEET_HEIGHT = 704


def main() -> None:
    """Run StreamDCS on a demo stream and write the pictures."""
    encoder = encoders.load("demo")
    prototypes = encoder.prototypes(KNOWN)
    stream = DemoStream(SAMPLES, unknown=0.3, seed=SEED)
    images = [sample.image for sample in stream]
    features = encoder.encode(images)
    known = np.array([sample.label >= 0 for sample in stream])
    engine = OpenSetClassifier.with_encoder(encoder, KNOWN).engine
    engine.observe_many(features)
    checks = [engine.explain(feature).verification for feature in features]
    scores = np.array([check.score for check in checks])
    cosines = features @ prototypes.T
    draw_steps(stream, cosines, scores, checks[0].threshold, known)
    draw_scores(cosines.max(axis=1), scores, checks[0].threshold, known)
    draw_charts(encoder)
    draw_protodcs(encoder)
    draw_commands()


def draw_steps(stream, cosines, scores, threshold, known) -> None:
    """Draw the way of one known and one unknown image from pixels to decision."""
    examples = [next(n for n in range(SAMPLES - 100, SAMPLES) if known[n] == kind and (scores[n] > threshold) == kind)
                for kind in (True, False)]  # fmt: skip
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    FigureCanvasAgg(figure)
    for row, (number, axes) in enumerate(zip(examples, figure.subplots(2, 3, width_ratios=(0.6, 1, 1.2)), strict=True)):
        picture, bars, histogram = axes
        picture.imshow(stream[number].image)
        picture.set_xticks([])
        picture.set_yticks([])
        best = np.argsort(-cosines[number])[:5]
        bars.barh([KNOWN[k] for k in best][::-1], cosines[number][best][::-1], color=GREY)
        bars.set_xlim(0, 1)
        histogram.hist(scores, 50, color="#cccccc")
        histogram.axvline(threshold, color="black", linestyle="--", label="threshold")
        color = BLUE if scores[number] > threshold else ORANGE
        answer = KNOWN[best[0]] if scores[number] > threshold else "unknown"
        histogram.axvline(scores[number], color=color, linewidth=3, label=f"this image: {answer}")
        histogram.legend(fontsize=8, frameon=False)
        histogram.set_yticks([])
        if row == 0:
            picture.set_title("1. image", fontsize=10)
            bars.set_title("2. cosines with the class prototypes", fontsize=10)
            histogram.set_title("3. score, compared with the stream", fontsize=10)
    save(figure, "concepts.png")


def draw_scores(largest, scores, threshold, known) -> None:
    """Draw how the largest cosine and the score of StreamDCS separate known from unknown images."""
    figure = Figure(figsize=(10, 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, values, title in zip(
        figure.subplots(1, 2), (largest, scores), ("Largest cosine (zero-shot)", "Score of StreamDCS"), strict=True
    ):
        bins = np.linspace(*np.quantile(values, (0.002, 0.998)), 40)
        axes.hist(values[known], bins, color=BLUE, alpha=0.75, label="known images")
        axes.hist(values[~known], bins, color=ORANGE, alpha=0.75, hatch="///", label="unknown images")
        axes.set_title(title, fontsize=10)
        axes.set_ylabel("images", fontsize=8)
        if values is scores:
            axes.axvline(threshold, color="black", linestyle="--", label="threshold")
        axes.legend(fontsize=8, frameon=False)
    save(figure, "scores.png")


def draw_charts(encoder) -> None:
    """Draw what `docs/how-to/charts.md` draws."""
    stream = DemoStream(600, unknown=0.5, seed=SEED)
    engine = OpenSetClassifier.with_encoder(encoder, KNOWN).engine
    decisions = engine.observe_many(encoder.encode([sample.image for sample in stream]))
    figure = Figure(figsize=(11, 6), layout="constrained")
    FigureCanvasAgg(figure)
    left, matrix = figure.subfigures(1, 2, width_ratios=(1, 1.1))
    scores, rate = left.subplots(2, 1)
    plot.score_histogram(engine, axes=scores)
    plot.unknown_rate(decisions, axes=rate)
    truth = [sample.kind if sample.label >= 0 else None for sample in stream]
    plot.confusion_matrix(decisions, truth, axes=matrix.subplots())
    save(figure, "charts.png")


def draw_protodcs(encoder) -> None:
    """Draw the two checks of ProtoDCS, and its temporary and evolved prototypes, on the stream of the explanation."""
    stream = DemoStream(540, unknown=0.5)
    known = np.array([sample.label >= 0 for sample in stream])
    engine = ProtoDCS(encoder.prototypes(KNOWN), classes=KNOWN)
    told = []
    for feature in encoder.encode(sample.image for sample in stream):
        told.append(engine.explain(feature))
        engine.observe(feature)
    figure = Figure(figsize=(11, 3.9), layout="constrained")
    FigureCanvasAgg(figure)
    first, second, third = figure.subplots(1, 3)

    late = range(len(told) - 140, len(told))
    openness = np.array([why.first_check.openness for why in told])
    for chosen, color, marker, label in ((known, BLUE, "o", "known image"), (~known, ORANGE, "^", "unknown image")):
        shown = [place for place in late if chosen[place]]
        first.scatter(shown, openness[shown], 12, color=color, marker=marker, label=label)
    for gate, style, label in (("trust_gate", "-", "trust gate"), ("cache_gate", "--", "cache gate")):
        first.plot(late, [getattr(told[n].first_check, gate) for n in late], style, color="black", label=label)
    first.set_title("First check: openness S and the gates", fontsize=10)
    first.set_xlabel("image")

    scores = engine.score_distribution()
    second.hist(scores.values, 20, density=True, color="#cccccc", label="latest 100 images")
    grid = np.linspace(scores.values.min(), scores.values.max(), 200)
    for group, color in zip(scores.groups, (BLUE, ORANGE), strict=True):
        second.plot(grid, group.density(grid), color=color, label=f"{group.name} component")
    second.axvline(scores.threshold, color="black", linestyle="--", label="boundary")
    second.set_title("Final verification: the mixture over S'", fontsize=10)
    second.set_xlabel("openness S'")
    second.set_yticks([])
    second.set_ylim(0, 1.45 * second.get_ylim()[1])

    stepped = [n for n, why in enumerate(told) if why.temporary.stepped]
    third.scatter(stepped, [told[n].temporary.text_step for n in stepped], 8, color=GREY, label="temporary, from P_t")
    # The distance of two unit vectors from one minus their cosine.
    moved = [np.sqrt(2 * why.evolution.drift_after) for why in told]
    third.plot(moved, color=BLUE, linewidth=2, label="evolved, from the initial prototypes")
    third.set_ylim(0, 1.5 * max(max(moved), max(told[n].temporary.text_step for n in stepped)))
    third.set_title("Text prototypes: mean distance", fontsize=10)
    third.set_xlabel("image")
    for axes in (first, second, third):
        axes.legend(fontsize=8, loc="upper left", framealpha=1, edgecolor="white")
    first.set_ylim(openness.min() - 0.05, openness.max() + 0.25)
    save(figure, "protodcs.png")


def draw_commands() -> None:
    """Write the pictures that the commands of the pages write."""
    with TemporaryDirectory() as folder:

        def run(*words) -> None:
            command = [sys.executable, "-m", "protodcs", *words]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)

        run("demo", "--folder", "pictures")
        run("classify", "pictures", "--model", "demo", "--classes", "demo", "--sheet", "unknown.png")
        run("compare", "pictures", "--model", "demo", "--classes", "demo", "--figure", ASSETS / "compare.png")
        run("demo", "--terminal", "--images", "600", "--out", ASSETS / "demo.png")
        with Image.open(Path(folder) / "unknown.png") as sheet:
            sheet.crop((0, 0, sheet.width, SHEET_HEIGHT)).quantize(256).save(ASSETS / "contact-sheet.png")


def save(figure: Figure, name: str) -> None:
    """Write a picture on white, so that it can be read in dark mode too."""
    figure.savefig(ASSETS / name, format="png", dpi=110, facecolor="white", metadata={"Software": None})


if __name__ == "__main__":
    main()
