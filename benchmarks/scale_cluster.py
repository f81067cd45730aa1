# SPDX-License-Identifier: Apache-2.0
"""Rank 0 in one child process and all other ranks as threads of another one, for `benchmarks.scale`. No JAX.

Each rank calls `call_roll` and runs a `Watch`, as a process of a cluster does. The clock of Linux's `time.monotonic` is the same
in both processes, so their times can be subtracted.
"""

import os
import resource
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from benchmarks.parent import ROOT, Child
from phalanx._src.cluster.connections.rollcall import call_roll
from phalanx._src.cluster.connections.secret import Secret
from phalanx._src.cluster.spec import ClusterSpec
from phalanx._src.cluster.watch.watch import Watch
from phalanx._src.launch.plan import free_ports
from phalanx.errors import StartupError

_HERE = "benchmarks.scale_cluster"
_SECRET = Secret("the secret of this benchmark")
_DEADLINE_S = 120.0
_STALL_S = 600.0
_SMALL_STACK = 256 << 10
_LONG_INTERVAL_S = 0.5
_PROGRAM = {"argument": ["float32[512,512]"] * 40, "result": ["float32[512,512]"] * 40}
_TCP_INFO_BYTES = 160


@dataclass(frozen=True)
class Outcome:
    """The results of one run.

    Args:
      chief: measurements of rank 0.
      members: measurements of the other ranks.
    """

    chief: dict[str, Any]
    members: dict[str, Any]


def roll_call(num_ranks: int, *, missing: Sequence[int] = (), timeout_s: float = 60.0) -> Outcome:
    """Runs one roll call. The `missing` ranks never come."""
    return _both("roll_call_of_chief", "roll_call_of_members", num_ranks, missing, timeout_s=timeout_s)


def watched(num_ranks: int, *, quiet_s: float) -> Outcome:
    """Runs the watch for `quiet_s` seconds, and then cuts the connection of the last rank."""
    return _both("watch_of_chief", "watch_of_members", num_ranks, (), quiet_s=quiet_s)


def _both(chief: str, members: str, num_ranks: int, missing: Sequence[int], **options: Any) -> Outcome:
    (port,) = free_ports(1)
    # Only the address of rank 0 is connected to. The names of the other ranks have the length of real ones.
    addresses = [f"127.0.0.1:{port}", *(f"worker-{rank}.training.svc:2222" for rank in range(1, num_ranks))]
    come = [rank for rank in range(1, num_ranks) if rank not in missing]
    source = {"PYTHONPATH": str(ROOT / "src")}
    with Child(environment=source) as first, Child(environment=source) as others, ThreadPoolExecutor(2) as pool:
        of_chief = pool.submit(first.call, f"{_HERE}:{chief}", _DEADLINE_S, addresses=addresses, **options)
        of_members = pool.submit(
            others.call, f"{_HERE}:{members}", _DEADLINE_S, addresses=addresses, come=come, **options
        )
        return Outcome(of_chief.result(), of_members.result())


def roll_call_of_chief(addresses: list[str], timeout_s: float) -> dict[str, Any]:
    """In a child: calls the roll as rank 0."""
    _raise_limit()
    bytes_before, cpu_before_s, began_s = _resident_bytes(), time.process_time(), time.monotonic()
    error = ""
    lines: Mapping[int, socket.socket] = {}
    try:
        lines = call_roll(addresses, 0, about=_about(addresses), secret=_SECRET, timeout_s=timeout_s)
    except StartupError as e:
        error = str(e)
    return {
        "began_s": began_s,
        "ended_s": time.monotonic(),
        "cpu_s": time.process_time() - cpu_before_s,
        "bytes": _resident_bytes() - bytes_before,
        "present": len(lines),
        "error": error,
    }


def roll_call_of_members(addresses: list[str], come: list[int], timeout_s: float) -> dict[str, Any]:
    """In a child: calls the roll as the ranks in `come`, all at the same moment."""
    _raise_limit()
    errors: dict[int, str] = {}
    ended_s: dict[int, float] = {}

    def call(rank: int) -> None:
        try:
            call_roll(addresses, rank, about=about, secret=_SECRET, timeout_s=timeout_s)
        except StartupError as e:
            errors[rank] = str(e)
        ended_s[rank] = time.monotonic()

    about = _about(addresses)
    began_s = _at_once(call, come)
    texts = sorted(set(errors.values()))
    return {
        "began_s": began_s,
        "ended_s": max(ended_s.values()),
        "errors": len(errors),
        "different_errors": len(texts),
        "first_error": texts[0] if texts else "",
    }


def watch_of_chief(addresses: list[str], quiet_s: float) -> dict[str, Any]:
    """In a child: runs the watch of rank 0 until it has told the others that a rank has died."""
    _raise_limit()
    lines = call_roll(addresses, 0, about=_about(addresses), secret=_SECRET, timeout_s=_DEADLINE_S)
    watch = Watch(addresses, 0, lines, _STALL_S)
    watch.start()
    time.sleep(4.0)  # The members start theirs, one after the other.
    traffic, cpu_before_s, began_s = _traffic(lines.values()), time.process_time(), time.monotonic()
    time.sleep(quiet_s)
    passed_s = time.monotonic() - began_s
    cpu_share = (time.process_time() - cpu_before_s) / passed_s
    received, sent, messages_in, messages_out = (
        (after - before) / passed_s for before, after in zip(traffic, _traffic(lines.values()), strict=True)
    )
    cpu_before_s = time.process_time()
    watch.agree(_PROGRAM)
    agreed_s, agree_cpu_s = time.monotonic(), time.process_time() - cpu_before_s
    text = watch.loss(_DEADLINE_S)
    return {
        "agreed_s": agreed_s,
        "agree_cpu_s": agree_cpu_s,
        "told_s": time.monotonic(),
        "text": text or "",
        "cpu_share": cpu_share,
        "received_bytes_per_s": received,
        "sent_bytes_per_s": sent,
        "messages_in_per_s": messages_in,
        "messages_out_per_s": messages_out,
    }


def watch_of_members(addresses: list[str], come: list[int], quiet_s: float) -> dict[str, Any]:
    """In a child: runs the watches of all other ranks, and cuts the connection of the last one."""
    _raise_limit()
    about = _about(addresses)
    lines: dict[int, Mapping[int, socket.socket]] = {}

    def call(rank: int) -> None:
        lines[rank] = call_roll(addresses, rank, about=about, secret=_SECRET, timeout_s=_DEADLINE_S)

    _at_once(call, come)
    watches = {rank: Watch(addresses, rank, lines[rank], _STALL_S) for rank in come}
    for watch in watches.values():
        watch.start()
        time.sleep(1.0 / len(watches))  # Real processes do not report at the same moment either.
    cpu_before_s = time.process_time()
    time.sleep(quiet_s + 5.0)
    cpu_share = (time.process_time() - cpu_before_s) / (quiet_s + 5.0)
    agreed_s: dict[int, float] = {}

    def agree(rank: int) -> None:
        watches[rank].agree(_PROGRAM)
        agreed_s[rank] = time.monotonic()

    asked_s = _at_once(agree, come)
    time.sleep(2.0)
    victim = come[-1]
    cut_s = time.monotonic()
    lines[victim][0].shutdown(socket.SHUT_RDWR)
    known_s = 0.0
    for rank in come[:-1]:
        watches[rank].loss(_DEADLINE_S)
        known_s = max(known_s, time.monotonic())
    texts = {watches[rank].loss() for rank in come[:-1]}
    return {
        "asked_s": asked_s,
        "agreed_s": max(agreed_s.values()),
        "cut_s": cut_s,
        "known_s": known_s,
        "texts": [str(text) for text in texts],
        "cpu_share": cpu_share,
    }


def _at_once(call: Callable[[int], None], ranks: Sequence[int]) -> float:
    """Runs `call` for all ranks, in one thread per rank, and returns the time at which all began."""
    threading.stack_size(_SMALL_STACK)
    # Each thread that waits for the interpreter wakes up once per interval, which takes all cores if there are thousands.
    sys.setswitchinterval(_LONG_INTERVAL_S)
    go = threading.Event()

    def run(rank: int) -> None:
        go.wait(_DEADLINE_S)
        call(rank)

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in ranks]
    for thread in threads:
        thread.start()
    time.sleep(0.5)  # Rank 0 listens.
    began_s = time.monotonic()
    go.set()
    for thread in threads:
        thread.join(max(0.0, began_s + _DEADLINE_S - time.monotonic()))
    return began_s


def _about(addresses: Sequence[str]) -> str:
    """Returns what `phalanx._src.runtime.bootstrap` passes to the roll call."""
    return f"{ClusterSpec({'worker': list(addresses)}).as_dict()}"


def _raise_limit() -> None:
    """Allows as many open files as this user may have: a process that simulates n ranks has 2 n of them."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def _resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGESIZE")


def _traffic(connections: Any) -> tuple[int, int, int, int]:
    """Returns bytes received, bytes sent, and TCP segments with data in both directions, as the kernel counts them."""
    total = [0, 0, 0, 0]
    for connection in connections:
        info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO_BYTES)
        # See `struct tcp_info` in linux/tcp.h.
        sent, received = struct.unpack_from("QQ", info, 120)
        segments_in, segments_out = struct.unpack_from("II", info, 152)
        total = [a + b for a, b in zip(total, (received, sent, segments_in, segments_out), strict=True)]
    return total[0], total[1], total[2], total[3]
