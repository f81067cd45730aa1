# SPDX-License-Identifier: Apache-2.0
"""Makes the kernel drop connections to a port of this process that come from machines outside the group. Uses the standard library only.

Libraries open ports that let in whoever connects. A classic BPF program at the socket (socket(7), SO_ATTACH_FILTER) decides before they see
a connection, and needs no privileges. It sees addresses and not users, so it cannot tell apart the users of one machine.
"""

import ctypes
import ipaddress
import socket
import struct
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from phalanx._src.cluster.connections.ports import Socket, cut, sockets_of_process, something_waits

MOST_ADDRESSES = 400
"""The kernel's programs have at most 4,096 instructions, and one address of IPv6 needs nine."""

_SO_ATTACH_FILTER = 26
_POLL_S = 0.01
# See linux/filter.h and linux/bpf_common.h.
_LOAD, _LOAD_BYTE, _AND, _JUMP, _IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x05, 0x15, 0x06
_NETWORK_HEADER = 0xFFF00000
_ADMIT, _DROP = (_RETURN, 0, 0, 0xFFFFFFFF), (_RETURN, 0, 0, 0)

_Instruction = tuple[int, int, int, int]


def addresses_of_machine() -> list[str]:
    """Returns the addresses of this machine, but not those of a single link. Empty where the system does not tell."""
    addresses = set()
    with suppress(OSError):
        address = ""
        for line in Path("/proc/net/fib_trie").read_text().splitlines():
            if "|-- " in line:
                address = line.split()[-1]
            elif "/32 host LOCAL" in line:
                addresses.add(address)
        lines = Path("/proc/net/if_inet6").read_text().splitlines()
        of_version_6 = [ipaddress.IPv6Address(int(line.split()[0], 16)) for line in lines]
        addresses |= {str(address) for address in of_version_6 if not address.is_link_local}
    return sorted(addresses)


def host_of_other(connection: Socket) -> str:
    """Returns the address from which a connection comes. Empty if its other end has gone."""
    try:
        return str(connection.getpeername()[0]).removeprefix("::ffff:").partition("%")[0]
    except OSError:
        return ""


def admit_only(port: int, hosts: Collection[str]) -> bool:
    """Admits only connections from some addresses at a port of this process, and ends those from others that are there.

    Where the kernel refuses the filter, those who connect later get in.

    Args:
      port: the port.
      hosts: the addresses.

    Returns:
      Whether this process listens at the port.
    """
    listens = False
    for each in _sockets_at(port):
        if _listens(each):
            listens = True
            with suppress(OSError):
                _attach(each, hosts)
    for each in _sockets_at(port):
        if (other := host_of_other(each)) and other not in hosts:
            cut(each)
    return listens


def is_visited(port: int) -> bool:
    """Whether anybody has connected to a port at which this process listens, even if only for a moment."""
    # Those that wait at the socket that listens are accepted, or have been when the second look begins.
    return any(_waits(each) for each in _sockets_at(port)) or any(not _listens(each) for each in _sockets_at(port))


@contextmanager
def admitting(port: int, hosts: Collection[str]) -> Iterator[None]:
    """Does the same as soon as the process listens at a port, which it begins to do in the block."""
    is_over = threading.Event()

    def wait() -> None:
        while not admit_only(port, hosts) and not is_over.wait(_POLL_S):
            pass

    thread = threading.Thread(target=wait, name="phalanx-filter", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        thread.join()


def _sockets_at(port: int) -> Iterator[Socket]:
    for each in sockets_of_process():
        with each:
            if each.getsockname()[1] == port:
                yield each


def _listens(each: Socket) -> bool:
    return bool(each.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _waits(each: Socket) -> bool:
    return _listens(each) and something_waits(each)


def _attach(listener: Socket, hosts: Collection[str]) -> None:
    program = _program(hosts)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *instruction) for instruction in program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))


def _program(hosts: Collection[str]) -> list[_Instruction]:
    """Returns a program that drops all packets from other addresses: a connection may be half open when the socket gets it."""
    addresses = [ipaddress.ip_address(host) for host in hosts]
    of_version_4 = [(_LOAD, 0, 0, _NETWORK_HEADER + 12)]
    of_version_6: list[_Instruction] = []
    for address in addresses:
        if address.version == 4:
            of_version_4 += [(_IF_EQUAL, 0, 1, int(address)), _ADMIT]
            continue
        words = struct.unpack(">4I", address.packed)
        for index, word in enumerate(words):
            # A word that differs leads to the next address: behind the words that are left, and what admits.
            of_version_6 += [(_LOAD, 0, 0, _NETWORK_HEADER + 8 + 4 * index), (_IF_EQUAL, 0, 7 - 2 * index, word)]
        of_version_6.append(_ADMIT)
    of_version_4.append(_DROP)
    of_version_6.append(_DROP)
    return [
        (_LOAD_BYTE, 0, 0, _NETWORK_HEADER),
        (_AND, 0, 0, 0xF0),
        (_IF_EQUAL, 1, 0, 0x40),
        (_JUMP, 0, 0, len(of_version_4)),
        *of_version_4,
        *of_version_6,
    ]
