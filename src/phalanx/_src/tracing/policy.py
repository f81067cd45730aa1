# SPDX-License-Identifier: Apache-2.0
"""The policy table: what reading and assigning a Keras variable does under a strategy.

There is one variable type, `keras.Variable`. Its `synchronization` and `aggregation` select a row:

    synchronization   aggregation          write in a replica function     how and when the values are combined
    auto, on_write    sum                  combined at once                sum of the values (or increments)
    auto, on_write    mean                 combined at once                mean of the values (or increments)
    auto, on_write    only_first_replica   combined at once                value of the first replica
    auto, on_write    none, trainable      rejected unless equal           (the replicas must hold the same weights)
    auto, on_write    none, floating       local to the replica            mean, at the end of the program
    auto, on_write    none, other dtype    local to the replica            value of the first replica, at the end
    on_read           sum                  local to the replica            sum, for reads outside replicas
    on_read           mean                 local to the replica            mean, for reads outside replicas
    on_read           only_first_replica   local to the replica            value of the first replica, for reads outside
    on_read           none                 like auto with none             like auto with none
    on_demand         sum                  local to the replica            sum, computed at each read outside
    on_demand         mean                 local to the replica            mean, computed at each read outside
    on_demand         mean, trainable      rejected unless equal           (otherwise only an optimizer may write)
    a row per row of the global batch      local to the replica            the rows of all replicas, at the end

Phalanx sets `on_demand` for the gradient accumulators of optimizers, so that a step that only accumulates needs no all-reduce. With
local updates, it sets it for all variables whose values it would combine to a mean. A program that only reads such a variable gets the
combined value.

The mean of a variable of integers has no fraction, as if a float were assigned: -2.5 becomes -2.

In cross-replica context, an assignment stores the value unchanged, and a read returns the combined value. In update context (in an
optimizer's update or in `extended.update`), all replicas hold equal gradients, so any assignment is allowed. `assign_add` and
`assign_sub` combine the increments: on two replicas, `assign_add(1)` under `sum` adds 2.
"""

import enum
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from phalanx._src import compat
from phalanx._src.compat import Variable
from phalanx._src.tracing import context
from phalanx.errors import AggregationError, InvalidArgumentError, VariableError, VariableIndexError, shown


class Write(enum.Enum):
    """When a write in a replica function is combined over the replicas."""

    NOW = enum.auto()
    AT_BOUNDARY = enum.auto()
    REFUSED = enum.auto()


class Combine(enum.Enum):
    """How the replicas' values are combined into one value."""

    SUM = enum.auto()
    MEAN = enum.auto()
    FIRST = enum.auto()
    ROWS = enum.auto()


@dataclass(frozen=True)
class Policy:
    """One row of the policy table.

    Args:
      write: when a write in a replica function is combined.
      combine: how the values are combined.
      on_read: whether each replica keeps its own component between programs.
      on_demand: whether the components are combined at each read, instead of at the end of each program.
    """

    write: Write
    combine: Combine
    on_read: bool = False
    on_demand: bool = False

    @property
    def is_local(self) -> bool:
        """Whether each replica has its own value when a program starts."""
        return self.on_read or self.combine is Combine.ROWS


_COMBINE = {"sum": Combine.SUM, "mean": Combine.MEAN, "only_first_replica": Combine.FIRST}


def policy_of(variable: Variable) -> Policy:
    """Returns the row of the policy table for `variable`.

    Raises:
      AggregationError: the aggregation is "mean" and the dtype is bool, or the synchronization is "none".
    """
    if isinstance(variable, compat.RowVariable):
        return Policy(Write.AT_BOUNDARY, Combine.ROWS)
    aggregation, is_floating = variable.aggregation, jnp.issubdtype(variable.dtype, jnp.floating)
    if aggregation == "mean" and variable.dtype == "bool":
        raise AggregationError(
            f'{describe(variable)} with aggregation="mean"',
            "bools have no mean.",
            'dtype="float32", or aggregation="only_first_replica"',
        )
    if variable.synchronization == "none":
        raise AggregationError(
            f'{describe(variable)} with synchronization="none"',
            "a strategy keeps the replicas of a variable equal, so it must synchronize them.",
            'synchronization="auto" or "on_read"',
        )
    if aggregation == "none":
        if variable.trainable and is_floating and variable.synchronization != "on_read":
            return Policy(Write.REFUSED, Combine.MEAN)
        return Policy(Write.AT_BOUNDARY, Combine.MEAN if is_floating else Combine.FIRST)
    if variable.synchronization == "on_demand":
        # Weights that replicas train alone are written by optimizers only, which synchronize them.
        write = Write.REFUSED if variable.trainable else Write.AT_BOUNDARY
        return Policy(write, _COMBINE[aggregation], on_read=True, on_demand=True)
    if variable.synchronization == "on_read":
        return Policy(Write.AT_BOUNDARY, _COMBINE[aggregation], on_read=True)
    return Policy(Write.NOW, _COMBINE[aggregation])


def check_variable(name: str, value: object, hint: str) -> Variable:
    """Returns `value`, a Keras variable.

    Raises:
      InvalidArgumentError: `value` is not a variable.
    """
    if not isinstance(value, Variable):
        raise InvalidArgumentError(f"{name}={shown(value)}", "must be a Keras variable.", hint)
    return value


def _check_new_variable(variable: Variable) -> None:
    """Rejects a new variable that no program of the current strategy could use, and records the strategy."""
    if context.has_strategy():
        policy, strategy = policy_of(variable), context.get_strategy()
        if strategy.local_updates is not None and policy.combine is Combine.MEAN and not policy.on_read:
            compat.make_on_demand([variable], "mean")
        # The number and not the strategy, so that a variable does not keep its strategy alive.
        compat.set_maker(variable, strategy.number)


def _check_index(variable: Variable, index: Any) -> None:
    """Rejects a static index that is out of bounds, which JAX would clamp.

    Python iterates over an object with `__getitem__` until an IndexError, so a loop over a variable would never end. Variables
    of plain Keras code, outside all scopes, keep the behaviour of Keras.
    """
    # An index that is an array may be traced, and then its value is unknown.
    parts = index if isinstance(index, tuple) else (index,)
    if not all(isinstance(i, _STATIC) for i in parts) or not _is_of_strategy(variable):
        return
    try:
        # NumPy checks the index on a view of one element, which takes no memory for the shape of the variable.
        np.broadcast_to(np.empty((), bool), tuple(variable.shape))[index]
    except IndexError as e:
        call = f"{describe(variable)}[{shown(index)}]"
        if not variable.shape:  # Not an IndexError, which would end a loop over the variable as if it were empty.
            raise VariableError(call, "a scalar has no elements.", "float(variable), or variable.value") from None
        raise VariableIndexError(call, f"{e}.", "use an index below the size of the dim") from None


_STATIC = (int, slice, np.integer, type(None), type(...))


def _is_of_strategy(variable: Variable) -> bool:
    """Returns whether a strategy created the variable, or is current, or a program is being traced."""
    return compat.maker_of(variable) is not None or compat.lift_scope() is not None or context.has_strategy()


compat.on_variable(_check_new_variable)
compat.on_index(_check_index)


def refuse_write(description: str) -> AggregationError:
    """Returns the error for a write that the policy table rejects."""
    return AggregationError(
        f"assign to {description} in replica context",
        'the variable is trainable and has aggregation="none", and the value may differ between replicas, so they would hold '
        "different weights.",
        "use optimizer.apply_gradients(...); or assign a value that get_replica_context().all_reduce(...) returned; or set variable.trainable = False if no optimizer trains it, as for a target "
        'network; or create it with aggregation="mean", "sum" or "only_first_replica"; or call '
        'merge_call(lambda strategy, x: variable.assign(strategy.reduce("MEAN", x, axis=None)), args=(value,))',
    )


def describe(variable: Variable) -> str:
    """Returns the name of a variable for a message, for example `variable 'dense/kernel' (784, 512) float32`."""
    return f"variable {variable.path!r} {tuple(variable.shape)} {variable.dtype}"


def initial_components(variable: Variable, value: Any, num_replicas: int) -> jax.Array:
    """Returns components (num_replicas, ...) of an on-read variable that combine to `value`."""
    # With NumPy if possible: JAX would compile a program per shape.
    xp: Any = jnp if isinstance(value, jax.core.Tracer) else np
    # The components of a sum must add up to `value`, so only replica 0 has it.
    rest = xp.zeros_like(value) if policy_of(variable).combine is Combine.SUM else value
    parts: jax.Array = xp.stack([value] + [rest] * (num_replicas - 1))
    return parts
