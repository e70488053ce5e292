"""One piece of work: a few images of equal size, what to do to them, and the randomness of each.

A corruption may draw only from the generators it gets here, all that an image needs before the next image's turn.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from ...arrays import Floats, Pixels

Variant: TypeAlias = Literal["published", "fixed"]
FAMILIES: tuple[str, ...] = ("cifar", "tiny-imagenet", "imagenet")
VARIANTS: tuple[Variant, ...] = ("published", "fixed")

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Task:
    """What a corruption gets.

    Attributes:
        images: (N, H, W, 3), contiguous, never written to.
        keys: (N, 2) uint64, the key of each image's generator.
        severity: 1 to 5.
        overlays: the folder of the frost overlays, None for the usual place.
    """

    images: Pixels
    keys: NDArray[np.uint64]
    family: str
    severity: int
    variant: Variant
    overlays: Path | None = None

    @property
    def half(self) -> float:
        """What is added before the fraction is cut off: 0.5 rounds, 0 truncates as published."""
        return 0.5 if self.variant == "fixed" else 0.0

    def pick(self, table: Mapping[str, Sequence[T]]) -> T:
        """The constant of this family and severity."""
        return table[self.family][self.severity - 1]

    def generators(self) -> Iterator[np.random.Generator]:
        """One generator per image, in order; each is valid until the next is taken."""
        # One generator is set to one key after the other: the same numbers as from a new one, at a tenth of the time.
        bits = np.random.Philox(key=0)
        generator = np.random.Generator(bits)
        fresh = bits.state
        for key in self.keys:
            fresh["state"]["key"] = key
            bits.state = fresh
            yield generator

    def draw(self, shape: tuple[int, ...], fill: Callable[[np.random.Generator, Floats], object]) -> Floats:
        """(N, *shape): `fill(generator, part)` writes the part of each image."""
        out = np.empty((len(self.images), *shape))
        for part, generator in zip(out, self.generators(), strict=True):
            fill(generator, part)
        return out


def normal(generator: np.random.Generator, part: Floats) -> None:
    """Fill with standard normal numbers."""
    generator.standard_normal(out=part)


def uniform(generator: np.random.Generator, part: Floats) -> None:
    """Fill with numbers from [0, 1)."""
    generator.random(out=part)
