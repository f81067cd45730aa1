# SPDX-License-Identifier: Apache-2.0
"""What a program asks of the strategy that runs it. The rooms below `strategies` know no other part of a strategy."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import keras

from phalanx.collectives.cross_device import CrossDeviceOps
from phalanx.compat import Variable
from phalanx.errors import InvalidArgumentError, shown
from phalanx.mesh.topology import Topology
from phalanx.mesh.values import PerReplica
from phalanx.options import RunOptions
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
    """Where an optimizer's updates run."""

    IN_REPLICAS = "in replicas"
    """Each replica updates its own copy of the variables with the summed gradients."""

    AFTER_REPLICAS = "after replicas"
    """The program updates the variables when the replicas have done their part, because each holds only a shard of them."""

    AFTER_PROGRAM = "after program"
    """The strategy updates the variables when the program has ended, where they are stored. The program works on copies."""


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
    @abstractmethod
    def cross_device_ops(self) -> CrossDeviceOps | None:
        """Returns the collectives that aggregate gradients; None if there is one replica."""

    @property
    @abstractmethod
    def requires_static_shapes(self) -> bool:
        """Returns whether shapes must not depend on values. May be called in any context."""

    @abstractmethod
    def aggregate_gradients(self, grads: Sequence[Any]) -> list[Any]:
        """Returns gradients summed over the replicas, inside a program; None stays None."""

    @abstractmethod
    def divide_gradients(self, grads: Sequence[Any], dims: Sequence[int | None]) -> list[Any]:
        """Returns gradients summed over the replicas, inside a program: per gradient this replica's shard along a dim, or the whole."""

    @abstractmethod
    def apply_update(self, update: Update) -> None:
        """Applies an optimizer's update that a program has left, if `storage` is another place than `topology`."""

    @abstractmethod
    def run(
        self,
        fn: Callable[..., Any],
        args: Sequence[Any] = (),
        kwargs: dict[str, Any] | None = None,
        options: RunOptions | None = None,
    ) -> PyTree:
        """Runs `fn` once per replica, as one compiled program. In cross-replica context or outside all scopes."""

    @abstractmethod
    def replicate(self, tree: PyTree) -> PyTree:
        """Returns a pytree of arrays placed on all replicas, as a `Mirrored`. In cross-replica context."""

    @abstractmethod
    def merged(self, fn: Callable[..., Any], *values: PerReplica) -> PyTree:
        """Returns what `fn` makes of values in a merge function of all replicas. Inside a program, outside its replicas."""

    @abstractmethod
    def in_program(self, key: Hashable, fn: Callable[[PyTree], PyTree], value: PyTree) -> PyTree:
        """Returns `fn(value)`, computed by the program that is traced, or by one of its own under `key`. In cross-replica context."""


def check_strategy(name: str, value: object, hint: str) -> None:
    """Raises unless an argument is a strategy.

    Raises:
      InvalidArgumentError: it is something else.
    """
    if not isinstance(value, AbstractStrategy):
        raise InvalidArgumentError(f"{name}={shown(value)}", "must be a Strategy.", hint)
