# SPDX-License-Identifier: Apache-2.0
"""Handles of per-worker values and datasets."""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, final

from phalanx._src.tracing.scope import innermost
from phalanx.errors import CallError, ContextError, InvalidArgumentError, shown
from phalanx.typing import PyTree


class PerWorkerValues:
    """A handle of one value per worker. `ClusterCoordinator.create_per_worker_values` creates it.

    As an argument of a scheduled step, it is replaced by the value of the worker that runs the step.

    Source: tf.distribute.experimental.coordinator.PerWorkerValues.
    """

    def __init__(self, name: int, given: object, fn: Callable[[], Any], close: Callable[[int], None]) -> None:
        self.name, self.given, self.fn = name, given, fn
        # At the end of the program, the workers end too.
        weakref.finalize(self, close, name).atexit = False


@final
class PerWorkerIterator(PerWorkerValues):
    """A handle of one iterator per worker. `iter(PerWorkerDataset)` returns it; scheduled steps call `next` on it."""

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> NoReturn:
        """Raises an error, because batches are available only in scheduled steps.

        Raises:
          ContextError: always.
        """
        raise ContextError(
            "next(iterator) of a per-worker iterator was called at the coordinator",
            "its batches are on the workers.",
            "coordinator.schedule(step, args=(iterator,)), and next(iterator) inside the step",
        )

    def get_next(self) -> NoReturn:
        """Raises the same error as `next`. Inside a scheduled step it returns the next batch."""
        next(self)


@final
class PerWorkerDataset:
    """A handle of one dataset per worker. `ClusterCoordinator.create_per_worker_dataset` creates it.

    Source: tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset.
    """

    def __init__(self, make: Callable[[], PerWorkerIterator], spec_of: Callable[[PerWorkerIterator], Any]) -> None:
        self._make, self._spec_of = make, spec_of

    @functools.cached_property
    def element_spec(self) -> PyTree:
        """The structure, shapes and dtypes of the first batch of a worker. May be read outside of scheduled steps.

        Some worker creates the dataset for this, and reads a batch that no step gets.
        """
        return self._spec_of(self._make())

    def __iter__(self) -> Iterator[Any]:
        """Returns a handle of iterators at the start of the datasets. Must be called outside of scheduled steps.

        Raises:
          ContextError: called in a scheduled step.
        """
        if innermost() is not None:
            raise ContextError(
                "iter(dataset) of a per-worker dataset was called in a scheduled step",
                "each step would start the dataset from the beginning.",
                "iterator = iter(dataset) at the coordinator, and args=(iterator,)",
            )
        return self._make()


def check_function(name: str, fn: object) -> None:
    """Checks that `fn` is callable.

    Raises:
      InvalidArgumentError: `fn` is not callable.
    """
    if not callable(fn):
        raise InvalidArgumentError(f"{name}={shown(fn)}", "must be a function.", f"{name}=lambda: ...")


def check_maker(name: str, fn: Callable[[], Any]) -> None:
    """Checks that workers can call `fn` without arguments.

    Raises:
      InvalidArgumentError: `fn` is not callable.
      CallError: `fn` needs arguments.
    """
    check_function(name, fn)
    try:
        signature = inspect.signature(fn)
    except ValueError:  # Some functions written in C have no signature.
        return
    try:
        signature.bind()
    except TypeError as e:
        raise CallError(
            f"{name}={shown(fn)}",
            f"workers call it without arguments: {e}.",
            f"{name}=lambda: strategy.distribute_datasets_from_function(fn), for a function of an InputContext",
        ) from None
