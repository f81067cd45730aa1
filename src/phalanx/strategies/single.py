# SPDX-License-Identifier: Apache-2.0
"""The strategies of one replica: the default one, and `OneDeviceStrategy`."""

import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, final

import jax
from typing_extensions import override

from phalanx import compat
from phalanx.errors import ContextError
from phalanx.mesh.arrays import is_sparse, of_other_library
from phalanx.mesh.topology import NOWHERE, Nowhere, Topology
from phalanx.mesh.values import Mirrored, map_leaves
from phalanx.options import RunOptions
from phalanx.programs import explain
from phalanx.strategies.base import Strategy
from phalanx.strategies.synchronous import SynchronousStrategy
from phalanx.tracing import context
from phalanx.tracing.context import ReplicaContext
from phalanx.tracing.discovery import NeedsProgram


@final
class DefaultStrategy(Strategy):
    """What `get_strategy()` returns outside all scopes: `run` calls the function, nothing is placed or split.

    There is one instance. A replica function with a `GradientTape` is compiled, for a gradient needs the whole function;
    others are just called.
    """

    _instance: "DefaultStrategy | None" = None

    def __init__(self) -> None:
        if DefaultStrategy._instance is not None:
            raise ContextError(
                "DefaultStrategy()", "there is one default strategy only.", "phalanx.get_strategy() outside all scopes"
            )
        super().__init__()
        DefaultStrategy._instance = self
        self._with_tape: set[types.CodeType] = set()

    @property
    @override
    def topology(self) -> Nowhere:
        return NOWHERE

    @override
    def execute(self, fn: Callable[..., Any], args: Any, kwargs: dict[str, Any], options: RunOptions) -> Any:
        code = getattr(fn, "__code__", None)
        if code in self._with_tape:
            return super().execute(fn, args, kwargs, options)
        with suppress(NeedsProgram), compat.transaction():
            args, kwargs = map_leaves(_plain, (args, kwargs))
            return explain.call(fn, args, kwargs)
        if code is not None:
            self._with_tape.add(code)
        return super().execute(fn, args, kwargs, options)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ContextError(
            "copy.deepcopy of the default strategy", "there is one default strategy only.", "phalanx.get_strategy()"
        )


@final
class OneDeviceStrategy(SynchronousStrategy):
    """Variables and computation on one device. May be made outside all scopes.

    Args:
      device: for example `"/gpu:0"`, `"cpu:0"` or `jax.local_devices()[0]`.

    Raises:
      DeviceError: this process has no such device.

    Example:
      >>> import phalanx
      >>> strategy = phalanx.OneDeviceStrategy("cpu:1")
      >>> strategy.run(lambda x: x + 1, args=(1,))
      Array(2, dtype=int32, weak_type=True)
    """

    def __init__(self, device: str | jax.Device) -> None:
        super().__init__(Topology.of([device]))


def _plain(leaf: Any) -> Any:
    """Returns an argument as a replica function gets it: without `Mirrored`, and a tensor of another library as an array."""
    if isinstance(leaf, Mirrored):
        return leaf.value
    array = None if is_sparse(leaf) else of_other_library(leaf, "an argument")
    return leaf if array is None else array


_default = DefaultStrategy()
context.register_default(_default, ReplicaContext(_default, 0))
