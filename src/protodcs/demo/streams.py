"""Streams of drawn images: a chosen share of unknown objects, in bursts or not, under shifts that come and go."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from ..arrays import Flags, Labels, Pixels
from ..errors import InputError
from .drawing import draw
from .kinds import KNOWN, UNKNOWN
from .shifts import SHIFTS, shifted


@dataclass(frozen=True, slots=True)
class Sample:
    """One image of a stream.

    Attributes:
        image: RGB pixels (96, 96, 3).
        kind: what the image shows.
        label: position of the kind in `KNOWN`; -1 if it is unknown.
        shift: one of `SHIFTS`.
    """

    image: Pixels
    kind: str
    label: int
    shift: str


class DemoStream:
    """A stream of drawn images. The same arguments give the same images.

    Args:
        length: number of images.
        unknown: share of images of unknown kinds, 0 to 1.
        burst: number of unknown images that arrive one after another.
        shifts: shifts in their order. They start again after the last one.
        shift_length: number of images until the next shift; None divides the stream evenly.
        seed: random seed.

    >>> stream = DemoStream(100, unknown=0.1, shifts=("clean", "fog"), shift_length=20)
    >>> sum(sample.label < 0 for sample in stream)
    10
    >>> stream[20].shift
    'fog'
    """

    def __init__(
        self,
        length: int,
        *,
        unknown: float = 0.2,
        burst: int = 1,
        shifts: Sequence[str] = ("clean",),
        shift_length: int | None = None,
        seed: int = 0,
    ):
        if length < 1 or burst < 1 or (shift_length is not None and shift_length < 1):
            raise InputError(
                f"length, burst and shift_length must be at least 1; given: {length}, {burst} and {shift_length}"
            )
        if not 0 <= unknown <= 1:
            raise InputError(f"unknown must be between 0 and 1; given: {unknown}")
        if not shifts or not set(shifts) <= set(SHIFTS):
            raise InputError(f"shifts must be some of {', '.join(SHIFTS)}; given: {list(shifts)}")
        self.length = length
        self.shifts = tuple(shifts)
        self.shift_length = shift_length or -(-length // len(shifts))
        self.seed = seed
        rng = np.random.default_rng([seed, 0])
        self.labels: Labels = np.where(_unknown(length, unknown, burst, rng), -1, rng.integers(len(KNOWN), size=length))

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, place: int) -> Sample:
        """Return one sample. Its image depends on the arguments of the stream and its place alone."""
        if not 0 <= place < self.length:
            raise IndexError(f"the stream has {self.length} images; given: {place}")
        rng = np.random.default_rng([self.seed, 1, place])
        label = int(self.labels[place])
        kind = KNOWN[label] if label >= 0 else str(rng.choice(UNKNOWN))
        shift = self.shift_at(place)
        return Sample(shifted(draw(kind, rng), shift, rng), kind, label, shift)

    def shift_at(self, place: int) -> str:
        """Return the shift at a place."""
        return self.shifts[place // self.shift_length % len(self.shifts)]

    def __iter__(self) -> Iterator[Sample]:
        return (self[place] for place in range(self.length))


def _unknown(length: int, share: float, burst: int, rng: np.random.Generator) -> Flags:
    """Return which places (length,) are unknown."""
    left = round(length * share)
    bursts = [min(burst, left - start) for start in range(0, left, burst)]
    groups = [*bursts, *[0] * (length - left)]
    flags = [flag for group in rng.permutation(groups) for flag in ([True] * group or [False])]
    return np.array(flags, dtype=np.bool_)
