"""Processes of workers and servers: which they are, and whether they are still there."""

import ipaddress
import os
import signal
import time
from pathlib import Path


def pid_of(actor):
    """The process of an actor."""
    import ray  # Strategies import it in a way of their own, if they are the first.

    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def servers_of(strategy):
    """The processes of the parameter servers."""
    return [pid_of(server) for server in strategy.homes.servers.actors]


def workers_of(strategy):
    """The processes of the workers."""
    return [pid_of(actor) for actor in strategy.cluster.actors if actor not in strategy.homes.servers.actors]


def is_there(pid):
    """Whether a process runs, or is stopped; not whether one that has ended waits for its parent."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def family_of(pid):
    """A process and all that descend from it."""
    children = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            children.setdefault(parent, []).append(int(entry))
    family = [pid]
    for one in family:
        family += children.get(one, [])
    return family


def listening(pids):
    """The addresses at which processes listen."""
    inodes = set()
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            target = os.readlink(fd) if fd.is_symlink() else ""
            inodes |= {target[8:-1]} if target.startswith("socket:[") else set()
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and rest[5] in inodes:
                words = bytes.fromhex(local.partition(":")[0])
                packed = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                address = ipaddress.ip_address(packed)
                found.add(str(getattr(address, "ipv4_mapped", None) or address))
    return found


def wait_until(is_so, deadline_s=60.0):
    """Waits for something that must come true."""
    deadline = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(pid, sign=signal.SIGKILL):
    """Sends a signal to one process."""
    os.kill(pid, sign)
