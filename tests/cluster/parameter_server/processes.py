"""Processes of workers and servers: which they are, and whether they are still there."""

import os
import signal
import time

import ray


def pid_of(actor):
    """The process of an actor."""
    return ray.get(actor.__ray_call__.remote(lambda _: os.getpid()))


def servers_of(strategy):
    """The processes of the parameter servers."""
    return [pid_of(server) for server in strategy.homes.servers]


def workers_of(strategy):
    """The processes of the workers."""
    return [pid_of(actor) for actor in strategy.cluster.actors if actor not in strategy.homes.servers]


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


def wait_until(is_so, deadline_s=60.0):
    """Waits for something that must come true."""
    deadline = time.monotonic() + deadline_s
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def end(pid, sign=signal.SIGKILL):
    """Sends a signal to one process."""
    os.kill(pid, sign)
