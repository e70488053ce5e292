"""Chance that is the same on every machine: raw Philox words, and what integer arithmetic makes of them.

A manifest must come out byte for byte alike wherever it is built. The methods of numpy's Generator may change between
versions, and floating-point functions may differ in their last digit between platforms. So only the raw 64-bit output
of the Philox counter is used, its key comes from SHA-256, and nothing here may ever touch a float.
"""

import hashlib
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from ...arrays import Integers

# Gives the next `count` words of one endless sequence of uniform 64-bit words.
Draw = Callable[[int], NDArray[np.uint64]]


def drawing(protocol: str, seed: int, purpose: str) -> Draw:
    """The sequence of words that belongs to this protocol, seed and purpose and to no other."""
    digest = hashlib.sha256(f"protodcs-stream\n{protocol}\n{seed}\n{purpose}".encode()).digest()
    key = np.array([int.from_bytes(digest[:8], "little"), int.from_bytes(digest[8:16], "little")], dtype=np.uint64)
    return np.random.Philox(key=key).random_raw


def permutation(draw: Draw, count: int) -> Integers:
    """(count,) the numbers 0..count-1 in an order of which every one is equally likely.

    Each number gets a random word and the words are sorted. Two equal words would favour the lower number, so then
    all are drawn again, so that the result is exactly uniform.
    """
    while True:
        words = draw(count)
        order = np.argsort(words, kind="stable").astype(np.int64)
        ranked = words[order]
        if not (ranked[1:] == ranked[:-1]).any():
            return order


def below(draw: Draw, bounds: Integers) -> Integers:
    """(N,) for each bound, at least 1, a whole number from 0 to bound - 1, all equally likely.

    The remainder of a word by the bound is uniform once the lowest `2**64 mod bound` words are thrown back; the places
    whose word was thrown back draw again, in order.
    """
    limits = bounds.astype(np.uint64)
    values = np.empty(len(limits), dtype=np.uint64)
    waiting = np.arange(len(limits))
    while len(waiting):
        words = draw(len(waiting))
        limit = limits[waiting]
        # The sum is 2**64 - limit, which fits into a word and leaves the same remainder as 2**64.
        accepted = words >= (~limit + np.uint64(1)) % limit
        values[waiting[accepted]] = words[accepted] % limit[accepted]
        waiting = waiting[~accepted]
    return values.astype(np.int64)


def shuffled(draw: Draw, items: Integers) -> Integers:
    """The items in a uniformly random order."""
    return items[permutation(draw, len(items))]


def interleaved(draw: Draw, first: Integers, second: Integers) -> Integers:
    """Both sequences in one, each in its own order, every way of mixing them equally likely."""
    places = np.sort(permutation(draw, len(first) + len(second))[: len(first)])
    return placed(places, first, second)


def placed(places: Integers, first: Integers, second: Integers) -> Integers:
    """One sequence with `first` at the given places, in increasing order, and `second` in the others."""
    mixed = np.empty(len(first) + len(second), dtype=np.int64)
    free = np.ones(len(mixed), dtype=np.bool_)
    free[places] = False
    mixed[places] = first
    mixed[free] = second
    return mixed
