# SPDX-License-Identifier: Apache-2.0
"""Copies of all variables in the memory of the host, from which a training goes on after the loss of a process."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from phalanx import compat
from phalanx.compat import Variable
from phalanx.mesh.topology import Topology
from phalanx.programs.identity import IdentityMap
from phalanx.programs.state import to_host, unfinished_variables

_variables: IdentityMap[bool] = IdentityMap()
"""All Keras variables of this process."""
compat.on_variable(lambda variable: _variables.__setitem__(variable, True))


@dataclass(frozen=True)
class Copy:
    """The values of all variables at one moment.

    Args:
      step: number of steps that the training had made.
      stage: what was done after these steps. See `Progress`.
      position: how far the training had come, apart from the variables.
      values: the values of the variables.
    """

    step: int
    stage: list[int]
    position: dict[str, Any]
    values: "IdentityMap[np.ndarray]"


class Copier:
    """Copies variables to the host. An array that is still the one of the last copy is not copied again."""

    def __init__(self) -> None:
        self._known = 0
        self._last: IdentityMap[tuple[Callable[[], Any], np.ndarray]] = IdentityMap()

    @property
    def has_missed(self) -> bool:
        """Whether variables were created since the last copy."""
        return len(_variables) != self._known

    def copy(
        self,
        step: int,
        stage: list[int],
        position: dict[str, Any],
        topology: Topology,
        *,
        is_lenient: bool = False,
    ) -> Copy | None:
        """Returns a copy of all variables of this process. None if a variable has no value that this process knows alone.

        Args:
          step: see `Copy`.
          stage: see `Copy`.
          position: see `Copy`.
          topology: the devices of the training.
          is_lenient: whether a variable that a failed program has consumed gets an old value.
        """
        values: IdentityMap[np.ndarray] = IdentityMap()
        self._known = len(_variables)
        unfinished = {id(v): is_zero for v, is_zero in unfinished_variables(topology)}
        for variable, _ in _variables.items():
            array = compat.raw_value(variable)
            if array is None:
                is_zero = unfinished.get(id(variable))
                if is_zero is False:
                    return None
                if is_zero:
                    values[variable] = np.zeros(variable.shape, compat.dtype_of(variable))
            elif isinstance(array, jax.Array):
                if not array.is_deleted():
                    values[variable] = self._of(variable, array, topology)
                elif is_lenient:
                    last = self._last.get(variable)
                    values[variable] = last[1] if last else np.zeros(variable.shape, compat.dtype_of(variable))
                else:
                    return None
        return Copy(step, stage, position, values)

    def _of(self, variable: Variable, array: jax.Array, topology: Topology) -> np.ndarray:
        last = self._last.get(variable)
        if last is not None and last[0]() is array:
            return last[1]
        host = to_host(array, topology)
        self._last[variable] = weakref.ref(array), host
        return host


def others(copy: Copy) -> tuple[list[tuple[Variable, np.ndarray]], list[str]]:
    """Returns the variables that a copy does not have with their present values, and the names of those that have lost theirs."""
    found, lost = [], []
    for variable, _ in _variables.items():
        array = compat.raw_value(variable)
        if copy.values.get(variable) is not None or not isinstance(array, jax.Array):
            continue
        if array.is_deleted():
            lost.append(variable.path)
        else:
            found.append((variable, np.array(array)))
    return found, lost
