"""Count the operations of engine steps: run the kernels as plain Python and count the lines that they execute.

Run it as a program with PROTODCS_KERNEL=numpy. Its argument is a JSON list of `[OPTIONS, CLASSES, DIMENSION, SAMPLES]`.
For each entry it prints the mean and the largest count of the last 32 samples, as JSON. A line of a kernel is one
operation on one number, so the counts do not depend on the machine.
"""

import json
import os
import sys
from functools import partial
from pathlib import Path

import numpy as np

_COUNTED = 32


def counts(options, classes, dimension, samples):
    """Return how many lines of the core each of the last observes executes."""
    from protodcs import methods

    rng = np.random.default_rng(0)
    prototypes = _unit(rng.standard_normal((classes, dimension)))
    engine = methods.create(options.pop("method"), prototypes, **options)
    counted = []
    for number in range(samples):
        noise = rng.standard_normal(dimension) / np.sqrt(dimension)
        feature = noise if number % 2 else prototypes[rng.integers(classes)] + 0.7 * noise
        observe = partial(engine.observe, _unit(feature))
        if number < samples - _COUNTED:
            observe()
        else:
            counted.append(_lines_of(observe))
    return counted


def _lines_of(function):
    from protodcs import core

    folder = f"{Path(core.__file__).parent}{os.sep}"
    lines = 0

    def trace(frame, event, _argument):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(folder):
            return None
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(None)
    return lines


def _unit(rows):
    return (rows / np.linalg.norm(rows, axis=-1, keepdims=True)).astype(np.float32)


def _run_kernels_as_python():
    """Replace the compiler, before any kernel is defined: loops instead of their vectorised references."""
    from protodcs.core import compiled

    compiled.kernel = lambda *_signatures, **_options: lambda function: function

    from protodcs.core.protodcs import memory

    # The alignment follows single changes, as with compiled kernels.
    memory.KERNEL = "numba"


if __name__ == "__main__":
    _run_kernels_as_python()
    found = []
    for options, classes, dimension, samples in json.loads(sys.argv[1]):
        counted = counts(options, classes, dimension, samples)
        found.append([sum(counted) / len(counted), max(counted)])
    print(json.dumps(found))
