# SPDX-License-Identifier: Apache-2.0
"""A parameter server: it holds variables and optimizer slots, and applies updates to them.

A push is applied on all servers or on none. The protocol:

1. The worker sends parts to servers on other machines (`hold`), and the rest to the first server (`exchange`).
2. When the clock allows the push, the first server gives it a turn, applies its own part, and tells the other servers (`commit`).
3. The others apply their parts in the order of the turns. Then `exchange` returns the values for the worker's next step.

A worker that dies before step 2 leaves no trace. After step 2 all servers have what they need, so the push is completed.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.export
import numpy as np

from phalanx._src.parameter_server.processes.calls import Busy, Sign
from phalanx._src.parameter_server.remote.plans import (
    Decision,
    FencedError,
    Inventory,
    Label,
    LostServerError,
    Push,
    Pusher,
    State,
    UpdateProgram,
)
from phalanx._src.parameter_server.remote.shared_memory import Packed, SharedMemoryConnection
from phalanx._src.parameter_server.remote.staleness import Clock
from phalanx._src.parameter_server.remote.values import ServerValues
from phalanx._src.typed_jax import set_config
from phalanx.typing import PyTree

_WAIT_S = 600.0
"""Seconds that a push waits for others before it fails. A lost worker is forgotten long before."""


class ParameterServer:
    """Holds values by key. Its methods may be called in several threads.

    `_change` guards all state. Threads wait on it for their turn.

    Args:
      index: index of this server.
      max_staleness: bound of the staleness, in updates. Only the first server uses its clock.
    """

    def __init__(self, index: int, max_staleness: int | None = None) -> None:
        # Imported here, because Ray is an optional dependency.
        import ray

        self._ray = ray
        # The accelerators of the machine belong to its workers.
        set_config("jax_platforms", "cpu")
        self._index = index
        self._values = ServerValues()
        self._lives: dict[int, int] = {}
        self._clock = Clock(max_staleness)
        self._peers: Sequence[Any] = ()
        self._applied = self._num_restarts = 0
        # Parts of pushes that arrived from other machines and that the first server has not decided yet.
        self._held: dict[tuple[Pusher, int], Push] = {}
        # On the first server: the last applied push of each worker, its pending commits on other servers, and the last turn of
        # each server.
        self._done: dict[Pusher, int] = {}
        self._commits: dict[Pusher, dict[int, Any]] = {}
        self._turns: dict[int, int] = defaultdict(int)
        self._change = threading.Condition(threading.RLock())
        self._lines: dict[Pusher, SharedMemoryConnection] = {}

    def ping(self) -> Sign:
        """Returns a heartbeat."""
        # Without the lock, because a heartbeat must not wait for an update.
        return Busy().sign(jax.default_backend())

    def meet(self, peers: Sequence[Any]) -> None:
        """Records the actors of all servers."""
        self._peers = peers

    def near(self, pusher: Pusher, greeting: object) -> bool:
        """Offers shared memory between a worker and this server.

        Args:
          pusher: the worker.
          greeting: see `SharedMemoryConnection.greeting`.

        Returns:
          Whether both are on one machine, and use shared memory from now on.
        """
        line = SharedMemoryConnection(pusher)
        if not line.understands(greeting):
            return False
        with self._change:
            self._require(pusher)
            self._lines[pusher] = line
        return True

    def put(
        self,
        values: Mapping[int, np.ndarray],
        labels: Mapping[int, Label] | None = None,
        done: Mapping[Pusher, int] | None = None,
    ) -> None:
        """Stores values, labels of new keys, and the number of the last push of each worker that the values contain."""
        with self._change:
            self._values.put(values, labels or {})
            self._done.update(done or {})

    def make(self, key: int, program: bytes, labels: Mapping[int, Label]) -> None:
        """Initializes a table by running the serialized program of its initializer."""
        with self._change:
            self._values.make(key, program, labels)

    def get(self, requests: Sequence[int | tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """Returns values: the full array for a key, or some rows for a pair of a key and row indices."""
        with self._change:
            return self._values.get(requests)

    def drop(self, keys: Iterable[int]) -> None:
        """Deletes values."""
        with self._change:
            self._values.drop(keys)

    def inventory(self) -> Inventory | None:
        """Returns the inventory of this server, or None if its start was interrupted before it met the other servers."""
        with self._change:
            return Inventory(dict(self._lives), dict(self._values.labels)) if self._peers else None

    def keep(self, keys: Collection[int]) -> None:
        """Deletes all other values, and the programs of a coordinator that has died."""
        with self._change:
            self._values.keep(keys)

    def learn(self, name: int, program: UpdateProgram) -> None:
        """Compiles and stores the program of an optimizer's update."""
        with self._change:
            self._values.learn(name, program)

    def enter(self, pushers: Iterable[Pusher]) -> None:
        """Registers workers that will push. Earlier generations of the same workers are rejected from now on."""
        with self._moving():
            for pusher in pushers:
                self._lives[pusher.worker] = pusher.life
            self._clock.enter(pushers)

    def leave(self, pusher: Pusher) -> None:
        """Records that a worker will not push until it pulls again."""
        with self._moving():
            self._clock.leave(pusher)

    def release(self, pusher: Pusher) -> None:
        """Records that the current step of a worker will not push, because it failed or changed nothing."""
        with self._moving():
            self._clock.release(pusher)

    def forget(self, pusher: Pusher, after: int = 0) -> list[int]:
        """Drops the undecided pushes of a lost worker, and rejects its later calls.

        Args:
          pusher: the worker.
          after: turn of this server that must be applied first: the last one that the first server gave before it forgot the
            worker. 0 on the first server.

        Returns:
          The last turn of each server.
        """
        with self._moving():
            self._wait(lambda: self._applied >= after)
            # The next worker of this index may have entered already.
            self._lives[pusher.worker] = max(self._lives.get(pusher.worker, 0), pusher.life + 1)
            self._clock.forget(pusher)
            self._lines.pop(pusher, None)
            # Wakes the call of the lost worker that waits in `exchange`, which then fails.
            self._change.notify_all()
            self._held = {name: p for name, p in self._held.items() if p.pusher != pusher}
        return [self._turns[i] for i in range(len(self._peers))]

    def last_push(self, pusher: Pusher) -> int:
        """Returns the number of the last push of a worker that was applied; -1 if there was none. For the first server."""
        with self._change:
            return self._done.get(pusher, -1)

    def pull(self, requests: Sequence[Any], pusher: Pusher) -> PyTree:
        """Returns the current version, and values as `get` does. Registers that the worker uses them for a step."""
        with self._change:
            self._require(pusher)
            return self._answer(pusher, requests)

    def hold(self, push: Push) -> None:
        """Stores this server's part of a push until the first server decides about it."""
        with self._change:
            self._require(push.pusher)
            self._held[push.name] = push

    def exchange(self, sent: Push | Packed) -> dict[int, Any]:
        """Takes a push and returns when all servers have applied it. Called on the first server only.

        Args:
          sent: the push, directly or in shared memory.

        Returns:
          Per server that was asked for values, its answer as from `pull`.

        Raises:
          LostServerError: another server has died.
          FencedError: the worker was declared lost.
        """
        push = self._received(sent)
        # Counted before the push is pending, because a restart drops what is pending.
        pusher, restarts = push.pusher, self._num_restarts
        with self._moving():
            self._require(pusher)
            self._clock.push(push)
        answers = {}
        with self._change:
            self._wait(lambda: self._done.get(pusher, -1) >= push.number or self._num_restarts > restarts, pusher)
            if self._done.get(pusher, -1) < push.number:
                raise LostServerError("A server was lost while a push waited for its turn.")
            if push.requests is not None:
                answers[self._index] = self._answer(pusher, push.requests[self._index])
            commits = self._commits.pop(pusher)
        # Without the lock, so that pushes of other workers are applied while the other servers answer.
        dead = self._ray.exceptions
        try:
            if commits:
                answers |= zip(commits, self._ray.get(list(commits.values())), strict=True)
        except (dead.RayActorError, dead.OutOfMemoryError, FencedError, LostServerError) as e:
            raise LostServerError(str(e)) from None
        return {s: x for s, x in answers.items() if x is not None}

    def commit(self, decision: Decision, pusher: Pusher, requests: Sequence[Any] | None) -> PyTree:
        """Applies a decision of the first server, after this server's previous turn.

        Args:
          decision: the turn and its pushes.
          pusher: the worker to answer.
          requests: values that the worker needs for its next step. None if it has no next step.

        Returns:
          The answer for the worker, as from `pull`, or None.
        """
        before = decision.follows[self._index]
        with self._change:
            self._wait(lambda: self._applied >= before)
            # Otherwise this turn is done already: another of its pushes came first, or a restart moved all servers to a later
            # update.
            if self._applied == before:
                pushes = [
                    self._held.pop(name) if sent is None else self._received(sent)
                    for name, sent in decision.parts[self._index]
                ]
                self._apply(decision.turn, pushes)
            return None if requests is None else self._answer(pusher, requests)

    def state(self) -> State:
        """Returns all values and labels, and the last pushes, as `put` takes them."""
        with self._change:
            return self._values.get_all(), dict(self._values.labels), dict(self._done)

    def statistics(self) -> tuple[int, Counter[int], int]:
        """Returns the number of applied updates, the histogram of staleness (staleness to number of steps), and the bytes held."""
        with self._change:
            return self._clock.version, Counter(self._clock.staleness), self._values.num_bytes

    def num_applied(self) -> int:
        """Returns the number of applied updates."""
        # Without the lock: `Servers` asks for this number to see whether a busy server is alive.
        return self._applied

    def align_all(self, applied: int) -> None:
        """Makes all servers continue from the same update after a restart. Called on the first server only.

        The lock is held during the calls, so that no update is decided in between.
        """
        with self._change:
            self.align(max(applied, self._applied))
            self._ray.get([s.align.remote(self._applied) for i, s in enumerate(self._peers) if i != self._index])

    def align(self, applied: int) -> None:
        """Continues from update number `applied`, and drops all pending pushes."""
        with self._change:
            self._applied = self._clock.version = applied
            self._turns.update(dict.fromkeys(range(len(self._peers)), applied))
            self._held.clear()
            self._clock.clear()
            self._num_restarts += 1
            self._change.notify_all()

    def _received(self, sent: Push | Packed) -> Push:
        if isinstance(sent, Push):
            return sent
        with self._change:
            self._require(sent.pusher)
            if sent.pusher not in self._lines:
                raise LostServerError("The server was restarted, and cannot read the shared memory of its predecessor.")
            push: Push = self._lines[sent.pusher].unpack(sent)
        return push

    def _answer(self, pusher: Pusher, requests: Sequence[Any]) -> PyTree:
        reply = (self._clock.pull(pusher) if self._index == 0 else 0, self.get(requests))
        return self._lines[pusher].pack(reply) if pusher in self._lines else reply

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Guards a change of the clock, and then applies every push that the clock allows."""
        with self._change:
            yield
            while pushes := self._clock.ready():
                peers = {s for push in pushes for s in push.peer_pushes}
                follows = {s: self._turns[s] for s in (self._index, *peers)}
                parts = {s: [(p.name, p.peer_pushes[s]) for p in pushes if s in p.peer_pushes] for s in peers}
                decision = Decision(self._applied + 1, follows, parts)
                self._turns.update(dict.fromkeys(follows, decision.turn))
                # Sent first, so that the other servers apply their parts at the same time.
                self._commits.update((push.pusher, self._committing(push, decision)) for push in pushes)
                self._apply(decision.turn, pushes)

    def _committing(self, push: Push, decision: Decision) -> dict[int, Any]:
        """Sends a decision to the other servers without waiting. Returns the pending answers, by server."""
        requests = push.requests or {}
        return {s: self._peers[s].commit.remote(decision, push.pusher, requests.get(s)) for s in push.peer_pushes}

    def _apply(self, turn: int, pushes: Sequence[Push]) -> None:
        """Applies some pushes as one update. See `ServerValues.apply`."""
        self._values.apply(pushes)
        for push in pushes:
            self._done[push.pusher] = push.number
        self._applied = turn
        self._change.notify_all()

    def _require(self, pusher: Pusher) -> None:
        if pusher.life < self._lives.get(pusher.worker, 0):
            raise FencedError(f"Worker {pusher.worker} was declared lost, and another worker runs its step.")

    def _wait(self, is_ready: Callable[[], bool], pusher: Pusher | None = None) -> None:
        """Waits until `is_ready`, or until `pusher` is declared lost. The caller holds `_change`.

        Raises:
          TimeoutError: neither happened in time.
          FencedError: `pusher` was declared lost.
        """

        def is_over() -> bool:
            return is_ready() or (pusher is not None and pusher.life < self._lives.get(pusher.worker, 0))

        if not self._change.wait_for(is_over, timeout=_WAIT_S):
            raise TimeoutError(f"Parameter server {self._index} waited {_WAIT_S:.0f} s for an update of other workers.")
        if pusher is not None and not is_ready():
            self._require(pusher)
