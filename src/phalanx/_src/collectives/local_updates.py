# SPDX-License-Identifier: Apache-2.0
"""Training in which replicas update their own variables, and synchronize them once in several steps."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, final

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.collectives import packing, primitives
from phalanx._src.collectives.compressed import CompressedSum
from phalanx._src.collectives.compression import compression_of
from phalanx._src.collectives.dtypes import mean_of_parts, parts_of_mean
from phalanx._src.compat import Variable
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.options import CommunicationOptions, PowerSGD, TopK
from phalanx._src.typed_jax import psum, shape_dtype
from phalanx.errors import InvalidArgumentError, arguments, shown


class Applied(NamedTuple):
    """An optimizer that one replica has just applied.

    Args:
      optimizer: the optimizer.
      trained: the variables that it trains.
      written: the replica-local variables that the step has written so far.
      whole: sums gradients over the replicas.
      num_replicas: the number of replicas.
    """

    optimizer: keras.optimizers.Optimizer
    trained: Sequence[Variable]
    written: Sequence[Variable]
    whole: Callable[[Sequence[Any]], list[Any]]
    num_replicas: int


class Synchronization(NamedTuple):
    """What one optimizer's step may synchronize.

    Args:
      variables: the variables that it changes.
      run: maps their values on this replica to their new values. In steps that are not due, these are the old ones.
    """

    variables: list[Variable]
    run: Callable[[list[jax.Array]], list[jax.Array]]


class LocalUpdates(ABC):
    """How replicas train separately for some steps. The base class of `LocalSGD` and `DiLoCo`.

    Attributes:
      every: number of an optimizer's updates between two synchronizations.
      replicas_per_group: number of replicas that aggregate their gradients at every step, and so stay equal.
    """

    every: int
    replicas_per_group: int

    def __post_init__(self) -> None:
        arguments.integer("every", self.every, least=1, hint="every=8")
        arguments.integer("replicas_per_group", self.replicas_per_group, least=1, hint="replicas_per_group=1")

    @abstractmethod
    def _synchronizations(self, applied: Applied) -> Iterator[Synchronization]:
        """See `synchronizations`."""


@final
@dataclass(frozen=True)
class LocalSGD(LocalUpdates):
    """Replicas that train separately, and take the mean of their variables once in several steps. May be created in any context.

    Between two synchronizations each replica has its own variables, optimizer slots and statistics. Outside the replicas they
    read as their means, including in evaluations and checkpoints; between processes, such a read is a collective call. With `every=1` and
    SGD, this equals synchronous training. A synchronization sends the weights, the slots of the optimizer, and all other
    variables of floats that a step assigns before it applies gradients.

    Args:
      every: number of an optimizer's updates between two synchronizations.
      replicas_per_group: number of replicas that aggregate their gradients at every step, for example the devices of a machine.

    Raises:
      InvalidArgumentError: an argument is not a positive integer.

    Source: Stich 2018, https://arxiv.org/abs/1805.09767.

    Example:
      >>> import phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], local_updates=phalanx.experimental.LocalSGD(every=4))
      >>> strategy.local_updates.every
      4
    """

    every: int = 8
    replicas_per_group: int = 1

    @override
    def _synchronizations(self, applied: Applied) -> Iterator[Synchronization]:
        optimizer, trained = applied.optimizer, applied.trained
        compat.take_outer(trained)  # They may have been trained with `DiLoCo` before.
        ids = set(map(id, [*trained, *optimizer.variables]))
        # Accumulators are zero after an update, and replicas synchronize only then.
        ids -= set(map(id, compat.accumulators(optimizer, trained) if compat.accumulation_steps(optimizer) else ()))
        yield _average([v for v in applied.written if id(v) in ids or _is_of_nobody(v)], applied, self.every)


@final
@dataclass(frozen=True)
class DiLoCo(LocalUpdates):
    """Replicas that train separately, and an outer optimizer that applies their mean change. May be created in any context.

    Once in several steps, the mean change of the weights since the last synchronization is the outer gradient. The outer optimizer
    applies it to the outer weights, with which all replicas continue. Outside the replicas, the outer weights are what is read,
    in evaluations and checkpoints too. The slots of the inner optimizer stay local. A single replica has an outer optimizer too, but its
    weights are read unchanged.

    Args:
      outer_optimizer: an optimizer whose configuration the outer optimizers take, or a function that makes one: with several
        processes, Keras can make optimizers only after the strategy. None is SGD(0.7, momentum=0.9, nesterov=True).
      every: number of an optimizer's updates between two synchronizations of a weight.
      fragments: number of parts of about equal size into which the weights are divided. One part is synchronized each
        `every / fragments` updates, so that no step sends all of them.
      compression: how outer gradients are sent: None, "bfloat16", "int8", `PowerSGD` or `TopK`. What was not sent is added to the
        next outer gradient.
      replicas_per_group: number of replicas that aggregate their gradients at every step, for example the devices of a machine.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or `fragments` does not divide `every`.

    Source: Douillard et al. 2023, https://arxiv.org/abs/2311.08105; for fragments Douillard et al. 2025,
    https://arxiv.org/abs/2501.18512.

    Example:
      >>> import phalanx
      >>> diloco = phalanx.experimental.DiLoCo(every=20, fragments=4)
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], local_updates=diloco)
      >>> strategy.local_updates.fragments
      4
    """

    outer_optimizer: keras.optimizers.Optimizer | Callable[[], keras.optimizers.Optimizer] | None = None
    every: int = 100
    fragments: int = 1
    compression: str | PowerSGD | TopK | None = None
    replicas_per_group: int = 1
    _config: dict[str, Any] | None = field(default=None, init=False, repr=False, compare=False)

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        arguments.integer("fragments", self.fragments, least=1, hint="fragments=1")
        if self.every % self.fragments:
            raise InvalidArgumentError(
                f"DiLoCo(every={self.every}, fragments={self.fragments})",
                "the fragments are synchronized at equal distances, so their number must divide `every`.",
                f"every={self.fragments * math.ceil(self.every / self.fragments)}",
            )
        if self.outer_optimizer is not None and not callable(self.outer_optimizer):
            _require_optimizer(self.outer_optimizer)
            # Now, because in a step the learning rate has no value.
            object.__setattr__(self, "_config", self.outer_optimizer.get_config())
        # Refuses a wrong choice before the first step.
        compression_of(CommunicationOptions(compression=self.compression))

    @override
    def _synchronizations(self, applied: Applied) -> Iterator[Synchronization]:
        for number, fragment in enumerate(_fragments(applied.trained, self.fragments)):
            if fragment:
                yield self._outer_step(applied, number, fragment)
        yield _average(list(filter(_is_of_nobody, applied.written)), applied, self.every)

    def _new_outer_optimizer(self) -> keras.optimizers.Optimizer:
        optimizer = self.outer_optimizer
        if optimizer is None:
            return keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True, name="outer")
        if isinstance(optimizer, keras.optimizers.Optimizer):
            return type(optimizer).from_config(self._config)
        made = optimizer()
        _require_optimizer(made)
        return made

    def _outer_step(self, applied: Applied, number: int, fragment: list[Variable]) -> Synchronization:
        optimizer, n = applied.optimizer, applied.num_replicas
        whole = None if n == 1 else applied.whole
        outer = compat.beside(optimizer, "outer", fragment, _outer_variable)
        outer_optimizer = compat.optimizer_beside(optimizer, number, self._new_outer_optimizer)
        compat.build_optimizer(outer_optimizer, outer)
        state = outer_optimizer.variables
        compat.keep_equal(state)
        changes = [shape_dtype(tuple(v.shape), compat.dtype_of(v)) for v in fragment]
        compression = compression_of(CommunicationOptions(compression=self.compression))
        compressed = compression and CompressedSum(compression, whole, optimizer, changes, fragment)
        compression_variables = compressed.variables if compressed else []
        lengths = [len(fragment), len(outer), len(state)]

        def step(values: list[jax.Array]) -> list[jax.Array]:
            local, weights, slots, unsent = _cut(values, lengths)
            # Outer minus local weights, because an optimizer subtracts its gradient. `whole` adds, and the mean is wanted.
            changes = [(w - x) / n for w, x in zip(weights, local, strict=True)]
            if compressed:
                gradients, unsent = compressed.sum(changes, unsent)
            else:
                gradients = changes if whole is None else whole(changes)
            weights, slots = outer_optimizer.stateless_apply(slots, gradients, weights)
            weights = [_constrained(v, w) for v, w in zip(fragment, weights, strict=True)]
            return [*weights, *weights, *slots, *unsent]  # All replicas continue from the outer weights.

        def run(values: list[jax.Array]) -> list[jax.Array]:
            # The fragments are due at equal distances, the last one at the end of each period.
            due = compat.is_due(optimizer, self.every, (number + 1) * self.every // self.fragments)
            changed: list[jax.Array] = lax.cond(due, step, lambda x: x, values)
            return changed

        return Synchronization([*fragment, *outer, *state, *compression_variables], run)


def require_groups(local: LocalUpdates, num_replicas: int) -> None:
    """Checks that the replicas form groups.

    Raises:
      InvalidArgumentError: they do not.
    """
    size = local.replicas_per_group
    if num_replicas > 1 and num_replicas % size:
        raise InvalidArgumentError(
            f"replicas_per_group={size} with {num_replicas} replicas",
            "every group must have the same number of replicas.",
            f"replicas_per_group={math.gcd(num_replicas, size)}",
        )


def gradients_of(local: LocalUpdates, grads: Sequence[Any], num_replicas: int) -> list[Any]:
    """Returns the gradients with which this replica updates its variables.

    Args:
      local: how replicas train on their own.
      grads: this replica's part of the gradients of the global batch, whose sum over the replicas is the gradient.
      num_replicas: the number of replicas.
    """
    require_groups(local, num_replicas)
    size = min(local.replicas_per_group, num_replicas)
    count = num_replicas // size
    # Each group updates as if the other groups had equal gradients, which the sum would contain too.
    scaled = [g * count for g in grads if g is not None]
    if size > 1:
        scaled = _sums(scaled, None if count == 1 else size)
    gradients = iter(scaled)
    return [None if g is None else next(gradients) for g in grads]


def synchronizations(local: LocalUpdates, applied: Applied) -> Iterator[Synchronization]:
    """Returns the synchronization to run after an optimizer was applied."""
    return local._synchronizations(applied)


def refuse(local_updates: object, strategy: str, why: str) -> None:
    """Refuses local updates under a strategy that has no use for them.

    Raises:
      InvalidArgumentError: `local_updates` is not None.
    """
    if local_updates is not None:
        raise InvalidArgumentError(
            f"{strategy}(local_updates={shown(local_updates)})",
            why,
            "phalanx.MirroredStrategy(local_updates=phalanx.experimental.LocalSGD(every=8))",
        )


def _require_optimizer(value: object) -> None:
    if arguments.is_integer(value):
        raise InvalidArgumentError(
            f"DiLoCo({value})", "the first argument is the outer optimizer.", f"DiLoCo(every={value})"
        )
    hint = "outer_optimizer=lambda: keras.optimizers.SGD(0.7, momentum=0.9, nesterov=True)"
    arguments.instance("outer_optimizer", value, keras.optimizers.Optimizer, hint)
    if isinstance(value, keras.optimizers.LossScaleOptimizer):
        raise InvalidArgumentError(
            "outer_optimizer=LossScaleOptimizer",
            "outer gradients do not come from a loss, so there is nothing to scale.",
            hint,
        )


def _average(variables: list[Variable], applied: Applied, every: int) -> Synchronization:
    """Returns the synchronization that gives all replicas the means of some variables."""
    n = applied.num_replicas
    if n == 1 or not variables:
        return Synchronization([], lambda values: values)

    def means(values: list[jax.Array]) -> list[jax.Array]:
        parts, structure = jax.tree.flatten([parts_of_mean(x, None, n) for x in values])
        totals = jax.tree.unflatten(structure, _sums(parts))
        averages = [mean_of_parts(total, n, x.dtype) for total, x in zip(totals, values, strict=True)]
        return [_constrained(v, x) for v, x in zip(variables, averages, strict=True)]

    return Synchronization(
        variables, lambda values: lax.cond(compat.is_due(applied.optimizer, every), means, lambda x: x, values)
    )


def _constrained(variable: Variable, value: jax.Array) -> jax.Array:
    """Returns a value that satisfies the constraint of a variable, as after each update of an optimizer."""
    constraint = getattr(variable, "constraint", None)
    return value if constraint is None else constraint(value)


def _sums(arrays: list[jax.Array], group: int | None = None) -> list[jax.Array]:
    """Returns the sums of arrays over the replicas, or over those of the same group of this size."""
    count = lax.axis_size(REPLICA_AXIS)
    groups = None if group is None else np.arange(count).reshape(-1, group).tolist()
    reduce = lambda buffers: list(psum(buffers, REPLICA_AXIS, axis_index_groups=groups))  # noqa: E731
    return primitives.packed(reduce, arrays, packing.by_length([str(x.dtype) for x in arrays]))


def _is_of_nobody(variable: Variable) -> bool:
    """Whether a variable is neither trained nor a slot, for example a statistic of BatchNormalization."""
    return not variable.trainable and compat.reference_of(variable) is None


def _fragments(variables: Sequence[Variable], count: int) -> list[list[Variable]]:
    """Divides variables into fragments of about equal size. The order in a fragment is theirs."""
    sizes = [math.prod(v.shape) for v in variables]
    loads, places = [0] * count, [0] * len(variables)
    for i in sorted(range(len(variables)), key=lambda i: -sizes[i]):
        places[i] = loads.index(min(loads))
        loads[places[i]] += sizes[i]
    return [[v for v, place in zip(variables, places, strict=True) if place == i] for i in range(count)]


def _cut(values: list[Any], lengths: Sequence[int]) -> list[list[Any]]:
    """Returns the parts of a list that have these lengths, and the rest."""
    ends = [0, *np.cumsum(lengths).tolist(), len(values)]
    return [values[a:b] for a, b in zip(ends, ends[1:], strict=False)]


def _outer_variable(variable: Variable) -> Variable:
    """Returns the outer weights of a variable. They begin with its value.

    A second optimizer of the same variables continues with the outer weights of the first one, if these are the value.
    """
    outer, value = compat.outer_of(variable), compat.raw_value(variable)
    if outer is not None and (value is None or value is compat.raw_value(outer)):
        return outer
    outer = keras.Variable(
        lambda shape, dtype: jnp.asarray(variable.value, dtype),
        shape=tuple(variable.shape),
        dtype=compat.dtype_of(variable),
        trainable=False,
        name="outer",
    )
    compat.keep_equal([outer])
    compat.set_outer(variable, outer)
    return outer
