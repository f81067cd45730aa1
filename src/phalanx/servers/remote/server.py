# SPDX-License-Identifier: Apache-2.0
"""A parameter server: variables and optimizer slots, and the updates of them.

A push counts on all servers or on none. The first server gets all of it, or where a server is on another machine the word that
this one holds its part; when the clock allows the push it applies its own part, and has the others apply theirs in the same order.
"""

import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np

from phalanx.servers.calls import Busy, Sign
from phalanx.servers.remote.plans import Decision, FencedError, LostServerError, Push, Pusher, Rows, UpdateProgram
from phalanx.servers.remote.shared_memory import Line, Packed
from phalanx.servers.remote.staleness import Clock

_WAIT_S = 600.0
"""How long a push waits for others before that is an error; a worker that is lost is forgotten long before."""


class ParameterServer:
    """Holds values by key. Its methods may be called in several threads.

    Args:
      index: its number.
      max_staleness: the bound of the clock, which the first server keeps.
    """

    def __init__(self, index: int, max_staleness: int | None = None) -> None:
        # Where parameter servers are not used it need not be installed.
        import ray

        self._ray = ray
        # It shares its machine's accelerators with nobody, but workers do.
        jax.config.update("jax_platforms", "cpu")
        self._index = index
        self._values: dict[int, jax.Array] = {}
        self._updates: dict[int, tuple[UpdateProgram, Callable[..., Any]]] = {}
        self._lives: dict[int, int] = {}
        self._clock = Clock(max_staleness)
        self._peers: Sequence[Any] = ()
        self._applied = self._num_restarts = 0
        # Parts of pushes that are to be decided, where this server is not on the worker's machine.
        self._held: dict[tuple[Pusher, int], Push] = {}
        # At the first server: which push was the last of each worker, its parts on their way, and the last turn of each server.
        self._done: dict[Pusher, int] = {}
        self._commits: dict[Pusher, dict[int, Any]] = {}
        self._turns: dict[int, int] = defaultdict(int)
        self._change = threading.Condition(threading.RLock())
        self._lines: dict[Pusher, Line] = {}

    def ping(self) -> Sign:
        """Returns a sign of life."""
        return Busy().sign(jax.default_backend())

    def meet(self, peers: Sequence[Any]) -> None:
        """Records who the servers are."""
        self._peers = peers

    def near(self, pusher: Pusher, greeting: Any) -> bool:
        """Hears from a worker that has begun a line; returns whether it is used from now on."""
        line = Line(pusher)
        if not line.understands(greeting):
            return False
        with self._change:
            self._require(pusher)
            self._lines[pusher] = line
        return True

    def put(self, values: dict[int, np.ndarray]) -> None:
        """Stores values."""
        with self._change:
            self._values.update({key: jnp.array(x) for key, x in values.items()})

    def make(self, key: int, program: bytes) -> None:
        """Makes a table by its initializer's program."""
        with self._change:
            self._values[key] = jax.jit(jax.export.deserialize(bytearray(program)).call)()

    def get(self, asked: Sequence[int | tuple[int, np.ndarray]]) -> list[np.ndarray]:
        """Returns values, whole or some of their rows."""
        with self._change:
            return [
                np.asarray(self._values[x[0]])[x[1]] if isinstance(x, tuple) else np.asarray(self._values[x])
                for x in asked
            ]

    def drop(self, keys: Iterable[int]) -> None:
        """Forgets values."""
        with self._change:
            for key in keys:
                self._values.pop(key, None)

    def learn(self, name: int, program: UpdateProgram) -> None:
        """Hears how an optimizer's update is done."""
        with self._change:
            self._updates[name] = program, _in_place(program)

    def enter(self, pushers: Iterable[Pusher]) -> None:
        """Hears that steps of these workers are to be expected; of those with these numbers, no others count any more."""
        with self._moving():
            for pusher in pushers:
                self._lives[pusher.worker] = pusher.life
            self._clock.enter(pushers)

    def leave(self, pusher: Pusher) -> None:
        """Hears that no step of a worker is to be expected."""
        with self._moving():
            self._clock.leave(pusher)

    def release(self, pusher: Pusher) -> None:
        """Hears that a step of a worker has failed."""
        with self._moving():
            self._clock.release(pusher)

    def forget(self, pusher: Pusher, after: int = 0) -> list[int]:
        """Hears that a worker is lost: what it has not pushed whole will never count. Returns the last turn of each server.

        Args:
          pusher: the worker.
          after: this server's last turn, as the first one knew it when it heard of it: what is among these counts here too.
        """
        with self._moving():
            self._wait(lambda: self._applied >= after)
            self._lives[pusher.worker] = max(self._lives.get(pusher.worker, 0), pusher.life + 1)
            self._clock.forget(pusher)
            self._lines.pop(pusher, None)
            self._change.notify_all()
            self._held = {name: p for name, p in self._held.items() if p.pusher != pusher}
        return [self._turns[i] for i in range(len(self._peers))]

    def pull(self, asked: Sequence[Any], pusher: Pusher) -> Any:
        """Returns the version, and values."""
        with self._change:
            self._require(pusher)
            return self._answer(pusher, asked)

    def hold(self, push: Push) -> None:
        """Takes its part of a push, which the first server has not decided yet."""
        with self._change:
            self._require(push.pusher)
            self._held[push.name] = push

    def exchange(self, sent: Push | Packed) -> dict[int, Any]:
        """Takes a push, as the first server, and returns when all servers have applied it: of each that is asked its answer to a `pull`.

        Raises:
          LostServerError: another server has died.
        """
        push = self._received(sent)
        pusher, restarts = push.pusher, self._num_restarts
        with self._moving():
            self._require(pusher)
            self._clock.push(push)
        answers = {}
        with self._change:
            self._wait(lambda: self._done.get(pusher, -1) >= push.number or self._num_restarts > restarts, pusher)
            if self._done.get(pusher, -1) < push.number:
                raise LostServerError("a server was lost while a push waited for its turn")
            if push.asked is not None:
                answers[self._index] = self._answer(pusher, push.asked[self._index])
            commits = self._commits.pop(pusher)
        try:
            answers |= zip(commits, self._ray.get(list(commits.values())), strict=True)
        except (self._ray.exceptions.RayActorError, FencedError, LostServerError) as e:
            raise LostServerError(str(e)) from None
        return {s: x for s, x in answers.items() if x is not None}

    def commit(self, decision: Decision, pusher: Pusher, asked: Sequence[Any] | None) -> Any:
        """Applies what the first server has decided, after what it has decided of this server before; answers its worker."""
        before = decision.follows[self._index]
        with self._change:
            self._wait(lambda: self._applied >= before)
            # Else another push of this turn came first, or a server was restarted, and all go on from a later update.
            if self._applied == before:
                pushes = [
                    self._held.pop(name) if sent is None else self._received(sent)
                    for name, sent in decision.parts[self._index]
                ]
                self._apply(decision.turn, pushes)
            return None if asked is None else self._answer(pusher, asked)

    def state(self) -> dict[int, np.ndarray]:
        """Returns all values."""
        with self._change:
            return {key: np.asarray(x) for key, x in self._values.items()}

    def statistics(self) -> tuple[int, Counter[int], int]:
        """Returns how many updates were applied, of how many steps the staleness was how great, and the bytes held."""
        with self._change:
            return self._clock.version, Counter(self._clock.staleness), sum(x.nbytes for x in self._values.values())

    def num_applied(self) -> int:
        """Returns how many updates were applied."""
        return self._applied

    def align_all(self, applied: int) -> None:
        """Lets all servers go on after the loss of one, from the same update; the first server does it, between two updates."""
        with self._change:
            self.align(max(applied, self._applied))
            self._ray.get([s.align.remote(self._applied) for i, s in enumerate(self._peers) if i != self._index])

    def align(self, applied: int) -> None:
        """Goes on from the update that all servers are to be at; what was not applied is dropped."""
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
                raise LostServerError(
                    "a server was started again, and the memory of the push was that of the one before"
                )
            push: Push = self._lines[sent.pusher].unpack(sent)
        return push

    def _answer(self, pusher: Pusher, asked: Sequence[Any]) -> Any:
        reply = (self._clock.pull(pusher) if self._index == 0 else 0, self.get(asked))
        return self._lines[pusher].pack(reply) if pusher in self._lines else reply

    @contextmanager
    def _moving(self) -> Iterator[None]:
        """Applies what can be, after the clock has heard something."""
        with self._change:
            yield
            while pushes := self._clock.ready():
                others = {s for push in pushes for s in push.others}
                follows = {s: self._turns[s] for s in (self._index, *others)}
                parts = {s: [(p.name, p.others[s]) for p in pushes if s in p.others] for s in others}
                decision = Decision(self._applied + 1, follows, parts)
                self._turns.update(dict.fromkeys(follows, decision.turn))
                self._commits.update((push.pusher, self._committing(push, decision)) for push in pushes)
                self._apply(decision.turn, pushes)

    def _committing(self, push: Push, decision: Decision) -> dict[int, Any]:
        """Lets the other servers begin to apply what was decided."""
        asked = push.asked or {}
        return {s: self._peers[s].commit.remote(decision, push.pusher, asked.get(s)) for s in push.others}

    def _apply(self, turn: int, pushes: Sequence[Push]) -> None:
        gradients: dict[int, list[list[Any]]] = {}
        for push in pushes:
            for key, increment in push.added.items():
                self._values[key] = _added(self._values[key], increment)
            self._values.update({key: jnp.array(x) for key, x in push.set.items()})
            for name, of_update in push.updates.items():
                gradients.setdefault(name, []).append(of_update)
        for name, given in gradients.items():
            program, run = self._updates[name]
            mean = given[0] if len(given) == 1 else [sum(each) / len(given) for each in zip(*given, strict=True)]
            values = [self._values.pop(key) for key in program.keys]
            self._values.update(zip(program.keys, run(values, mean), strict=True))
        # The gradients are in memory that workers overwrite as soon as they hear of this.
        jax.block_until_ready(list(self._values.values()))
        for push in pushes:
            self._done[push.pusher] = push.number
        self._applied = turn
        self._change.notify_all()

    def _require(self, pusher: Pusher) -> None:
        if pusher.life < self._lives.get(pusher.worker, 0):
            raise FencedError(f"worker {pusher.worker} was taken for lost, and its step was given to another one")

    def _wait(self, is_ready: Callable[[], bool], pusher: Pusher | None = None) -> None:
        def is_over() -> bool:
            return is_ready() or (pusher is not None and pusher.life < self._lives.get(pusher.worker, 0))

        if not self._change.wait_for(is_over, timeout=_WAIT_S):
            raise TimeoutError(f"parameter server {self._index} waited {_WAIT_S:.0f} s for an update of other workers")
        if pusher is not None and not is_ready():
            self._require(pusher)


def _in_place(program: UpdateProgram) -> Callable[[list[jax.Array], list[Any]], list[jax.Array]]:
    """Returns the update as a function from values and gradients to values, which takes those that it writes."""
    exported: Any = jax.export.deserialize(bytearray(program.module))
    written = set(program.set)
    numbers = range(len(program.keys))

    def update(old: dict[int, jax.Array], kept: dict[int, jax.Array], gradients: list[Any], ids: Any) -> dict[int, Any]:
        values, of = old | kept, program.rows_of
        # Rows that only fill up are behind the last one: they read as zero, and are not written.
        given = [
            values[i] if of[i] is None else values[i].at[ids[of[i]]].get(mode="fill", fill_value=0) for i in numbers
        ]
        _, _, new, _ = exported.call(given, gradients)
        return {
            i: x if of[i] is None else values[i].at[ids[of[i]]].set(x, mode="drop")
            for i, x in zip(program.set, new, strict=True)
        }

    compiled = jax.jit(update, donate_argnums=0)
    specs = exported.in_tree.unflatten(exported.in_avals)[0][1]
    tables = {of: i for i, of in enumerate(program.rows_of) if of is not None}

    def in_place(values: list[jax.Array], gradients: list[Any]) -> list[jax.Array]:
        kept = {i: x for i, x in enumerate(values) if i not in written}
        filled = {g: _filled(gradients[g], len(values[i]), specs[g].shape[0]) for g, i in tables.items()}
        ids = {g: rows.ids for g, rows in filled.items()}
        dense = [filled[g].values if g in filled else x for g, x in enumerate(gradients)]
        new = compiled({i: values[i] for i in program.set}, kept, dense, ids)
        return [x for _, x in sorted({**kept, **new}.items())]

    return in_place


def _filled(rows: Rows, behind: int, count: int) -> Rows:
    """Returns so many rows."""
    room = count - len(rows.ids)
    ids = np.concatenate([rows.ids, np.full(room, behind, rows.ids.dtype)])
    return Rows(ids, np.concatenate([rows.values, np.zeros((room, *rows.values.shape[1:]), rows.values.dtype)]))


@jax.jit
def _added(value: jax.Array, increment: jax.Array) -> jax.Array:
    return value + increment
