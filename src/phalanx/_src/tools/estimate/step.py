# SPDX-License-Identifier: Apache-2.0
"""The first training step of a script: catches it before it runs, and compiles it for other devices."""

import re
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

import jax
from typing_extensions import override

from phalanx._src.mesh.layout import AbstractLayout
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.program import Call
from phalanx._src.runtime.observers import Observer, observers
from phalanx._src.runtime.settings import settings
from phalanx._src.strategies.synchronous import SynchronousStrategy
from phalanx._src.tools.estimate import flops
from phalanx._src.tools.estimate.hlo import HloProgram
from phalanx._src.tracing.structure import Arguments
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import InvalidArgumentError, TraceError

T = TypeVar("T")

_LARGE_BYTES = 1 << 20
"""Size in bytes from which a variable gets no value, so that a model that is too large for this machine can be created."""

_OUT_OF_MEMORY = re.compile(r"RESOURCE_EXHAUSTED.*?(?:[Uu]sed |\()([\d.]+)([KMGT]?)\)? (?:of|exceeds)", re.DOTALL)
_UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}


class Memory(NamedTuple):
    """Bytes of one device.

    Args:
      arguments: variables and batch.
      temporary: what the program needs besides arguments and results.
      peak: the most that is in use at any time.
      reused: bytes of arguments whose memory the results take over.
    """

    arguments: int
    temporary: int
    peak: int
    reused: int


class Lowered(NamedTuple):
    """A step for certain devices, before it is compiled."""

    stage: jax.stages.Lowered
    devices: tuple[jax.Device, ...]
    num_replicas: int
    counted_flops: float


class Compiled(NamedTuple):
    """A step for certain devices, as their compiler made it.

    Args:
      memory: its memory. The peak alone is known if the program does not fit.
      flops: multiplications and additions of one device.
      num_bytes: bytes that one device reads and writes.
      program: the parsed text of the program. None if it does not fit.
      seconds: the time that the compiler took.
    """

    memory: Memory
    flops: float
    num_bytes: float
    program: HloProgram | None
    seconds: float


class _Reached(BaseException):
    """Ends a training run before its first step. Not an `Exception`, so that the training does not handle it."""


@dataclass(frozen=True)
class FirstStep:
    """The first step of a training run, which has not run.

    Args:
      call: the call of its program.
      strategy: the strategy that runs it.
    """

    call: Call
    strategy: SynchronousStrategy

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.call.name

    @property
    def num_rows(self) -> int | None:
        """The number of rows that each replica gets. None if no argument is distributed."""
        dim = self._dim_of_rows
        # Most arguments have one row per example. Others may have any size.
        sizes = Counter(x.shape[dim] for x in self._sharded() if len(x.shape) > dim)
        return sizes.most_common(1)[0][0] if sizes else None

    @property
    def num_steps(self) -> int:
        """The number of steps that one call of the program runs."""
        return self.call.program.num_steps or 1

    @property
    def layout(self) -> AbstractLayout | None:
        """The layout of the strategy."""
        return self.strategy.topology.layout

    def lower(
        self, devices: Sequence[jax.Device], layout: AbstractLayout | None = None, num_rows: int | None = None
    ) -> Lowered:
        """Traces and lowers the step for other devices.

        Args:
          devices: the devices, which need not exist.
          layout: the layout of the variables.
          num_rows: rows of each replica. None for as many as the script has.
        """
        before = self.strategy.topology
        topology = Topology(tuple(devices), before.axes, layout, update_sharding=before.update_sharding)
        dim, script_rows = self._dim_of_rows, self.num_rows

        def convert(x: Any) -> jax.ShapeDtypeStruct:
            # The first dim of a sharded argument is that of the replicas.
            shape = [topology.num_replicas, *x.shape[1:]]
            if num_rows and len(shape) > dim and shape[dim] == script_rows:
                shape[dim] = num_rows
            return shape_dtype(tuple(shape), x.dtype)

        with self.strategy.placed_on(topology), settings.changed(convert=convert), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # The script showed its warnings when it was traced here.
            traced = self.call.traced_again().trace()
            # The jaxpr is the program of one replica, which XLA partitions over the devices of the replica.
            counted = flops.count(traced.jaxpr.jaxpr) / topology.devices_per_replica
            return Lowered(traced.lower(), topology.devices, topology.num_replicas, counted)

    @property
    def _dim_of_rows(self) -> int:
        # The dims are replica, step if the program runs several, and row.
        return 1 if self.call.program.num_steps is None else 2

    def _sharded(self) -> list[Any]:
        all_arguments: list[Arguments] = [self.call.arguments, *self.call.batches]
        return [x for a in all_arguments for x, is_sharded in zip(a.arrays, a.sharded, strict=True) if is_sharded]


class _AtFirstStep(Observer, Generic[T]):
    """Ends the code before its first training step.

    Args:
      use: function of the step.

    Attributes:
      results: what `use` has returned; empty before the first training step.
    """

    def __init__(self, use: Callable[[FirstStep], T]) -> None:
        self._use = use
        self.results: list[T] = []

    @override
    def before_program(self, call: Call) -> None:
        # `_Reached` runs the `finally` blocks of the code, which may train too.
        if self.results or not call.program.trains:
            return
        strategy = call.program.strategy
        if not isinstance(strategy, SynchronousStrategy):
            raise InvalidArgumentError(
                f"phalanx.estimate of a step of {type(strategy).__name__}",
                "only synchronous strategies have one program for all devices.",
                "phalanx.MirroredStrategy()",
            )
        # Here and not after the code has ended, when its model may be gone.
        self.results.append(self._use(FirstStep(call, strategy)))
        raise _Reached


def at_first_step(train: Callable[[], Any], use: Callable[[FirstStep], T]) -> T:
    """Calls `train`, stops it before its first training step, and returns `use(step)`.

    Raises:
      TraceError: `train` runs no training step.
      InvalidArgumentError: the strategy of the step has no fixed devices.
    """
    first = _AtFirstStep(use)
    try:
        with (
            observers.including(first),
            settings.changed(hollow_bytes=_LARGE_BYTES, wraps_one_replica=True, emulates_tpus=True),
            warnings.catch_warnings(),
        ):
            # JAX writes programs for absent devices into its persistent cache, but cannot read them from it.
            warnings.filterwarnings("ignore", "Error reading persistent compilation cache")
            train()
    except _Reached:
        pass
    if not first.results:
        raise TraceError(
            "phalanx.estimate of a function that runs no training step",
            "no model of a strategy was trained by fit, and strategy.run has called no step that applies an optimizer, assigns a "
            "trainable variable, or returns the state that it takes.",
            "with phalanx.MirroredStrategy(1).scope(): around the code that creates the model",
        )
    return first.results[0]


def compiled(lowered: Lowered) -> Compiled:
    """Compiles a step. May be called in any thread."""
    start = time.perf_counter()
    try:
        executable = lowered.stage.compile()
    except jax.errors.JaxRuntimeError as e:
        # A compiler refuses a program that does not fit, but its message has the bytes.
        used = _OUT_OF_MEMORY.search(str(e))
        if used is None:
            raise
        peak = int(float(used[1]) * _UNITS[used[2]])
        return Compiled(Memory(0, 0, peak, 0), lowered.counted_flops, 0.0, None, time.perf_counter() - start)
    program, memory = HloProgram(executable.as_text() or ""), executable.memory_analysis()
    assert memory is not None
    # XLA counts the body of a loop once, however often it runs.
    costs = {} if program.num_loops else executable.cost_analysis() or {}
    return Compiled(
        Memory(
            memory.argument_size_in_bytes,
            memory.temp_size_in_bytes,
            _peak(memory),
            memory.alias_size_in_bytes,
        ),
        costs.get("flops", lowered.counted_flops),
        costs.get("bytes accessed", float(program.num_bytes)),
        program,
        time.perf_counter() - start,
    )


def _peak(memory: Any) -> int:
    """Returns the highest use of memory. Arguments stay where they are, and results take over what is reused."""
    persistent_bytes = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
    # Compilers for TPUs leave temporary memory out of the sum, and those for CPUs out of the peak.
    return int(max(persistent_bytes + memory.temp_size_in_bytes, memory.peak_memory_in_bytes))
