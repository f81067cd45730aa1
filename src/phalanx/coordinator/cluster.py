# SPDX-License-Identifier: Apache-2.0
"""`ClusterCoordinator`: steps that any worker does."""

import inspect
import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, final

import jax

from phalanx.coordinator import progress
from phalanx.coordinator.progress import Status
from phalanx.coordinator.queue import Closure, ClosureQueue, RemoteValue
from phalanx.coordinator.steps import Steps, check_call, name_of
from phalanx.coordinator.supervisor import MOST_LOSSES, State, Supervisor, Work, WorkerLost, lost_again
from phalanx.coordinator.values import PerWorkerDataset, PerWorkerIterator, PerWorkerValues, check_function, check_maker
from phalanx.errors import InvalidArgumentError, shown
from phalanx.programs.function import Function
from phalanx.strategies.parameter_server import ParameterServerStrategy, on_run

_of_strategy: "weakref.WeakKeyDictionary[ParameterServerStrategy, ClusterCoordinator]" = weakref.WeakKeyDictionary()


@final
class ClusterCoordinator:
    """Schedules steps to the workers of a `ParameterServerStrategy`. Must be made outside all scopes, or in the strategy's.

    There is one for each strategy: made once more, it is the same.

    Args:
      strategy: the strategy.

    Raises:
      InvalidArgumentError: another kind of strategy.
      ContextError: the strategy was closed.

    Source: tf.distribute.coordinator.ClusterCoordinator.
    """

    _is_ready = False

    def __new__(cls, strategy: ParameterServerStrategy) -> "ClusterCoordinator":
        """Returns the one of the strategy."""
        if not isinstance(strategy, ParameterServerStrategy):
            raise InvalidArgumentError(
                f"ClusterCoordinator({shown(strategy)})",
                "only the steps of a ParameterServerStrategy are scheduled.",
                "ClusterCoordinator(phalanx.ParameterServerStrategy())",
            )
        strategy.homes.servers.require_open()
        if strategy not in _of_strategy:
            _of_strategy[strategy] = super().__new__(cls)
        return _of_strategy[strategy]

    def __init__(self, strategy: ParameterServerStrategy) -> None:
        if self._is_ready:
            return
        self._is_ready = True
        self._strategy, self._queue, self._names = strategy, ClosureQueue(wake=self._wake), itertools.count()
        self._supervisors = [Supervisor(i, strategy, self._queue) for i in range(strategy.cluster.workers)]
        platforms = sorted({s.platform() for s in self._supervisors})
        self._steps = Steps(strategy, platforms)
        strategy.homes.servers.tell("enter", [s.pusher for s in self._supervisors])
        for supervisor in self._supervisors:
            supervisor.begin(self._steps)
        strategy.before_close(self._queue.stop)

    @property
    def strategy(self) -> ParameterServerStrategy:
        """The strategy whose workers do the steps."""
        return self._strategy

    def schedule(
        self, fn: Callable[..., Any], args: Sequence[Any] | None = None, kwargs: dict[str, Any] | None = None
    ) -> RemoteValue:
        """Lets some worker call `fn(*args, **kwargs)`, and returns at once. May be called outside of scheduled steps.

        The function is traced here, once for arguments of the same shapes, and sent as a program. It runs at least once: when
        its worker is lost, another one does it again. It waits for room where very many steps are queued.

        Args:
          fn: reads and writes variables, calls `strategy.run` and the like, as in `phalanx.function`.
          args: its arguments; of per-worker iterators and values the function gets those of its worker.
          kwargs: its keyword arguments.

        Returns:
          What the function will return.

        Raises:
          Exception: what an earlier step raised, once; this one is not scheduled then, and those that waited are cancelled.
          TraceError: the function cannot be traced.
          InvalidArgumentError: a `RemoteValue` among the arguments, or no function.
        """
        check_function("fn", fn)
        check_call(args, kwargs, RemoteValue)
        return self._scheduled(fn, tuple(args or ()), kwargs or {}, is_run=False)

    def _scheduled(self, fn: Any, args: Any, kwargs: Any, *, is_run: bool) -> RemoteValue:
        step, inputs, resources = self._steps.step(fn, args, kwargs, is_run=is_run)
        if not step.programs:
            # Here, and not in a worker's thread: Keras's settings are those of this thread.
            self._steps.program(step, fn, self._specs(resources))
        closure = Closure(Work(step, fn, inputs, resources))
        self._queue.put(closure)
        return closure.outcome

    def join(self) -> None:
        """Waits until all scheduled steps have been done. May be called outside of scheduled steps.

        On a terminal it shows a line: steps per second, workers, queue and staleness. Elsewhere it writes such a line every 30 s.

        Raises:
          Exception: the first that a step raised; the others are cancelled.
          ServerLostError: a parameter server has died, or gives no sign of life.
          WorkerLostError: a step does not end, or ends each worker that tries it.
        """
        with progress.shown(self.status, self._num_done):
            self._queue.join()

    def done(self) -> bool:
        """Returns whether all scheduled steps have been done; raises what `join` raises."""
        return self._queue.done()

    def fetch(self, val: Any) -> Any:
        """Returns a nest with the values of its `RemoteValue`s, as soon as they are known, with NumPy arrays and numbers.

        Raises:
          CancelledError: a step will not run to its end.
          Exception: what a step raised.
        """
        is_remote = lambda x: isinstance(x, RemoteValue)  # noqa: E731
        return jax.tree.map(lambda x: x.fetch() if is_remote(x) else x, val, is_leaf=is_remote)

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Makes a dataset of each worker's own. May be called outside of scheduled steps.

        Args:
          dataset_fn: makes the dataset, on each worker, which calls it again when it comes back after a loss; or a dataset, which is
            copied to them. A dataset is whatever gives batches when it is iterated over, or a function without arguments that returns
            such.

        Returns:
          What `iter` makes an argument of `schedule` of.

        Raises:
          InvalidArgumentError: neither, or a function that needs arguments.
        """
        if isinstance(dataset_fn, Function):  # It is called as it is: a program cannot return a dataset.
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
        return PerWorkerDataset(
            lambda: PerWorkerIterator(next(self._names), dataset_fn, make, self._drop), self.spec_of
        )

    def create_per_worker_values(self, fn: Callable[[], Any]) -> PerWorkerValues:
        """Makes a value of each worker's own: what `fn` returns there. May be called outside of scheduled steps.

        Args:
          fn: returns a nest of arrays.

        Raises:
          InvalidArgumentError: `fn` is no function, or needs arguments.
        """
        check_maker("fn", fn)
        return PerWorkerValues(next(self._names), fn, fn, self._drop)

    def status(self) -> Status:
        """Returns how far the steps are. May be called in any context."""
        ((updates, staleness, _),) = self._strategy.homes.servers.ask("statistics", (0,))
        return Status(
            workers=len(self._supervisors),
            alive=sum(s.state is State.WORKING for s in self._supervisors),
            queued=len(self._queue),
            in_flight=self._queue.num_in_flight,
            done=self._num_done,
            again=sum(s.num_again for s in self._supervisors),
            updates=updates,
            staleness=dict(sorted(staleness.items())),
        )

    @property
    def _num_done(self) -> int:
        return sum(s.num_steps for s in self._supervisors)

    def spec_of(self, resource: PerWorkerValues) -> Any:
        """Returns the shapes and dtypes of a worker's next batch, which is not taken, as a nest. May be called in any context."""
        (((tree, leaves),),) = self._specs([resource])
        return tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in leaves])

    def _specs(self, resources: Sequence[PerWorkerValues]) -> Any:
        if not resources:
            return ()
        losses: list[str] = []
        while True:
            for supervisor in sorted(self._supervisors, key=lambda s: s.state is not State.WORKING):
                try:
                    return supervisor.specs(resources)
                except WorkerLost as e:
                    losses.append(str(e))
                    if len(losses) == MOST_LOSSES:
                        names = ", ".join(f"`{name_of(r.given)}`" for r in resources)
                        raise lost_again(f"the datasets and values of workers: {names}", losses) from e

    def _wake(self) -> None:
        for supervisor in self._supervisors:
            supervisor.wake()

    def _drop(self, name: int) -> None:
        for supervisor in self._supervisors:
            supervisor.drop(name)


def _run(strategy: ParameterServerStrategy, fn: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Does `strategy.run` on some worker."""
    return ClusterCoordinator(strategy)._scheduled(fn, args, kwargs, is_run=True).get()


on_run(_run)
