# SPDX-License-Identifier: Apache-2.0
"""A cache of compiled programs, by function and by the key of their arguments."""

import functools
import inspect
import operator
import types
import weakref
from collections.abc import Hashable, Sequence
from typing import Any, Generic, TypeVar

import keras

from phalanx._src import compat
from phalanx._src.compat import Variable
from phalanx._src.programs.identity import IdentityMap
from phalanx.errors import RecompilationWarning, warn_of_slip
from phalanx.errors.frames import is_of_user

P = TypeVar("P")

_NEW_FUNCTIONS_BEFORE_WARNING = 3


class ProgramCache(Generic[P]):
    """Programs by function and key. A program is dropped with its function, or with the object whose method it is.

    Functions and objects are compared by `==`, as in a dict: an equal frozen dataclass that is created for each call finds its
    programs.
    """

    def __init__(self) -> None:
        self._of_owner: weakref.WeakKeyDictionary[Any, dict[Hashable, list[P]]] = weakref.WeakKeyDictionary()
        self._of_unhashable: IdentityMap[dict[Hashable, list[P]]] = IdentityMap()
        self._new_functions = NewFunctions()

    def known(self, function: object, key: Hashable) -> list[P]:
        """Returns the programs of a function and a key, as a list to which the caller adds new ones."""
        owner, name = function, None
        # Each access of `object.method` makes another bound method, and a weak reference to it would end at once.
        if isinstance(function, types.MethodType):
            owner, name = function.__self__, function.__func__
        owners: Any = self._of_owner
        try:
            programs = owners.get(owner)
        except TypeError:  # The owner has no hash, or no weak references.
            owners = self._of_unhashable
            programs = owners.get(owner)
        if programs is None:
            self._new_functions.note(function)
            programs = owners[owner] = {}
        elif self._new_functions.times:
            self._new_functions.forgive(function)
        full_key = (name, key)
        if full_key not in programs:
            programs[full_key] = []
        cached: list[P] = programs[full_key]
        return cached

    def forgive(self, function: object) -> None:
        """Stops counting a function as new at each call, for example because its program could not be traced."""
        self._new_functions.forgive(function)


class Settings:
    """The settings of Python objects that a program was traced with.

    Args:
      variables: the variables of the program. Gradients depend on which of them are trainable.
      optimizers: the optimizers that the program applies. Their learning rates, if they are numbers, are constants in it.
    """

    def __init__(self, variables: Sequence[Variable], optimizers: Sequence[keras.optimizers.Optimizer]) -> None:
        self._variables, self._optimizers = variables, optimizers
        self._trainable = [v.trainable for v in variables]
        self._rates = [compat.learning_rate_of(o) for o in optimizers]
        self._changes = compat.changes.trainable

    def hold(self) -> bool:
        """Returns whether no setting has changed since."""
        # Variables of other programs change this counter too, so the flags decide. At most steps the counter alone is compared.
        if self._changes != compat.changes.trainable:
            if [v.trainable for v in self._variables] != self._trainable:
                return False
            self._changes = compat.changes.trainable
        optimizers = self._optimizers
        # By identity: the rate may be a Keras variable, which compares by value.
        return not optimizers or all(map(operator.is_, map(compat.learning_rate_of, optimizers), self._rates))


class NewFunctions:
    """Warns of functions that are created at each call, and therefore compiled each time.

    Attributes:
      times: how many functions with the same code were new in a row, by code.
    """

    def __init__(self) -> None:
        self.times: dict[types.CodeType, int] = {}

    def note(self, function: object) -> None:
        """Counts a function that was not called before."""
        code = _code_of(function)
        if code is None or not is_of_user(code.co_filename):
            return
        self.times[code] = times = self.times.get(code, 0) + 1
        if times == _NEW_FUNCTIONS_BEFORE_WARNING:
            warn_of_slip(
                f"{code.co_qualname} ({code.co_filename}:{code.co_firstlineno}) is created at each call, so it is "
                "compiled each time.",
                "define it once, outside the loop, and pass what changes as arguments",
                RecompilationWarning,
            )

    def forgive(self, function: object) -> None:
        """Resets the count of a function that is called again."""
        self.times.pop(_code_of(function), None)  # type: ignore[arg-type]


def _code_of(function: Any) -> types.CodeType | None:
    function = inspect.unwrap(function)
    while isinstance(function, functools.partial):
        function = inspect.unwrap(function.func)
    return getattr(function, "__code__", None)
