# SPDX-License-Identifier: Apache-2.0
"""Traces scheduled functions and exports them as programs for the workers."""

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any

import jax
import numpy as np

from phalanx._src.compat import Variable
from phalanx._src.kernels.platforms import compiled_for
from phalanx._src.parameter_server.remote.plans import WorkerProgram
from phalanx._src.parameter_server.scheduling.values import PerWorkerDataset, PerWorkerIterator, PerWorkerValues
from phalanx._src.parameter_server.variables.homes import Homes
from phalanx._src.programs.cache import ProgramCache, Settings
from phalanx._src.programs.export import export
from phalanx._src.tracing import context
from phalanx._src.tracing.context import Mode
from phalanx._src.tracing.policy import describe
from phalanx._src.tracing.records import EITHER_WAY, Recording, deliver
from phalanx._src.tracing.strategy import AbstractStrategy
from phalanx._src.tracing.structure import Arguments, Structure
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import InvalidArgumentError, shown
from phalanx.typing import PyTree

_SEED_STRIDE = np.uint32(0x9E3779B9)
"""Added to a seed after each step. It is odd, so seeds repeat only after 2**32 steps."""


@dataclass(frozen=True)
class Placeholder:
    """Stands for a per-worker dataset or value among the arguments.

    Args:
      number: index of the dataset or value among the resources of the step.
      is_iterator: whether the resource is the iterator of a dataset.
    """

    number: int
    is_iterator: bool


@dataclass(eq=False)
class ScheduledStep:
    """One function with one structure of arguments.

    Args:
      number: identifies the step on the workers.
      arguments: the arguments of the first call.
      is_run: whether the function is a replica function for `Strategy.run`.
      recording: selects what the programs record, or `EITHER_WAY` if they record nothing.
      programs: the traced programs, keyed by the shapes of the batches of the workers.
      outputs: the structures of the return value and of the records, without arrays, keyed by program variant.
      seeds: the variables that hold the states of the random generators which the step uses.
      settings: the settings of variables and optimizers at the time of the trace. None before the first trace.
    """

    number: int
    arguments: Arguments
    is_run: bool
    recording: Hashable
    programs: dict[Any, WorkerProgram] = field(default_factory=dict)
    outputs: dict[int, tuple[Structure, jax.tree_util.PyTreeDef]] = field(default_factory=dict)
    seeds: list[Variable] = field(default_factory=list)
    settings: Settings | None = None

    def finish(self, variant: int, arrays: list[Any], recording: Recording) -> PyTree:
        """Gives the records of one execution to their writers, and returns the return value.

        Args:
          variant: number of the program.
          arrays: what the program has returned.
          recording: what the thread recorded that has scheduled the step.
        """
        output, records = self.outputs[variant]
        count = len(arrays) - records.num_leaves
        if recorded := records.unflatten(arrays[count:]):
            with recording.applied():
                deliver(recorded)
        return output.join(arrays[:count], [])


class StepCache:
    """Caches the programs of all scheduled steps.

    Args:
      strategy: the strategy under which steps are traced.
      homes: the placement of the strategy's variables on parameter servers.
      platforms: returns the JAX platforms for which programs are exported. Called at the first trace.
    """

    def __init__(self, strategy: AbstractStrategy, homes: Homes, platforms: Callable[[], Sequence[str]]) -> None:
        self._strategy, self._homes, self._platforms = strategy, homes, platforms
        self._numbers, self._variants = itertools.count(), itertools.count()
        self._cache: ProgramCache[ScheduledStep] = ProgramCache()
        self._lock = threading.RLock()

    def step(
        self, fn: Callable[..., Any], args: PyTree, kwargs: PyTree, recording: Recording, *, is_run: bool
    ) -> tuple[ScheduledStep, tuple[Any, ...], list[PerWorkerValues]]:
        """Returns the step of a call, and the arrays and the per-worker resources among its arguments."""
        resources: list[PerWorkerValues] = []

        def placeholder(leaf: PyTree) -> PyTree:
            if not isinstance(leaf, PerWorkerValues):
                return leaf
            # Two arguments may be the same iterator. They then take batches from it in turn.
            number = next((i for i, r in enumerate(resources) if r is leaf), len(resources))
            if number == len(resources):
                resources.append(leaf)
            return Placeholder(number, isinstance(leaf, PerWorkerIterator))

        args, kwargs = jax.tree.map(placeholder, (args, kwargs), is_leaf=lambda x: isinstance(x, PerWorkerValues))
        arguments = Arguments(args, kwargs)
        with self._lock:
            known = self._cache.known(fn, (arguments.key, is_run))
            # In place, because the cache holds this list. A step whose settings have changed needs another program.
            known[:] = [step for step in known if step.settings is None or step.settings.hold()]
            scheduled_step = next((step for step in known if step.recording in (EITHER_WAY, recording.key)), None)
            if scheduled_step is None:
                scheduled_step = ScheduledStep(next(self._numbers), arguments, is_run, recording.key)
                known.append(scheduled_step)
            return scheduled_step, tuple(np.asarray(x) for x in arguments.arrays), resources

    def program(
        self, step: ScheduledStep, fn: Callable[..., Any], specs: PyTree, recording: Recording
    ) -> WorkerProgram:
        """Returns the program of a step for batches with the shapes `specs`. Traces it at the first call.

        Raises:
          TraceError: the step cannot be traced.
        """
        with self._lock:
            # Under the lock, because the threads of several workers may ask for the same program at once.
            if specs not in step.programs:
                try:
                    with recording.applied():
                        step.programs[specs] = self._traced(step, fn, specs)
                except Exception:
                    self._cache.forgive(fn)
                    raise
            return step.programs[specs]

    def seeds(self, step: ScheduledStep) -> tuple[np.ndarray, ...]:
        """Returns generator states for one execution of a step. No other execution gets the same states."""
        with self._lock:
            states = [np.asarray(v.value) for v in step.seeds]
            for variable, state in zip(step.seeds, states, strict=True):
                variable.assign(np.concatenate([state[:1] + _SEED_STRIDE, state[1:]]))
            return tuple(states)

    def _traced(self, step: ScheduledStep, fn: Callable[..., Any], specs: PyTree) -> WorkerProgram:
        taken = [list(of_resource) for of_resource in specs]
        while True:
            used: list[_TracedBatches] = []
            try:
                exported = self._exported(step, fn, taken, used)
                break
            except _NeedsMore as e:
                # Assumes the shape of the previous batch. A worker with another shape asks for a new program.
                taken[e.number].append(taken[e.number][-1])
        homes = self._homes
        updates = tuple(homes.updates.plan(u, exported) for u in exported.updates)
        homes.take_in([v for i, v in enumerate(exported.variables) if i not in exported.seeds])
        placements = tuple(
            None if i in exported.seeds else homes.placement(v) for i, v in enumerate(exported.variables)
        )
        step.settings = Settings(exported.variables, [u.optimizer for u in exported.updates])
        step.seeds = [exported.variables[i] for i in exported.seeds]
        variant = next(self._variants)
        step.outputs[variant] = exported.output, exported.records
        step.recording = exported.recording
        return WorkerProgram(
            name=name_of(fn),
            module=exported.module,
            draws=tuple(batches.taken for batches in used),
            values=placements,
            added=exported.added,
            set=exported.set,
            updates=updates,
            holders=homes.ledger.copies([p for p in placements if p is not None]),
            variant=variant,
            ids=exported.ids,
            lookups=exported.lookups,
            tables={i: (n, describe(exported.variables[i])) for i, n in exported.num_rows.items()},
        )

    def _exported(
        self, step: ScheduledStep, fn: Callable[..., Any], taken: list[list[Any]], used: list["_TracedBatches"]
    ) -> PyTree:
        arguments = step.arguments
        arrays = [np.asarray(x) for x in arguments.arrays]
        drawn = [shape_dtype(x.shape, x.dtype) for of in taken for _, leaves in of for x in leaves]

        def call(inputs: list[Any]) -> PyTree:
            rest = iter(inputs[len(arrays) :])
            # Made again in each call: the export of a step with tables traces it more than once.
            used[:] = [
                _TracedBatches(i, [tree.unflatten([next(rest) for _ in leaves]) for tree, leaves in of])
                for i, of in enumerate(taken)
            ]
            args, kwargs = arguments.structure.join(inputs[: len(arrays)])
            fill = lambda x: used[x.number].fill(x) if isinstance(x, Placeholder) else x  # noqa: E731
            args, kwargs = jax.tree.map(fill, (args, kwargs))
            return self._strategy.run(fn, args, kwargs) if step.is_run else fn(*args, **kwargs)

        platforms = self._platforms()
        with context.enter(Mode(self._strategy, None)), compiled_for(platforms):
            return export(call, [*arrays, *drawn], platforms, clips=self._homes.updates.clips)


def name_of(fn: object) -> str:
    """Returns the name of a function for messages."""
    return str(getattr(fn, "__qualname__", repr(fn)))


class _TracedBatches:
    """Stands for a per-worker dataset or value while a step is traced."""

    def __init__(self, number: int, batches: list[Any]) -> None:
        self._number, self._batches = number, batches
        self.taken = 0

    def fill(self, placeholder: Placeholder) -> Any:
        """Returns the argument that replaces `placeholder`."""
        if placeholder.is_iterator:
            return self
        self.taken = 1
        return self._batches[0]

    def __iter__(self) -> "_TracedBatches":
        return self

    def __next__(self) -> PyTree:
        if self.taken == len(self._batches):
            raise _NeedsMore(self._number)
        self.taken += 1
        return self._batches[self.taken - 1]

    def get_next(self) -> PyTree:
        """Returns the next batch, under the name that tf.data uses."""
        return next(self)


class _NeedsMore(BaseException):
    """A traced function takes more batches than provided. A BaseException, so that user code does not catch it."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def check_call(args: PyTree, kwargs: PyTree, remote: type) -> None:
    """Checks the arguments of a step.

    Args:
      args: positional arguments of the step.
      kwargs: keyword arguments of the step.
      remote: the class of remote values.

    Raises:
      InvalidArgumentError: `args` is not a list or tuple, or an argument is a remote value, a per-worker dataset, or an
        iterator of this process, whose first batch every step would reuse.
    """
    if not isinstance(args, list | tuple | NoneType):
        raise InvalidArgumentError(f"args={shown(args)}", "must be a list or a tuple.", "args=(iterator,)")
    leaves = jax.tree.leaves((args, kwargs), is_leaf=lambda x: isinstance(x, remote) or hasattr(x, "__next__"))
    if any(isinstance(x, remote) for x in leaves):
        raise InvalidArgumentError(
            "a RemoteValue among the arguments of schedule",
            "the step that computes it may not have run yet.",
            "schedule(fn, args=(value.fetch(),))",
        )
    for leaf in leaves:
        if isinstance(leaf, PerWorkerDataset):
            raise InvalidArgumentError(
                "a per-worker dataset among the arguments of schedule",
                "a step takes batches from an iterator, not from the dataset.",
                "iterator = iter(dataset), once per epoch, and args=(iterator,)",
            )
        if hasattr(leaf, "__next__") and not isinstance(leaf, PerWorkerValues):
            raise InvalidArgumentError(
                f"{shown(leaf)} among the arguments of schedule",
                "it is an iterator of this process, but steps run on workers.",
                "iter(coordinator.create_per_worker_dataset(dataset_fn)), or next(iterator) as the argument",
            )
