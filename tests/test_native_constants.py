"""The compiled step of StreamDCS uses the numbers and the array places of the Python code.

Tuned constants are read from `constants.py` when the extension is imported. These tests compare what the C and Cython
sources write down a second time.
"""

import re
from pathlib import Path

from protodcs.core.streamdcs import class_baseline, class_bias, constants, rule, state, threshold, verification

SOURCES = Path(state.__file__).parents[1] / "_native"


def source(name):
    return (SOURCES / name).read_text(encoding="utf-8")


def enumerations():
    """Return the names of each enumeration of places, in order."""
    blocks = re.findall(r"^cdef enum:\n((?:    .*\n)+)", source("streamdcs_constants.pxi"), re.MULTILINE)
    return [re.findall(r"\w+", block) for block in blocks]


def place_names(module, first, last):
    """Return the names that a module gives to the places of an array, in order."""
    text = Path(module.__file__).read_text(encoding="utf-8")
    (names,) = re.findall(rf"^({first}, .*, {last}) = range\(", text, re.MULTILINE)
    return names.split(", ")


def test_arrays_have_the_same_places_in_both():
    signals, pool, rule_fields, progress, samples, vectors, sums, sides, _ = enumerations()
    assert len(signals) == len(place_names(verification, "_BASE", "SIGNALS"))
    assert pool == place_names(class_baseline, "POOL_MEAN", "POOLED")[:-1]
    assert [name.lower() for name in rule_fields] == list(rule.Rule._fields)
    assert progress == place_names(verification, "SEEN", "PROGRESS")[:-1]
    assert [name.removesuffix("_SAMPLES") for name in samples] == place_names(state, "SEQUENCE", "SAMPLES")[:-1]
    assert vectors == [name.lstrip("_") for name in place_names(class_bias, "_COUNT", "VECTORS")[:-1]]
    assert [name.removeprefix("BIAS") for name in sums][5:] == ["CONFIDENCE", "_SEEN", "SINCE"]
    assert len(sums) == class_bias.SUMS
    assert sides == ["UNKNOWN", "KNOWN"]
    assert (verification.UNKNOWN, verification.KNOWN) == (0, 1)


def test_numbers_of_the_fit_are_the_same_in_both():
    text = source("refit.pxi")
    assert re.findall(r"SMALL = (\S+)", text) == [str(threshold._SMALL).replace("e-0", "e-")]
    assert re.findall(r"EM_ITERATIONS = (\d+)", text) == [str(threshold._ITERATIONS)]
    assert re.findall(r"EM_STARTS = \[(.*)\]", text) == [", ".join(map(str, threshold._STARTS))]
    assert re.findall(r"LEAST_VARIANCE (\S+)\n", source("streamdcs.h")) == [str(class_baseline._LEAST_VARIANCE)]


def test_every_tuned_constant_of_the_step_is_read_from_python():
    names = {name for name in vars(constants) if name.isupper()}
    for file in ("streamdcs_constants.pxi", "refit.pxi"):
        for name, value in re.findall(r"(?:double|int64_t|,) (\w+) = ([^,\n]+)", source(file)):
            if name in names:
                assert value.startswith(f"c.{name}"), f"{file} sets {name} to {value}"
