"""Train the encoder of the demo and write its files: `python scripts/train_demo_encoder.py`.

Draws its own images, needs no data, and takes about 30 minutes on two busy CPU cores. Needs the extra `export`.
Half of the images show made-up objects with made-up names. So it knows more than the kinds of the demo, as CLIP does.
"""

import argparse
import hashlib
import json
import math
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from protodcs.demo.drawing import COLOURS, draw
from protodcs.demo.kinds import EXTRA, KNOWN, OUTLINES, UNKNOWN
from protodcs.demo.shifts import SHIFTS, shifted
from protodcs.encoders.demo import BUCKETS, FOLDER, NAMES, tokens
from protodcs.encoders.onnx import ABOUT, IMAGES, TEXTS, About, file_hash
from protodcs.encoders.preprocessing import Preprocessing

SIDE = 64
PREPROCESSING = Preprocessing(SIDE, SIDE, "squash", SIDE, "bilinear", mean=(0.5, 0.5, 0.5), std=(0.25, 0.25, 0.25))
DIMENSION, LOGIT_SCALE = 128, 25.0
TEMPLATES = ("a photo of a {}.", "a drawing of a {}.", "a {}", "{}", "a picture of one {} on a background.")
MADE_UP = 300


def made_up(rng):
    """Return the outlines of an object of one to four parts, some of them with a mirror image."""
    parts = []
    for number in range(rng.integers(1, 5)):
        size = rng.uniform(0.5, 0.95, size=2) if number == 0 else rng.uniform(0.12, 0.5, size=2)
        corners = int(rng.integers(3, 9)) if rng.random() < 0.7 else 36
        angles = (np.arange(corners) + rng.uniform(-0.25, 0.25, size=corners)) * 2 * np.pi / corners
        lengths = np.ones(corners) if corners == 36 else rng.uniform(0.45, 1, size=corners)
        shape = np.stack([np.cos(angles), np.sin(angles)], axis=1) * lengths[:, None] * size
        if number and rng.random() < 0.3:
            shape = np.concatenate([shape, 0.6 * shape[::-1]])
        points = shape + rng.uniform(-1, 1, size=2) * (1 - size)
        colour = 0 if number == 0 else int(rng.integers(4))
        parts.append((colour, points))
        if rng.random() < 0.4:
            parts.append((colour, points * (-1, 1)))
    return tuple(parts)


def made_up_kinds():
    """Return made-up names with their outlines."""
    rng = np.random.default_rng(2025)
    syllables = [first + vowel for first in "bdfgklmnprstvz" for vowel in "aeiou"]
    kinds = {}
    while len(kinds) < MADE_UP:
        kinds["".join(rng.choice(syllables, size=rng.integers(2, 4)))] = made_up(rng)
    return kinds


OUTLINES.update(made_up_kinds())
# The encoder never sees the unknown kinds, neither images nor words.
KINDS = KNOWN + EXTRA + tuple(made_up_kinds())
NAMED = len(KNOWN + EXTRA)


def convolution(inside, outside, width, stride):
    """Return a convolution with normalisation."""
    return nn.Sequential(
        nn.Conv2d(inside, outside, width, stride, width // 2, bias=False), nn.BatchNorm2d(outside), nn.ReLU()
    )


class ImageTower(nn.Module):
    """Five convolutions, two of them with a shortcut, mean and maximum over the last grid, a projection."""

    def __init__(self):
        super().__init__()
        sizes = [(3, 32, 5, 2), (32, 64, 3, 2), (64, 64, 3, 1), (64, 128, 3, 2), (128, 128, 3, 1)]
        self.layers = nn.ModuleList(convolution(*size) for size in sizes)
        self.projection = nn.Linear(128 * 2, DIMENSION)

    def forward(self, pixels):
        """Return (N, 128) for (N, 3, 64, 64)."""
        grid = pixels
        for layer in self.layers:
            made = layer(grid)
            grid = grid + made if made.shape == grid.shape else made
        return self.projection(torch.cat([grid.mean(dim=(2, 3)), grid.amax(dim=(2, 3))], dim=1))


class TextTower(nn.Module):
    """A sum over words and their pieces, and two layers."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(BUCKETS, 64, padding_idx=0)
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, DIMENSION))

    def forward(self, numbers):
        """Return (N, 128) for token numbers (N, length)."""
        used = (numbers != 0).float().sum(dim=1, keepdim=True)
        return self.layers(self.table(numbers).sum(dim=1) / used.sqrt())


def drawn(task):
    """Return images, kinds and colours of one share of the training set."""
    seed, count = task
    rng = np.random.default_rng([2024, seed])
    named, other = rng.integers(NAMED, size=count), rng.integers(NAMED, len(KINDS), size=count)
    kinds, colours = np.where(rng.random(count) < 0.5, named, other), rng.integers(len(COLOURS), size=count)
    names = list(COLOURS)
    images = [draw(KINDS[kind], rng, names[colour]) for kind, colour in zip(kinds, colours, strict=True)]
    return PREPROCESSING.fitted(images), kinds, colours


def training_set(count, workers):
    """Return images, kinds and colours."""
    with ProcessPoolExecutor(workers) as pool:
        parts = list(pool.map(drawn, [(part, count // 40) for part in range(40)]))
    return [np.concatenate(column) for column in zip(*parts, strict=True)]


def unit(rows):
    """Return the rows at unit length."""
    return functional.normalize(rows, dim=1)


def batch_loss(image_tower, text_tower, pixels, kinds, colours, rng):
    """Return the loss of telling kinds apart, and pairs of kind and colour, by their captions."""
    with torch.autocast("cpu", torch.bfloat16):
        features = image_tower(pixels)
    features = unit(features.float())
    template = TEMPLATES[rng.integers(len(TEMPLATES))]
    by_kind = unit(text_tower(torch.from_numpy(tokens([template.format(kind) for kind in KINDS]))))
    loss = functional.cross_entropy(LOGIT_SCALE * features @ by_kind.T, kinds, label_smoothing=0.05)
    pairs = [f"{colour} {kind}" for kind in KINDS for colour in COLOURS]
    by_pair = unit(text_tower(torch.from_numpy(tokens([template.format(pair) for pair in pairs]))))
    return loss + 0.3 * functional.cross_entropy(LOGIT_SCALE * features @ by_pair.T, kinds * len(COLOURS) + colours)


def augmented(images, rng):
    """Return the images moved by up to four pixels, with another brightness and contrast."""
    padded = np.pad(images, ((0, 0), (4, 4), (4, 4), (0, 0)), mode="edge")
    top, left = rng.integers(9, size=2)
    moved = padded[:, top : top + SIDE, left : left + SIDE]
    if rng.random() < 0.5:
        moved = moved[:, :, ::-1]
    pixels = PREPROCESSING.normalised(np.ascontiguousarray(moved))
    contrast = rng.uniform(0.85, 1.15, size=(len(pixels), 1, 1, 1))
    pixels = pixels * contrast + rng.normal(scale=0.1, size=(len(pixels), 3, 1, 1))
    return torch.from_numpy(pixels.astype(np.float32)).to(memory_format=torch.channels_last)


def train(images, kinds, colours, epochs, batch=128):
    """Return both towers after training."""
    rng = np.random.default_rng(7)
    torch.manual_seed(7)
    image_tower, text_tower = ImageTower().to(memory_format=torch.channels_last), TextTower()
    parameters = [*image_tower.parameters(), *text_tower.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.02)
    steps = epochs * (len(images) // batch)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=4e-3, total_steps=steps, pct_start=0.15)
    labels = torch.from_numpy(kinds), torch.from_numpy(colours)
    for epoch in range(epochs):
        started, total = time.monotonic(), 0.0
        order = rng.permutation(len(images))
        for start in range(0, len(images) - batch + 1, batch):
            rows = order[start : start + batch]
            chosen = [column[torch.from_numpy(rows)] for column in labels]
            loss = batch_loss(image_tower, text_tower, augmented(images[rows], rng), *chosen, rng)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            total += loss.item()
        mean = total / (len(images) // batch)
        print(f"epoch {epoch + 1} of {epochs}: loss {mean:.3f}, {time.monotonic() - started:.0f} s", flush=True)
    return image_tower.eval(), text_tower.eval()


def export(image_tower, text_tower):
    """Write both towers as ONNX files, and `encoder.json`."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            image_tower,
            (torch.zeros(1, 3, SIDE, SIDE),),
            FOLDER / IMAGES,
            input_names=["pixels"],
            dynamic_axes={"pixels": {0: "images"}},
            dynamo=False,
        )
        torch.onnx.export(
            text_tower,
            (torch.ones(1, 4, dtype=torch.int64),),
            FOLDER / TEXTS,
            input_names=["tokens"],
            dynamic_axes={"tokens": {0: "sentences", 1: "length"}},
            dynamo=False,
        )
    (FOLDER / NAMES).write_text("".join(f"{name}\n" for name in KINDS))
    files = {file: file_hash(FOLDER / file) for file in (IMAGES, TEXTS)}
    about = About(
        name="demo",
        dimension=DIMENSION,
        logit_scale=LOGIT_SCALE,
        weights=hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest(),
        preprocessing=asdict(PREPROCESSING),
        templates=["a photo of a {}."],
        files=files,
    )
    (FOLDER / ABOUT).write_text(about.model_dump_json(indent=2) + "\n")


def test():
    """Print the accuracy over the known kinds, without and with each shift."""
    from protodcs import encoders, metrics

    encoder = encoders.load("demo")
    prototypes = encoder.prototypes(KNOWN)
    rng = np.random.default_rng(99)
    labels = np.arange(1000) % len(KNOWN)
    images = [draw(KNOWN[label], rng) for label in labels]
    unknown = [draw(UNKNOWN[number % len(UNKNOWN)], rng) for number in range(500)]
    for shift in SHIFTS:
        cosines, others = (
            encoder.encode([shifted(image, shift, rng) for image in part]) @ prototypes.T for part in (images, unknown)
        )
        accuracy = np.mean(cosines.argmax(axis=1) == labels)
        auroc = metrics.auroc(cosines.max(axis=1), others.max(axis=1))
        print(f"{shift:9s} accuracy {accuracy:.1%}, AUROC of the maximum cosine {auroc:.1%}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--images", type=int, default=80000, help="Training images (default: 80000).")
    parser.add_argument("--epochs", type=int, default=9, help="Passes over the training images (default: 9).")
    parser.add_argument("--workers", type=int, default=2, help="Processes that draw (default: 2).")
    options = parser.parse_args()
    columns = training_set(options.images, options.workers)
    print(f"{len(columns[0])} images of {len(KINDS)} kinds")
    export(*train(*columns, options.epochs))
    size = sum(file.stat().st_size for file in Path(FOLDER).iterdir())
    print(f"{FOLDER}: {math.ceil(size / 1000)} kB")
    test()
