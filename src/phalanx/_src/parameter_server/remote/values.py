# SPDX-License-Identifier: Apache-2.0
"""The values that a parameter server holds, and the programs that update them."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, final

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from phalanx._src.kernels import optimization
from phalanx._src.parameter_server.remote.plans import Label, Push, Rows, UpdateProgram
from phalanx._src.typed_jax import block_until_ready


@final
class ServerValues:
    """Values by key, with labels. The caller holds a lock.

    Attributes:
      labels: what a new coordinator needs to know of each key.
    """

    def __init__(self) -> None:
        self._arrays: dict[int, jax.Array] = {}
        self.labels: dict[int, Label] = {}
        self._updates: dict[int, tuple[UpdateProgram, Callable[..., Any]]] = {}

    @property
    def num_bytes(self) -> int:
        """The size of all values."""
        return sum(array.nbytes for array in self._arrays.values())

    def put(self, values: Mapping[int, np.ndarray], labels: Mapping[int, Label]) -> None:
        """Stores values, and labels of new keys."""
        self._arrays.update({key: jnp.array(x) for key, x in values.items()})
        self.labels.update(labels)

    def make(self, key: int, program: bytes, labels: Mapping[int, Label]) -> None:
        """Initializes a table by running the serialized program of its initializer."""
        self._arrays[key] = jax.jit(jax.export.deserialize(bytearray(program)).call)()
        self.labels.update(labels)

    def get(self, requests: Sequence[int | tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """Returns values: the full array for a key, or some rows for a pair of a key and row indices."""
        return [
            np.asarray(self._arrays[x[0]])[x[1]] if isinstance(x, tuple) else np.asarray(self._arrays[x])
            for x in requests
        ]

    def get_all(self) -> dict[int, np.ndarray]:
        """Returns all values."""
        return {key: np.asarray(x) for key, x in self._arrays.items()}

    def drop(self, keys: Iterable[int]) -> None:
        """Deletes values."""
        for key in keys:
            self._arrays.pop(key, None)
            self.labels.pop(key, None)

    def keep(self, keys: Collection[int]) -> None:
        """Deletes all other values, and all programs."""
        self.drop(self._arrays.keys() - set(keys))
        self._updates.clear()

    def learn(self, name: int, program: UpdateProgram) -> None:
        """Compiles and stores the program of an optimizer's update."""
        self._updates[name] = program, _in_place(program)

    def apply(self, pushes: Sequence[Push]) -> None:
        """Applies some pushes as one update: increments and assignments in order, and optimizers with the mean gradient."""
        gradients: dict[int, list[list[Any]]] = {}
        for push in pushes:
            for key, increment in push.added.items():
                self._arrays[key] = _added(self._arrays[key], increment)
            # Copies, because these arrays may be in shared memory too.
            self._arrays.update({key: jnp.array(x) for key, x in push.set.items()})
            for name, of_update in push.updates.items():
                gradients.setdefault(name, []).append(of_update)
        for name, terms in gradients.items():
            program, run = self._updates[name]
            # Several terms are arrays and never rows of a table: only bounded staleness has several, and it refuses tables.
            mean = terms[0] if len(terms) == 1 else [sum(each) / len(terms) for each in zip(*terms, strict=True)]
            # The program consumes the arrays that it writes, so the server lets go of them first.
            values = [self._arrays.pop(key) for key in program.keys]
            self._arrays.update(zip(program.keys, run(values, mean), strict=True))
        # The gradients may be in shared memory, which a worker overwrites as soon as its push has returned.
        block_until_ready(list(self._arrays.values()))


def _in_place(program: UpdateProgram) -> Callable[[list[jax.Array], list[Any]], list[jax.Array]]:
    """Compiles an update as a function from values and gradients to values, which donates the values that it writes."""
    exported: Any = jax.export.deserialize(bytearray(program.module))
    written = set(program.set)
    numbers = range(len(program.keys))

    def update(
        old: dict[int, jax.Array], unchanged: dict[int, jax.Array], gradients: list[Any], ids: Any
    ) -> dict[int, Any]:
        values, of = old | unchanged, program.rows_of
        # Padding ids point past the last row. These rows are read as zero and are not written.
        inputs = [
            values[i] if of[i] is None else values[i].at[ids[of[i]]].get(mode="fill", fill_value=0) for i in numbers
        ]
        _, _, new, _ = exported.call(inputs, gradients)
        return {
            i: x if of[i] is None else values[i].at[ids[of[i]]].set(x, mode="drop")
            for i, x in zip(program.set, new, strict=True)
        }

    options = optimization.compiler_options(jax.local_devices())
    compiled = jax.jit(update, donate_argnums=0, compiler_options=options)
    specs = exported.in_tree.unflatten(exported.in_avals)[0][1]
    tables = {of: i for i, of in enumerate(program.rows_of) if of is not None}

    def in_place(values: list[jax.Array], gradients: list[Any]) -> list[jax.Array]:
        unchanged = {i: x for i, x in enumerate(values) if i not in written}
        filled = {g: _filled(gradients[g], len(values[i]), specs[g].shape[0]) for g, i in tables.items()}
        ids = {g: rows.ids for g, rows in filled.items()}
        dense = [filled[g].values if g in filled else x for g, x in enumerate(gradients)]
        new = compiled({i: values[i] for i in program.set}, unchanged, dense, ids)
        return [x for _, x in sorted({**unchanged, **new}.items())]

    return in_place


def _filled(rows: Rows, behind: int, count: int) -> Rows:
    """Pads rows to a fixed number, so that one program fits. The padding ids are `behind`, the number of rows of the table."""
    room = count - len(rows.ids)
    ids = np.concatenate([rows.ids, np.full(room, behind, rows.ids.dtype)])
    return Rows(ids, np.concatenate([rows.values, np.zeros((room, *rows.values.shape[1:]), rows.values.dtype)]))


@jax.jit
def _added(value: jax.Array, increment: jax.Array) -> jax.Array:
    return value + increment
