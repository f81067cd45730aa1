# SPDX-License-Identifier: Apache-2.0
"""Variables that are found by name, for functions that create their layers and optimizers again at each call."""

import collections
import inspect
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from keras import Variable
from keras.src.backend.common import global_state
from keras.src.backend.common.name_scope import current_path
from keras.src.utils.naming import auto_name, to_snake_case

from phalanx._src.compat.hooks import extend
from phalanx.errors import VariableError
from phalanx.typing import PyTree

_STORE, _COUNTS = "phalanx_variable_store", "object_name_uids"


class VariableStore:
    """The variables that functions create, by name, as the graph of TensorFlow 1 keeps them.

    Inside `reusing`, creating a variable returns the variable that has its name. Names that Keras generates begin from the
    start in each such block, so the first `Dense` of a function is always called `dense`. Python's random generator is
    restored after the block, because a layer draws its seed from it.

    Args:
      seed: seed of the random generator in each block. None draws one.
    """

    def __init__(self, seed: int | None = None) -> None:
        self.variables: dict[str, Variable] = {}
        self._seed = random.getrandbits(64) if seed is None else seed
        self._taken: collections.Counter[str] = collections.Counter()

    @contextmanager
    def reusing(self) -> Iterator[None]:
        """Returns the variables of this store to the code inside the `with` block that would create them."""
        before = {name: global_state.get_global_attribute(name) for name in (_STORE, _COUNTS)}
        state, taken = random.getstate(), self._taken
        self._taken = collections.Counter()
        global_state.set_global_attribute(_STORE, self)
        global_state.set_global_attribute(_COUNTS, collections.defaultdict(int))
        random.seed(self._seed)
        try:
            yield
        finally:
            random.setstate(state)
            self._taken = taken
            for name, value in before.items():
                global_state.set_global_attribute(name, value)

    def find(self, kind: type[Variable], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Variable:
        """Returns the variable that these arguments create: a known one, or a new one without a value.

        Raises:
          VariableError: the known variable has another shape.
        """
        arguments = inspect.signature(kind.__init__).bind(None, *args, **kwargs).arguments
        name = arguments.get("name") or _next_name(kind)
        path = "/".join(filter(None, (current_path(), name)))
        count = self._taken[path]
        self._taken[path] += 1
        key = f"{path}_{count}" if count else path
        variable = self.variables.get(key)
        if variable is None:
            variable = self.variables[key] = object.__new__(kind)
            return variable
        _require_shape(key, arguments.get("shape"), variable.shape)
        if not arguments.get("name"):
            auto_name(kind.__name__)  # Counts the name that the known variable has.
        return variable


def _next_name(kind: type[Variable]) -> str:
    """Returns the name that Keras gives to the next variable without a name."""
    name = to_snake_case(kind.__name__)
    count = (global_state.get_global_attribute(_COUNTS) or {}).get(name, 0)
    return f"{name}_{count}" if count else name


def _require_shape(name: str, shape: Sequence[int] | int | None, known: Sequence[int]) -> None:
    new_shape = (shape,) if isinstance(shape, int) else shape
    if new_shape is not None and tuple(new_shape) != tuple(known):
        raise VariableError(
            f"the variable {name!r} of shape {tuple(new_shape)}",
            f"a variable of this name exists and has the shape {tuple(known)}.",
            "features of the same shapes in all calls; or another name for the layer",
        )


def store() -> VariableStore | None:
    """Returns the store whose variables are reused in this thread, or None."""
    variable_store: VariableStore | None = global_state.get_global_attribute(_STORE)
    return variable_store


def _new(kind: type[Variable], *args: PyTree, **kwargs: PyTree) -> Variable:
    variable_store = store()
    # Without arguments, a variable is copied or unpickled.
    if variable_store is None or not (args or kwargs):
        return object.__new__(kind)
    return variable_store.find(kind, args, kwargs)


Variable.__new__ = _new


@extend(Variable, "__init__")
def _init(original: Callable[..., Any], self: Variable, initializer: object, *args: PyTree, **kwargs: PyTree) -> None:
    if "_initializer" in vars(self):
        return  # A known variable, which `__new__` has returned.
    original(self, initializer, *args, **kwargs)
