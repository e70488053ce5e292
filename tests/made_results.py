"""Makes rows and traces as `protodcs bench run` writes them, small and without running anything."""

import hashlib
import json

import numpy as np

from protodcs.bench import rows as row_files
from protodcs.bench import traces as trace_files
from protodcs.bench.rows import FIGURES, GATHERED
from protodcs.bench.traces import Trace


def rows_of(
    label,
    accuracy,
    method="tda",
    stream="dtd",
    protocol="shuffled",
    encoder="CLIP ViT-B/32 feature pack",
    known="100 ImageNet classes",
    unknown="dtd",
    segments=("clean",),
    grid="made-up",
    config=None,
    first_seed=0,
    **figures,
):
    """Rows of one label: `accuracy` and every other figure is a list, one value for each seed."""
    found = []
    for place, value in enumerate(accuracy):
        seed = first_seed + place
        identity = {
            "grid": grid, "method": method, "label": label, "kind": "features", "config": json.dumps(config or {}),
            "score": "max cosine", "stream": stream, "known": known, "unknown": unknown, "protocol": protocol,
            "seed": seed, "encoder": encoder, "fingerprint": "weights=1", "manifest": f"manifest{seed}", "classes": 10,
            "dimension": 4, "prompts": "0123456789abcdef",
        }  # fmt: skip
        cell = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:20]
        given = {name: values[place] for name, values in figures.items()}
        numbers = {**dict.fromkeys(FIGURES, 0.5), "known_samples": 40.0, "unknown_samples": 60.0}
        numbers |= {"known_accuracy": value, **given}
        measured = {
            "seconds": 0.2, "peak_memory_mb": 300.0, "versions": '{"protodcs": "0.1"}', "machine": "x86_64 Linux",
            "started": f"2026-01-{seed + 1:02}T00:00:00+00:00",
            "command": f"protodcs bench run grids/{grid}.yaml --out results",
        }  # fmt: skip
        places = [*enumerate(segments), *((at, name) for name, at in GATHERED.items())]
        found += [
            {**identity, "cell": cell, **numbers, **measured, "segment": name, "position": at} for at, name in places
        ]
    return found


def trace_of(label, method="zero_shot", samples=400, seed=0, stream="dtd", encoder="CLIP ViT-B/32 feature pack"):
    """A trace of noise in which known samples are a little more familiar than unknown ones."""
    rng = np.random.default_rng(seed)
    labels = np.where(rng.random(samples) < 0.5, -1, rng.integers(10, size=samples))
    known = labels >= 0
    openness = np.where(known, 0.65, 0.75) + 0.03 * rng.normal(size=samples)
    right = rng.random(samples) < 0.7
    arrays = {
        "label": labels, "index": np.where(right, labels, rng.integers(10, size=samples)).clip(0),
        "segment": np.zeros(samples, int), "known": openness < 0.7, "score": 1 - openness, "openness": openness,
        "openness_first": openness, "p_unknown": rng.random(samples), "aleatoric": rng.random(samples),
        "epistemic": rng.random(samples), "confidence": rng.random(samples), "entropy": rng.random(samples),
        "trusted": known, "cached": known, "evolved": known,
    }  # fmt: skip
    about = {
        key: value
        for key, value in rows_of(label, [0.5], method, stream, encoder=encoder)[0].items()
        if key in row_files.IDENTITY and key not in ("segment", "position")
    }
    about |= {"temperature": 0.01, "segments": ["clean"], "first_fit": None}
    about["command"] = "protodcs bench run grids/made-up.yaml --out results"
    if method == "protodcs":
        about["first_fit"] = 100
        arrays |= {
            "cache_early": rng.normal(size=(12, 4)).astype(np.float32), "cache_early_class": np.repeat([0, 1, 2], 4),
            "cache_late": rng.normal(size=(20, 4)).astype(np.float32), "cache_late_class": np.repeat([0, 1, 2, 3], 5),
            "window": openness[-100:], "mixture": np.array([[0.5, 0.65, 0.0009], [0.5, 0.75, 0.0009]]),
            "prototypes": rng.normal(size=(10, 4)).astype(np.float32),
        }  # fmt: skip
    return Trace(about, arrays)


def write_folder(folder, rows=(), traces=()):
    """A folder of results: one file for each cell."""
    for name in ("cells", "traces"):
        (folder / name).mkdir(parents=True)
    for cell in dict.fromkeys(row["cell"] for row in rows):
        row_files.write(folder / "cells" / f"{cell}.parquet", [row for row in rows if row["cell"] == cell])
    for number, trace in enumerate(traces):
        trace_files.write(folder / "traces" / f"{number:03}.safetensors", trace)
    return folder
