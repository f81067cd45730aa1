# SPDX-License-Identifier: Apache-2.0
"""`fit`, `evaluate` and `predict` whose steps are scheduled to workers."""

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

import keras
from typing_extensions import override

from phalanx import compat
from phalanx.coordinator import ClusterCoordinator, PerWorkerDataset, RemoteValue, experimental_get_current_worker_index
from phalanx.errors import InvalidArgumentError
from phalanx.input.sources.functions import InputContext
from phalanx.keras import steps
from phalanx.keras.data import DatasetCreator
from phalanx.keras.training import ModelTrainer, ReplicaStep
from phalanx.programs.interrupts import Interrupts
from phalanx.strategies.parameter_server import ParameterServerStrategy

_AHEAD = 16
"""How many steps of each worker may wait or run: enough to keep it busy, and few enough for callbacks to keep up."""

_REFRESH_S = 1.0


class ScheduledTrainer(ModelTrainer):
    """Trains, evaluates and predicts on the workers of a `ParameterServerStrategy`.

    Args:
      model: the model.
      strategy: the strategy.
    """

    def __init__(self, model: keras.Model, strategy: ParameterServerStrategy) -> None:
        self._coordinator = ClusterCoordinator(strategy)
        self._workers = strategy.cluster.workers
        self._running: deque[RemoteValue] = deque()
        super().__init__(model, strategy)

    @override
    def _program(self, step: ReplicaStep) -> Callable[[Any, int | None], Any]:
        def replica_step(batch: Any) -> Any:
            return step(self._model, batch)

        def scheduled(batch: Any) -> Any:
            return self._strategy.run(replica_step, args=(next(batch) if hasattr(batch, "__next__") else batch,))

        scheduled.__qualname__ = f"{self._model.name}.{step.__name__}"

        def call(batch: Any, _: int | None) -> Any:
            if self._model.run_eagerly:
                raise InvalidArgumentError(
                    "run_eagerly=True under ParameterServerStrategy",
                    "steps run as programs on workers.",
                    "compile(...) without it; or OneDeviceStrategy to look into a step",
                )
            value = self._coordinator.schedule(scheduled, args=(batch,))
            if step is steps.predict:
                return value.get()
            self._running.append(value)
            return value

        return call

    @override
    def _data(self, x: Any, num_steps: int | None, **data: Any) -> Any:
        if not isinstance(x, (DatasetCreator, PerWorkerDataset)) and not _is_function(x):
            return super()._data(x, num_steps, **data)
        if num_steps is None:
            raise InvalidArgumentError(
                "steps_per_epoch=None with a dataset function",
                "each worker has a dataset of its own, and none of them says when an epoch ends.",
                "fit(dataset_fn, steps_per_epoch=100); steps=100 in evaluate",
            )
        return WorkersData(self._coordinator, x, num_steps, self._workers)

    @override
    def _epoch(
        self, data: Any, program: Callable[..., Any], callbacks: Any, kind: str, interrupts: Interrupts
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
                while len(self._running) > _AHEAD * self._workers:
                    self._running.popleft().get()
                done = first + sum(count for _, count in parts)
                if is_last := done == data.num_batches:
                    self._coordinator.join()
                if is_last or time.monotonic() - read_at > _REFRESH_S:
                    logs, read_at = compat.to_python(self._model.get_metrics_result()), time.monotonic()
                with interrupts.held():
                    end(done - 1, logs)
                if self._model.stop_training if kind == "train" else self._model.stop_evaluating:
                    break
        except BaseException:
            with suppress(Exception):
                self._coordinator.join()
            raise
        finally:
            self._running.clear()
        self._coordinator.join()
        return self._logs_of(last)

    @override
    def _on_batch(self, method: str, program: Callable[..., Any], data: Any, *, return_dict: bool) -> Any:
        model = self._ready(method)
        with self._strategy.scope(), Interrupts(again_at_once=True) as interrupts:
            compat.build(model, data, has_own_step=steps.has_own(model, method.removesuffix("_on_batch")))
            batch = self._one_batch(data)
            model.reset_metrics()
            with interrupts.held():
                last = program(batch, None)
            self._running.clear()
            self._coordinator.join()
            logs = compat.to_python(self._logs_of(last))
        return logs if return_dict else compat.in_order(model, logs)

    def _logs_of(self, last: RemoteValue | None) -> dict[str, Any]:
        """Returns the metrics, and what else a step of the user's own returned last."""
        results = compat.to_python(self._model.get_metrics_result())
        outputs = None if last is None else last.get()
        return (
            {**outputs, **{k: v for k, v in results.items() if k in outputs}} if isinstance(outputs, dict) else results
        )


class WorkersData:
    """Epochs of so many batches of the workers' own datasets; what `EpochData` is for data at the coordinator.

    Args:
      coordinator: whose workers.
      dataset_fn: maps an `InputContext` to a dataset; or a per-worker dataset.
      num_steps: how many batches make an epoch.
      workers: how many workers there are.
    """

    def __init__(self, coordinator: ClusterCoordinator, dataset_fn: Any, num_steps: int, workers: int) -> None:
        def own() -> Any:
            return dataset_fn(InputContext(workers, experimental_get_current_worker_index(), 1))

        own.__qualname__ = getattr(dataset_fn, "__qualname__", repr(dataset_fn))
        is_made = isinstance(dataset_fn, PerWorkerDataset)
        self._dataset = dataset_fn if is_made else coordinator.create_per_worker_dataset(own)
        self._coordinator, self.num_batches = coordinator, num_steps
        self._iterator: Any = iter(self._dataset)

    @property
    def element_spec(self) -> Any:
        """The shapes of a batch."""
        return self._coordinator.spec_of(self._iterator)

    def restart(self) -> None:
        """Lets the next epoch begin with the first batches."""
        self._iterator = iter(self._dataset)

    def epoch(self) -> Iterator[tuple[int, list[tuple[Any, int]]]]:
        """Yields each step of an epoch."""
        for step in range(self.num_batches):
            yield step, [(self._iterator, 1)]


def _is_function(x: Any) -> bool:
    return callable(x) and not hasattr(x, "__len__") and not hasattr(x, "__iter__") and not isinstance(x, type)
