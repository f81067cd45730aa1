"""Simulates workers in one process: their readers in turn, or as threads that exchange arrays at a barrier."""

import itertools
import threading
import time

import jax
import numpy as np

import phalanx
from phalanx._src.input import state as positions
from phalanx._src.input.shard import InputWorker, shares, split
from phalanx._src.input.sources.rows import read
from phalanx._src.options import AutoShardPolicy

DATA, FILE = AutoShardPolicy.DATA, AutoShardPolicy.FILE

DEADLINE_S = 100.0
"""Bounds the waits of tests that would otherwise hang."""

SHAPES = list(itertools.product(range(1, 5), range(1, 5)))
"""Workers and replicas of each."""

MOVES = [((1, 4), (2, 2)), ((2, 2), (4, 1)), ((4, 1), (2, 2)), ((2, 2), (1, 4)), ((1, 1), (4, 4)), ((3, 2), (1, 1))]
"""Shapes before and after a restart."""


def mirrored(replicas):
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


def wait_for(condition):
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def workers(count, replicas):
    return [InputWorker(i, count, replicas) for i in range(count)]


def open_all(source, shape, policy=DATA, state=None):
    return [source.open(w, policy, state) for w in workers(*shape)]


def rows(piece):
    """Returns the rows of a worker's piece: those of its first leaf, without a row of padding."""
    if piece is None:
        return []
    (part,) = piece.parts
    leaf = np.asarray(read(jax.tree.leaves(part)[0])).tolist()
    assert len(leaf) == sum(piece.counts) or (not sum(piece.counts) and len(leaf) == 1)
    return leaf[: sum(piece.counts)]


def take(readers, steps=None):
    """Returns what all workers read for each step, until none has more: `[step][worker]`."""
    taken = []
    while steps is None or len(taken) < steps:
        pieces = [reader.read() for reader in readers]
        if all(piece is None for piece in pieces):
            break
        taken.append(pieces)
    return taken


def rows_of(taken):
    return [x for pieces in taken for piece in pieces for x in rows(piece)]


def assert_shared(source, shape, batch_rows, order=None):
    """Asserts that the workers read each row once and in order, as their shares of batches of `batch_rows` rows."""
    taken = take(open_all(source, shape))
    assert rows_of(taken) == (list(range(sum(batch_rows))) if order is None else order)
    assert len(taken) == len(batch_rows)
    for pieces, total in zip(taken, batch_rows, strict=True):
        counts = [n for piece in pieces for n in piece.counts]
        assert counts == shares(total, shape[0] * shape[1])
        assert max(counts) - min(counts) <= 1
        assert [len(rows(piece)) for piece in pieces] == [sum(piece.counts) for piece in pieces]
        assert {piece.rows for piece in pieces} == {total}
        laid = [
            {*split(piece.counts, max(1, *counts)).ravel().tolist()} & {*range(sum(piece.counts))} for piece in pieces
        ]
        assert sum(map(len, laid)) == total


def assert_goes_on(source, before, after, order):
    """Asserts that other workers continue from every position, which is the same for all, in the order of one worker.

    At the end no worker has another batch, and the position stays.
    """
    for steps in range(len(order) + 2):
        readers = open_all(source, before)
        taken = take(readers, steps)
        state = through_text(readers[0].get_state())
        assert all(reader.get_state() == state for reader in readers)
        for shape in (before, after):
            assert rows_of(taken) + rows_of(take(open_all(source, shape, state=state))) == order
        if len(taken) < steps:
            assert [reader.read() for reader in readers] == [None] * before[0]
            assert readers[0].get_state() == state
            return
    raise AssertionError("the source does not end")


def batch_sizes(num_rows, batch_size):
    return [min(batch_size, num_rows - start) for start in range(0, num_rows, batch_size)]


def combined(states):
    """Returns the position that `of_all_workers` makes of the workers' positions, without an exchange."""
    texts = [np.frombuffer(positions.to_text(s).encode(), np.uint8) for s in states]
    width = max(map(len, texts))
    told = iter([np.array([[len(t)] for t in texts]), np.stack([np.pad(t, (0, width - len(t))) for t in texts])])
    return positions.of_all_workers(states[0], lambda values: next(told))


def through_text(state):
    return positions.from_text(positions.to_text(state))


def together(count, work):
    """Calls `work(index, exchange)` in a thread for each worker; returns the results, or what was raised."""
    barrier, told, results = threading.Barrier(count), [None] * count, [None] * count

    def exchange_of(index):
        def exchange(values):
            told[index] = np.array(values)
            barrier.wait(DEADLINE_S)
            everything = np.stack(told)
            barrier.wait(DEADLINE_S)
            return everything

        return exchange

    def run(index):
        try:
            results[index] = work(index, exchange_of(index))
        except Exception as e:
            results[index] = e

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(3 * DEADLINE_S)
        assert not thread.is_alive(), "a worker waits for ever"
    return results


def prefetching():
    return [t for t in threading.enumerate() if t.name == "phalanx-prefetch"]


def content(batch):
    return [np.asarray(v).tolist() for v in batch.values]
