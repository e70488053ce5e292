"""What a corruption costs and does: `python -m benchmarks.corruptions`, with `--write` to keep it in docs/results.

Speed is that of one thread, in images per second over all five severities, each the median of repeats in which the
corruptions take turns. Damage is the mean PSNR against the clean images of CIFAR-10. The contact sheet shows a picture
drawn here, because the image sets have their own terms; `--sheet FILE` makes one of a real image to look at.
"""

import argparse
import io
import json
import os
import platform
import sys
import time
from pathlib import Path

for _variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")

import cv2  # noqa: E402 - the thread limits above must come first
import numba  # noqa: E402
import numpy as np  # noqa: E402
import PIL  # noqa: E402
import pyarrow.parquet as parquet  # noqa: E402
from PIL import Image, ImageDraw  # noqa: E402

from protodcs.data.corruptions import NAMES, corrupt, family_of  # noqa: E402

RESULTS = Path(__file__).parent.parent / "docs" / "results"
SEVERITIES = range(1, 6)
REPEATS = 5
# Side -> how many images are corrupted in one go.
BATCHES = {32: 256, 64: 96, 224: 12}
PSNR_IMAGES = 1000
# An image that did not change at all would have an endless PSNR: errors count as at least this, in squared levels.
SMALLEST_ERROR = 0.01
CELL, LABEL, LINE, GAP = 128, 132, 16, 4


def data():
    if "PROTODCS_DATA" not in os.environ:
        sys.exit("error: set PROTODCS_DATA to the folder of the test data: the images are real")
    return Path(os.environ["PROTODCS_DATA"])


def photos(name, count):
    rows = next(parquet.ParquetFile(data() / f"{name}.parquet").iter_batches(count, columns=["image"]))
    files = [io.BytesIO(row) for row in rows.column("image").to_pylist()]
    return np.stack([np.asarray(Image.open(file).convert("RGB")) for file in files])


def batches():
    """Real images of each size; those of 224 are Tiny-ImageNet's, enlarged."""
    small, middle = photos("cifar10_test", BATCHES[32]), photos("tiny_imagenet_val", BATCHES[64])
    large = [Image.fromarray(image).resize((224, 224), Image.Resampling.BICUBIC) for image in middle[: BATCHES[224]]]
    return {32: small, 64: middle, 224: np.stack([np.asarray(image) for image in large])}


def seconds(images, name, severity):
    start = time.perf_counter()
    corrupt(images, name, severity, source="benchmark", indices=range(len(images)))
    return time.perf_counter() - start


def speeds(images):
    """Name -> images per second at each severity, and over all of them."""
    times = {name: np.empty((REPEATS, 5)) for name in NAMES}
    for name in NAMES:
        for severity in SEVERITIES:
            seconds(images[:2], name, severity)
    for repeat in range(REPEATS):
        for severity in SEVERITIES:
            for name in NAMES:
                times[name][repeat, severity - 1] = seconds(images, name, severity)
    return {
        name: {
            "per_second": 5 * len(images) / float(np.median(rows, axis=0).sum()),
            "per_second_by_severity": [len(images) / float(value) for value in np.median(rows, axis=0)],
        }
        for name, rows in times.items()
    }


def psnr(images, name, severity):
    result = corrupt(images, name, severity, source="cifar10-test", indices=range(len(images)))
    errors = ((result.astype(np.float64) - images) ** 2).mean(axis=(1, 2, 3))
    return float(np.mean(10 * np.log10(255**2 / np.maximum(errors, SMALLEST_ERROR))))


def picture(side=64):
    """A landscape with a house: sky, sun, hills, straight edges, small windows, saturated colours."""
    large = 8 * side
    image = Image.new("RGB", (large, large), (120, 175, 225))
    draw = ImageDraw.Draw(image)
    for y in range(large):
        draw.line([(0, y), (large, y)], fill=(110 + 90 * y // large, 165 + 60 * y // large, 230))

    def shape(kind, corners, colour):
        getattr(draw, kind)([(x * large / 64, y * large / 64) for x, y in corners], fill=colour)

    shape("ellipse", [(46, 5), (57, 16)], (250, 215, 70))
    shape("polygon", [(0, 40), (18, 22), (34, 38), (50, 26), (64, 40), (64, 64), (0, 64)], (92, 130, 96))
    shape("rectangle", [(0, 44), (64, 64)], (98, 158, 62))
    shape("rectangle", [(14, 32), (40, 54)], (205, 92, 66))
    shape("polygon", [(10, 33), (27, 18), (44, 33)], (92, 48, 40))
    shape("rectangle", [(24, 43), (31, 54)], (62, 42, 34))
    for x in (17, 34):
        shape("rectangle", [(x, 36), (x + 4, 40)], (245, 240, 205))
    shape("rectangle", [(52, 42), (54, 56)], (96, 66, 42))
    shape("ellipse", [(46, 26), (61, 46)], (38, 98, 46))
    shape("polygon", [(25, 64), (27, 54), (29, 54), (40, 64)], (212, 196, 160))
    return np.asarray(image.resize((side, side), Image.Resampling.BOX))


def sheet(image):
    """Clean and all corruptions of one image, a row each, with a column per severity."""
    rows = ("clean", *NAMES)
    canvas = Image.new("RGB", (LABEL + 5 * (CELL + GAP), LINE + len(rows) * (CELL + GAP)), "white")
    draw = ImageDraw.Draw(canvas)
    for severity in SEVERITIES:
        draw.text((LABEL + (severity - 1) * (CELL + GAP) + CELL // 2, 2), str(severity), fill="black")
    for at, name in enumerate(rows):
        top = LINE + at * (CELL + GAP)
        draw.text((4, top + CELL // 2 - 6), name, fill="black")
        for severity in SEVERITIES:
            shown = image if name == "clean" else one(image, name, severity)
            cell = Image.fromarray(shown).resize((CELL, CELL), Image.Resampling.NEAREST)
            canvas.paste(cell, (LABEL + (severity - 1) * (CELL + GAP), top))
    return canvas


def one(image, name, severity):
    return corrupt(image[None], name, severity, source="sheet", indices=[0])[0]


def measure():
    speed = {side: speeds(images) for side, images in batches().items()}
    clean = photos("cifar10_test", PSNR_IMAGES)
    return [
        {
            "corruption": name,
            "speed": {str(side): speed[side][name] for side in speed},
            "psnr": [psnr(clean, name, severity) for severity in SEVERITIES],
        }
        for name in NAMES
    ]


def as_markdown(result):
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items())
    lines = [
        "# What the corruptions cost and do",
        "",
        "`python -m benchmarks.corruptions --write`: the variant `published`, one thread. Images per second over all",
        f"five severities, each the median of {REPEATS} repeats in which the corruptions take turns, in brackets the",
        f"slowest severity: {BATCHES[32]} images of CIFAR-10 (32), {BATCHES[64]} of Tiny-ImageNet (64) and",
        f"{BATCHES[224]} of those enlarged (224), each with the constants of its own family. Mean PSNR in dB against",
        f"the first {PSNR_IMAGES} test images of CIFAR-10, severities 1 to 5; random numbers of the source",
        f"`cifar10-test`. {versions}, {result['machine']}.",
        "",
        "| corruption | 32 | 64 | 224 | PSNR 1 | 2 | 3 | 4 | 5 |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in result["rows"]:
        cells = [
            f"{speed['per_second']:,.0f} ({min(speed['per_second_by_severity']):,.0f})"
            for speed in row["speed"].values()
        ]
        cells += [f"{value:.1f}" for value in row["psnr"]]
        lines.append(f"| {row['corruption']} | {' | '.join(cells)} |")
    lines += [
        "",
        "The PSNR of five corruptions does not fall with every severity, because of their constants:",
        "",
        "- `glass_blur` smooths less at severity 4 than at 3, but exchanges pixels twice.",
        "- `frost` takes less of the image, and so less light, from 3 on.",
        "- `elastic_transform` moves the corners less and less.",
        "- `spatter` is water up to 3, and mud from 4 on.",
        "- `saturate` takes colour away at 1 and 2, and adds it from 3 on.",
        "",
        "A drawn picture, 64x64, with the constants of `tiny-imagenet`; the columns are the severities 1 to 5:",
        "",
        "![Each corruption at five severities](corruptions.png)",
    ]
    return "\n".join(lines) + "\n"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--write", action="store_true", help="keep the result in docs/results")
    parser.add_argument("--sheet", type=Path, help="only draw the contact sheet of a real image into this file")
    arguments = parser.parse_args()
    if arguments.sheet:
        sheet(photos("tiny_imagenet_val", 8)[7]).save(arguments.sheet)
        return
    cv2.setNumThreads(1)
    versions = {
        "Python": platform.python_version(),
        "numpy": np.__version__,
        "numba": numba.__version__,
        "OpenCV": cv2.__version__,
        "Pillow": PIL.__version__,
    }
    result = {"benchmark": "corruptions", "machine": platform.machine(), "versions": versions, "rows": measure()}
    result["families"] = {str(side): family_of(side, side) for side in BATCHES}
    print(json.dumps(result) if arguments.json else as_markdown(result))
    if arguments.write:
        RESULTS.mkdir(parents=True, exist_ok=True)
        (RESULTS / "corruptions.md").write_text(as_markdown(result))
        (RESULTS / "corruptions.json").write_text(json.dumps(result, indent=1) + "\n")
        sheet(picture()).save(RESULTS / "corruptions.png", optimize=True)


if __name__ == "__main__":
    main()
