# SPDX-License-Identifier: Apache-2.0
"""Copies of all variables in the memory of the host, from which a training run continues after the loss of a process."""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import numpy as np

from phalanx._src import compat
from phalanx._src.compat import Variable
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.programs.values import Share, put_share, share_of, to_host

_variables: IdentityMap[bool] = IdentityMap()
"""All Keras variables of this process."""


class _UserChanges:
    """Counts new variables, and assignments outside programs. Code of the user that has made them is not called again."""

    def __init__(self) -> None:
        self.count = 0

    def create(self, variable: Variable) -> None:
        """Counts a new variable, and remembers it."""
        _variables[variable] = True
        self.count += 1

    def assign(self, variable: Variable) -> None:
        """Counts an assignment."""
        self.count += 1


_changes = _UserChanges()
compat.on_variable(_changes.create)
compat.on_assign(_changes.assign)


class Kind(NamedTuple):
    """What identifies a variable in another process, which has run the same program.

    Args:
      path: its path.
      number: how many variables with this path were created before.
      shape: its shape.
      dtype: its dtype.
    """

    path: str
    number: int
    shape: tuple[int, ...]
    dtype: str


def kinds_of(values: Sequence[tuple[Variable, np.ndarray]]) -> list[Kind]:
    """Returns the kinds of variables, in their order."""
    seen: dict[str, int] = {}
    kinds = []
    for variable, value in values:
        number = seen[variable.path] = seen.get(variable.path, -1) + 1
        kinds.append(Kind(variable.path, number, value.shape, str(value.dtype)))
    return kinds


def fingerprint(kinds: Sequence[Kind]) -> str:
    """Returns a text that is equal for equal variables."""
    return hashlib.sha256(repr(sorted(kinds)).encode()).hexdigest()


def taken_over(
    values: Sequence[tuple[Variable, np.ndarray]], kinds: Sequence[Sequence[Any]], source_values: Sequence[Any]
) -> list[tuple[Variable, np.ndarray]]:
    """Returns the variables with the values of another process. A variable that it does not have keeps its value.

    Args:
      values: the variables of this process.
      kinds: the kinds of the variables of the other process.
      source_values: the values of these variables.
    """
    theirs = {Kind(*kind): np.array(value) for kind, value in zip(kinds, source_values, strict=True)}
    pairs = zip(values, kinds_of(values), strict=True)
    return [(variable, theirs.get(kind, value)) for (variable, value), kind in pairs]


@dataclass(frozen=True)
class Copy:
    """The values of all variables at one moment.

    Args:
      step: number of steps that the training had made.
      stage: what was done after these steps. See `Progress`.
      position: how far the training had come, apart from the variables.
      values: the values of the variables.
      shares: what this process has of variables that are combined over the replicas later.
    """

    step: int
    stage: list[int]
    position: dict[str, Any]
    values: "IdentityMap[np.ndarray]"
    shares: "IdentityMap[Share]" = field(default_factory=IdentityMap)


class Copier:
    """Copies variables to the host. An array that is still the one of the last copy is not copied again."""

    def __init__(self) -> None:
        self._known = 0
        self._last: IdentityMap[tuple[Callable[[], Any], np.ndarray]] = IdentityMap()

    @property
    def has_missed(self) -> bool:
        """Whether variables were created, or assigned outside programs, since the last copy."""
        return _changes.count != self._known

    def copy(
        self, step: int, stage: list[int], position: dict[str, Any], topology: Topology, *, is_lenient: bool = False
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
        # Before the values are read, so that an assignment by another thread in between makes the next copy due.
        self._known = _changes.count
        shares: IdentityMap[Share] = IdentityMap()
        for variable, _ in _variables.items():
            array = compat.raw_value(variable)
            if _is_on_demand(variable):
                share = share_of(variable, topology)
                if share is None:
                    return None
                is_mean = variable.aggregation == "mean"
                # Accumulated gradients must not be lost with another process.
                if share.value.any() and not (share.is_whole or is_mean or compat.is_unsent(variable)):
                    return None
                shares[variable] = share
                if is_mean:  # A process that joins begins with this one's value.
                    values[variable] = share.value if share.is_whole else share.value.mean(0).astype(share.value.dtype)
            elif isinstance(array, jax.Array):
                if not array.is_deleted():
                    values[variable] = self._of(variable, array)
                elif is_lenient:
                    last = self._last.get(variable)
                    values[variable] = last[1] if last else np.zeros(variable.shape, compat.dtype_of(variable))
                else:
                    return None
        return Copy(step, stage, position, values, shares)

    def _of(self, variable: Variable, array: jax.Array) -> np.ndarray:
        last = self._last.get(variable)
        if last is not None and last[0]() is array:
            return last[1]
        host = to_host(array)
        # Weak, so that a copy on the host does not keep the memory of the device.
        self._last[variable] = weakref.ref(array), host
        return host


def others(copy: Copy) -> tuple[list[tuple[Variable, np.ndarray]], list[str]]:
    """Returns the present values of variables that a copy lacks, and the names of variables whose values are lost."""
    uncopied_values, lost = [], []
    for variable, _ in _variables.items():
        array = compat.raw_value(variable)
        # A process that joins has run no step, so its copy has no weights that replicas train alone.
        is_sum = _is_on_demand(variable) and variable.aggregation != "mean"
        if is_sum or copy.values.get(variable) is not None or not isinstance(array, jax.Array):
            continue
        if array.is_deleted():
            lost.append(variable.path)
        else:
            uncopied_values.append((variable, np.array(array)))
    return uncopied_values, lost


def put_shares(copy: Copy, topology: Topology) -> None:
    """Gives this process what it had of the variables that are combined later, and what it begins with if it had nothing."""
    for variable, _ in _variables.items():
        if _is_on_demand(variable):
            put_share(variable, copy.shares.get(variable), topology)


def _is_on_demand(variable: Variable) -> bool:
    return bool(variable.synchronization == "on_demand")
