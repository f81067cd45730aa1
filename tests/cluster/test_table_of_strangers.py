"""Strangers at every port of every kind of group, before, during and after its start; and the ports that each kind opens.

Another user of the machine, and another machine, do what they can. Needs root, for both: the machines are network namespaces.
"""

import os
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import strangers
from groups import BETWEEN, HOSTS, OF_RAY, Group, Program
from tests.waiting import wait_until

from phalanx.errors import StartupError
from phalanx.testing import VirtualNetwork

STRANGE, NEXT_TO = "198.51.100.9", "198.51.100.1"
MOST_GROWTH = 50 << 20
PAGE = (Path(__file__).parents[2] / "docs" / "security.md").read_text()

HANDSHAKE = "Phalanx's handshake in worker 0"
SERVICE = "JAX's coordination service in worker 0"
APART = "JAX's coordination service in a separate process"
GLOO = "gloo, on CPUs"
RENDEZVOUS = "the rendezvous in `phalanx run`"
RENDEZVOUS_APART = "the rendezvous in `phalanx run` on the first machine"
RAY = "Ray"
HERE, FIRST, SECOND, ALL = "127.0.0.1", *HOSTS, "0.0.0.0"
LISTENERS = {
    "fixed": {(GLOO, HERE): 2},
    "estimator": {(GLOO, HERE): 2},
    "elastic": {(GLOO, HERE): 2, (RENDEZVOUS, HERE): 1},
    "machines": {(GLOO, FIRST): 1, (GLOO, SECOND): 1, (SERVICE, FIRST): 1},
    "elastic machines": {(GLOO, FIRST): 1, (GLOO, SECOND): 1, (APART, FIRST): 1, (RENDEZVOUS_APART, FIRST): 1},
    "servers": {(RAY, HERE): None},
    "tasks": {(RAY, ALL): None, (RAY, HERE): None, (RAY, FIRST): None, (RAY, SECOND): None},
}
"""Who listens where in a group that trains, in the words of the page: how often, or any number of times."""
CELLS = [("user", kind) for kind in LISTENERS] + [("machine", kind) for kind in BETWEEN]


class Machines:
    """The two machines of a group, and a third one, from which both can be reached.

    Args:
      stack: ends them.
    """

    def __init__(self, stack):
        network = stack.enter_context(VirtualNetwork())
        self.command, self.third = network.command, f"phalanx{os.getpid()}c"
        subprocess.run(["ip", "netns", "add", self.third], check=True)
        stack.callback(subprocess.run, ["ip", "netns", "del", self.third], check=False)
        first, second = (network.command(machine, [])[3] for machine in (0, 1))
        for words in (
            f"ip link add third netns {first} type veth peer name third netns {self.third}",
            f"ip -n {first} addr add {NEXT_TO}/24 dev third",
            f"ip -n {self.third} addr add {STRANGE}/24 dev third",
            f"ip -n {first} link set third up",
            f"ip -n {self.third} link set third up",
            f"ip -n {self.third} route add 192.0.2.0/24 via {NEXT_TO}",
            f"ip -n {second} route add 198.51.100.0/24 via {HOSTS[0]}",
            f"ip netns exec {first} sysctl -qw net.ipv4.ip_forward=1",
        ):
            subprocess.run(words.split(" "), check=True)

    def program(self, machine, *words, user=()):
        """The command of a stranger. Its text is passed on, because another user may not enter this folder."""
        return self.command(
            machine, [*user, "/usr/bin/env", "python3", "-c", Path(strangers.__file__).read_text(), *words]
        )

    def listening(self):
        """The address, port and inode of each socket that listens on the machines."""
        for machine in (0, 1):
            for line in subprocess.check_output(self.program(machine), text=True).splitlines():
                host, port, inode = line.split(" ")
                yield host, int(port), int(inode)

    def strangers(self, stack, who, deed, kind):
        """Starts a stranger for each machine of a kind of group: another user there, or another machine."""
        words = {
            "user": lambda m: self.program(m, deed, user=("setpriv", "--reuid=65534", "--clear-groups")),
            "machine": lambda m: self.program(m, deed, f"/run/netns/{self.third}", HOSTS[m]),
        }[who]
        return [stack.enter_context(Program(words(machine))) for machine in ((0, 1) if kind in BETWEEN else (0,))]


@pytest.fixture(scope="module")
def machines():
    if sys.platform != "linux" or os.getuid() or not shutil.which("setpriv"):
        pytest.skip("needs root, to be another user and another machine")
    with ExitStack() as stack:
        try:
            yield Machines(stack)
        except StartupError as e:
            pytest.skip(f"{e}")


def named_listeners(group):
    """Who listens where, in the words of the page, and how often."""
    rendezvous = RENDEZVOUS_APART if group.kind in BETWEEN else RENDEZVOUS
    names = {"Ray": RAY, "service": APART, "launcher": rendezvous}
    return Counter(
        (names.get(role) or (SERVICE if port == 7001 else GLOO), ALL if host == "::" else host)
        for role, host, port in group.listeners()
    )


@pytest.fixture(scope="module")
def quiet(machines, tmp_path_factory):
    """A function that returns the listeners of a kind of group without strangers, and the memory of its processes. Each runs once."""
    results = {}

    def run(kind):
        if kind not in results:
            with ExitStack() as stack:
                group = Group(stack, machines, kind, tmp_path_factory.mktemp("quiet"))
                assert group.trains(), group.out
                results[kind] = named_listeners(group), group.peaks()
                assert group.ends_well(), group.out
        return results[kind]

    return run


@pytest.mark.cover(["kind"], {"machines"})
@pytest.mark.parametrize("kind", LISTENERS)
def test_ports_are_those_of_the_page(quiet, kind):
    """No other process listens, none at another address, and docs/security.md has a row for each."""
    listeners, _ = quiet(kind)
    expected = LISTENERS[kind]
    assert {*listeners} <= {*expected}
    assert {who: listeners[who] for who, count in expected.items() if count} == {w: n for w, n in expected.items() if n}
    for who, _ in listeners:
        assert f"| {who} |" in PAGE or (who == RAY and "## Parameter servers" in PAGE)


def test_page_has_no_other_ports():
    """Each row of its table of ports is one of a kind of group that this file starts."""
    section = PAGE.partition("## Several workers")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[1] for line in section.splitlines() if line.startswith("| ")][1:]
    assert {*rows} <= {HANDSHAKE, *(who for kind in LISTENERS.values() for who, _ in kind)}


@pytest.mark.cover(["who", "kind", "deed"], {("machine", "machines", "ranks")})
@pytest.mark.parametrize("deed", strangers.DEEDS)
@pytest.mark.parametrize(("who", "kind"), CELLS)
def test_strangers_have_no_effect(machines, quiet, tmp_path, who, kind, deed):
    """The training ends with the right weights and code 0, in as much memory. What the page lists may end its start, with an error that names them."""
    _, usual = quiet(kind)
    for is_before in (True, False):
        (folder := tmp_path / f"{is_before}").mkdir()
        with ExitStack() as stack:
            if is_before:
                machines.strangers(stack, who, deed, kind)
            group = Group(stack, machines, kind, folder)
            if group.trains():
                meet(group, machines.strangers(stack, who, deed, kind), who, deed)
                peaks = group.peaks()
                assert group.ends_well(), group.out
                # JAX's service between machines keeps memory for each connection.
                most = (2 if who == "user" and kind in ("machines", "elastic machines") else 1) * MOST_GROWTH
                assert {role for role, peak in peaks.items() if peak > usual[role] + most} == set(), (peaks, usual)
                return
            # Users of the machines may be at gloo's ports before the workers.
            assert is_before, group.out
            assert who == "user", group.out
            assert "StartupError" in group.out, group.out
            assert "strangers had connected to its port before the other processes, from " in group.out


def meet(group, present, who, deed):
    """Waits until strangers have been at all ports of a group, and are named where they can be seen."""
    ports = {port for _, host, port in group.listeners() if who == "user" or host != HERE}
    wait_until(lambda: {int(n) for each in present for n in re.findall(r"been at (\d+)", each.out)} >= ports)
    if who == "user" and deed in ("stay", "half", "crowd", "ranks") and group.kind not in OF_RAY:
        wait_until(lambda: "Strangers have connected to " in group.out)
    # The processes look at their connections once per second.
    time.sleep(1.0)
