# SPDX-License-Identifier: Apache-2.0
"""What `phalanx doctor` checks of the network: names, addresses, proxies and ports. It sends nothing."""

import errno
import ipaddress
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from phalanx._src.cluster.connections.hosts import PROXIES, found_at, is_loopback, reason_of, routes
from phalanx._src.cluster.connections.listener import listen, split
from phalanx.errors.printable import printable


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Args:
      name: what was checked.
      is_passed: whether the check passed.
      finding: the result, as a sentence.
      hint: what to do if the check failed.

    Example:
      >>> print(Check("clocks", False, "rank 1 is 60 s ahead.", "start chronyd"))
      FAIL clocks: rank 1 is 60 s ahead.
      HINT: start chronyd
    """

    name: str
    is_passed: bool
    finding: str
    hint: str = ""

    def __str__(self) -> str:
        line = f"{'PASS' if self.is_passed else 'FAIL'} {self.name}: {self.finding}"
        return printable(line if self.is_passed else f"{line}\nHINT: {self.hint}")


def check_network(addresses: Sequence[str], rank: int, environ: Mapping[str, str] = os.environ) -> list[Check]:
    """Returns the checks that one process makes before it meets the others.

    Args:
      addresses: `host:port` of all processes, by rank.
      rank: the rank of this process.
      environ: environment variables of this process.
    """
    checks = [check_name(addresses, rank), check_proxies(environ), check_port(addresses[0]) if rank == 0 else None]
    return [check for check in checks if check]


def check_name(addresses: Sequence[str], rank: int) -> Check | None:
    """Checks that the host name of rank 0 leads to it. Returns None if the cluster names an address instead.

    Args:
      addresses: `host:port` of all processes, by rank.
      rank: the rank of this process.
    """
    (host, port), (this_host, _) = split(addresses[0]), split(addresses[rank])
    if _is_address(host):
        return None
    try:
        place = found_at(host, port)
    except OSError as e:
        finding = f"rank {rank} does not find {host}, the host of rank 0: {e.strerror}."
        return Check(
            "names", False, finding, f"write a line with its address and {host} into /etc/hosts, or use addresses"
        )
    # In brackets, because it may be an IPv6 address.
    if not is_loopback(f"[{place}]:{port}"):
        return Check("names", True, f"rank {rank} finds {host} at {place}.")
    # The `/etc/hosts` of Debian leads the name of a machine back to the machine.
    if host == this_host:
        return Check(
            "names", True, f"{host} resolves to its own machine ({place}), so rank 0 listens at all its addresses."
        )
    finding = f"on the machine of rank {rank}, {host} is {place}, which is that machine itself, not rank 0."
    return Check(
        "names", False, finding, f"write the address by which others reach {host} into /etc/hosts of that machine"
    )


def check_proxies(environ: Mapping[str, str]) -> Check | None:
    """Tells what becomes of proxies. Returns None if the environment names none."""
    names = ", ".join(name for name in PROXIES if environ.get(name))
    return Check("proxies", True, f"{names}: the workers do not use it between each other.") if names else None


def check_port(address: str) -> Check:
    """Checks that this process can listen at an address, given as "host:port"."""
    try:
        # Closed at once, because the handshake listens there next.
        listen(address).close()
    except OSError as e:
        hint = "end the process that uses the port, or set the address to a name of this machine and a free port"
        if e.errno == errno.EADDRNOTAVAIL:
            hint = "another index in the task of this machine, or a name of this machine in the address of the first worker"
        return Check("port", False, f"rank 0 cannot listen at {address}: {reason_of(e)}.", hint)
    return Check("port", True, f"rank 0 can listen at {address}.")


def own_address(addresses: Sequence[str]) -> str:
    """Returns the address from which messages of this machine to the other machines of a cluster come. Empty if there are none.

    Args:
      addresses: `host:port` of all processes.
    """
    return next(iter(routes(address for address in addresses if not is_loopback(address))), "")


def judge_addresses(addresses: Sequence[str], own_addresses: Sequence[str]) -> Check | None:
    """Checks that ranks on other hosts have other addresses. Returns None if all processes are on one machine.

    Args:
      addresses: `host:port` of all processes, by rank.
      own_addresses: one result of `own_address` per rank.
    """
    if not any(own_addresses):
        return None
    hosts = [split(address)[0] for address in addresses]
    first_ranks: dict[str, int] = {}
    for rank, own in enumerate(own_addresses):
        first = first_ranks.setdefault(own, rank)
        # Such hosts are on one machine, or behind one router.
        if hosts[first] != hosts[rank]:
            finding = f"rank {first} ({hosts[first]}) and rank {rank} ({hosts[rank]}) send from the same address, {own or 'none'}."
            return Check("addresses", False, finding, "name each machine by an address of the network that joins them")
    return Check(
        "addresses", True, ", ".join(f"rank {rank} sends from {own}" for rank, own in enumerate(own_addresses)) + "."
    )


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
