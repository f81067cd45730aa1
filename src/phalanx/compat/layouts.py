# SPDX-License-Identifier: Apache-2.0
"""Where Keras puts new variables, and the shapes that it knows of them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import keras
from keras import Variable

ShardingOf = Callable[[str, Sequence[int]], jax.sharding.NamedSharding]
"""Where a variable of that path and shape lives."""


class _Layout(keras.distribution.DataParallel):
    """Gives new Keras variables their shardings."""

    def __init__(self, sharding_of: ShardingOf, mesh: jax.sharding.Mesh) -> None:
        super().__init__(devices=[f"{d.platform}:{d.id}" for d in mesh.devices.flat], auto_shard_dataset=False)
        self._sharding_of = sharding_of

    def get_variable_layout(self, variable: Variable) -> jax.sharding.NamedSharding:
        return self._sharding_of(layout_path(variable), variable.shape)


@contextmanager
def variable_layout(sharding_of: ShardingOf, mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Lets variables that are made inside live in `sharding_of(path, shape)`, over a mesh."""
    with _Layout(sharding_of, mesh).scope():
        yield


def set_variable_layout(sharding_of: ShardingOf, mesh: jax.sharding.Mesh) -> None:
    """Lets variables that are made from here on live in `sharding_of(path, shape)`, over a mesh."""
    keras.distribution.set_distribution(_Layout(sharding_of, mesh))


def unset_variable_layout() -> None:
    """Lets variables that are made from here on live where Keras puts them."""
    keras.distribution.set_distribution(None)


def layout_path(variable: Variable) -> str:
    """Returns the path that decides where a variable lives: of an optimizer's slot that of the variable which it is for."""
    return vars(variable).get("_phalanx_follows", variable.path)  # type: ignore[no-any-return]


@contextmanager
def shapes(of: Sequence[tuple[Variable, tuple[int, ...]]]) -> Iterator[None]:
    """Lets variables have other shapes meanwhile, for a trace over some of their rows."""
    own = [v._shape for v, _ in of]
    for variable, shape in of:
        variable._shape = shape
    try:
        yield
    finally:
        for (variable, _), shape in zip(of, own, strict=True):
            variable._shape = shape


def layout_of(variable: Variable) -> Any:
    """Returns the sharding with which `variable` was made, if it was made in a scope."""
    return variable._layout
