# SPDX-License-Identifier: Apache-2.0
"""Scheduled functions as programs of the workers."""

import inspect
import itertools
import threading
import weakref
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import jax
import numpy as np

from phalanx import compat
from phalanx.compat import Variable
from phalanx.coordinator.values import PerWorkerDataset, PerWorkerIterator, PerWorkerValues
from phalanx.errors import InvalidArgumentError, shown
from phalanx.programs.cache import MadeAnew
from phalanx.programs.export import export
from phalanx.servers.remote.plans import StepProgram
from phalanx.strategies.parameter_server import ParameterServerStrategy
from phalanx.tracing import context
from phalanx.tracing.context import Mode
from phalanx.tracing.policy import describe
from phalanx.tracing.structure import Arguments, Structure

_SEED_STRIDE = np.uint32(0x9E3779B9)
"""Odd, so that as many steps as there are numbers have different seeds."""


@dataclass(frozen=True)
class Slot:
    """Stands for a worker's own dataset or value among the arguments.

    Args:
      number: which of them.
      is_iterator: whether it is a dataset's iterator.
    """

    number: int
    is_iterator: bool


@dataclass(eq=False)
class Step:
    """One function with arguments of one kind.

    Args:
      number: its name.
      arguments: those of the first call.
      is_run: whether the function is one for `Strategy.run`.
      is_first: whether its function was not scheduled before.
      programs: what workers run, by the shapes of their batches.
      outputs: what it returns, without its arrays, by variant.
      seeds: the states of the random generators that it draws from.
      shaped_by: variables and whether they are trained, and optimizers and what decides their learning rates.
      changes: how often `trainable` of any variable had been set then.
    """

    number: int
    arguments: Arguments
    is_run: bool
    is_first: bool
    programs: dict[Any, StepProgram] = field(default_factory=dict)
    outputs: dict[int, Structure] = field(default_factory=dict)
    seeds: list[Variable] = field(default_factory=list)
    shaped_by: list[tuple[Any, Any]] = field(default_factory=list)
    changes: int = 0

    def fits(self) -> bool:
        """Whether the Python objects that shaped its programs are as they were."""
        if self.changes == compat.changes.trainable:
            return all(_shape_of(x) is known for x, known in self.shaped_by if not isinstance(x, Variable))
        self.changes = compat.changes.trainable
        return all(_shape_of(x) is known for x, known in self.shaped_by)


class Steps:
    """All steps of a coordinator.

    Args:
      strategy: whose variables they use.
      platforms: of the workers.
    """

    def __init__(self, strategy: ParameterServerStrategy, platforms: Sequence[str]) -> None:
        self._strategy, self._platforms = strategy, platforms
        self._numbers, self._variants = itertools.count(), itertools.count()
        self._of_function: weakref.WeakKeyDictionary[Any, dict[Hashable, Step]] = weakref.WeakKeyDictionary()
        self._lock, self._made_anew = threading.RLock(), MadeAnew()

    def step(
        self, fn: Any, args: Any, kwargs: Any, *, is_run: bool
    ) -> tuple[Step, tuple[Any, ...], list[PerWorkerValues]]:
        """Returns the step of a call, its arrays, and the workers' own datasets and values among its arguments."""
        resources: list[PerWorkerValues] = []

        def slot(leaf: Any) -> Any:
            if not isinstance(leaf, PerWorkerValues):
                return leaf
            number = next((i for i, r in enumerate(resources) if r is leaf), len(resources))
            if number == len(resources):
                resources.append(leaf)
            return Slot(number, isinstance(leaf, PerWorkerIterator))

        args, kwargs = jax.tree.map(slot, (args, kwargs), is_leaf=lambda x: isinstance(x, PerWorkerValues))
        arguments = Arguments(args, kwargs)
        owner, name = (fn.__self__, fn.__func__) if inspect.ismethod(fn) else (fn, None)
        with self._lock:
            known = self._of_function.setdefault(owner, {})
            key = (name, arguments.key, is_run)
            if known:
                self._made_anew.forgive(fn)
            if key not in known or not known[key].fits():
                known[key] = Step(next(self._numbers), arguments, is_run, is_first=not known)
            return known[key], tuple(np.asarray(x) for x in arguments.arrays), resources

    def program(self, step: Step, fn: Any, specs: Any) -> StepProgram:
        """Returns the program of a step for batches of some shapes; traces it the first time.

        Raises:
          TraceError: it cannot be traced.
        """
        with self._lock:
            if specs not in step.programs:
                program = self._traced(step, fn, specs)
                if step.is_first and not step.programs:
                    self._made_anew.note(fn)
                step.programs[specs] = program
            return step.programs[specs]

    def seeds(self, step: Step) -> tuple[np.ndarray, ...]:
        """Returns states for the random generators of one execution of a step, which no other gets."""
        with self._lock:
            states = [np.asarray(v.value) for v in step.seeds]
            for variable, state in zip(step.seeds, states, strict=True):
                variable.assign(np.concatenate([state[:1] + _SEED_STRIDE, state[1:]]))
            return tuple(states)

    def _traced(self, step: Step, fn: Any, specs: Any) -> StepProgram:
        taken = [list(of_resource) for of_resource in specs]
        while True:
            used: list[_Batches] = []
            try:
                exported = self._exported(step, fn, taken, used)
                break
            except _NeedsMore as e:
                # As large as the one before: a worker that has another one asks again.
                taken[e.number].append(taken[e.number][-1])
        homes = self._strategy.homes
        updates = tuple(homes.plan(u, exported) for u in exported.updates)
        homes.take_in([v for i, v in enumerate(exported.variables) if i not in exported.seeds])
        placements = tuple(
            None if i in exported.seeds else homes.placement(v) for i, v in enumerate(exported.variables)
        )
        shaping = [*exported.variables, *(u.optimizer for u in exported.updates)]
        step.shaped_by, step.changes = [(x, _shape_of(x)) for x in shaping], compat.changes.trainable
        step.seeds = [exported.variables[i] for i in exported.seeds]
        variant = next(self._variants)
        step.outputs[variant] = exported.output
        return StepProgram(
            name=name_of(fn),
            module=exported.module,
            draws=tuple(batches.taken for batches in used),
            values=placements,
            added=exported.added,
            set=exported.set,
            updates=updates,
            holders=homes.holders([p for p in placements if p is not None]),
            variant=variant,
            ids=exported.ids,
            lookups=exported.lookups,
            tables={i: (n, describe(exported.variables[i])) for i, n in exported.num_rows.items()},
        )

    def _exported(self, step: Step, fn: Any, taken: list[list[Any]], used: list["_Batches"]) -> Any:
        given = step.arguments
        own = [np.asarray(x) for x in given.arrays]
        drawn = [jax.ShapeDtypeStruct(x.shape, x.dtype) for of in taken for _, leaves in of for x in leaves]

        def call(inputs: list[Any]) -> Any:
            rest = iter(inputs[len(own) :])
            used[:] = [
                _Batches(i, [tree.unflatten([next(rest) for _ in leaves]) for tree, leaves in of])
                for i, of in enumerate(taken)
            ]
            args, kwargs, _ = Arguments.rebuild(given.structure, len(given.rows), inputs[: len(own)])
            fill = lambda x: used[x.number].fill(x) if isinstance(x, Slot) else x  # noqa: E731
            args, kwargs = jax.tree.map(fill, (args, kwargs))
            return self._strategy.run(fn, args, kwargs) if step.is_run else fn(*args, **kwargs)

        with context.enter(Mode(self._strategy, None)):
            return export(call, [*own, *drawn], self._platforms, clips=self._strategy.homes.clips)


def name_of(fn: Any) -> str:
    """Returns what a function is called in messages."""
    return str(getattr(fn, "__qualname__", repr(fn)))


def _shape_of(shaping: Any) -> Any:
    """Returns what programs depend on in a variable or an optimizer."""
    return shaping.trainable if isinstance(shaping, Variable) else compat.learning_rate_of(shaping)


class _Batches:
    """A worker's dataset, or value, while a step is traced."""

    def __init__(self, number: int, batches: list[Any]) -> None:
        self._number, self._batches = number, batches
        self.taken = 0

    def fill(self, slot: Slot) -> Any:
        """Returns what the function gets."""
        if slot.is_iterator:
            return self
        self.taken = 1
        return self._batches[0]

    def __iter__(self) -> "_Batches":
        return self

    def __next__(self) -> Any:
        if self.taken == len(self._batches):
            raise _NeedsMore(self._number)
        self.taken += 1
        return self._batches[self.taken - 1]

    def get_next(self) -> Any:
        """`next` under the name it has in tf.data."""
        return next(self)


class _NeedsMore(BaseException):
    """A function takes more batches than were there. Not an `Exception`: nothing between may catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def check_call(args: Any, kwargs: Any, remote: type) -> None:
    """Raises for arguments that no step takes.

    Raises:
      InvalidArgumentError: no list or tuple; the value of another step, which may not be known yet; or an iterator that is not
        of the workers, of which the step would have one batch for ever.
    """
    if not isinstance(args, list | tuple | NoneType):
        raise InvalidArgumentError(f"args={shown(args)}", "must be a list or a tuple.", "args=(iterator,)")
    leaves = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, remote) or hasattr(x, "__next__"))
    if any(isinstance(x, remote) for x in leaves):
        raise InvalidArgumentError(
            "a RemoteValue among the arguments of schedule",
            "the step that makes it may not have run yet.",
            "schedule(fn, args=(value.fetch(),))",
        )
    for leaf in leaves:
        if isinstance(leaf, PerWorkerDataset):
            raise InvalidArgumentError(
                "a per-worker dataset among the arguments of schedule",
                "a step takes batches from an iterator of it.",
                "iterator = iter(dataset), once for an epoch, and args=(iterator,)",
            )
        if hasattr(leaf, "__next__") and not isinstance(leaf, PerWorkerValues):
            raise InvalidArgumentError(
                f"{shown(leaf)} among the arguments of schedule",
                "it is an iterator of this process, and steps run on workers.",
                "iter(coordinator.create_per_worker_dataset(dataset_fn)); or next(iterator) as the argument",
            )
