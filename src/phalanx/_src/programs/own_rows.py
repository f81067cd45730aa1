# SPDX-License-Identifier: Apache-2.0
"""A replica has only its rows: traces the function of the user for each number of rows that a replica has of a batch.

All replicas run one program, whose arrays have room for the largest share of the batch. `stages` makes one program of the traces.
"""

import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback

from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.values import ComponentSizes
from phalanx._src.programs import gathering
from phalanx._src.programs.stages import StagedTrace, Stages
from phalanx._src.runtime.observers import Observer
from phalanx._src.tracing.discovery import Discovery
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import TraceError, warn_of_slip
from phalanx.typing import PyTree


class Inputs(NamedTuple):
    """The inputs of a replica's program, or their shapes.

    Args:
      values: the values of the variables.
      sharded: the arguments of this replica.
      whole: the arguments that are equal on all replicas.
    """

    values: list[Any]
    sharded: list[Any]
    whole: list[Any]


class RowShare(NamedTuple):
    """The sizes of the arguments of some replicas.

    Args:
      sizes: for each sharded argument, and then for each batch, the sizes of the leading dims. None if they are equal on all replicas.
      replicas: the numbers of the replicas that have these sizes. None have those of a share that is traced only to see which results
        grow with the rows.
    """

    sizes: tuple[tuple[int, ...] | None, ...]
    replicas: tuple[int, ...] = ()

    def shapes(self, arrays: Sequence[Any]) -> list[Any]:
        """Returns the shapes of the arguments, whose arrays have a dim for replicas, with these sizes."""
        return [
            x if size is None else shape_dtype((x.shape[0], *size, *x.shape[1 + len(size) :]), x.dtype)
            for x, size in zip(arrays, self.sizes, strict=False)  # The sizes of batches follow.
        ]


def whole_share(arrays: Sequence[Any], rows: Sequence[ComponentSizes | None]) -> RowShare:
    """Returns the share of a replica that would have the rows of all.

    Args:
      arrays: the shapes of the arguments, whose arrays have a dim for replicas.
      rows: for each of them, and then for each batch, the sizes of its components. None if they are equal.
    """
    sizes: list[tuple[int, ...] | None] = []
    for x, of_x in itertools.zip_longest(arrays, rows):
        if of_x is not None:
            sizes.append((sum(of_x.counts), *map(max, zip(*(size[1:] for size in of_x.sizes), strict=True))))
        else:
            sizes.append((x.shape[0] * x.shape[1],) if x is not None and len(x.shape) > 1 else None)
    return RowShare(tuple(sizes))


def shares_of(rows: Sequence[ComponentSizes | None], num_replicas: int) -> list[RowShare]:
    """Returns the shares that replicas have of padded batches, each once.

    Replicas without any row belong to the first share, and take part with padding. If all others have equal shares, another share has
    one row more. It tells the results that grow with the rows from others.

    Args:
      rows: for each sharded argument, and for each batch, the sizes of its components. None if they are equal.
      num_replicas: number of replicas.
    """
    known: dict[tuple[tuple[int, ...] | None, ...], list[int]] = {}
    empty = []
    for replica in range(num_replicas):
        sizes = tuple(None if x is None else x.sizes[replica] for x in rows)
        if any(size is not None and 0 not in size for size in sizes):
            known.setdefault(sizes, []).append(replica)
        else:
            empty.append(replica)
    # In a batch without rows, all replicas take part with a row of padding.
    if not known:
        known[tuple(None if x is None else tuple(max(1, n) for n in x.sizes[0]) for x in rows)] = []
    shares = [RowShare(sizes, tuple(replicas)) for sizes, replicas in known.items()]
    shares[0] = shares[0]._replace(replicas=(*shares[0].replicas, *empty))
    # One share alone does not tell whether a result has four rows because the replica has, or for another reason.
    if len(shares) == 1:
        more = tuple(
            None if x is None or size is None else tuple(n + (d in x.dims) for d, n in enumerate(size))
            for x, size in zip(rows, shares[0].sizes, strict=True)
        )
        shares.append(RowShare(more))
    return shares


def sizes_of(
    shapes: Sequence[tuple[int, ...]], shares: Sequence[RowShare], is_empty: Sequence[bool]
) -> ComponentSizes | None:
    """Returns the sizes of a value whose shape differs between shares. None if it does not.

    A replica without rows has none in the dims that differ.

    Args:
      shapes: the shape of the value in each share.
      shares: the shares.
      is_empty: for each replica, whether it has no rows.
    """
    if len({*map(len, shapes)}) > 1:
        return None
    grows = [len({*sizes}) > 1 for sizes in zip(*shapes, strict=True)]
    if not any(grows):
        return None
    last = max(d for d, each in enumerate(grows) if each)
    share_of = {replica: i for i, share in enumerate(shares) for replica in share.replicas}
    return ComponentSizes(
        tuple(
            tuple(0 if empty and grow else n for n, grow in zip(shapes[share_of[i]][: last + 1], grows, strict=False))
            for i, empty in enumerate(is_empty)
        )
    )


def sizes_of_results(
    traces: Sequence[Discovery], shares: Sequence[RowShare], is_empty: Sequence[bool]
) -> tuple[ComponentSizes | None, ...]:
    """Returns the sizes of the results of a replica function on all replicas, from the traces of the shares.

    Args:
      traces: the traces.
      shares: the shares.
      is_empty: for each replica, whether it has no rows.

    Raises:
      TraceError: the function returns another number of arrays for fewer rows.
    """
    numbers = [len(each.outputs.results) for each in traces]
    if len({*numbers}) > 1:
        raise TraceError(
            f"a replica function that returns {numbers[0]} arrays for some numbers of rows and {min(numbers, key=numbers[0].__eq__)} for "
            "others",
            "replicas with different numbers of rows run one program, which has one structure of results.",
            "return the same structure for any number of rows",
        )
    results = zip(*(each.outputs.results for each in traces), strict=True)
    return tuple(sizes_of([x.shape[1:] for x in each], shares, is_empty) for each in results)


@dataclass
class Gathered:
    """What depends on the rows of a replica, and is known only when all shares have been traced.

    Args:
      shares: the shares.
      is_empty: for each replica, whether it has no rows.
      is_padded: whether the function gets a mask, because replicas will compute padding too.

    Attributes:
      numbers: the places of numbers that the function returns and that depend on the rows, so that they become arrays.
    """

    shares: Sequence[RowShare]
    is_empty: Sequence[bool]
    is_padded: bool = False
    numbers: frozenset[int] = frozenset()
    _seen: dict[int, list[tuple[int, ...]]] = field(default_factory=dict)
    _known: list[ComponentSizes | None] = field(default_factory=list)
    _share: int = 0

    def traces(self, trace: Callable[[RowShare], Discovery]) -> list[Discovery]:
        """Returns the traces of all shares, by a function that traces one."""
        made = []
        for number, share in enumerate(self.shares):
            self._share, self._seen[number] = number, []
            made.append(trace(share))
        return made

    @property
    def share(self) -> RowShare:
        """The share that is traced."""
        return self.shares[self._share]

    def sizes(self, size: int) -> tuple[int, ...] | None:
        """Returns the size on each replica of the dim that is gathered next. None if it is equal on all, as far as is known.

        Args:
          size: the size of the dim in this trace.
        """
        seen = self._seen.setdefault(self._share, [])
        seen.append((size,))
        # A gather is known by its place among the gathers of the trace, which is the same for every number of rows.
        rows = self._known[len(seen) - 1] if len(seen) <= len(self._known) else None
        return None if rows is None else rows.counts

    def is_settled(self, numbers: Iterable[int]) -> bool:
        """Returns whether the traces knew all that depends on the rows. Call it when all shares have been traced.

        Args:
          numbers: the places of numbers that the function returns and that differ.
        """
        # Later sizes may depend on earlier ones, so it may take several rounds.
        shapes = zip(*(self._seen[i] for i in range(len(self.shares))), strict=False)
        sizes = [sizes_of(each, self.shares, self.is_empty) for each in shapes]
        # Without a size that differs, the first round of traces is enough.
        known = sizes if any(sizes) else []
        all_numbers = self.numbers.union(numbers)
        is_settled = known == self._known and all_numbers == self.numbers
        self._known, self.numbers = known, all_numbers
        return is_settled


class DividedProgram:
    """The program of a replica whose arguments have room for the largest share. Made, and run, inside the mapped function.

    Args:
      discoveries: the traces of the shares.
      shares: the shares that replicas have.
      inputs: the shapes of the inputs, one per share.
      differ: for each result, whether it depends on the number of rows alone. Empty if each replica has rows.

    Attributes:
      outputs: the shapes of what a replica returns, with room for the largest share.

    Raises:
      IndivisibleError: the traces do not exchange the same.
    """

    def __init__(
        self,
        discoveries: Sequence[Discovery],
        shares: Sequence[RowShare],
        inputs: Sequence[Inputs],
        differ: Sequence[bool],
    ) -> None:
        leaves = jax.tree.leaves(discoveries[0].outputs)
        self._tree = cast(Any, jax.tree.structure(discoveries[0].outputs))
        traces = [_traced(*each) for each in zip(discoveries, inputs, strict=True)]
        self._stages = Stages(traces)
        # What a replica without rows computes of its padding, or of the shape of that, which it does not return.
        self._of_padding: list[int] = []
        if differ:
            values, sharded, whole = (jax.tree.leaves(each) for each in inputs[0])
            of_rows = [size is not None for size, _ in zip(shares[0].sizes, sharded, strict=False)]
            depends = traces[0].depends_on([*(False for _ in values), *of_rows, *(False for _ in whole)])
            results = jax.tree.leaves(discoveries[0].outputs.results)
            self._of_padding = [i for i, _ in enumerate(results) if depends[i] or differ[i]]
        columns = zip(*(jax.tree.leaves(each.outputs) for each in discoveries), strict=True)
        sizes = (tuple(map(max, zip(*(x.shape for x in each), strict=True))) for each in columns)
        self.outputs = self._tree.unflatten([shape_dtype(size, x.dtype) for size, x in zip(sizes, leaves, strict=True)])
        share_of = {replica: i for i, share in enumerate(shares) for replica in share.replicas}
        self._share_of = [share_of[replica] for replica in sorted(share_of)] if len(shares) > 1 else []

    def run(self, inputs: Inputs, rows: PyTree, observers: Sequence[Observer]) -> PyTree:
        """Returns the outputs of the replica, with room for those of the largest share.

        Args:
          inputs: the inputs.
          rows: the number of rows of this replica.
          observers: the objects to notify of the parts of a step.
        """
        # The number of a replica is the only thing that its program does not share with the others.
        branch = jnp.asarray(self._share_of)[lax.axis_index(REPLICA_AXIS)] if self._share_of else None
        note = (lambda sent: _report_own_part(observers, rows, sent)) if observers else None
        results = self._stages.run(jax.tree.leaves(inputs), branch, note)
        for i in self._of_padding:
            results[i] = jnp.where(rows > 0, results[i], jnp.zeros_like(results[i]))
        if observers:
            _report_end(observers, results)
        outputs: PyTree = self._tree.unflatten(results)
        return outputs


def _traced(discovery: Discovery, inputs: Inputs) -> StagedTrace:
    leaves, tree = jax.tree.leaves(inputs), cast(Any, jax.tree.structure(inputs))

    def flat(*arrays: jax.Array) -> list[Any]:
        values, sharded, whole = tree.unflatten(arrays)
        return jax.tree.leaves(gathering.run(discovery, values, sharded, whole))

    return StagedTrace(flat, leaves)


def warn_of_padding(cause: str, hint: str) -> None:
    """Warns of a step that computes padded rows too."""
    warn_of_slip(
        f"{cause}. So this step computes padded rows too, and only Keras losses and metrics exclude them.",
        f"{hint}; or drop_remainder=True",
    )


def _report_own_part(observers: Sequence[Observer], rows: PyTree, sent: Sequence[jax.Array]) -> jax.Array:
    """Reports the end of a replica's own part, when `sent` is computed. Returns True, computed after the report."""

    def note_own_part(replica: np.ndarray, rows: np.ndarray, *_: np.ndarray) -> np.bool:
        for observer in observers:
            observer.after_own_part(int(replica), int(rows))
        return np.True_

    # `jax.debug.callback` returns nothing that the exchange could wait for.
    token: jax.Array = io_callback(
        note_own_part, jax.typeof(jnp.bool(True)), lax.axis_index(REPLICA_AXIS), jnp.int32(rows), *_elements(sent)
    )
    return token


def _report_end(observers: Sequence[Observer], last: Sequence[jax.Array]) -> None:
    """Reports the end of the step, when `last` is computed."""

    def note_end(replica: np.ndarray, *_: np.ndarray) -> None:
        for observer in observers:
            observer.after_replica_step(int(replica))

    jax.debug.callback(note_end, lax.axis_index(REPLICA_AXIS), *_elements(last))


def _elements(arrays: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns an element of each array of numbers."""
    arrays = list(map(jnp.asarray, arrays))
    # A callback waits for all its inputs, and one element is enough for that. The whole arrays would be copied to the host.
    return [x.ravel()[0] for x in arrays if x.size and not jnp.issubdtype(x.dtype, jax.dtypes.extended)]
