# SPDX-License-Identifier: Apache-2.0
"""Shardings of new Keras variables, and temporary shapes of existing ones."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import jax
import keras
from keras import Variable

from phalanx._src.compat.facts import facts_of

ShardingOf = Callable[[str, Sequence[int]], jax.sharding.NamedSharding | None]
"""Maps the path and the shape of a variable to its sharding. None for one that Keras creates as it does without a distribution."""


class _Layout(keras.distribution.DataParallel):
    """A Keras distribution that asks a function for the sharding of each new variable.

    Keras consults the current `keras.distribution` whenever it creates a variable. Its own distributions cannot shard an
    optimizer's slot like the variable that the slot belongs to.
    """

    def __init__(self, sharding_of: ShardingOf, mesh: jax.sharding.Mesh) -> None:
        super().__init__(devices=[f"{d.platform}:{d.id}" for d in mesh.devices.flat], auto_shard_dataset=False)
        self._sharding_of = sharding_of

    def get_variable_layout(self, variable: Variable) -> jax.sharding.NamedSharding | None:
        return self._sharding_of(layout_path(variable), variable.shape)

    def get_data_layout(self, data_shape: Sequence[int]) -> keras.distribution.TensorLayout:
        """Whole on every device: rows that a library places by Keras's distribution are those of no step of the strategy."""
        return keras.distribution.TensorLayout([None] * len(data_shape), self.device_mesh)


@contextmanager
def variable_layout(sharding_of: ShardingOf, mesh: jax.sharding.Mesh) -> Iterator[None]:
    """Creates variables inside the context with the sharding `sharding_of(path, shape)` over `mesh`."""
    with _Layout(sharding_of, mesh).scope():
        yield


def set_variable_layout(sharding_of: ShardingOf, mesh: jax.sharding.Mesh) -> None:
    """Creates all later variables of the process with the sharding `sharding_of(path, shape)` over `mesh`."""
    keras.distribution.set_distribution(_Layout(sharding_of, mesh))


def unset_variable_layout() -> None:
    """Creates all later variables with the sharding that Keras chooses, as without `set_variable_layout`."""
    keras.distribution.set_distribution(None)


def layout_path(variable: Variable) -> str:
    """Returns the path that decides the sharding of a variable: its own, or for a slot that of the trained variable."""
    path = facts_of(variable).layout_path
    return variable.path if path is None else path  # type: ignore[no-any-return]


@contextmanager
def shapes(of: Sequence[tuple[Variable, tuple[int, ...]]]) -> Iterator[None]:
    """Gives variables other shapes inside the context, to trace a program over some of their rows.

    Args:
      of: pairs of a variable and its temporary shape.
    """
    original_shapes = [v._shape for v, _ in of]
    for variable, shape in of:
        variable._shape = shape
    try:
        yield
    finally:
        for (variable, _), shape in zip(of, original_shapes, strict=True):
            variable._shape = shape


def layout_of(variable: Variable) -> jax.sharding.Sharding | None:
    """Returns the sharding with which `variable` was created, or None if it was created outside all scopes."""
    layout: jax.sharding.Sharding | None = variable._layout
    return layout


def move_layout(variable: Variable, sharding: jax.sharding.Sharding | None) -> None:
    """Makes `sharding`, which is of other devices, the one with which `variable` counts as created."""
    variable._layout = sharding


def layout_of_shards(variable: Variable) -> jax.sharding.Sharding | None:
    """Returns the sharding of a variable whose devices hold shards; None for one that each device holds whole."""
    layout = layout_of(variable)
    return layout if isinstance(layout, jax.sharding.Sharding) and not layout.is_fully_replicated else None


def divided_layout(variable: Variable) -> jax.sharding.Sharding | None:
    """Returns the sharding of a variable whose shards belong to several processes; None for other variables."""
    layout = layout_of(variable)
    return layout if isinstance(layout, jax.sharding.Sharding) and not layout.is_fully_addressable else None
