# SPDX-License-Identifier: Apache-2.0
"""The context manager that makes a strategy current."""

from collections.abc import Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Generic, TypeVar

from jax.sharding import NamedSharding

from phalanx._src import compat
from phalanx._src.tracing import context
from phalanx._src.tracing.context import Mode
from phalanx._src.tracing.strategy import AbstractStrategy
from phalanx.errors import ContextError, MixedStrategyError

S = TypeVar("S", bound=AbstractStrategy)


class Scope(Generic[S]):
    """The context manager that `Strategy.scope` returns."""

    def __init__(self, strategy: S) -> None:
        self._strategy = strategy
        # One `Scope` may be entered again before it is left, so each entry has its own stack.
        self._open: list[ExitStack] = []

    def __enter__(self) -> S:
        _require_enterable(self._strategy)
        with ExitStack() as stack:
            # The default strategy is current when no context is open.
            if self._strategy.storage.has_devices:
                stack.enter_context(context.enter(Mode(self._strategy, None)))
                # Keras creates variables without calling a strategy, but asks its current distribution for their placement.
                home = self._strategy.storage.of_new_variables
                if home is not None:
                    stack.enter_context(compat.variable_layout(self._sharding_of_new, home.mesh))
            self._open.append(stack.pop_all())
        return self._strategy

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._open.pop().__exit__(kind, error, traceback)

    def _sharding_of_new(self, path: str, shape: Sequence[int]) -> NamedSharding | None:
        # In an elastic group, the devices may have changed since the scope was opened.
        return self._strategy.storage.sharding_of_new(path, shape)


def _require_enterable(strategy: AbstractStrategy) -> None:
    if not context.depth():
        return
    mode = context.current()
    if mode.strategy is not strategy and not strategy.topology.has_devices:
        raise ContextError(
            "the scope of the default strategy was entered",
            f"inside the scope of {mode.strategy!r}.",
            "leave that scope first",
        )
    if mode.strategy is not strategy:
        raise MixedStrategyError(
            f"the scope of {strategy!r} was entered",
            f"inside the scope of {mode.strategy!r}, but only one strategy can be current.",
            "leave the other scope first",
        )
    if mode.replica is not None:
        raise ContextError(
            "Strategy.scope was entered in replica context",
            "it works only in cross-replica context.",
            "phalanx.get_replica_context().merge_call(fn)",
        )
