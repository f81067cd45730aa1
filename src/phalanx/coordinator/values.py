# SPDX-License-Identifier: Apache-2.0
"""What each worker has of its own."""

import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, NoReturn, final

from phalanx.errors import ContextError, InvalidArgumentError, shown
from phalanx.tracing.scope import innermost


class PerWorkerValues:
    """A value of each worker's own. `ClusterCoordinator.create_per_worker_values` makes it.

    Among the arguments of a scheduled step it becomes the value of the worker that does it.

    Source: tf.distribute.experimental.coordinator.PerWorkerValues.
    """

    def __init__(self, name: int, given: Any, fn: Callable[[], Any], close: Callable[[int], None]) -> None:
        self.name, self.given, self.fn, self.close = name, given, fn, close

    def __del__(self) -> None:
        self.close(self.name)


@final
class PerWorkerIterator(PerWorkerValues):
    """The place of each worker in its dataset. `iter` of a `PerWorkerDataset` makes it; scheduled steps call `next` of it."""

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> NoReturn:
        """Raises: batches are taken in scheduled steps."""
        raise ContextError(
            "next of a per-worker iterator at the coordinator",
            "its batches are on the workers.",
            "coordinator.schedule(step, args=(iterator,)), and next(iterator) inside the step",
        )

    def get_next(self) -> NoReturn:
        """Raises what `next` raises; inside a scheduled step it returns the next batch."""
        next(self)


@final
class PerWorkerDataset:
    """A dataset of each worker's own. `ClusterCoordinator.create_per_worker_dataset` makes it.

    Source: tf.distribute.coordinator.ClusterCoordinator.create_per_worker_dataset.
    """

    def __init__(self, make: Callable[[], PerWorkerIterator], spec_of: Callable[[PerWorkerIterator], Any]) -> None:
        self._make, self._spec_of = make, spec_of

    @functools.cached_property
    def element_spec(self) -> Any:
        """The structure, shapes and dtypes of a worker's first batch. May be read outside of scheduled steps.

        Some worker makes the dataset for it, and takes a batch that no step gets.
        """
        return self._spec_of(self._make())

    def __iter__(self) -> Iterator[Any]:
        """Returns iterators at the beginning of the datasets. Must be called outside of scheduled steps."""
        if innermost() is not None:
            raise ContextError(
                "iter of a per-worker dataset in a scheduled step",
                "each step would begin the dataset anew.",
                "iterator = iter(dataset) at the coordinator, and args=(iterator,)",
            )
        return self._make()


def check_function(name: str, fn: Any) -> None:
    """Raises unless `fn` is callable.

    Raises:
      InvalidArgumentError: it is not.
    """
    if not callable(fn):
        raise InvalidArgumentError(f"{name}={shown(fn)}", "must be a function.", f"{name}=lambda: ...")


def check_maker(name: str, fn: Any) -> None:
    """Raises unless `fn` can be called without arguments, as workers do.

    Raises:
      InvalidArgumentError: it cannot.
    """
    check_function(name, fn)
    try:
        signature = inspect.signature(fn)
    except ValueError:  # Of some that are written in C nothing is known.
        return
    try:
        signature.bind()
    except TypeError as e:
        raise InvalidArgumentError(
            f"{name}={shown(fn)}",
            f"workers call it without arguments: {e}.",
            f"{name}=lambda: strategy.distribute_datasets_from_function(fn), for a function of an InputContext",
        ) from None
