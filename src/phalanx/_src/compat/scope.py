# SPDX-License-Identifier: Apache-2.0
"""The interface of the Keras scope in which a program is traced."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import keras
from keras import Variable
from keras.src.backend.common import global_state

from phalanx._src.compat.hooks import extend
from phalanx._src.mesh.arrays import require_live
from phalanx.typing import PyTree


class AbstractLiftScope(keras.StatelessScope, ABC):
    """The scope that handles reads and writes of Keras variables while a program is traced.

    Keras calls `get_current_value`, and `add_update` with `(variable, value)` to assign. The wrapped methods of this package call the others. `phalanx._src.tracing` has
    the implementation, which this package must not import.
    """

    @abstractmethod
    def get_current_value(self, variable: Variable) -> jax.Array:
        """Returns the value of `variable` inside the trace."""

    @abstractmethod
    def note_read(self) -> None:
        """Records that the trace depends on state that can change between calls. Call it before reading such state."""

    @abstractmethod
    def add_delta(self, variable: Variable, delta: jax.Array, *, negative: bool = False) -> jax.Array:
        """Adds `delta` to `variable` inside the trace, or subtracts it, and returns the new value."""

    @abstractmethod
    def fold_seed(self, seed: jax.Array, state: Variable) -> jax.Array:
        """Returns this replica's seed for the `seed` drawn from `state`."""

    @abstractmethod
    def note_averages(self, variables: Sequence[Variable]) -> None:
        """Marks `variables` as moving averages, so that the next assignment is treated as one."""

    @abstractmethod
    def apply_gradients(
        self, optimizer: keras.optimizers.Optimizer, apply: Callable[..., None], grads: Sequence[Any], variables: object
    ) -> None:
        """Aggregates gradients over the replicas, then calls `apply` to update the variables."""

    @abstractmethod
    def aggregated(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Returns gradients aggregated over the replicas, unless this is update context."""

    @abstractmethod
    def check_stateless_apply(self) -> None:
        """Checks that an optimizer may be applied without naming its variables.

        Raises:
          PhalanxError: it may not.
        """

    @property
    @abstractmethod
    def share(self) -> "AbstractBatchShare":
        """The share of a batch of the replica that is traced."""

    @property
    @abstractmethod
    def replicas_of_rows(self) -> int:
        """The number of replicas that share the rows of a batch, if this code runs for one of them, and 1 otherwise."""

    @abstractmethod
    def updating(self) -> AbstractContextManager[None]:
        """Enters update context, in which gradients are already aggregated and any assignment is allowed."""


class AbstractBatchShare(ABC):
    """The share that a replica has of a batch, with all that it must know of the rows of the others. `phalanx._src.tracing` has the implementation."""

    @abstractmethod
    def example_mask(self) -> jax.Array | None:
        """Returns a bool array (per_replica_batch,), True for real rows, or None if the batch has no padding."""

    @property
    @abstractmethod
    def is_averaging(self) -> bool:
        """Whether this replica computes means over its own rows, as Keras's trainer does.

        The mean over the global batch is then the sum of these means, weighted by each replica's share of the rows.
        """

    @property
    @abstractmethod
    def is_part(self) -> bool:
        """Whether this replica is averaging over rows that are a part of the batch."""

    @property
    def has_others(self) -> bool:
        """Whether this replica may compute with the rows of the others too: it has a part of a batch, without padding."""
        return self.is_part and self.example_mask() is None

    @property
    @abstractmethod
    def is_whole(self) -> bool:
        """Whether this replica computes with the rows of all replicas, which `whole_batch` has returned."""

    @abstractmethod
    def sizes(self, tree: PyTree) -> Sequence[int]:
        """Returns the different numbers of rows that a function of rows may get here: those of the batch, the largest, and of replicas.

        Args:
          tree: pytree of arrays of rows of this replica.
        """

    @abstractmethod
    def whole_batch(self, tree: PyTree) -> AbstractContextManager[PyTree]:
        """Enters a context in which this replica computes with the rows of all replicas, so that a mean is right as it is.

        Args:
          tree: pytree of arrays of rows. The context manager returns it with the rows of all replicas.
        """

    @abstractmethod
    def total(self, value: jax.Array) -> jax.Array:
        """Returns the sum over the replicas."""

    @abstractmethod
    def part_of(self, total: jax.Array) -> jax.Array:
        """Returns the part of this replica in a sum over the replicas that is known."""

    @abstractmethod
    def across_replicas(self, variables: Sequence[Variable]) -> AbstractContextManager[None]:
        """Enters a context in which the variables of a metric have their values for all replicas. All replicas must enter it."""

    @abstractmethod
    def share_of_loss(self, total: jax.Array, count: jax.Array | None) -> jax.Array:
        """Returns this replica's share of a loss over the global batch, divided by the weight that the trainer multiplies it by.

        Args:
          total: the sum of this replica's values.
          count: how much they count in what a mean divides by. None for a sum.
        """

    @abstractmethod
    def weight_of_mean(self, weight: jax.Array | None) -> jax.Array | float:
        """Returns the weight of a mean over this replica's rows, to which the user gave `weight` or None."""

    @abstractmethod
    def check_loss(self, name: str, reduction: str) -> None:
        """Checks that a loss that is a mean is not used with several replicas.

        Raises:
          PhalanxError: the loss is a mean, and there are several replicas.
        """

    @abstractmethod
    def moments(
        self, values: jax.Array, counts: jax.Array, axes: Sequence[int], *, everywhere: bool
    ) -> tuple[Any, Any]:
        """Returns the mean and the variance of the values that count.

        Args:
          values: array (per_replica_batch, ...).
          counts: bool array of the same shape. True for values that count.
          axes: dims to reduce.
          everywhere: whether to reduce over all replicas too.
        """

    @abstractmethod
    def weight_of_value(self) -> jax.Array | None:
        """Returns the weight of one value per replica, if all together count as much as there are replicas. None for 1."""


def active_scope() -> keras.StatelessScope | None:
    """Returns the innermost `keras.StatelessScope` of this thread, or None."""
    return global_state.get_global_attribute("stateless_scope")


def lift_scope() -> AbstractLiftScope | None:
    """Returns the innermost scope of this thread if it is a lifting scope, else None."""
    scope = active_scope()
    return scope if isinstance(scope, AbstractLiftScope) else None


def surrounding_scope() -> AbstractLiftScope | None:
    """Returns the innermost lifting scope of this thread, even from inside the scopes of Keras's stateless methods."""
    scope = active_scope()
    while scope is not None and not isinstance(scope, AbstractLiftScope):
        scope = scope.original_scope
    return scope


def note_read() -> None:
    """Calls `AbstractLiftScope.note_read` of the surrounding scope, if a step is traced."""
    scope = surrounding_scope()
    if scope is not None:
        scope.note_read()


def is_lifting() -> bool:
    """Whether a step is traced in this thread, even from inside the scopes of Keras's stateless methods."""
    return surrounding_scope() is not None


def require_live_outside_steps(value: object) -> None:
    """Checks that `value` was not kept from a step. In a step, the program explains it, and needs no operation for the check.

    Raises:
      TraceError: `value` was kept from a step.
    """
    if not is_lifting():
        require_live(value)


@extend(keras.StatelessScope, "get_current_value")
def _get_current_value(original: Callable[..., PyTree], self: keras.StatelessScope, variable: Variable) -> PyTree:
    # A user's `layer.stateless_call` inside a replica function opens a plain scope inside ours. Keras 3 looks up a variable
    # in the innermost scope only, so a variable that this scope does not map would become a constant of the program.
    value = original(self, variable)
    outer = self.original_scope
    return outer.get_current_value(variable) if value is None and outer is not None else value
