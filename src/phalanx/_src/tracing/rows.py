# SPDX-License-Identifier: Apache-2.0
"""The rows that one replica has of a batch, where replicas have different numbers of rows."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from phalanx._src.typed_jax import optimization_barrier
from phalanx.typing import PyTree


@dataclass(frozen=True, eq=False)
class ReplicaRows:
    """The rows of a replica. Only inside a replica function.

    A replica without rows computes with padding, because all replicas take part in each exchange. What it computes does not count.

    Args:
      counts: number of rows of each replica.
      replica: the number of this replica, a traced int32.
      places: number of rows of the arrays of this replica.
      is_padded: whether the arrays may have padding after the rows of this replica.
      gathered: function of the size of the dim that is gathered next. Returns its size on each replica, or None if they are equal.
    """

    counts: Sequence[int]
    replica: jax.Array
    places: int
    is_padded: bool = False
    gathered: Callable[[int], Sequence[int] | None] | None = None

    @property
    def total(self) -> int:
        """Number of rows of the global batch."""
        return sum(self.counts)

    @property
    def num_replicas(self) -> int:
        """Number of replicas that have rows."""
        return sum(count > 0 for count in self.counts)

    @property
    def number(self) -> PyTree:
        """Number of rows of this replica."""
        return self.places if self.is_exact else jnp.asarray(self.counts)[self.replica]

    @property
    def is_exact(self) -> bool:
        """Whether the arrays of each replica are exactly its rows."""
        return not self.is_padded and 0 not in self.counts

    @property
    def has_rows(self) -> jax.Array | None:
        """Whether this replica has rows: a traced bool. None if all replicas have."""
        return self.number > 0 if 0 in self.counts else None

    @property
    def mask(self) -> jax.Array | None:
        """A bool array (places,), True for real rows of the arrays. None if the arrays have no padding."""
        return jnp.arange(self.places) < self.number if self.is_padded else None

    @property
    def weight(self) -> PyTree:
        """The fraction of the rows of the global batch that this replica has."""
        return self.number / max(1, self.total)

    @staticmethod
    def staged(value: PyTree) -> PyTree:
        """Returns numbers and arrays as values of the trace. JAX would replace the sum of a constant over the replicas by a multiple."""
        return jax.tree.map(
            lambda x: x if isinstance(x, jax.core.Tracer) else optimization_barrier(jnp.asarray(x)), value
        )

    def with_rows(self, value: jax.Array, otherwise: PyTree = 0) -> jax.Array:
        """Returns `value` if this replica has rows, else `otherwise`."""
        return value if self.has_rows is None else jnp.where(self.has_rows, value, otherwise)
