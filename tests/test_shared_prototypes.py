"""Test the blob of prototypes that streams share: it comes back to the bit, also in threads, and damage is found."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from protodcs import Prototypes
from protodcs.errors import StoreError
from protodcs.serve.stream.shared import pack_prototypes, pack_rows, unpack_prototypes, unpack_vocabulary


def prototypes(count=7, dimension=12):
    return Prototypes(np.random.default_rng(0).normal(size=(count, dimension)))


def test_packed_prototypes_come_back_to_the_bit():
    packed = pack_prototypes(prototypes())
    found = unpack_prototypes(packed)
    assert np.array_equal(found.unit, prototypes().unit)
    assert found.fingerprint == prototypes().fingerprint
    assert pack_prototypes(found) == packed


def test_many_threads_may_unpack_at_once():
    packed = pack_prototypes(prototypes())
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(unpack_prototypes, [packed] * 2000))
    assert {one.fingerprint for one in found} == {prototypes().fingerprint}


def test_a_packed_vocabulary_comes_back_with_its_fingerprint():
    rows = prototypes(20).unit
    found = unpack_vocabulary(pack_rows(rows), "0" * 64)
    assert np.array_equal(found.rows, rows)
    assert found.fingerprint == "0" * 64


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_a_blob_that_was_cut_is_rejected(cut):
    with pytest.raises(StoreError, match="shared rows are damaged"):
        unpack_prototypes(pack_prototypes(prototypes())[:cut])


def test_a_blob_with_more_bytes_is_rejected():
    with pytest.raises(StoreError, match="shared rows are damaged"):
        unpack_prototypes(pack_prototypes(prototypes()) + b"x")
