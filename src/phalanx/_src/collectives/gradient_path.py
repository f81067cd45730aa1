# SPDX-License-Identifier: Apache-2.0
"""The path of gradients from the tape to the optimizer: summed, compressed, kept on their replica, or accumulated."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, final

import jax
import jax.numpy as jnp
import keras
from jax import lax

from phalanx._src import compat
from phalanx._src.collectives.compressed import CompressedSum
from phalanx._src.collectives.compression import Compression
from phalanx._src.collectives.local_updates import LocalUpdates, gradients_of
from phalanx._src.compat import Variable


class GradientPath(Protocol):
    """What happens to the gradients of one update. A path may contain another one."""

    @property
    def variables(self) -> Sequence[Variable]:
        """The state that the path keeps between steps."""

    def sum(self, grads: Sequence[Any], state: Sequence[jax.Array]) -> tuple[list[Any], list[jax.Array]]:
        """Returns the gradients for the optimizer, and the new values of `variables`.

        Args:
          grads: this replica's gradients: one per variable, or None.
          state: the values of `variables`.
        """


@dataclass(frozen=True)
class Aggregation:
    """How the replicas of a strategy aggregate gradients.

    Args:
      full: sums gradients over the replicas, uncompressed. None with one replica.
      num_replicas: number of replicas.
      compression: the algorithm that compresses them. None if they are sent uncompressed.
      local: how replicas train by themselves. None if gradients are summed at every step.
    """

    full: Callable[[Sequence[Any]], list[Any]] | None
    num_replicas: int
    compression: Compression | None
    local: LocalUpdates | None

    def path(
        self, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Sequence[Variable] | None
    ) -> GradientPath:
        """Returns the path of the gradients of one update.

        Args:
          optimizer: the optimizer. It is built, if the path keeps state in addition to its slots.
          grads: one gradient per variable, or None.
          variables: the variables. None for those that the optimizer was built with.
        """
        if self.local is not None:
            return _LocalSum(self.local, self.num_replicas)
        if not compat.accumulation_steps(optimizer):
            return self._sum(optimizer, grads, variables)
        # With one replica too, because a process that joins a group begins alone.
        accumulators = compat.accumulators(optimizer, variables)
        # Each replica adds up its own gradients, so that they are all-reduced once per update instead of once per step. This
        # holds for all that the optimizer has, because another step may train variables that this one does not.
        compat.make_on_demand(compat.accumulators(optimizer, None), "sum")
        inner = self._sum(optimizer, grads, variables)
        return inner if self.num_replicas == 1 else _AccumulatedSum(inner, optimizer, accumulators)

    def _sum(
        self, optimizer: keras.optimizers.Optimizer, grads: Sequence[Any], variables: Sequence[Variable] | None
    ) -> GradientPath:
        if self.compression is None:
            return _FullSum(self.full or list)
        compat.build_optimizer(optimizer, variables)
        # With one replica too: a group of processes may shrink to one, and a process that joins it begins alone.
        return CompressedSum(self.compression, self.full, optimizer, grads, compat.trained_by(optimizer, variables))


@final
class _FullSum:
    """Sums gradients over the replicas, uncompressed.

    Args:
      full: sums them.
    """

    def __init__(self, full: Callable[[Sequence[Any]], list[Any]]) -> None:
        self._full = full
        self.variables: Sequence[Variable] = ()

    def sum(self, grads: Sequence[Any], state: Sequence[jax.Array]) -> tuple[list[Any], list[jax.Array]]:
        return self._full(grads), list(state)


@final
class _LocalSum:
    """Keeps gradients on their replica, or in its group, scaled as if the other replicas had the same ones.

    Args:
      local: how replicas train by themselves.
      num_replicas: number of replicas.
    """

    def __init__(self, local: LocalUpdates, num_replicas: int) -> None:
        self._local, self._num_replicas = local, num_replicas
        self.variables: Sequence[Variable] = ()

    def sum(self, grads: Sequence[Any], state: Sequence[jax.Array]) -> tuple[list[Any], list[jax.Array]]:
        return gradients_of(self._local, grads, self._num_replicas), list(state)


@final
class _AccumulatedSum:
    """Adds gradients up on their replica, and sums the totals in the last step before an update.

    Args:
      inner: the path of the totals.
      optimizer: the optimizer, which counts the steps.
      accumulators: its variables for the sums of earlier steps: one per gradient.
    """

    def __init__(
        self, inner: GradientPath, optimizer: keras.optimizers.Optimizer, accumulators: Sequence[Variable]
    ) -> None:
        self._inner, self._optimizer, self._count = inner, optimizer, len(accumulators)
        self.variables: Sequence[Variable] = [*accumulators, *inner.variables]

    def sum(self, grads: Sequence[Any], state: Sequence[jax.Array]) -> tuple[list[Any], list[jax.Array]]:
        local_sums, inner_state = state[: self._count], state[self._count :]

        def sum_totals() -> tuple[list[Any], list[jax.Array]]:
            totals = [None if g is None else g + x for g, x in zip(grads, local_sums, strict=True)]
            sums, new_state = self._inner.sum(totals, inner_state)
            # Keras's `apply` adds the accumulators to the gradients. The totals contain them already.
            return sums, [*map(jnp.zeros_like, local_sums), *new_state]

        # In all other steps, Keras's `apply` adds the gradients to the accumulators.
        result: tuple[list[Any], list[jax.Array]] = lax.cond(
            compat.is_last_accumulated(self._optimizer), sum_totals, lambda: (list(grads), list(state))
        )
        return result
