# SPDX-License-Identifier: Apache-2.0
"""All processes wait for each other before a new program runs, and compare it. Rank 0 compares and answers."""

import json
import threading
from collections.abc import Callable, Mapping
from typing import final

from phalanx._src.cluster.watch.agreement import READ, Difference, Signature, compare, shortened
from phalanx._src.cluster.watch.messages import ComparisonAnswer, ComparisonRequest, WatchMessage
from phalanx._src.cluster.watch.reporting import Operations
from phalanx._src.cluster.watch.verdict import Members


@final
class Comparison:
    """The comparison of programs between the processes of a group.

    Args:
      members: what is known of the processes.
      operations: what this process does.
      say: sends a message to all others.

    Attributes:
      signature: the one that this process compares now, or None.
    """

    def __init__(self, members: Members, operations: Operations, say: Callable[[WatchMessage], None]) -> None:
        self._members, self._operations, self._say = members, operations, say
        self._known: set[str] = set()
        self.signature: Signature | None = None
        self._difference: Difference | None = None
        self._is_answered = threading.Event()
        self._settling = threading.Lock()

    def ask(self, signature: Signature) -> None:
        """Begins to compare a signature, cut to what fits into a message."""
        # Before the request is sent, so that the answer to it is not cleared.
        self._is_answered.clear()
        self._difference, self.signature = None, shortened(signature)

    def wait(self, tick_s: float, is_over: Callable[[], bool]) -> Difference | None:
        """Waits for the answer, and returns it. Looks each `tick_s` seconds whether there will be none."""
        while not self._is_answered.wait(tick_s) and not is_over():
            pass
        return self._difference

    def answer(self, difference: Difference | None) -> None:
        """Ends the wait of this process."""
        self._difference = difference
        self._is_answered.set()

    def settle(self, now_s: float) -> None:
        """Answers the processes that wait, on rank 0, once every process waits or is in that step already."""
        if self._members.rank != 0:
            return
        # Called by the watchdog and by a main thread that asks, and only one may answer.
        with self._settling:
            members = self._members.by_rank
            # Rank 0 sends nothing to itself, so its own state enters here.
            for message in (self._operations.report(), ComparisonRequest(self.signature)):
                members[0].hear(message, now_s)
            requests = {rank: m.signature for rank, m in members.items() if m.signature is not None}
            if not requests:
                return
            turn = min(members[rank].turn for rank in requests)
            # A rank that has been inside this turn for seconds runs a program that it knows, and will not ask.
            known = [rank for rank, m in members.items() if rank not in requests and m.is_waiting(turn, now_s)]
            if len(requests) + len(known) < len(members):
                return
            difference = self._difference_of(requests, known)
            for member in members.values():
                member.signature = None
            self.signature = None
            self.answer(difference)
            self._say(ComparisonAnswer(difference))

    def _difference_of(self, requests: Mapping[int, Signature], known: list[int]) -> Difference | None:
        """Compares the programs of the ranks that wait. The `known` ranks run a program that was compared before."""
        is_read = any(READ in signature for signature in requests.values())
        # A program that is known has no signature here, and is not a read.
        difference = compare({**requests, **({rank: {} for rank in known} if is_read else {})})
        # Dicts and lists have no hash.
        texts = {json.dumps(signature) for signature in requests.values()}
        if known and difference is None and not texts <= self._known:
            difference = Difference(
                "program", None, [(list(requests), "a new one"), (known, "one that it has run before")]
            )
        # Reads are compared each time, so they never become known.
        if difference is None and not is_read:
            self._known |= texts
        return difference
