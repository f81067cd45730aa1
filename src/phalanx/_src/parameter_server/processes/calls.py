# SPDX-License-Identifier: Apache-2.0
"""The one place where a coordinator waits for workers and parameter servers.

Every wait is cut into slices. Between slices, Ctrl-C takes effect, and every process that the answer depends on is asked for a
heartbeat. A process can be lost in three ways:

    Silent    no heartbeat for the time limit
    Gone      the process has died
    Stalled   the process is alive, but has been busy with one thing for the time limit

Long waits are logged.
"""

import logging
import os
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from platform import node as host_name
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, final

from phalanx._src.parameter_server.processes.handles import Ray

A = TypeVar("A")
R = TypeVar("R")
R_co = TypeVar("R_co", covariant=True)
P = ParamSpec("P")

_log = logging.getLogger("phalanx")

# The longest delay of Ctrl-C.
_SLICE_S = 0.5
# Seconds before the first log line about a wait. The interval doubles after each.
_NOTE_S = 10.0


@dataclass(frozen=True)
class Sign:
    """A heartbeat of a process.

    Args:
      platform: JAX platform of the process, such as "cpu".
      pid: process id.
      host: host name.
      busy: description of the user code that the process is running, which must end within the time limit. Empty if none.
      busy_s: seconds for which it has been running.
    """

    platform: str
    pid: int
    host: str
    busy: str = ""
    busy_s: float = 0.0


class Lost(Exception):
    """Waiting for a process is pointless.

    Args:
      peer: the process.
      found: what happened to it, as the predicate of a sentence: "has died".
    """

    def __init__(self, peer: "Peer[Any]", found: str) -> None:
        super().__init__(f"{peer} {found}")
        self.peer, self.found = peer, found


class Gone(Lost):
    """The process has died."""


class Silent(Lost):
    """The process sends no heartbeat."""


class Stalled(Lost):
    """The process is alive but makes no progress."""


@final
class Busy:
    """Records, per thread, which user code a process is running and since when."""

    def __init__(self) -> None:
        self._since: dict[int, tuple[str, float]] = {}

    @contextmanager
    def with_(self, what: str) -> Iterator[None]:
        """Records `what` as the current activity of this thread inside the context."""
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
        """Returns a heartbeat with the longest-running activity."""
        # Other threads may change the dict at any time, so copy its values in one call.
        now = time.monotonic()
        what, began = min(list(self._since.values()), key=lambda x: x[1], default=("", now))
        return Sign(platform, os.getpid(), host_name(), what, now - began)


@dataclass(frozen=True)
class Reply(Generic[R_co]):
    """A pending call of a process.

    Args:
      peer: the process that was called.
      method: name of the method.
      reference: Ray's object reference to the result.
    """

    peer: "Peer[Any]"
    method: str
    reference: object


@final
class Peer(Generic[A]):
    """The coordinator's handle of a worker or a parameter server, whose class is `A`.

    Args:
      ray: the module `ray`.
      actor: Ray's handle of the actor.
      name: name in messages, such as "worker 0".
      timeout_s: seconds that the process may pass without a heartbeat, or busy with one thing.
      start_s: seconds that the process may take to start.

    Attributes:
      sign: the last heartbeat. None until the process has started.
    """

    def __init__(self, ray: Ray, actor: Any, name: str, timeout_s: float, start_s: float) -> None:
        self._ray, self.actor, self.name = ray, actor, name
        self._timeout_s, self._start_s = timeout_s, start_s
        self.sign: Sign | None = None
        self._lock = threading.Lock()
        self._looked_at = self._asked_at = time.monotonic()
        self._silent_s = 0.0
        # The pending heartbeat request. At most one is pending, so that a busy process does not collect a queue of them.
        self._ping: object = actor.ping.remote()

    def ask(self, method: Callable[Concatenate[A, P], R], *args: P.args, **kwargs: P.kwargs) -> Reply[R]:
        """Calls a method of class `A` without waiting. `Calls.answers` waits for the result."""
        name = method.__name__
        return Reply(self, name, getattr(self.actor, name).remote(*args, **kwargs))

    def look(self, since: float) -> None:
        """Checks the heartbeat, and requests the next one.

        Args:
          since: time on the monotonic clock. A heartbeat that was requested earlier does not count as stalled.

        Raises:
          Lost: the process is silent, gone or stalled.
        """
        with self._lock:
            now = time.monotonic()
            # Count at most two slices per look. If this process itself was stopped, a heartbeat may have arrived unnoticed.
            passed_s, self._looked_at = min(now - self._looked_at, 2 * _SLICE_S), now
            if self._ping is None:
                self._ping, self._asked_at, self._silent_s = self.actor.ping.remote(), now, 0.0
                return
            if not self._ray.wait([self._ping], timeout=0)[0]:
                self._silent_s += passed_s
                if self._silent_s > (self._start_s if self.sign is None else self._timeout_s):
                    raise Silent(self, f"has sent no heartbeat for {self._silent_s:.0f} s")
                return
            ping, self._ping, self._silent_s = self._ping, None, 0.0
        try:
            self.sign = sign = self._ray.get(ping)
        except self._ray.exceptions.RayError as e:
            raise Gone(self, f"has died ({_why(e)})") from e
        if self._asked_at > since and sign.busy_s > self._timeout_s:
            raise Stalled(self, f"is alive but has been {sign.busy} for {sign.busy_s:.0f} s")

    def __str__(self) -> str:
        return self.name if self.sign is None else f"{self.name} (pid {self.sign.pid} at {self.sign.host})"


@final
class Calls:
    """Waits for the results of calls.

    Args:
      ray: the module `ray`.
    """

    def __init__(self, ray: Ray) -> None:
        self._ray = ray
        self._noted: dict[str, float] = {}

    def answers(self, replies: Sequence[Reply[R]], dependencies: Collection[Peer[Any]] = ()) -> list[R]:
        """Waits for all calls and returns their results.

        Args:
          replies: the pending calls.
          dependencies: other processes that the results may depend on.

        Raises:
          Lost: a called process is lost, or one of `dependencies` is silent.
          Exception: a called method raised it.
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
            for peer in {id(p): p for p in dependencies if all(p is not r.peer for r in waiting)}.values():
                try:
                    peer.look(began)
                except (Gone, Stalled):
                    # This does not end the wait. If the result depends on the process, the called process reports the failure.
                    continue
            if time.monotonic() - began > note_s:
                self._note(waiting, note_s)
                note_s *= 2

    def _unanswered(self, replies: Sequence[Reply[R]]) -> list[Reply[R]]:
        references = [reply.reference for reply in replies]
        _, left = self._ray.wait(references, num_returns=len(references), timeout=0)
        return [reply for reply in replies if reply.reference in left]

    def _error(self, replies: Sequence[Reply[Any]], error: Exception) -> BaseException:
        """Returns the error to raise: the error of a dead process if there is one, or else of a method that raised."""
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

    def _note(self, waiting: Sequence[Reply[Any]], waited_s: float) -> None:
        """Logs which processes this one waits for, once if several threads wait for the same."""
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
                else f"it is running `{reply.method}`"
            )
            _log.warning("waiting for %s for %.0f s: %s.", reply.peer, waited_s, doing)


def _why(error: object) -> str:
    """Returns Ray's reason for the death of an actor, in one line."""
    if type(error).__name__ == "OutOfMemoryError":
        return "Ray killed it because its machine was running out of memory"
    # Ray's message is a paragraph, in which the line with the exit code or signal is the useful one.
    lines = [line.strip() for line in str(error).splitlines()]
    exit_lines = [line for line in lines if "exit" in line.lower()]
    return (exit_lines or lines or ["for unknown reasons"])[-1].rstrip(".")
