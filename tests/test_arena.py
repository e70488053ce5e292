import copy
import pickle

import numpy as np
import pytest

from protodcs.core.arena import Arena

LAYOUT = {
    "text": (np.float32, (3, 5)),
    "mean": (np.float64, (7,)),
    "counts": (np.int64, (3,)),
    "bias": (np.float64, (2, 2)),
    "empty": (np.float32, (0, 5)),
}


def filled():
    arena = Arena(LAYOUT)
    for number, array in enumerate(arena.values(), start=1):
        array[...] = number
    return arena


def test_a_new_arena_holds_zeros_of_the_given_types_and_shapes():
    arena = Arena(LAYOUT)
    assert list(arena) == list(LAYOUT)
    for name, (dtype, shape) in LAYOUT.items():
        assert arena[name].dtype == dtype
        assert arena[name].shape == shape
        assert not arena[name].any()


def test_every_array_is_contiguous_and_aligned():
    arena = Arena(LAYOUT)
    for array in (*arena.values(), *arena.buffers):
        assert array.ctypes.data % 64 == 0
        assert array.flags.carray


def test_arrays_are_views_of_the_buffers_and_do_not_overlap():
    arena = filled()
    assert [buffer.dtype for buffer in arena.buffers] == [np.int64, np.float32, np.float64]
    assert [array.ravel().tolist() for array in arena.values()] == [[1] * 15, [2] * 7, [3] * 3, [4] * 4, []]
    for buffer in arena.buffers:
        buffer[:] = 9
    assert all((array == 9).all() for array in arena.values())


@pytest.mark.parametrize("duplicate", [Arena.copy, copy.deepcopy, lambda arena: pickle.loads(pickle.dumps(arena))])
def test_a_copy_has_its_own_memory(duplicate):
    arena = filled()
    copied = duplicate(arena)
    for array in arena.values():
        array[...] = -1
    assert [array.ravel().tolist() for array in copied.values()] == [[1] * 15, [2] * 7, [3] * 3, [4] * 4, []]
    copied.buffers[1][:] = 8
    assert (copied["text"] == 8).all()


def test_copy_from_takes_over_all_arrays():
    arena, other = Arena(LAYOUT), filled()
    arena.copy_from(other)
    assert all(np.array_equal(arena[name], other[name]) for name in LAYOUT)


def test_copy_from_needs_the_same_layout():
    with pytest.raises(ValueError, match="broadcast"):
        Arena(LAYOUT).copy_from(Arena({"text": (np.float32, (300,))}))


def test_other_types_are_an_error():
    with pytest.raises(TypeError, match="holds float32, float64 and int64; given: float16"):
        Arena({"half": (np.float16, (3,))})


def test_the_number_of_bytes_counts_whole_cache_lines():
    assert Arena({"one": (np.float64, (1,)), "nine": (np.float64, (9,))}).nbytes == 64 + 128


def test_an_arena_takes_over_the_bytes_of_another_whatever_it_held_before():
    layout = {"counts": (np.int64, (3,)), "history": (np.float64, (5000,))}
    arena = Arena(layout)
    arena["counts"][:] = 1, 2, 3
    arena["history"][:10] = -0.0
    data = b"".join(arena.packed())
    assert len(data) < arena.nbytes / 3
    other = Arena(layout)
    for array in other.values():
        array[...] = 9
    other.unpack(memoryview(data))
    assert [mine.tobytes() for mine in other.values()] == [theirs.tobytes() for theirs in arena.values()]


def test_zeros_between_arrays_are_left_out():
    arena = Arena({"rows": (np.float64, (100, 8)), "history": (np.float64, (1000,))})
    arena["rows"][[3, 50]] = 1.5
    arena["history"][-1] = -0.0
    bits, lines = arena.packed()
    assert len(bits) == arena.bitmap_bytes
    assert lines.nbytes == 3 * 64


def test_bytes_behind_the_content_are_ignored_and_missing_ones_are_an_error():
    arena = filled()
    data = b"".join(arena.packed())
    other = Arena(LAYOUT)
    other.unpack(memoryview(data + b"more"))
    assert [mine.tobytes() for mine in other.values()] == [theirs.tobytes() for theirs in arena.values()]
    with pytest.raises(ValueError, match="smaller than requested"):
        other.unpack(memoryview(data[:-1]))
