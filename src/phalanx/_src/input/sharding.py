# SPDX-License-Identifier: Apache-2.0
"""Sharding of a dataset between workers: choosing the policy, and reporting which worker reads what."""

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, final

from typing_extensions import override

from phalanx._src.input import shard
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.base import (
    UNKNOWN,
    AbstractReader,
    AbstractSource,
    Facts,
    Piece,
    State,
    check_count,
    rows_of,
    state_entry,
)
from phalanx._src.input.sources.partial import USED, PartialBatches
from phalanx._src.options import AutoShardPolicy
from phalanx.errors import InputError, shown
from phalanx.typing import PyTree

_log = logging.getLogger("phalanx.input")

_MOST_ANNOUNCED = 16  # Workers, of which a cluster may have thousands.


@dataclass(frozen=True)
class WorkerShard:
    """The part of a dataset that one worker reads. `explain_sharding` returns one per worker.

    Args:
      worker: rank of the worker, from 0.
      num_workers: number of workers.
      policy: the policy in force, never AUTO.
      records: first and last row that the worker reads of every `batch_size` rows. None if it reads other rows.
      batch_size: global batch size in rows. None if it is unknown before reading.
      num_records: number of rows of the dataset. None if it is unknown.
      files: paths of the files that the worker reads. Empty if the dataset does not consist of files.
      num_files: number of files of the dataset.
      reads_all: whether the worker also reads the rows of other workers, and skips them.

    Example:
      >>> print(WorkerShard(worker=1, num_workers=2, policy=AutoShardPolicy.DATA, records=(4, 7), batch_size=8))
      worker 1 of 2 reads records 4..7 of every 8 (DATA)
    """

    worker: int
    num_workers: int
    policy: AutoShardPolicy
    records: tuple[int, int] | None = None
    batch_size: int | None = None
    num_records: int | None = None
    files: tuple[str, ...] = ()
    num_files: int = 0
    reads_all: bool = False

    def __str__(self) -> str:
        who, name = f"worker {self.worker} of {self.num_workers} reads", self.policy.name
        total = "" if self.num_records is None else f" of {self.num_records}"
        if self.policy is AutoShardPolicy.FILE:
            return f"{who} {len(self.files)} of {self.num_files} files ({name})"
        if self.num_workers == 1:
            return f"{who} all records{total} ({name})"
        if self.policy is not AutoShardPolicy.DATA:
            shards = "all records" if self.policy is AutoShardPolicy.OFF else "its own shard"
            return f"{who} {shards}{total} ({name})"
        if self.records is None:
            return f"{who} its part of every batch ({name}; each worker reads everything and keeps its own rows)"
        first, last = self.records
        how = "; each worker reads everything and keeps its own records" if self.reads_all else ""
        rows = f"records {first}..{last}" if last >= first else "no record"
        return f"{who} {rows} of every {self.batch_size}{total and ', of ' + str(self.num_records) + ' in all'} ({name}{how})"


@dataclass(frozen=True)
class Plan:
    """The sharding of a dataset between workers.

    Args:
      source: the source that each worker opens.
      policy: FILE or DATA, for `AbstractSource.open`.
      agreed: whether the workers read different rows and must therefore agree on the number of steps. See `Lockstep`.
      shards: one per worker, for the report to the user.
    """

    source: AbstractSource
    policy: AutoShardPolicy
    agreed: bool
    shards: Sequence[WorkerShard]

    def at(self, state: State) -> "Plan":
        """Returns the plan with which a pass begins at a position, which may lie within a batch."""
        is_whole = USED not in state or self.source.facts.whole is not None
        return self if is_whole else dataclasses.replace(self, source=PartialBatches(self.source, Fraction(1)))

    def announce(self, worker: InputWorker) -> None:
        """Logs on the chief what each of the first workers reads, once per text and process."""
        if worker.is_chief:
            # Python prints warnings even if the program configures no logging.
            level = logging.INFO if worker.count == 1 else logging.WARNING
            for each in self.shards[:_MOST_ANNOUNCED]:
                _say_once(level, str(each))
            if (unnamed := len(self.shards) - _MOST_ANNOUNCED) > 0:
                _say_once(
                    level, f"{unnamed} more workers read their shards. phalanx.explain_sharding lists all of them"
                )


def plan(
    dataset: Any, source_of: Callable[[Any], AbstractSource], policy: AutoShardPolicy, worker: InputWorker
) -> Plan:
    """Decides how `dataset` is sharded between workers.

    Args:
      dataset: the dataset that the user passed.
      source_of: converts a dataset to a source.
      policy: the policy that the user requested.
      worker: this worker.

    Returns:
      The plan.

    Raises:
      InputError: `policy` is FILE but the dataset has too few files or none, or `policy` is HINT but the dataset cannot
        shard itself.
    """
    source = source_of(dataset)
    facts = source.facts
    policy = _resolved(dataset, policy, facts, worker)
    agreed = worker.count > 1 and policy is not AutoShardPolicy.DATA
    shards = [_shard(facts, policy, dataclasses.replace(worker, index=i)) for i in range(worker.count)]
    # Under OFF and HINT, each worker reads its own global batches.
    if agreed and policy is not AutoShardPolicy.FILE:
        source = CutBatches(source_of(_own_shard(dataset, worker)) if policy is AutoShardPolicy.HINT else source)
    in_force = AutoShardPolicy.FILE if policy is AutoShardPolicy.FILE else AutoShardPolicy.DATA
    return Plan(source, in_force, agreed, shards)


def _resolved(dataset: Any, policy: AutoShardPolicy, facts: Facts, worker: InputWorker) -> AutoShardPolicy:
    if policy is AutoShardPolicy.AUTO:
        policy = _policy_of_tensorflow(dataset)
    num_files = len(facts.files)
    if policy is AutoShardPolicy.FILE and worker.count > 1 and num_files < worker.count:
        problem = (
            f"the dataset has {num_files} files for {worker.count} workers."
            if num_files
            else "the dataset does not consist of files."
        )
        raise InputError(
            f"AutoShardPolicy.FILE for {shown(dataset)}", problem, "auto_shard_policy=phalanx.data.AutoShardPolicy.DATA"
        )
    if policy is AutoShardPolicy.AUTO and num_files >= worker.count:
        return AutoShardPolicy.FILE
    if policy is AutoShardPolicy.AUTO:
        if num_files and worker.is_chief:
            _say_once(
                logging.WARNING,
                f"{num_files} files are too few for {worker.count} workers, so each reads its rows of every batch",
            )
        return AutoShardPolicy.DATA
    # A single worker reads all rows in any case, so it may ask for FILE without files.
    return AutoShardPolicy.DATA if policy is AutoShardPolicy.FILE and not num_files else policy


def _policy_of_tensorflow(dataset: object) -> AutoShardPolicy:
    """Returns the policy that the options of a `tf.data.Dataset` request, or AUTO."""
    tf = sys.modules.get("tensorflow")
    if tf is None or not isinstance(dataset, tf.data.Dataset):
        return AutoShardPolicy.AUTO
    policy = AutoShardPolicy(int(dataset.options().experimental_distribute.auto_shard_policy))
    # Phalanx cannot see the files of a `tf.data.Dataset`, so it cannot shard by file.
    return AutoShardPolicy.AUTO if policy is AutoShardPolicy.FILE else policy


@functools.cache
def _say_once(level: int, text: str) -> None:
    """Logs a text once per process, because most datasets of a program have the same text."""
    _log.log(level, text)


def _own_shard(dataset: object, worker: InputWorker) -> PyTree:
    if not hasattr(dataset, "shard"):
        raise InputError(
            f"AutoShardPolicy.HINT for {shown(dataset)}",
            "the dataset has no method `shard(num_workers, worker)`.",
            "auto_shard_policy=phalanx.data.AutoShardPolicy.AUTO",
        )
    return dataset.shard(worker.count, worker.index)


def _shard(facts: Facts, policy: AutoShardPolicy, worker: InputWorker) -> WorkerShard:
    files = facts.files
    worker_files = tuple(files[i] for i in worker.files(len(files))) if policy is AutoShardPolicy.FILE else files
    rows = worker.rows(facts.batch_size) if facts.batch_size and policy is AutoShardPolicy.DATA else None
    return WorkerShard(
        worker=worker.index,
        num_workers=worker.count,
        policy=policy,
        records=(rows.start, rows.stop - 1) if rows is not None else None,
        batch_size=facts.batch_size,
        num_records=facts.num_records,
        files=worker_files,
        num_files=len(files),
        reads_all=policy is AutoShardPolicy.DATA and worker.count > 1 and not facts.has_random_access,
    )


@final
class CutBatches(AbstractSource):
    """Cuts each batch of a source into one batch per worker, for workers that each read a whole dataset.

    All workers together then take the rows of one global batch per step.

    Args:
      source: source of global batches, which each worker reads completely.
    """

    def __init__(self, source: AbstractSource) -> None:
        self._source = source

    @property
    @override
    def facts(self) -> Facts:
        facts = self._source.facts
        return Facts(batch_size=facts.batch_size, num_batches=UNKNOWN, owner=facts.owner)

    @override
    def open(self, worker: InputWorker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        whole, cut = self.start(state)
        inner = self._source.open(InputWorker(), policy, whole)
        return _CutReader(inner, worker, check_count(cut, "part of a batch", worker.count))

    @override
    def start(self, state: State | None) -> tuple[State | None, int]:
        whole = state_entry(state, "whole", None, beside=("cut",))
        self._source.start(whole)
        return whole, check_count(state_entry(state, "cut", 0, beside=("whole",)), "part of a batch")


@final
class _CutReader(AbstractReader):
    """Reads a batch and returns its parts one by one. `_before` is the position before that batch, for `get_state`."""

    def __init__(self, reader: AbstractReader, worker: InputWorker, cut: int) -> None:
        self._reader, self._worker, self._cut = reader, worker, 0
        self._before: State = reader.get_state()
        self._piece: Piece | None = None
        for _ in range(cut):
            self.read()

    @override
    def read(self) -> Piece | None:
        workers = self._worker.count
        if self._cut % workers == 0:
            self._before = self._reader.get_state()
            self._piece, self._cut = self._reader.read(), 0
        if self._piece is None:
            return None
        total = sum(self._piece.counts)
        rows = self._worker.rows(total, self._cut)
        self._cut += 1
        part = rows_of(self._piece.parts[0], rows, total)
        return Piece([part], shard.shares(len(rows), self._worker.replicas), None)

    @override
    def get_state(self) -> State:
        if self._cut == self._worker.count:
            return {"whole": self._reader.get_state(), "cut": 0}
        return {"whole": self._before, "cut": self._cut}
