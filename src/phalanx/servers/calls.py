# SPDX-License-Identifier: Apache-2.0
"""The one place where a coordinator waits for workers and parameter servers.

Every wait is cut into slices, between which Ctrl-C is heard and everybody concerned is asked for a sign of life. Who gives none for
the time limit is `Silent`, who has died is `Gone`, and who is alive but has been busy with one thing for the time limit is `Stalled`.
A wait that takes long is reported in the log.
"""

import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, final

_log = logging.getLogger("phalanx")

_SLICE_S = 0.5
_NOTE_S = 10.0


@dataclass(frozen=True)
class Sign:
    """A sign of life.

    Args:
      platform: on what the process computes.
      pid: the process.
      host: its machine.
      busy: what it has been doing, where that has to end within the time limit; empty if nothing.
      busy_s: for how long.
    """

    platform: str
    pid: int
    host: str
    busy: str = ""
    busy_s: float = 0.0


class Lost(Exception):
    """A process that cannot be waited for any longer.

    Args:
      peer: the process.
      found: what is the matter, as the end of a sentence about it.
    """

    def __init__(self, peer: "Peer", found: str) -> None:
        super().__init__(f"{peer} {found}")
        self.peer, self.found = peer, found


class Gone(Lost):
    """It has died."""


class Silent(Lost):
    """It gives no sign of life."""


class Stalled(Lost):
    """It is alive, and does not get on."""


@final
class Busy:
    """What a process is doing that has to end within the time limit, by thread."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[str, float]] = {}

    @contextmanager
    def with_(self, what: str) -> Iterator[None]:
        """Says what this thread does until it ends."""
        me = threading.get_ident()
        before, self._since[me] = self._since.get(me), (what, time.monotonic())
        try:
            yield
        finally:
            if before is None:
                del self._since[me]
            else:
                self._since[me] = before

    def sign(self, platform: str) -> Sign:
        """Returns a sign of life, with what has taken longest."""
        now = time.monotonic()
        what, began = min(list(self._since.values()), key=lambda x: x[1], default=("", now))
        return Sign(platform, os.getpid(), socket.gethostname(), what, now - began)


@dataclass(frozen=True)
class Reply:
    """What a process was asked.

    Args:
      peer: the process.
      method: what it was asked for.
      reference: Ray's, to the answer.
    """

    peer: "Peer"
    method: str
    reference: Any


@final
class Peer:
    """A worker or a parameter server, as its coordinator sees it.

    Args:
      ray: the module.
      actor: Ray's.
      name: as `worker 0`.
      timeout_s: for how long it may give no sign of life, or be busy with one thing.
      start_s: how long it may take to start.

    Attributes:
      sign: the last sign of life; None until it has started.
    """

    def __init__(self, ray: Any, actor: Any, name: str, timeout_s: float, start_s: float) -> None:
        self._ray, self.actor, self.name = ray, actor, name
        self._timeout_s, self._start_s = timeout_s, start_s
        self.sign: Sign | None = None
        self._lock = threading.Lock()
        self._looked_at = self._asked_at = time.monotonic()
        self._silent_s = 0.0
        self._ping: Any = actor.ping.remote()

    def ask(self, method: str, *args: Any) -> Reply:
        """Calls a method; `Calls.answers` waits for it."""
        return Reply(self, method, getattr(self.actor, method).remote(*args))

    def look(self, since: float) -> None:
        """Looks for a sign of life; what it has been busy with counts if it was asked after `since`.

        Raises:
          Lost: there is none, or it is a bad one.
        """
        with self._lock:
            now = time.monotonic()
            # If this process stood still itself, the answer may be on its way: time that nobody looked does not count.
            passed_s, self._looked_at = min(now - self._looked_at, 2 * _SLICE_S), now
            if self._ping is None:
                self._ping, self._asked_at, self._silent_s = self.actor.ping.remote(), now, 0.0
                return
            if not self._ray.wait([self._ping], timeout=0)[0]:
                self._silent_s += passed_s
                if self._silent_s > (self._start_s if self.sign is None else self._timeout_s):
                    raise Silent(self, f"has given no sign of life for {self._silent_s:.0f} s")
                return
            ping, self._ping, self._silent_s = self._ping, None, 0.0
        try:
            self.sign = sign = self._ray.get(ping)
        except self._ray.exceptions.RayError as e:
            raise Gone(self, f"has died ({_why(e)})") from e
        if self._asked_at > since and sign.busy_s > self._timeout_s:
            raise Stalled(self, f"is alive, and has been {sign.busy} for {sign.busy_s:.0f} s")

    def __str__(self) -> str:
        return self.name if self.sign is None else f"{self.name} (pid {self.sign.pid} at {self.sign.host})"


@final
class Calls:
    """Waits for answers.

    Args:
      ray: the module.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray
        self._noted: dict[str, float] = {}

    def answers(self, replies: Sequence[Reply], others: Collection[Peer] = ()) -> list[Any]:
        """Returns what was answered, as soon as all have answered.

        Args:
          replies: what was asked.
          others: processes that the answers may depend on.

        Raises:
          Lost: a process that was asked is lost; or another one is `Silent`.
          Exception: what was raised there.
        """
        references = [reply.reference for reply in replies]
        began = time.monotonic()
        note_s = _NOTE_S
        while True:
            try:
                return list(self._ray.get(references, timeout=_SLICE_S))
            except self._ray.exceptions.GetTimeoutError:
                pass
            except self._ray.exceptions.RayError as e:
                raise self._error(replies, e) from None
            waiting = self._unanswered(replies)
            for reply in waiting:
                reply.peer.look(began)
            for peer in {id(p): p for p in others if all(p is not r.peer for r in waiting)}.values():
                try:
                    peer.look(began)
                except (Gone, Stalled):
                    # Its own answer tells; what it was asked by another process fails there.
                    continue
            if time.monotonic() - began > note_s:
                self._note(waiting, note_s)
                note_s *= 2

    def _unanswered(self, replies: Sequence[Reply]) -> list[Reply]:
        references = [reply.reference for reply in replies]
        _, left = self._ray.wait(references, num_returns=len(references), timeout=0)
        return [reply for reply in replies if reply.reference in left]

    def _error(self, replies: Sequence[Reply], error: Any) -> BaseException:
        """Returns the error of the first that has died, or else has raised."""
        peer = replies[0].peer
        for reply in replies:
            if self._ray.wait([reply.reference], timeout=0)[0]:
                try:
                    self._ray.get(reply.reference)
                except self._ray.exceptions.RayTaskError:
                    peer = reply.peer
                except self._ray.exceptions.RayError as e:
                    return Gone(reply.peer, f"has died ({_why(e)})")
        if not isinstance(error, self._ray.exceptions.RayTaskError):
            return Gone(peer, f"has died ({_why(error)})")
        cause = error.cause
        if not isinstance(cause, BaseException):
            return error
        cause.add_note(f"On {peer.name}:\n{error}")
        return cause

    def _note(self, waiting: Sequence[Reply], waited_s: float) -> None:
        """Logs for whom somebody waits: once, if several threads do."""
        for reply in waiting:
            now = time.monotonic()
            if now - self._noted.get(reply.peer.name, -_NOTE_S) < 0.5 * _NOTE_S:
                continue
            self._noted[reply.peer.name] = now
            sign = reply.peer.sign
            doing = (
                "it is starting"
                if sign is None
                else f"it is {sign.busy}"
                if sign.busy
                else f"it was asked to `{reply.method}`"
            )
            _log.warning("waiting for %s since %.0f s: %s.", reply.peer, waited_s, doing)


def _why(error: Any) -> str:
    """Returns what Ray knows of the death of an actor, in one line."""
    if type(error).__name__ == "OutOfMemoryError":
        return "Ray ended it because its machine was running out of memory"
    lines = [line.strip() for line in str(error).splitlines()]
    told = [line for line in lines if "exit" in line.lower()]
    return (told or lines or ["for unknown reasons"])[-1].rstrip(".")
