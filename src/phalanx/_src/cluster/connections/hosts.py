# SPDX-License-Identifier: Apache-2.0
"""Finds the address at which the others of a cluster reach this machine, and keeps proxies out. Uses the standard library only."""

import ipaddress
import os
import socket
from collections.abc import Iterable, MutableMapping, Sequence
from contextlib import suppress
from pathlib import Path

from phalanx._src.cluster.spec import host_and_port

LOOPBACK = "127.0.0.1"
"""The address that only processes on this machine reach."""

PRIVATE = "unix:"
"""Prefix of an address that is not a port, as gRPC writes it."""

PROXIES = ("grpc_proxy", "https_proxy", "http_proxy")
"""The variables that name a proxy for gRPC, the strongest first."""
_EXCEPTIONS = ("no_grpc_proxy", "no_proxy", "NO_PROXY")


def joined(host: str, port: int) -> str:
    """Returns `host:port`, with brackets around an address of IPv6."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def shares_files() -> str:
    """Returns a text that is equal in processes that see the same files as the same user: this user, machine and view of its file systems."""
    about = [str(os.getuid())]
    for path in ("/proc/sys/kernel/random/boot_id", "/proc/self/ns/mnt"):  # Other systems than Linux have none.
        with suppress(OSError):
            about.append(os.readlink(path) if os.path.islink(path) else Path(path).read_text().strip())
    return " ".join(about)


def numeric(host: str) -> str:
    """Returns the address of IPv4 to which a host name leads.

    Raises:
      OSError: it leads nowhere.
    """
    return socket.gethostbyname(host)


def found_at(host: str, port: int) -> str:
    """Returns the address to which a connection with a host would go.

    Raises:
      OSError: this machine does not find the host.
    """
    return str(socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][4][0])


def reason_of(error: OSError) -> str:
    """Returns why a system call has failed."""
    if error.errno is None or isinstance(error, socket.gaierror):  # The numbers of the resolver have their own texts.
        return str(error.strerror)
    return os.strerror(error.errno)  # Python's own text may end with the address.


def is_private(address: str) -> bool:
    """Whether an address is no port, so that no other user reaches it."""
    return address.startswith(PRIVATE)


def is_loopback(address: str) -> bool:
    """Whether only processes on this machine can reach an address `host:port`."""
    host, _ = host_and_port(address)
    return host == "localhost" or _is_local(host)


def host_for_others(connections: Iterable[socket.socket], addresses: Sequence[str]) -> str:
    """Returns the address of this machine at which the other processes of the cluster can reach it.

    The name of a machine may lead nowhere, to another network, or back to the machine, as in the `/etc/hosts` of Debian. So this is the end of
    a connection that exists, or else the end of one that would reach another machine.

    Args:
      connections: open connections with other processes of the cluster. At least one.
      addresses: `host:port` of all processes.
    """
    hosts = [str(connection.getsockname()[0]) for connection in connections]
    far = [address for address in addresses if not is_loopback(address)]
    return next((host for host in [*hosts, *routes(far)] if not far or not _is_local(host)), hosts[0])


def routes(addresses: Iterable[str]) -> Iterable[str]:
    """Yields the address of this machine from which messages to each of the others would come. Sends nothing."""
    for address in addresses:
        with suppress(OSError):
            family, kind, *_, place = socket.getaddrinfo(*host_and_port(address), type=socket.SOCK_DGRAM)[0]
            with socket.socket(family, kind) as route:
                route.connect(place)
                yield str(route.getsockname()[0])


def bypass_proxies(addresses: Iterable[str], environment: MutableMapping[str, str] = os.environ) -> None:
    """Makes gRPC in this process connect to these addresses directly, although the environment names a proxy for the others.

    gRPC sends even 127.0.0.1 through a proxy. The variable that this sets is read by gRPC only.
    """
    if any(environment.get(name) for name in PROXIES):
        known = next((environment[name] for name in _EXCEPTIONS if environment.get(name)), "")
        reached = [host_and_port(address)[0] for address in addresses if not is_private(address)]
        hosts = [*filter(None, known.split(",")), *reached]
        environment["no_grpc_proxy"] = ",".join(dict.fromkeys(hosts))


def place_to_listen(host: str, port: int) -> tuple[socket.AddressFamily, tuple[str, int]]:
    """Returns the family and the address at which a process listens that others know by a host name or an address.

    Raises:
      OSError: the name leads nowhere.
    """
    family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    address = str(place[0])
    # Other machines come by another address if the name of this one leads back to it.
    return family, ("" if _is_local(address) and not is_loopback(f"{host}:{port}") else address, port)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # A name.
        return False
