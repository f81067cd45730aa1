"""Processes of workers and servers: which they are, and whether they are still there."""

import ipaddress
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).parent


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


@contextmanager
def process(*command, cwd=HERE, **environment):
    """A Python process, ended with all that descend from it; its errors go to a file."""
    with tempfile.TemporaryFile("w+") as log:
        one = subprocess.Popen(
            [sys.executable, *map(str, command)],
            env={k: v for k, v in os.environ.items() if k not in ("NPROC", "TF_CONFIG")}
            | {"PHALANX_CPU_DEVICES": "1", "JAX_PLATFORMS": "cpu"}
            | environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            cwd=cwd,
        )
        one.log = log
        try:
            yield one
        except BaseException:
            log.seek(0)
            print(f"---- {one.args}, with exit code {one.poll()}\n{log.read()[-8000:]}")
            raise
        finally:
            for pid in family_of(one.pid):
                if is_there(pid):
                    end(pid)
            one.wait()
            one.stdin.close()
            one.stdout.close()


def said(one):
    """What a process has said next; where it has ended, what it has said last."""
    line = one.stdout.readline()
    if not line.startswith(("{", '"')):
        try:
            rest, _ = one.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            rest = "(and goes on)"
        one.log.seek(0)
        raise AssertionError(f"it ended with {one.returncode}: {line}{rest}{one.log.read()[-6000:]}")
    return json.loads(line)


def tell(one, word):
    """Says something to a process."""
    one.stdin.write(word + "\n")
    one.stdin.flush()
