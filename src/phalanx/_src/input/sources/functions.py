# SPDX-License-Identifier: Apache-2.0
"""Sources of the datasets that a user's function returns, one per worker or one per replica."""

import hashlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, final

import jax
from typing_extensions import override

from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.adapt import source_of
from phalanx._src.input.sources.base import (
    AbstractReader,
    AbstractSource,
    Facts,
    Owner,
    Piece,
    State,
    num_rows,
    state_entry,
)
from phalanx._src.input.sources.rows import owned
from phalanx._src.mesh.memory import Pool
from phalanx._src.options import AutoShardPolicy, InputOptions, InputReplicationMode
from phalanx.errors import InputError, InvalidArgumentError, arguments
from phalanx.typing import PyTree


@dataclass(frozen=True)
class InputContext:
    """The argument of the function passed to `distribute_datasets_from_function`. May be used in any context.

    Args:
      num_input_pipelines: number of calls of the function, over all workers: one per worker, or one per replica.
      input_pipeline_id: index of this call, from 0.
      num_replicas_in_sync: number of replicas.

    Raises:
      InvalidArgumentError: an argument is not an integer, or is too small.

    Source: tf.distribute.InputContext.

    Example:
      >>> InputContext(num_input_pipelines=2, num_replicas_in_sync=4).get_per_replica_batch_size(64)
      16
    """

    num_input_pipelines: int = 1
    input_pipeline_id: int = 0
    num_replicas_in_sync: int = 1

    def __post_init__(self) -> None:
        arguments.integer("num_input_pipelines", self.num_input_pipelines)
        arguments.integer("input_pipeline_id", self.input_pipeline_id, least=0)
        arguments.integer("num_replicas_in_sync", self.num_replicas_in_sync)

    def get_per_replica_batch_size(self, global_batch_size: int) -> int:
        """Returns the batch size of one replica.

        Args:
          global_batch_size: rows of a global batch.

        Raises:
          InvalidArgumentError: `global_batch_size` is not a positive integer, or not divisible by the number of replicas.
        """
        arguments.integer("global_batch_size", global_batch_size, hint="global_batch_size=64")
        if global_batch_size % self.num_replicas_in_sync:
            raise InvalidArgumentError(
                f"global_batch_size={global_batch_size}",
                f"is not divisible by the number of replicas, {self.num_replicas_in_sync}.",
                "experimental_distribute_dataset, which splits a batch of any size",
            )
        return global_batch_size // self.num_replicas_in_sync

    def __str__(self) -> str:
        return f"InputContext(input pipeline {self.input_pipeline_id} of {self.num_input_pipelines})"


@final
class FunctionSource(AbstractSource):
    """Per-replica batches of the datasets that a function returns. The constructor calls the function.

    Args:
      dataset_fn: maps an `InputContext` to a dataset of per-replica batches.
      worker: this worker.
      options: decide whether the function is called once per worker or once per replica, and on which devices.
      devices: devices of the local replicas.
    """

    def __init__(
        self,
        dataset_fn: Callable[[InputContext], Any],
        worker: InputWorker,
        options: InputOptions,
        devices: Sequence[jax.Device],
    ) -> None:
        per_replica = options.experimental_replication_mode is InputReplicationMode.PER_REPLICA
        calls = worker.replicas if per_replica else 1
        on_device = options.experimental_place_dataset_on_device
        self._devices = list(devices) if on_device and devices else [None] * calls
        # The next batch of a step may then be written into the arrays of the first.
        self._reads_in_turn = calls < worker.replicas
        self._sources = []
        for call, device in enumerate(self._devices[:calls]):
            context = InputContext(worker.count * calls, worker.index * calls + call, worker.num_replicas)
            with _default_device(device):
                self._sources.append(source_of(dataset_fn(context)))

    @property
    @override
    def facts(self) -> Facts:
        if any(source.facts.owner is Owner.CALLER for source in self._sources):
            return Facts(owner=Owner.CALLER)
        return Facts(owner=Owner.UNTIL_READ if self._borrows and not self._reads_in_turn else Owner.NOBODY)

    @override
    def open(self, worker: InputWorker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        # Each pipeline is read as a whole, because the user's function has divided the data already.
        readers = [s.open(InputWorker(), policy, x) for s, x in zip(self._sources, self.start(state), strict=True)]
        return _FunctionReader(readers, self._devices, worker, copies=self._borrows and self._reads_in_turn)

    @override
    def start(self, state: State | None) -> list[State | None]:
        states = state_entry(state, "pipelines", [None] * len(self._sources))
        if not isinstance(states, list) or len(states) != len(self._sources):
            raise InputError(
                f"set_state of {len(states) if isinstance(states, list) else repr(states)} input pipelines",
                f"this dataset has {len(self._sources)} input pipelines.",
                "restore the position on as many replicas as it was saved on",
            )
        for source, each in zip(self._sources, states, strict=True):
            source.start(each)
        return states

    @override
    def note_first(self) -> None:
        for source in self._sources:
            source.note_first()

    @property
    @override
    def first(self) -> bytes:
        return hashlib.blake2b(b"".join(source.first for source in self._sources), digest_size=8).digest()

    @property
    def _borrows(self) -> bool:
        return any(source.facts.owner is Owner.UNTIL_READ for source in self._sources)


@final
class _FunctionReader(AbstractReader):
    """Reads one per-replica batch per local replica. With fewer readers than replicas, they are read in turn.

    Args:
      readers: one for all replicas, or one per replica.
      devices: the default devices of the readers.
      worker: this worker.
      copies: whether to copy each batch, because the next read of a step may be written into the same arrays.
    """

    def __init__(
        self, readers: Sequence[AbstractReader], devices: Sequence[Any], worker: InputWorker, *, copies: bool
    ) -> None:
        self._readers, self._devices, self._worker = readers, devices, worker
        self._copies, self._pool = copies, Pool()

    @override
    def read(self) -> Piece | None:
        replicas = self._worker.replicas
        parts = [self._read(i % len(self._readers)) for i in range(replicas)]
        real_parts = [part for part in parts if part is not None]
        if not real_parts:
            return None
        counts = [0 if part is None else num_rows(part) for part in parts]
        # Replicas whose dataset has ended take part in the step with a batch that is padding only.
        empty = jax.tree.map(lambda x: x[:0], real_parts[0])
        batches = [empty if part is None else part for part in parts]
        # Each worker knows only its own rows. `Lockstep` exchanges their numbers.
        return Piece(batches, counts, sum(counts) if self._worker.count == 1 else None)

    def _read(self, number: int) -> PyTree:
        # Here too, because a generator of the user runs when it is read.
        with _default_device(self._devices[number]):
            piece = self._readers[number].read()
        if piece is None:
            return None
        part = piece.parts[0]
        return jax.tree.map(lambda leaf: owned(leaf, self._pool), part) if self._copies else part

    @override
    def get_state(self) -> State:
        return {"pipelines": [reader.get_state() for reader in self._readers]}


def _default_device(device: jax.Device | None) -> AbstractContextManager[Any]:
    return nullcontext() if device is None else jax.default_device(device)
