# SPDX-License-Identifier: Apache-2.0
"""`ClusterCoordinator`: the public methods that schedule steps on workers."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from phalanx._src.parameter_server.scheduling import progress
from phalanx._src.parameter_server.scheduling.progress import Status
from phalanx._src.parameter_server.scheduling.queue import RemoteValue
from phalanx._src.parameter_server.scheduling.scheduler import Scheduler
from phalanx._src.parameter_server.scheduling.steps import check_call
from phalanx._src.parameter_server.scheduling.values import (
    PerWorkerDataset,
    PerWorkerValues,
    check_function,
    check_maker,
)
from phalanx._src.programs.function import Function
from phalanx._src.tracing.strategy import AbstractStrategy
from phalanx.errors import InvalidArgumentError, shown
from phalanx.errors.deferred import raise_deferred
from phalanx.typing import PyTree


@final
class ClusterCoordinator:
    """Schedules steps on the workers of a `ParameterServerStrategy`.

    Must be created outside all scopes, or in the scope of the strategy. The first coordinator of a strategy starts the
    workers. All coordinators of a strategy share its workers and its queue.

    Args:
      strategy: a `ParameterServerStrategy`.

    Raises:
      InvalidArgumentError: `strategy` is not a `ParameterServerStrategy`.
      ContextError: the strategy was closed.

    Source: tf.distribute.coordinator.ClusterCoordinator.

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.ParameterServerStrategy(workers=1)
      >>> coordinator = phalanx.coordinator.ClusterCoordinator(strategy)
      >>> dataset = coordinator.create_per_worker_dataset(lambda: [1.0, 2.0, 3.0])
      >>> with strategy.scope():
      ...     total = keras.Variable(0.0, trainable=False, aggregation="sum")
      >>> def step(iterator):
      ...     total.assign_add(next(iterator))
      >>> iterator = iter(dataset)
      >>> for _ in range(3):
      ...     _ = coordinator.schedule(step, args=(iterator,))
      >>> coordinator.join()
      >>> float(total.value)
      6.0
      >>> strategy.close()
    """

    def __init__(self, strategy: AbstractStrategy) -> None:
        # `strategies` is above this package, so the class of the strategy cannot be imported. The first access starts the workers.
        scheduler = getattr(strategy, "scheduler", None) if isinstance(strategy, AbstractStrategy) else None
        if not isinstance(scheduler, Scheduler):
            raise InvalidArgumentError(
                f"ClusterCoordinator({shown(strategy)})",
                "only a ParameterServerStrategy has workers on which steps can be scheduled.",
                "ClusterCoordinator(phalanx.ParameterServerStrategy())",
            )
        self._strategy, self._scheduler = strategy, scheduler

    @property
    def strategy(self) -> AbstractStrategy:
        """The strategy whose workers run the steps. May be called in any context."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> RemoteValue:
        """Schedules `fn(*args, **kwargs)` on any worker and returns immediately.

        May be called outside of scheduled steps.

        The function is traced in this process, once per set of argument shapes, and sent to the worker as a program. It
        runs at least once: if its worker is lost, another worker runs it again. The call blocks while the queue is
        full.

        Args:
          fn: the step. It may read and write variables and call `strategy.run`, as in `phalanx.function`.
          args: positional arguments of `fn`. A per-worker iterator or value is replaced by that of the worker.
          kwargs: keyword arguments of `fn`.

        Returns:
          A handle of the future return value.

        Raises:
          Exception: the error of an earlier step, raised once. This step is not scheduled, and queued steps are
            cancelled.
          CheckpointError: a save in the background has failed. This step is not scheduled.
          TraceError: the function cannot be traced.
          InvalidArgumentError: `fn` is not callable, or an argument is a `RemoteValue`.
        """
        raise_deferred()
        check_function("fn", fn)
        check_call(args, kwargs, RemoteValue)
        return self._scheduler.schedule(fn, tuple(args or ()), kwargs or {})

    def join(self) -> None:
        """Waits until all scheduled steps are done. May be called outside of scheduled steps.

        Shows a progress line with steps per second, workers, queue and staleness. On a terminal the line is refreshed.
        Elsewhere a new line is written every 30 s.

        Raises:
          Exception: the first error of a step. All other steps are cancelled.
          ServerLostError: a parameter server died or stopped responding.
          WorkerLostError: a step does not finish, or kills each worker that runs it.
        """
        with progress.shown(self.status, self._scheduler.num_done):
            self._scheduler.join()
        raise_deferred()

    def done(self) -> bool:
        """Returns whether all scheduled steps are done, without waiting. May be called outside of scheduled steps.

        Raises the same errors as `join`.
        """
        return self._scheduler.done()

    def fetch(self, val: PyTree) -> PyTree:
        """Waits for remote values and returns them as NumPy arrays and numbers.

        May be called outside of scheduled steps.

        Args:
          val: a pytree with `RemoteValue` leaves.

        Returns:
          The pytree, with each `RemoteValue` replaced by its value.

        Raises:
          CancelledError: a step was cancelled.
          Exception: the error of a step.
        """

        def fetched(leaf: object) -> PyTree:
            return leaf.fetch() if isinstance(leaf, RemoteValue) else leaf

        return jax.tree.map(fetched, val, is_leaf=lambda x: isinstance(x, RemoteValue))

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Creates one dataset per worker. May be called outside of scheduled steps.

        Args:
          dataset_fn: a function without arguments that returns a dataset, or a dataset. Each worker calls the function,
            and calls it again after a restart. A dataset is copied to each worker. A dataset is an iterable of batches,
            or a function without arguments that returns an iterator of batches.

        Returns:
          A `PerWorkerDataset`. Pass `iter(dataset)` to `schedule`.

        Raises:
          InvalidArgumentError: `dataset_fn` is neither a dataset nor a function, or the function needs arguments.
        """
        if isinstance(dataset_fn, Function):  # Called without compilation, because a program cannot return a dataset.
            dataset_fn = inspect.unwrap(dataset_fn)
        make = dataset_fn
        if callable(dataset_fn):
            check_maker("dataset_fn", dataset_fn)
        else:
            if not hasattr(dataset_fn, "__iter__") and not hasattr(dataset_fn, "__getitem__"):
                raise InvalidArgumentError(
                    f"create_per_worker_dataset({shown(dataset_fn, 80)})",
                    "must be a dataset, or a function that returns one.",
                    "create_per_worker_dataset(lambda: dataset)",
                )
            make = lambda: dataset_fn  # noqa: E731
        return self._scheduler.dataset(dataset_fn, make)

    def create_per_worker_values(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Creates one value per worker. May be called outside of scheduled steps.

        Args:
          fn: a function without arguments that returns a pytree of arrays. Each worker calls it once.

        Returns:
          A `PerWorkerValues`, which may be an argument of `schedule`.

        Raises:
          InvalidArgumentError: `fn` is not callable, or needs arguments.
        """
        check_maker("fn", fn)
        return self._scheduler.values(fn)

    def status(self) -> Status:
        """Returns the current progress of the scheduled steps. May be called in any context."""
        return self._scheduler.status()

    def spec_of(self, resource: PerWorkerValues) -> PyTree:
        """Returns the shapes and dtypes of the next batch of some worker, as a pytree. May be called in any context.

        The batch stays in the dataset.
        """
        return self._scheduler.spec_of(resource)
