"""Packing: properties of the arithmetic."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx._src.collectives.packing import ARRAYS_IN_A_BUFFER, by_bytes, by_count, no_longer_than, small_together

ARRAYS = st.lists(st.tuples(st.sampled_from(["f4", "i4", "f2"]), st.integers(0, 100)), max_size=30)


def unzipped(arrays):
    return [d for d, _ in arrays], [s for _, s in arrays]


def check(packs, arrays):
    """Every array is in one pack, in order within its dtype, and a pack has one dtype."""
    dtypes, _ = unzipped(arrays)
    assert sorted(i for p in packs for i in p) == list(range(len(arrays)))
    assert all(len({dtypes[i] for i in p}) == 1 for p in packs)
    for dtype in set(dtypes):
        flat = [i for p in packs for i in p if dtypes[i] == dtype]
        assert flat == sorted(flat)


@given(ARRAYS, st.integers(0, 6))
def test_by_count_respects_number_of_packs(arrays, num_packs):
    """At most `num_packs` packs a dtype; zero packs nothing."""
    packs = by_count(*unzipped(arrays), num_packs)
    check(packs, arrays)
    dtypes, _ = unzipped(arrays)
    for dtype in set(dtypes):
        mine = [p for p in packs if dtypes[p[0]] == dtype]
        assert len(mine) == dtypes.count(dtype) if num_packs == 0 else len(mine) <= max(num_packs, 1)


@given(ARRAYS, st.integers(0, 120))
def test_by_bytes_fills_all_packs_but_the_last(arrays, bytes_per_pack):
    """All packs of a dtype but the last hold at least `bytes_per_pack`, and would not without their last array."""
    dtypes, sizes = unzipped(arrays)
    packs = by_bytes(dtypes, sizes, bytes_per_pack)
    check(packs, arrays)
    for dtype in set(dtypes):
        mine = [p for p in packs if dtypes[p[0]] == dtype]
        assert bytes_per_pack > 0 or len(mine) == 1
        for pack in mine[:-1]:
            assert sum(sizes[i] for i in pack) >= bytes_per_pack
        for pack in mine if bytes_per_pack else []:
            assert sum(sizes[i] for i in pack[:-1]) < bytes_per_pack or len(pack) == 1


@pytest.mark.parametrize(
    ("sizes", "num_packs", "expected"),
    [
        ([4, 4, 4, 4], 2, [[0, 1], [2, 3]]),
        ([100, 1, 1], 2, [[0], [1, 2]]),
        ([1, 1, 100], 2, [[0, 1, 2]]),
        ([4, 4], 5, [[0], [1]]),
        ([], 3, []),
    ],
)
def test_by_count_examples(sizes, num_packs, expected):
    """Buffers of about equal bytes, in order."""
    assert by_count(["f4"] * len(sizes), sizes, num_packs) == expected


@given(ARRAYS, st.integers(0, 120))
def test_small_arrays_share_buffers(arrays, limit):
    """Arrays above the limit are alone, those below share as few buffers as their dtypes allow."""
    dtypes, sizes = unzipped(arrays)
    packs = small_together(dtypes, sizes, limit)
    assert sorted(i for p in packs for i in p) == list(range(len(arrays)))
    assert all(len(p) == 1 for p in packs for i in p if sizes[i] > limit)
    small = {dtypes[i] for i, size in enumerate(sizes) if size <= limit}
    assert sum(1 for p in packs if sizes[p[0]] <= limit) == len(small)


def test_small_arrays_do_not_make_a_buffer_of_any_length():
    """XLA would take long to compile it."""
    assert max(map(len, small_together(["f4"] * 100, [4] * 100, 8))) == ARRAYS_IN_A_BUFFER


@given(ARRAYS, st.integers(1, 9))
def test_no_longer_than(arrays, length):
    """What was one buffer is as few as hold it."""
    packs = by_count(*unzipped(arrays), 1)
    divided = no_longer_than(length, packs)
    check(divided, arrays)
    assert all(len(p) <= length for p in divided)
    assert len(divided) == sum(-(-len(p) // length) for p in packs)
