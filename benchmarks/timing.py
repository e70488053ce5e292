"""What all measurements share: one thread, turns, and ratios with their spread.

No absolute time is stable on a machine that others use too. So whatever is compared takes turns in one run, and a ratio
is given as the median over the turns with its quartiles.
"""

import importlib.util
import os
import platform
import sys
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "results"


def one_thread():
    """Keep numpy to one thread; it must not be imported yet."""
    for variable in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(variable, "1")


def timed(function, *arguments):
    """Seconds, and the result."""
    start = time.perf_counter()
    result = function(*arguments)
    return time.perf_counter() - start, result


def in_turns(tasks, rounds, repeats=1):
    """Seconds of each of some tasks, by name: {name: [seconds of one call, round by round]}."""
    times = {name: [] for name in tasks}
    for _ in range(rounds):
        for name, task in tasks.items():
            start = time.perf_counter()
            for _ in range(repeats):
                task()
            times[name].append((time.perf_counter() - start) / repeats)
    return times


def ratio(times, base):
    """Round by round, how many times as long: the median, and the quartiles as `low` and `high`."""
    import numpy as np

    low, middle, high = np.quantile(np.asarray(times) / np.asarray(base), (0.25, 0.5, 0.75))
    return {"ratio": float(middle), "low": float(low), "high": float(high), "rounds": len(times)}


def load(file, name):
    """A Python file as a module."""
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def clip_stream(name, classes=None):
    """Text prototypes and features of a real stream in order: of its first `classes` classes, and the unknown ones."""
    import numpy as np

    if "PROTODCS_DATA" not in os.environ:
        sys.exit("error: set PROTODCS_DATA to the folder of the test data: the streams are real CLIP features")
    tool = Path(os.environ["PROTODCS_DATA"]).parent / "tools" / "clip_streams.py"
    prototypes, features, labels = load(tool, "clip_streams").stream(name)
    classes = classes or len(prototypes)
    return np.ascontiguousarray(prototypes[:classes]), np.ascontiguousarray(features[labels < classes])


def machine():
    """Where and with what something was measured."""
    import numpy as np

    from protodcs.core._native import BACKEND

    versions = {"python": platform.python_version(), "numpy": np.__version__, "backend": BACKEND}
    return {"machine": platform.machine(), "cores": os.cpu_count(), "versions": versions}


def table(head, rows):
    """Lines of a table in Markdown."""
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(str(cell) for cell in row) + " |" for row in rows)]


def spread(row):
    """A ratio with its quartiles, in words."""
    return f"{row['ratio']:.2f} ({row['low']:.2f}-{row['high']:.2f})"
