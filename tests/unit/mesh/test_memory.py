"""Memory of the host that is used again."""

import jax
import numpy as np
import pytest

from phalanx._src.mesh import arrays
from phalanx._src.mesh.memory import Pool

SHAPE = (3, 5, 1111)


@pytest.mark.parametrize("dtype", ["float32", "int8", jax.numpy.bfloat16])
def test_entries_are_aligned_and_contiguous(dtype):
    """Whatever the size of an entry, so that each device can use its own."""
    array = Pool().empty(SHAPE, dtype)
    assert array.shape == SHAPE
    assert array.dtype == dtype
    assert all(arrays.address(entry) % arrays.ALIGNMENT == 0 and entry.flags.c_contiguous for entry in array)


def test_memory_is_lent_again_when_nobody_refers_to_it(collect):
    """A view, and a JAX array that shares the memory, refer to it."""
    pool = Pool()
    first = pool.empty(SHAPE, np.float32)
    place, view = arrays.address(first), first[1]
    shared = jax.device_put(first[0], jax.devices("cpu")[0])
    del first
    assert arrays.address(pool.empty(SHAPE, np.float32)) != place
    del view
    assert arrays.address(pool.empty(SHAPE, np.float32)) != place
    shared.delete()
    del shared
    collect()
    jax.device_put(0).block_until_ready()  # JAX drops its references at a later call.
    assert place in {arrays.address(x) for x in [pool.empty(SHAPE, np.float32) for _ in range(4)]}


def test_memory_of_another_size_is_not_lent():
    """Nor is small memory, which costs less than to look for a block."""
    pool = Pool()
    place = arrays.address(pool.empty((1, 100_000), np.float32))
    assert arrays.address(pool.empty((1, 10_000), np.float32)) != place
    assert pool.empty((0, 3), np.float32).shape == (0, 3)
