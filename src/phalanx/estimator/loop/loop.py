# SPDX-License-Identifier: Apache-2.0
"""The loop that runs the steps of a graph, with hooks between them."""

import logging
import os
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from typing import Any, final

import jax
import keras
import numpy as np
from typing_extensions import override

from phalanx._src.input.sources.functions import InputContext
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx._src.typed_jax import block_until_ready
from phalanx.coordinator import ClusterCoordinator, RemoteValue, experimental_get_current_worker_index
from phalanx.errors import CancelledError, InputError, InvalidArgumentError, OutOfRangeError, shown
from phalanx.estimator.loop.graph import Graph
from phalanx.estimator.loop.recorder import Recorder
from phalanx.estimator.loop.session import SessionRunArgs, SessionRunContext, SessionRunHook, SessionRunValues
from phalanx.keras.agreement import stops
from phalanx.typing import PyTree

_log = logging.getLogger("phalanx")

_AHEAD = 16
"""Number of scheduled steps per worker that may wait or run."""

# ClusterCoordinator cancels all queued steps after the first error, so the end of the data has two faces.
_ENDS = (OutOfRangeError, CancelledError)
"""What a scheduled step raises at the end of the data, and what those after it raise."""

Outputs = Any
"""What a step returns: the loss, the arrays for hooks, and the predictions; or a `RemoteValue` of these."""


class AbstractSteps(ABC):
    """The steps of a graph over the batches of an input function.

    Attributes:
      ahead: number of steps that may run while the loop continues.
      each: number of steps that one call of `run` makes.
    """

    ahead = each = 1

    @abstractmethod
    def prepare(self) -> None:
        """Traces the step for the first batch.

        Raises:
          InputError: there is no batch.
        """

    @abstractmethod
    def run(self) -> Outputs | None:
        """Runs a step, or one of each worker. Returns None at the end of the data."""

    def settle(self) -> None:  # noqa: B027  (only scheduled steps wait)
        """Waits until all steps so far have ended, so that the variables have their values."""

    @property
    def is_empty(self) -> bool:
        """Whether it is known that no batch is left."""
        return False


@final
class SynchronousSteps(AbstractSteps):
    """Steps that this process runs with its replicas.

    Args:
      graph: the graph.
      batches: batches of features and labels, distributed by the strategy of the graph if it has several replicas.
    """

    def __init__(self, graph: Graph, batches: Iterator[PyTree]) -> None:
        self._graph, self._batches = graph, batches
        self._next = next(self._batches, None)

    @property
    @override
    def is_empty(self) -> bool:
        return self._next is None

    @override
    def prepare(self) -> None:
        if self._next is None:
            raise _no_batch()
        self._graph.prepare(self._next)

    @override
    def run(self) -> Outputs | None:
        if self._next is None:
            return None
        outputs: Outputs = self._graph.program(self._next)
        self._next = next(self._batches, None)
        return outputs


@final
class ScheduledSteps(AbstractSteps):
    """Steps that the workers of a `ParameterServerStrategy` run, each on its own data.

    Args:
      graph: the graph.
      dataset_fn: function of an `InputContext`. Each worker calls it.
    """

    def __init__(self, graph: Graph, dataset_fn: Callable[[InputContext], Any]) -> None:
        assert isinstance(graph.strategy, ParameterServerStrategy)
        # The replica step and not the program: each worker compiles the step for itself.
        strategy, step = graph.strategy, graph.replica_step
        self._graph, self._coordinator = graph, ClusterCoordinator(strategy)
        workers = strategy.cluster.workers
        self.ahead = _AHEAD * workers
        # Hooks wait for values between steps, and synchronous workers make one update together: never between two of them.
        self.each = workers if strategy.max_staleness == 0 else 1

        def own_dataset() -> PyTree:
            return dataset_fn(InputContext(workers, experimental_get_current_worker_index(), 1))

        def scheduled(iterator: Iterator[Any]) -> Outputs:
            outputs: Outputs = strategy.run(step, args=(next(iterator),))
            return outputs

        self._step = scheduled
        self._iterator: Any = iter(self._coordinator.create_per_worker_dataset(own_dataset))
        self._running: deque[Any] = deque()

    @override
    def prepare(self) -> None:
        # Variables must exist before a worker can run a step, and the data is
        # on the workers: a batch of zeros stands in.
        spec = self._coordinator.spec_of(self._iterator)
        self._graph.prepare(jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), spec))

    @override
    def run(self) -> Outputs | None:
        try:
            for _ in range(self.each):
                value = self._coordinator.schedule(self._step, args=(self._iterator,))
                self._running.append(value)
            # Waiting for the oldest step bounds the queue, and raises here what that step raised on its worker.
            while len(self._running) > self.ahead:
                self._running.popleft().get()
        except _ENDS:
            return None
        return value

    @override
    def settle(self) -> None:
        # `join` waits for all of them and raises their errors, so their single results are of no interest.
        self._running.clear()
        with suppress(*_ENDS):
            self._coordinator.join()


def _no_batch() -> InputError:
    return InputError(
        "an input_fn without a batch", "the dataset is empty.", "return at least one batch, in the input_fn"
    )


@final
class GraphSession:
    """Evaluates variables, and what the last step has returned. Hooks receive it as their session.

    Args:
      graph: the graph.
      steps: its steps.
    """

    def __init__(self, graph: Graph, steps: AbstractSteps) -> None:
        self.graph, self._steps = graph, steps
        self._start = self._count = 0
        self._outputs: Outputs | None = None
        self._profile_dir: str | None = None

    def prepare(self) -> None:
        """Traces the step for the first batch."""
        self._steps.prepare()

    @property
    def step(self) -> int:
        """The number of training steps so far."""
        if self.graph.trace.counts_itself:
            self.settle()
            return int(self.graph.global_step)
        # Asking the devices would wait for the step that runs.
        return self._start + self._count * self.graph.is_training

    def start(self) -> None:
        """Counts from the number of steps that the variables have now."""
        self._start, self._count = int(self.graph.global_step), 0

    def advance(self) -> Outputs | None:
        """Runs a step. Returns None at the end of the data."""
        # Profiles one step: the request is used up even if the data ends here.
        folder, self._profile_dir = self._profile_dir, None
        if folder is None or self._steps.is_empty:
            return self._advance()
        self.settle()
        with jax.profiler.trace(folder):
            outputs = self._advance()
            self.wait()
        _log.info("Profiled step %d into %s.", self.step, os.path.join(folder, "plugins/profile"))
        return outputs

    def _advance(self) -> Outputs | None:
        outputs = self._steps.run()
        if outputs is not None:
            self._outputs = outputs
            self._count += self._steps.each
        return outputs

    def profile_next(self, folder: str) -> None:
        """Profiles the next step into a folder, if there is a next step."""
        self._profile_dir = folder

    def settle(self) -> None:
        """Waits until all scheduled steps have ended. Those that found no data are not counted."""
        self._steps.settle()
        if isinstance(self._outputs, RemoteValue):
            self._count = int(self.graph.global_step) - self._start

    @property
    def ahead(self) -> int:
        """The number of steps that may run while the loop continues."""
        return self._steps.ahead

    def later(self, fetch: PyTree) -> Callable[[], PyTree]:
        """Returns a function that returns the value of a fetch after the last step, without waiting for it now.

        The function returns None if the step found no data.
        """
        outputs = self._outputs

        def value() -> PyTree:
            # `run` reads the last outputs. They are swapped for the call, so that
            # `later` needs no second way to resolve a fetch.
            before, self._outputs = self._outputs, outputs
            try:
                return self.run(fetch)
            except _ENDS:
                return None
            finally:
                self._outputs = before

        return value

    def wait(self) -> None:
        """Waits until the last step has ended."""
        self.settle()
        if not isinstance(self._outputs, RemoteValue):
            # JAX dispatches asynchronously: without this, a profile of the step would end before the step does.
            block_until_ready(jax.tree.leaves(self._outputs))

    def run(self, fetches: PyTree, feed_dict: None = None) -> PyTree:
        """Returns the values of fetches.

        Args:
          fetches: nest of variables, names of variables, names given by `identity`, `"loss"`, and arrays of the model function.
          feed_dict: must be None.

        Returns:
          Nest like `fetches` of arrays. An array of the model function has its value of the last step, on the first replica of
          this process.

        Raises:
          InvalidArgumentError: a fetch is none of these, or the last step has not computed it.
        """
        SessionRunArgs(fetches, feed_dict)
        # A Keras variable is no leaf for JAX unless it is said to be one.
        return jax.tree.map(self._value, fetches, is_leaf=lambda x: isinstance(x, keras.Variable))

    def _value(self, fetch: PyTree) -> PyTree:
        if isinstance(fetch, keras.Variable):
            return np.asarray(fetch.value)
        # A constant of the model function is fetched as itself, as a constant tensor is in TensorFlow.
        if isinstance(fetch, (np.ndarray, np.generic, int, float)) or _is_concrete(fetch):
            return fetch
        loss, arrays, _ = self._last(fetch)
        if isinstance(fetch, str) and fetch.partition(":")[0] == "loss":
            return loss
        place = self.graph.place_of(fetch)
        if place is not None:
            # tf.estimator fetches from the first replica too: hooks see single values, not PerReplica ones.
            return self.graph.strategy.experimental_local_results(arrays[place])[0]
        variable = self.graph.find(fetch) if isinstance(fetch, str) else None
        if variable is None:
            raise InvalidArgumentError(
                f"fetches={shown(fetch)}",
                "it is neither a variable, nor an array that the hook got in the model_fn, nor a name of one.",
                "estimator.identity(array, name) in the model_fn, and this name in the hook",
            )
        return np.asarray(variable.value)

    def _last(self, fetch: PyTree) -> tuple[PyTree, PyTree, PyTree]:
        if self._outputs is None:
            # Variables have values before the first step: `after_create_session` may read them.
            if isinstance(fetch, str) and self.graph.find(fetch) is not None:
                return None, [], None
            raise InvalidArgumentError(f"fetches={shown(fetch)}", "no step has run yet.", "fetch it in before_run")
        loss, arrays, predictions = self._outputs.get() if isinstance(self._outputs, RemoteValue) else self._outputs
        return loss, arrays, predictions


def _is_concrete(fetch: object) -> bool:
    return isinstance(fetch, jax.Array) and not isinstance(fetch, jax.core.Tracer)


def run_loop(
    session: GraphSession, hooks: Sequence[SessionRunHook], most: int | None = None, recorder: Recorder | None = None
) -> Iterator[Outputs]:
    """Runs steps until the data ends or a hook of any worker requests a stop. Yields the outputs of each step.

    The hooks have begun, and the variables have their values.

    Args:
      session: runs the steps.
      hooks: the hooks, in order.
      most: number of steps after which it stops. None for no limit.
      recorder: records summaries. None for no summaries.
    """
    recorder = recorder or Recorder(None, None)
    # Hooks read these as `original_args`. The loop of tf.estimator fetches the train_op and the loss.
    run_args, count = SessionRunArgs(["loss", session.graph.global_step]), 0
    for hook in hooks:
        # No Coordinator: the loop has no queue runners that one would stop.
        hook.after_create_session(session, None)
    recorder.start(session.step)
    while most is None or count < most:
        run_context = SessionRunContext(run_args, session)
        hook_args = [hook.before_run(run_context) for hook in hooks]
        with recorder.step(session.step):
            outputs = session.advance()
        # The data has ended: tf.estimator ends normally here, too (OutOfRangeError is no error for it).
        if outputs is None:
            break
        count += 1
        try:
            results = [
                x if x is None else session.run(_fetches_of(h, x)) for h, x in zip(hooks, hook_args, strict=True)
            ]
        except _ENDS:  # A scheduled step found no data.
            break
        for hook, result in zip(hooks, results, strict=True):
            hook.after_run(run_context, SessionRunValues(result))
        yield outputs
        # All processes decide together: if one left the loop alone, the others would wait in the next all-reduce.
        if stops(run_context.stop_requested, session.graph.strategy.topology):
            break
    session.settle()
    for hook in hooks:
        hook.end(session)


def _fetches_of(hook: SessionRunHook, args: object) -> PyTree:
    if not isinstance(args, SessionRunArgs):
        raise InvalidArgumentError(
            f"{type(hook).__name__}.before_run, which returns {shown(args)}",
            "it must return SessionRunArgs or None.",
            "return estimator.SessionRunArgs(fetches)",
        )
    return args.fetches
