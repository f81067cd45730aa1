# SPDX-License-Identifier: Apache-2.0
"""Weight-update sharding: each replica updates its shard of a large variable, and holds only that shard of the optimizer's slots.

The gradients are reduce-scattered instead of all-reduced, and the updated shards are all-gathered, which sends as many bytes. The
variable itself stays whole on every replica.

Source: Xu et al. 2020, "Automatic Cross-Replica Sharding of Weight Update in Data-Parallel Training".
"""

from collections.abc import Sequence

import jax
import keras
import numpy as np
from jax import lax
from jax.sharding import NamedSharding

from phalanx._src import compat
from phalanx._src.compat import Variable
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.topology import Topology
from phalanx._src.typed_jax import partition_spec


def sharding_of(topology: Topology, variable: Variable) -> NamedSharding:
    """Returns the sharding of a variable between programs."""
    dim = dim_of_slot(topology, variable)
    if dim is None:
        return topology.sharding_of(compat.layout_path(variable), variable.shape)
    return NamedSharding(topology.mesh, partition_spec(*(None,) * dim, REPLICA_AXIS))


def dim_of_slot(topology: Topology, variable: Variable) -> int | None:
    """Returns the dim along which a slot is sharded over the replicas. None if each of them holds the whole, as of all other variables."""
    if not compat.is_elementwise(variable):
        return None
    return topology.update_dim(variable.shape, np.dtype(compat.dtype_of(variable)).itemsize)


def dims_of_update(
    topology: Topology, optimizer: keras.optimizers.Optimizer, trained: Sequence[Variable]
) -> dict[int, int]:
    """Returns the dims along which the replicas share the update of some variables and their slots.

    Args:
      topology: the devices.
      optimizer: the optimizer, which is built.
      trained: the variables that it updates.

    Returns:
      By id of a variable or slot, its dim. All others are updated as a whole by each replica.
    """
    known, dims = {id(v): v for v in trained}, dict[int, int]()
    for slot in optimizer.variables:
        variable = known.get(id(compat.reference_of(slot)))
        dim = dim_of_slot(topology, slot)
        # What an optimizer does may have changed since it was built.
        if variable is not None and dim is not None and compat.updates_elementwise(optimizer, variable):
            dims[id(slot)] = dims[id(variable)] = dim
    return dims


def shape_of_shard(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    """Returns the shape of what a replica holds of an array."""
    return tuple(n // lax.axis_size(REPLICA_AXIS) if i == dim else n for i, n in enumerate(shape))


def shard_of(whole: jax.Array, dim: int) -> jax.Array:
    """Returns this replica's shard of an array."""
    size = whole.shape[dim] // lax.axis_size(REPLICA_AXIS)
    shard: jax.Array = lax.dynamic_slice_in_dim(whole, lax.axis_index(REPLICA_AXIS) * size, size, dim)
    return shard


def whole_of(shard: jax.Array, dim: int) -> jax.Array:
    """Returns an array, given this replica's shard of it. All replicas must call it."""
    whole: jax.Array = lax.all_gather(shard, REPLICA_AXIS, axis=dim, tiled=True)
    return whole
