# SPDX-License-Identifier: Apache-2.0
"""The policy table: what reading and assigning a Keras variable does under a strategy.

There is one variable type, `keras.Variable`. Its `synchronization` and `aggregation` select a row:

    synchronization   aggregation          write in a replica function     combined over the replicas
    auto, on_write    sum                  at once                         sum of the values (or increments)
    auto, on_write    mean                 at once                         mean of the values (or increments)
    auto, on_write    only_first_replica   at once                         the first replica's value
    auto, on_write    none, trainable      refused                         (an optimizer may write)
    auto, on_write    none, floating       each replica its own            mean, when the program ends
    auto, on_write    none, other dtype    each replica its own            the first's, when the program ends
    on_read           sum                  each replica its own            sum, when read outside
    on_read           mean                 each replica its own            mean, when read outside
    on_read           only_first_replica   each replica its own            the first's, when read outside
    on_read           none                 as auto with none
    on_demand         sum                  each replica its own            sum, at each read outside

`on_demand` is what Phalanx makes of an optimizer's gradient accumulators: no step combines them.

In cross-replica context an assignment stores the value as it is, and a read gives the combined value. In update context
(an optimizer at work, `extended.update`) every replica holds the same gradients and assignments are free. `assign_add` and
`assign_sub` combine the increments, so `assign_add(1)` under `sum` on two replicas adds two.
"""

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx import compat
from phalanx.compat import Variable
from phalanx.errors import AggregationError, InvalidArgumentError, VariableIndexError, shown
from phalanx.tracing import context


class Write(enum.Enum):
    """When a write in a replica function is combined over the replicas."""

    NOW = enum.auto()
    AT_BOUNDARY = enum.auto()
    REFUSED = enum.auto()


class Combine(enum.Enum):
    """How the replicas' values become one."""

    SUM = enum.auto()
    MEAN = enum.auto()
    FIRST = enum.auto()


@dataclass(frozen=True)
class Policy:
    """A row of the table.

    Args:
      write: when a write is combined.
      combine: how.
      on_read: whether each replica keeps its own component from program to program.
      on_demand: whether they are combined when somebody reads the variable, and not at the end of each program.
    """

    write: Write
    combine: Combine
    on_read: bool = False
    on_demand: bool = False


_COMBINE = {"sum": Combine.SUM, "mean": Combine.MEAN, "only_first_replica": Combine.FIRST}


def policy_of(variable: Variable) -> Policy:
    """Returns the row of the table for `variable`.

    Raises:
      AggregationError: a mean of integers, or synchronization "none".
    """
    aggregation, floating = variable.aggregation, jnp.issubdtype(variable.dtype, jnp.floating)
    if aggregation == "mean" and not floating:
        raise AggregationError(
            f'{describe(variable)} with aggregation="mean"',
            f"the mean of {variable.dtype} values is no {variable.dtype}.",
            'aggregation="sum", or dtype="float32"',
        )
    if variable.synchronization == "none":
        raise AggregationError(
            f'{describe(variable)} with synchronization="none"',
            "a strategy keeps its replicas in step.",
            'synchronization="auto" or "on_read"',
        )
    if aggregation == "none":
        if variable.trainable and floating and variable.synchronization != "on_read":
            return Policy(Write.REFUSED, Combine.MEAN)
        return Policy(Write.AT_BOUNDARY, Combine.MEAN if floating else Combine.FIRST)
    if variable.synchronization == "on_demand":
        return Policy(Write.AT_BOUNDARY, Combine.SUM, on_read=True, on_demand=True)
    if variable.synchronization == "on_read":
        return Policy(Write.AT_BOUNDARY, _COMBINE[aggregation], on_read=True)
    return Policy(Write.NOW, _COMBINE[aggregation])


def check_variable(name: str, value: object, hint: str) -> Variable:
    """Returns an argument that has to be a variable.

    Raises:
      InvalidArgumentError: it is something else.
    """
    if not isinstance(value, Variable):
        raise InvalidArgumentError(f"{name}={shown(value)}", "must be a variable of Keras.", hint)
    return value


def _made(variable: Variable) -> None:
    """Rejects variables that no program of the current strategy could use, when they are made in its scope."""
    if context.has_strategy():
        policy_of(variable)
        compat.set_maker(variable, context.get_strategy().number)


def _check_index(variable: Variable, index: Any) -> None:
    """Rejects an index beyond the end, which JAX would clamp, so that no loop over a variable would ever end.

    Keras's own variables outside all scopes stay as Keras has them.
    """
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, _STATIC) for i in parts) or not _is_of_strategy(variable):
        return
    try:
        # An array without memory of its own.
        np.broadcast_to(np.empty((), bool), tuple(variable.shape))[index]
    except IndexError as e:
        raise VariableIndexError(
            f"{describe(variable)}[{shown(index)}]", f"{e}.", "an index below the size of its dim"
        ) from None


_STATIC = (int, slice, np.integer, type(None), type(...))


def _is_of_strategy(variable: Variable) -> bool:
    return compat.maker_of(variable) is not None or compat.lift_scope() is not None or context.has_strategy()


compat.on_variable(_made)
compat.on_index(_check_index)


def refuse_write(variable: Variable) -> AggregationError:
    """Returns the error for a write that the table refuses."""
    return AggregationError(
        f"assign to {describe(variable)} in replica context",
        'it is trainable and has aggregation="none", so the replicas would hold different weights.',
        "optimizer.apply_gradients(...); target.trainable = False for a target network or another copy that no optimizer "
        'trains; keras.Variable(..., aggregation="mean") (or "sum", "only_first_replica"); or '
        'merge_call(lambda strategy, x: variable.assign(strategy.reduce("MEAN", x, axis=None)), args=(value,))',
    )


def describe(variable: Variable) -> str:
    """Names a variable in a message, for example `variable 'dense/kernel' (784, 512) float32`."""
    return f"variable {variable.path!r} {tuple(variable.shape)} {variable.dtype}"


def initial_components(variable: Variable, value: Any, num_replicas: int) -> jax.Array:
    """Returns what the replicas hold of an on-read variable whose combined value is `value`, `(num_replicas, ...)`."""
    # On the host, where nothing is compiled for each shape.
    xp: Any = jnp if isinstance(value, jax.core.Tracer) else np
    if policy_of(variable).combine is not Combine.SUM:
        return xp.stack([value] * num_replicas)
    return xp.stack([value] + [xp.zeros_like(value)] * (num_replicas - 1))
