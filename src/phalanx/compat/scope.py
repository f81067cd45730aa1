# SPDX-License-Identifier: Apache-2.0
"""The scope of Keras in which a program is traced."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import keras
from keras import Variable
from keras.src.backend.common import global_state

from phalanx.compat.hooks import extend


class AbstractLiftScope(keras.StatelessScope):
    """The scope in which Keras variables are read and written while a program is traced.

    Keras calls `get_current_value` and `add_update`; the extended methods below call the rest.
    """

    def get_current_value(self, variable: Variable) -> Any:
        """Returns the value of `variable` inside the trace."""
        raise NotImplementedError

    def note_read(self) -> None:
        """Must be called before anything of the program is read that another program may have otherwise."""
        raise NotImplementedError

    def add_update(self, update: tuple[Variable, Any]) -> None:
        """Assigns `(variable, value)` inside the trace."""
        raise NotImplementedError

    def add_delta(self, variable: Variable, delta: Any, *, negative: bool = False) -> Any:
        """Adds `delta` to `variable` inside the trace, or subtracts it, and returns the new value."""
        raise NotImplementedError

    def fold_seed(self, seed: Any, state: Variable) -> Any:
        """Returns this replica's seed for the `seed` drawn from `state`."""
        raise NotImplementedError

    def note_averages(self, variables: Sequence[Variable]) -> None:
        """Hears that what is assigned to `variables` next are their moving averages."""
        raise NotImplementedError

    def apply_gradients(
        self, optimizer: keras.optimizers.Optimizer, apply: Callable[..., None], grads: Sequence[Any], variables: Any
    ) -> None:
        """Aggregates gradients over the replicas, then lets `apply` update the variables."""
        raise NotImplementedError

    def aggregated(self, grads: Sequence[Any]) -> Sequence[Any]:
        """Returns gradients aggregated over the replicas, unless this is update context."""
        raise NotImplementedError

    def example_mask(self) -> Any:
        """Returns which rows of this replica's batch are real, or None for a batch without padding."""
        raise NotImplementedError

    @property
    def is_averaging(self) -> bool:
        """Whether this is a replica that computes means over its own rows, as Keras's trainer does.

        The replicas' means, weighted by their parts of the global batch, add up to the mean over the global batch.
        """
        raise NotImplementedError

    def reduce_rows(self, values: Any, counts: Any, reduction: str) -> Any:
        """Reduces weighted losses `(per_replica_batch, ...)`, each of which counts for `counts` in a mean."""
        raise NotImplementedError

    def weight_of_mean(self, weight: Any) -> Any:
        """Returns what a mean over this replica's rows counts, to which the user gives `weight`, or none."""
        raise NotImplementedError

    def check_loss(self, name: str, reduction: str) -> None:
        """Raises for a loss that is a mean, where there are several replicas."""
        raise NotImplementedError

    def moments(self, values: Any, counts: Any, axes: Sequence[int], *, everywhere: bool) -> tuple[Any, Any]:
        """Returns mean and variance over some dims of the values that count; `everywhere` over all replicas."""
        raise NotImplementedError

    def count_of_a_row(self) -> Any:
        """Returns what one real row counts where a replica's part of the batch counts one."""
        raise NotImplementedError

    def updating(self) -> AbstractContextManager[None]:
        """Opens the update context: gradients are aggregated already, and assignments are free."""
        raise NotImplementedError


def active_scope() -> keras.StatelessScope | None:
    """Returns the innermost `keras.StatelessScope` of this thread."""
    return global_state.get_global_attribute("stateless_scope")


def lift_scope() -> AbstractLiftScope | None:
    """Returns the innermost lifting scope, if it is the innermost scope."""
    scope = active_scope()
    return scope if isinstance(scope, AbstractLiftScope) else None


def surrounding_scope() -> AbstractLiftScope | None:
    """Returns the innermost lifting scope, past the scopes in which Keras's stateless methods work."""
    scope = active_scope()
    while scope is not None and not isinstance(scope, AbstractLiftScope):
        scope = scope.original_scope
    return scope


def note_read() -> None:
    """Must be called before anything of a program is read that another program may have otherwise."""
    scope = surrounding_scope()
    if scope is not None:
        scope.note_read()


def is_lifting() -> bool:
    """Whether a step is traced in this thread, inside the scopes of Keras's stateless methods too."""
    return surrounding_scope() is not None


@extend(keras.StatelessScope, "get_current_value")
def _get_current_value(original: Callable[..., Any], self: keras.StatelessScope, variable: Variable) -> Any:
    # A user's `layer.stateless_call` inside a replica function opens a plain scope in ours: what it does not map must
    # come from ours, or it would become a constant of the program.
    value = original(self, variable)
    outer = self.original_scope
    return outer.get_current_value(variable) if value is None and outer is not None else value
