# SPDX-License-Identifier: Apache-2.0
"""The strategies with one replica: the default strategy and `OneDeviceStrategy`."""

import types
from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, final

import jax
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.mesh.arrays import is_sparse, of_other_library
from phalanx._src.mesh.nowhere import NOWHERE, Nowhere
from phalanx._src.mesh.topology import Topology
from phalanx._src.mesh.values import map_leaves, unwrapped
from phalanx._src.options import RunOptions
from phalanx._src.programs import explain
from phalanx._src.strategies.base import Strategy
from phalanx._src.strategies.synchronous import SynchronousStrategy
from phalanx._src.tracing import context
from phalanx._src.tracing.context import ReplicaContext
from phalanx._src.tracing.discovery import NeedsProgram
from phalanx._src.tracing.records import held
from phalanx.errors import ContextError
from phalanx.typing import PyTree


@final
class DefaultStrategy(Strategy):
    """Calls replica functions directly and places nothing. `get_strategy()` returns it outside all scopes.

    There is only one instance. A replica function with a `GradientTape` is compiled, because a gradient needs a trace
    of the whole function. Other functions are called without compilation.
    """

    _instance: "DefaultStrategy | None" = None

    def __init__(self) -> None:
        if DefaultStrategy._instance is not None:
            raise ContextError(
                "DefaultStrategy()", "there is only one default strategy.", "phalanx.get_strategy() outside all scopes"
            )
        super().__init__()
        DefaultStrategy._instance = self
        # Code instead of functions: a lambda in a loop is a new function each time, with the same code.
        self._with_tape: set[types.CodeType] = set()

    @property
    @override
    def topology(self) -> Nowhere:
        return NOWHERE

    @override
    def execute(self, fn: Callable[..., Any], args: PyTree, kwargs: dict[str, Any], options: RunOptions) -> PyTree:
        code = getattr(fn, "__code__", None)
        if code in self._with_tape:
            return super().execute(fn, args, kwargs, options)
        # A tape ends the eager call. The transaction undoes what the call has assigned, and the step starts again as a program.
        with suppress(NeedsProgram), compat.transaction(), held():
            args, kwargs = map_leaves(_plain, (args, kwargs))
            return explain.call(fn, args, kwargs)
        if code is not None:
            self._with_tape.add(code)
        return super().execute(fn, args, kwargs, options)

    def __deepcopy__(self, memo: object) -> NoReturn:
        raise ContextError(
            "copy.deepcopy of the default strategy", "there is only one default strategy.", "phalanx.get_strategy()"
        )


@final
class OneDeviceStrategy(SynchronousStrategy):
    """Places variables and computation on one device. May be created outside all scopes.

    Args:
      device: for example `"/gpu:0"`, `"cpu:0"` or `jax.local_devices()[0]`.

    Raises:
      DeviceError: this process has no such device.

    Source: tf.distribute.OneDeviceStrategy.

    Example:
      >>> import phalanx
      >>> strategy = phalanx.OneDeviceStrategy("cpu:1")
      >>> strategy.run(lambda x: x + 1, args=(1,))
      Array(2, dtype=int32, weak_type=True)
    """

    _explanation = "one device holds all variables and runs all steps."

    def __init__(self, device: str | jax.Device) -> None:
        super().__init__(Topology.of([device]))


def _plain(leaf: PyTree) -> PyTree:
    """Converts an argument for a replica function: unwraps a `Mirrored` and converts a tensor of another library."""
    leaf = unwrapped(leaf)
    array = None if is_sparse(leaf) else of_other_library(leaf, "an argument")
    return leaf if array is None else array


_default = DefaultStrategy()
context.register_default(_default, ReplicaContext(_default, 0))
