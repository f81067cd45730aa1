# SPDX-License-Identifier: Apache-2.0
"""`fit`, `evaluate` and `predict` under `ParameterServerStrategy`, with steps that are scheduled on workers."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import keras
from keras.callbacks import CallbackList
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.input.sources.base import State
from phalanx._src.input.sources.functions import InputContext
from phalanx._src.programs.interrupts import Interrupts
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx.coordinator import ClusterCoordinator, PerWorkerDataset, RemoteValue, experimental_get_current_worker_index
from phalanx.errors import InvalidArgumentError
from phalanx.keras import steps
from phalanx.keras.backup import refuse_position
from phalanx.keras.data import DatasetCreator, steps_in
from phalanx.keras.programs import ReplicaStep
from phalanx.keras.training import ModelTrainer
from phalanx.typing import PyTree

_AHEAD = 16
"""Number of steps per worker that may wait or run: enough to keep it busy, few enough for callbacks to keep up."""

_REFRESH_S = 1.0
"""Seconds between two reads of the metrics from the servers during an epoch."""


class ScheduledTrainer(ModelTrainer):
    """Trains, evaluates and predicts on the workers of a `ParameterServerStrategy`.

    Args:
      model: the model to train.
      strategy: the strategy in whose scope the model was created.
    """

    def __init__(self, model: keras.Model, strategy: ParameterServerStrategy) -> None:
        self._coordinator = ClusterCoordinator(strategy)
        self._workers = strategy.cluster.workers
        self._running: deque[RemoteValue] = deque()
        super().__init__(model, strategy)

    @override
    def _program(self, step: ReplicaStep) -> Callable[[Any, int | None], Any]:
        def replica_step(batch: PyTree) -> PyTree:
            return step(self._model, batch)

        def scheduled(batch: PyTree) -> PyTree:
            # An iterator stands for the worker's own dataset, and anything else for a batch that the coordinator sends.
            return self._strategy.run(replica_step, args=(next(batch) if hasattr(batch, "__next__") else batch,))

        scheduled.__qualname__ = f"{self._model.name}.{step.__name__}"

        def call(batch: PyTree, _: int | None) -> PyTree:
            if self._model.run_eagerly:
                raise InvalidArgumentError(
                    "run_eagerly=True under ParameterServerStrategy",
                    "steps run as compiled programs on the workers.",
                    "compile(...) without run_eagerly; to debug a step, use OneDeviceStrategy",
                )
            value = self._coordinator.schedule(scheduled, args=(batch,))
            if step is steps.predict:
                return value.get()  # The loop of `predict` reads the rows at once.
            self._running.append(value)
            return value

        return call

    @override
    def _settle(self) -> None:
        self._coordinator.join()

    @override
    def _data(self, x: PyTree, num_steps: int | None, **data: PyTree) -> PyTree:
        if not isinstance(x, (DatasetCreator, PerWorkerDataset)) and not _is_function(x):
            return super()._data(x, num_steps, **data)
        if num_steps is None:
            raise InvalidArgumentError(
                "steps_per_epoch=None with a dataset function",
                "each worker has its own dataset, so the length of an epoch is unknown.",
                "fit(dataset_fn, steps_per_epoch=100); steps=100 in evaluate",
            )
        return WorkersData(self._coordinator, x, num_steps, self._workers)

    @override
    def _epoch(
        self, data: PyTree, program: Callable[..., Any], callbacks: CallbackList, kind: str, interrupts: Interrupts
    ) -> dict[str, Any]:
        begin, end = compat.batch_hooks(callbacks, kind)
        logs: dict[str, Any] = {}
        read_at, last = time.monotonic(), None
        try:
            for first, parts in data.epoch():
                begin(first)
                with interrupts.held():
                    for batch, _ in parts:
                        last = program(batch, None)
                # Backpressure. Waiting for the oldest step also raises its error here, and not only at the end.
                while len(self._running) > _AHEAD * self._workers:
                    self._running.popleft().get()
                done = first + steps_in(parts)
                # The hook after the last batch gets the metrics of all steps, as in Keras.
                if is_last := done == data.num_batches:
                    self._coordinator.join()
                if is_last or time.monotonic() - read_at > _REFRESH_S:
                    logs, read_at = compat.to_python(self._model.get_metrics_result()), time.monotonic()
                with interrupts.held():
                    end(done - 1, logs)
                if self._model.stop_training if kind == "train" else self._model.stop_evaluating:
                    break
        except BaseException:
            # Let the scheduled steps finish, so that none of them changes variables after `fit` has raised.
            with suppress(Exception):
                self._coordinator.join()
            raise
        finally:
            self._running.clear()
        self._coordinator.join()
        return self._logs_of(last)

    @override
    def _on_batch(self, method: str, program: Callable[..., Any], data: PyTree, *, return_dict: bool) -> PyTree:
        model = self._ready(method)
        with self._strategy.scope(), Interrupts(again_at_once=True) as interrupts:
            compat.build(model, data, has_own_step=steps.has_own(model, method.removesuffix("_on_batch")))
            batch = self._one_batch(data)
            model.reset_metrics()
            with interrupts.held():
                last = program(batch, None)
            # `join` waits for the step, so its handle is not needed for backpressure.
            self._running.clear()
            self._coordinator.join()
            logs = compat.to_python(self._logs_of(last))
        return logs if return_dict else compat.in_order(model, logs)

    def _logs_of(self, last: RemoteValue | None) -> dict[str, Any]:
        """Returns the metrics, and the other outputs of a custom step from its last call."""
        results = compat.to_python(self._model.get_metrics_result())
        outputs = None if last is None else last.get()
        return (
            {**outputs, **{k: v for k, v in results.items() if k in outputs}} if isinstance(outputs, dict) else results
        )


class WorkersData:
    """Epochs of batches that the workers read from their own datasets. The counterpart of `EpochData`.

    Args:
      coordinator: schedules the steps.
      dataset_fn: maps an `InputContext` to a dataset, or a per-worker dataset.
      num_steps: number of batches per epoch.
      workers: number of workers.
    """

    def __init__(self, coordinator: ClusterCoordinator, dataset_fn: Any, num_steps: int, workers: int) -> None:
        # Each worker has one replica and its own batches, so its batch size is not divided by the number of workers.
        def make_dataset() -> PyTree:
            return dataset_fn(InputContext(workers, experimental_get_current_worker_index(), 1))

        make_dataset.__qualname__ = getattr(dataset_fn, "__qualname__", repr(dataset_fn))
        is_made = isinstance(dataset_fn, PerWorkerDataset)
        self._dataset: PerWorkerDataset = dataset_fn if is_made else coordinator.create_per_worker_dataset(make_dataset)
        self._coordinator, self.num_batches = coordinator, num_steps
        self._iterator: Any = iter(self._dataset)
        self._is_within = self._is_read = False

    @property
    def element_spec(self) -> PyTree:
        """Shapes and dtypes of a batch: a pytree of `jax.ShapeDtypeStruct`."""
        return self._coordinator.spec_of(self._iterator)

    def restart(self) -> None:
        """Makes the next epoch begin with the first batch of each worker."""
        # Each `iter` begins the datasets of all workers again, so not for one that nobody has read.
        if self._is_read:
            self._iterator, self._is_read = iter(self._dataset), False

    is_within_epoch = False

    def read_beside(self) -> None:
        """Nothing changes: the workers read in their own processes."""

    def require_batch(self, method: str) -> None:
        """Nothing is checked: each epoch has `num_batches` batches."""

    def get_state(self) -> State:
        """Returns the position at the end of an epoch: nothing, because each worker reads its own dataset.

        Raises:
          InputError: called within an epoch.
        """
        if self._is_within:
            raise refuse_position()
        return {}

    def set_state(self, state: State) -> None:
        """Begins the next epoch with the next batches."""

    def epoch(self) -> Iterator[tuple[int, list[tuple[Any, int]]]]:
        """Yields the steps of one epoch. Each has an iterator as its batch, from which the worker takes its next batch."""
        self._is_within = self._is_read = True
        for step in range(self.num_batches):
            yield step, [(self._iterator, 1)]
        self._is_within = False


def _is_function(x: PyTree) -> bool:
    return callable(x) and not hasattr(x, "__len__") and not hasattr(x, "__iter__") and not isinstance(x, type)
