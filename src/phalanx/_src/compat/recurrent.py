# SPDX-License-Identifier: Apache-2.0
"""The states of stateful recurrent layers, which have one row per row of the global batch."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

import jax
import keras
from keras import Variable

from phalanx._src.compat.hooks import extend
from phalanx._src.compat.scope import surrounding_scope
from phalanx.errors import InputError
from phalanx.typing import PyTree

_R = TypeVar("_R")


class RowVariable(Variable):
    """A variable with one row per row of the global batch. In a replica function it has the rows of that replica."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the variable, in a replica function the shape of the rows of this replica."""
        scope = surrounding_scope()
        return tuple(self._shape) if scope is None else self.shape_in_replica(scope.replicas_of_rows)

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape with the rows of the global batch."""
        return tuple(self._shape)

    def shape_in_replica(self, num_replicas: int) -> tuple[int, ...]:
        """Returns the shape of the rows of one replica.

        Raises:
          InputError: the replicas cannot have equal numbers of rows.
        """
        rows, *others = self._shape
        if rows % num_replicas:
            raise InputError(
                f"the state {self.path!r} of a layer with stateful=True, built for {rows} rows",
                f"{num_replicas} replicas cannot have equal numbers of these rows.",
                f"batches of {max(rows // num_replicas, 1) * num_replicas} rows",
            )
        return (rows // num_replicas, *others)


@extend(keras.layers.RNN, "_create_state_variables")
def _create_state_variables(original: Callable[..., None], self: keras.layers.RNN, batch_size: int) -> None:
    scope = surrounding_scope()
    # A layer that is built in a replica function sees the rows of one replica. Its first states do not belong to the trace.
    with nullcontext() if scope is None else jax.ensure_compile_time_eval():
        original(self, batch_size if scope is None else batch_size * scope.replicas_of_rows)
    for state in keras.tree.flatten(self.states):
        # Keras offers no way to choose the class.
        state.__class__ = RowVariable


@extend(keras.layers.RNN, "call")
def _call(
    original: Callable[..., _R], self: keras.layers.RNN, sequences: jax.Array, *args: PyTree, **kwargs: PyTree
) -> _R:
    """Calls a layer that expects as many rows as its states have here.

    Raises:
      InputError: the batch has another number of rows, or is padded.
    """
    scope = surrounding_scope()
    if scope is None or not self.stateful or self.states is None:
        return original(self, sequences, *args, **kwargs)
    state = keras.tree.flatten(self.states)[0]
    expected, rows = state.shape[0], sequences.shape[0]
    if scope.share.example_mask() is not None or rows != expected:
        raise InputError(
            f"{type(self).__name__} {self.name!r} with stateful=True, built for {state.whole_shape[0]} rows, on a batch of which a replica "
            f"has {rows} rows",
            f"each replica has the states of {expected} rows, and so needs as many rows of each batch.",
            f"batches that all have {state.whole_shape[0]} rows; experimental_distribute_dataset(..., drop_remainder=True)",
        )
    before, attributes = self._expected_batch_size, vars(self)
    # Through `vars`, because a layer may not get attributes after it was built.
    attributes["_expected_batch_size"] = expected
    try:
        return original(self, sequences, *args, **kwargs)
    finally:
        attributes["_expected_batch_size"] = before
