# SPDX-License-Identifier: Apache-2.0
"""Which worker reads what: the policy that is in force, and how it is told."""

import dataclasses
import functools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, final

from typing_extensions import override

from phalanx.errors import InputError, shown
from phalanx.input import shard
from phalanx.input.shard import Worker
from phalanx.input.sources.base import (
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
from phalanx.options import AutoShardPolicy

_log = logging.getLogger("phalanx.input")


@dataclass(frozen=True)
class WorkerShard:
    """What one worker reads. `explain_sharding` returns one for each.

    Args:
      worker: which worker, from 0.
      num_workers: how many there are.
      policy: the policy in force, never AUTO.
      records: the rows that it reads of every `batch_size` rows, the first and the last; None where it reads other rows.
      batch_size: the global batch size; None where only the data tells.
      num_records: how many rows the dataset has, if that is known.
      files: the files that it reads, where the dataset consists of files.
      num_files: how many files the dataset has.
      reads_all: whether it reads the rows of other workers too, and skips them.
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
            return f"{who} its part of every batch ({name}, by skipping the others' rows)"
        first, last = self.records
        how = ", by skipping the others' records" if self.reads_all else ""
        rows = f"records {first}..{last}" if last >= first else "no record"
        return f"{who} {rows} of every {self.batch_size}{total and ', of ' + str(self.num_records) + ' in all'} ({name}{how})"


@dataclass(frozen=True)
class Plan:
    """How a dataset is divided between workers.

    Args:
      source: what each worker opens.
      policy: FILE or DATA, for `AbstractSource.open`.
      agreed: whether the workers read different rows, so that they have to tell each other how many.
      shards: what each worker reads.
    """

    source: AbstractSource
    policy: AutoShardPolicy
    agreed: bool
    shards: Sequence[WorkerShard]

    def announce(self, worker: Worker) -> None:
        """Says on the chief who reads what, if no dataset before had the same said."""
        if worker.is_chief:
            level = logging.INFO if worker.count == 1 else logging.WARNING
            for each in self.shards:
                _say_once(level, str(each))


def plan(dataset: Any, source_of: Callable[[Any], AbstractSource], policy: AutoShardPolicy, worker: Worker) -> Plan:
    """Decides how `dataset` is divided.

    Args:
      dataset: what the user passed.
      source_of: returns the source that a dataset is.
      policy: what the user wants.
      worker: this worker.

    Raises:
      InputError: FILE for a dataset that has too few files or none, or HINT for one that cannot shard itself.
    """
    source = source_of(dataset)
    facts = source.facts
    policy = _resolved(dataset, policy, facts, worker)
    agreed = worker.count > 1 and policy is not AutoShardPolicy.DATA
    shards = [_shard(facts, policy, dataclasses.replace(worker, index=i)) for i in range(worker.count)]
    if agreed and policy is not AutoShardPolicy.FILE:
        source = CutBatches(source_of(_own_shard(dataset, worker)) if policy is AutoShardPolicy.HINT else source)
    in_force = AutoShardPolicy.FILE if policy is AutoShardPolicy.FILE else AutoShardPolicy.DATA
    return Plan(source, in_force, agreed, shards)


def _resolved(dataset: Any, policy: AutoShardPolicy, facts: Facts, worker: Worker) -> AutoShardPolicy:
    if policy is AutoShardPolicy.AUTO:
        policy = _policy_of_tensorflow(dataset)
    num_files = len(facts.files)
    if policy is AutoShardPolicy.FILE and worker.count > 1 and num_files < worker.count:
        found = (
            f"it has {num_files} files for {worker.count} workers." if num_files else "it does not consist of files."
        )
        raise InputError(
            f"AutoShardPolicy.FILE for {shown(dataset)}", found, "auto_shard_policy=phalanx.data.AutoShardPolicy.DATA"
        )
    if policy is AutoShardPolicy.AUTO and num_files >= worker.count:
        return AutoShardPolicy.FILE
    if policy is AutoShardPolicy.AUTO:
        if num_files and worker.is_chief:
            _say_once(
                logging.WARNING,
                f"{num_files} files are too few for {worker.count} workers: each takes its rows of every batch",
            )
        return AutoShardPolicy.DATA
    return AutoShardPolicy.DATA if policy is AutoShardPolicy.FILE and not num_files else policy


def _policy_of_tensorflow(dataset: Any) -> AutoShardPolicy:
    """Returns the policy among the options of a `tf.data.Dataset`."""
    tf = sys.modules.get("tensorflow")
    if tf is None or not isinstance(dataset, tf.data.Dataset):
        return AutoShardPolicy.AUTO
    policy = AutoShardPolicy(int(dataset.options().experimental_distribute.auto_shard_policy))
    # Its files are known to TensorFlow alone.
    return AutoShardPolicy.AUTO if policy is AutoShardPolicy.FILE else policy


@functools.cache
def _say_once(level: int, text: str) -> None:
    """Logs what is the same for most datasets of a program, and so was said before."""
    _log.log(level, text)


def _own_shard(dataset: Any, worker: Worker) -> Any:
    if not hasattr(dataset, "shard"):
        raise InputError(
            f"AutoShardPolicy.HINT for {shown(dataset)}",
            "it has no method `shard(num_workers, worker)` that says how to divide it.",
            "auto_shard_policy=phalanx.data.AutoShardPolicy.AUTO",
        )
    return dataset.shard(worker.count, worker.index)


def _shard(facts: Facts, policy: AutoShardPolicy, worker: Worker) -> WorkerShard:
    files = facts.files
    own = tuple(files[i] for i in worker.files(len(files))) if policy is AutoShardPolicy.FILE else files
    rows = worker.rows(facts.batch_size) if facts.batch_size and policy is AutoShardPolicy.DATA else None
    return WorkerShard(
        worker=worker.index,
        num_workers=worker.count,
        policy=policy,
        records=(rows.start, rows.stop - 1) if rows is not None else None,
        batch_size=facts.batch_size,
        num_records=facts.num_records,
        files=own,
        num_files=len(files),
        reads_all=policy is AutoShardPolicy.DATA and worker.count > 1 and not facts.has_random_access,
    )


@final
class CutBatches(AbstractSource):
    """Lets a worker read everything, and cuts each batch into as many as there are workers.

    So a step takes as many rows of all workers together as a global batch has.

    Args:
      source: what is read.
    """

    def __init__(self, source: AbstractSource) -> None:
        self._source = source

    @property
    @override
    def facts(self) -> Facts:
        facts = self._source.facts
        return Facts(batch_size=facts.batch_size, num_batches=UNKNOWN, is_borrowed=facts.is_borrowed)

    @override
    def open(self, worker: Worker, policy: AutoShardPolicy, state: State | None) -> AbstractReader:
        inner = self._source.open(Worker(), policy, state_entry(state, "whole", None, beside=("cut",)))
        cut = state_entry(state, "cut", 0, beside=("whole",))
        return _CutReader(inner, worker, check_count(cut, "part of a batch", worker.count))


@final
class _CutReader(AbstractReader):
    def __init__(self, reader: AbstractReader, worker: Worker, cut: int) -> None:
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
        own = Worker(self._cut, workers).rows(total)
        self._cut += 1
        part = rows_of(self._piece.parts[0], own, total)
        return Piece([part], shard.shares(len(own), self._worker.replicas), None)

    @override
    def get_state(self) -> State:
        if self._cut == self._worker.count:
            return {"whole": self._reader.get_state(), "cut": 0}
        return {"whole": self._before, "cut": self._cut}
