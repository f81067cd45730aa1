# SPDX-License-Identifier: Apache-2.0
"""The interface of a strategy that programs use. The packages below `strategies` use no other part of a strategy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import keras

from phalanx._src.collectives.compression import Compression
from phalanx._src.collectives.cross_device import CrossDeviceOps
from phalanx._src.collectives.local_updates import LocalUpdates
from phalanx._src.compat import Variable
from phalanx._src.mesh.topology import Topology
from phalanx._src.mesh.values import PerReplica
from phalanx._src.options import CommunicationOptions, RunOptions
from phalanx.errors import InvalidArgumentError, shown
from phalanx.typing import PyTree


@dataclass(frozen=True)
class Update:
    """An optimizer's update that runs after the replicas' part of a step, on the devices that hold the variables.

    Args:
      optimizer: the optimizer.
      variables: the variables that it updates.
      gradients: one per variable, summed over the replicas; None if a variable has no gradient.
      dims: per variable, the dim along which each replica holds a shard of the gradient; None if it holds the whole.
    """

    optimizer: keras.optimizers.Optimizer
    variables: tuple[Variable, ...]
    gradients: list[Any]
    dims: tuple[int | None, ...] = ()


class Updates(Enum):
    """The places where an optimizer's updates can run."""

    IN_REPLICAS = "in replicas"
    """Each replica updates its own copy of the variables with the summed gradients."""

    AFTER_REPLICAS = "after replicas"
    """The program updates the variables after its `shard_map`, because each replica holds only a shard of them."""

    AFTER_PROGRAM = "after program"
    """The strategy updates the variables after the program, on the devices that store them. The program works on copies."""


class AbstractStrategy(ABC):
    """The part of `phalanx.Strategy` that tracing, compiled programs and parameter servers use."""

    @property
    @abstractmethod
    def number(self) -> int:
        """Returns the number of this strategy in this process. Variables record the strategy in whose scope they were made."""

    @property
    @abstractmethod
    def topology(self) -> Topology:
        """Returns the devices of the replicas."""

    @property
    @abstractmethod
    def storage(self) -> Topology:
        """Returns the devices that hold the variables between programs."""

    @property
    @abstractmethod
    def num_replicas_in_sync(self) -> int:
        """Returns the number of replicas over which gradients are aggregated. May be called in any context."""

    @property
    @abstractmethod
    def updates(self) -> "Updates":
        """Returns where an optimizer's updates run. May be called in any context."""

    @property
    def donates(self) -> bool:
        """Returns whether a step may consume the variables' old values, which saves memory. May be called in any context."""
        return True

    @property
    @abstractmethod
    def cross_device_ops(self) -> CrossDeviceOps | None:
        """Returns the collectives that aggregate gradients; None if there is one replica."""

    @property
    def communication_options(self) -> CommunicationOptions | None:
        """Hints for the all-reduce of gradients."""
        return None

    @property
    def compression(self) -> Compression | None:
        """Returns the algorithm that compresses gradients if there are several replicas. None if they are sent whole."""
        return None

    @property
    def local_updates(self) -> LocalUpdates | None:
        """Returns how replicas that update their own variables are synchronized. None if gradients are aggregated at every step."""
        return None

    @property
    @abstractmethod
    def requires_static_shapes(self) -> bool:
        """Returns whether shapes must not depend on values. May be called in any context."""

    @abstractmethod
    def aggregate_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients summed over the replicas. Call it inside a program. None stays None."""

    @abstractmethod
    def divide_gradients(self, grads: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        """Returns this replica's shards of the gradients, summed over the replicas. Call it inside a program.

        Args:
          grads: one array per variable, or None.
          dims: per gradient, the dim to shard. None returns the full gradient.
        """

    @abstractmethod
    def apply_update(self, update: Update) -> None:
        """Applies an optimizer's update that a program has deferred. Used if `storage` differs from `topology`."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
        """Runs `fn` once per replica, as one compiled program. Call it in cross-replica context or outside all scopes."""

    @abstractmethod
    def replicate(self, tree: PyTree) -> PyTree:
        """Returns a pytree of arrays placed on all replicas, as a `Mirrored`. Call it in cross-replica context."""

    @abstractmethod
    def merged(self, fn: Callable[..., Any], *values: PerReplica) -> PyTree:
        """Returns the result of `fn(*values)`, called as a merge function. Call it in the cross-replica part of a program."""

    @abstractmethod
    def in_program(self, key: Hashable, fn: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
        """Returns `fn(value)`, computed inside a program. Call it in cross-replica context.

        Args:
          key: selects the compiled program among those of the strategy, if no program is being traced.
          fn: function of a pytree of arrays. It must do the same for equal keys.
          value: pytree of arrays.
        """


def check_strategy(name: str, value: object, hint: str) -> None:
    """Checks that an argument is a strategy.

    Args:
      name: name of the argument.
      value: the argument.
      hint: what to write instead.

    Raises:
      InvalidArgumentError: `value` is not a strategy.
    """
    if not isinstance(value, AbstractStrategy):
        raise InvalidArgumentError(f"{name}={shown(value)}", "must be a strategy.", hint)
