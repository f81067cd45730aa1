# SPDX-License-Identifier: Apache-2.0
"""Describes the ports that the processes of a cluster open, where they listen, and who gets in, for `phalanx doctor --ports`.

`hosts` decides where to listen, `listener` with `secret` who gets in, and `filters` which machines the kernel lets connect.

tests/cluster/test_table_of_strangers.py and tests/cluster/parameter_server/test_separate_processes.py compare it with the ports of real processes.
"""

from collections.abc import Sequence
from typing import NamedTuple

from phalanx._src.cluster.connections.hosts import is_loopback
from phalanx._src.cluster.connections.secret import TOKEN
from phalanx._src.cluster.spec import ClusterSpec, addresses_of_workers, host_and_port

_PROOF = f"processes that prove that they know {TOKEN}"
_USERS = "every user of the machines of the cluster"
_CLAIMED = f"{_USERS}; connections that no worker claims are closed and reported within seconds"


class Opening(NamedTuple):
    """A port, or a socket in a folder.

    Attributes:
      port: which port.
      listener: what listens there.
      where: the address at which it listens, and so who can reach it.
      admitted: who gets in.
    """

    port: str
    listener: str
    where: str
    admitted: str


def openings(spec: ClusterSpec, *, is_elastic: bool = False) -> list[Opening]:
    """Returns the ports that the processes of a cluster open.

    Args:
      spec: the cluster. Empty for a process alone.
      is_elastic: whether `phalanx run` starts another process for one that dies.
    """
    if not spec:
        return []
    if "ps" in spec.jobs:
        addresses = [spec.task_address(job, i) for job in ("chief", "worker", "ps") for i in spec.task_indices(job)]
        return _of_servers(spec.task_address("chief", 0), addresses)
    addresses = addresses_of_workers(spec)
    # A process alone exchanges nothing.
    if len(addresses) == 1:
        return []
    return _of_workers(addresses, is_elastic=is_elastic)


def _of_workers(addresses: Sequence[str], *, is_elastic: bool) -> list[Opening]:
    first, is_here = addresses[0], all(map(is_loopback, addresses))
    port = f"{host_and_port(first)[1]} of worker 0"
    result = [Opening(f"{port}, until all workers have joined", "the handshake of the workers", _at(first), _PROOF)]
    if is_elastic:
        result.append(Opening("a free port", "the rendezvous of phalanx run", _at(first), _PROOF))
    # What the connections of the handshake tell is unknown here: only addresses count.
    if is_here:
        private = "a socket in a folder that only this user enters"
        result.append(Opening("none", "JAX's coordination service", private, "processes of this user"))
    else:
        anyone = f"{_USERS}, unless JAX has certificates; everyone who reaches it, if a router changes addresses between them"
        where = f"{_at(first)}; none, as below 127.0.0.1, if all turn out to be on one machine"
        result.append(Opening(port, "JAX's coordination service", where, anyone))
    place = "127.0.0.1" if is_here else "the address of the worker that the others reach"
    result.append(Opening("a free port of each worker", "gloo, for arrays on CPUs", place, _CLAIMED))
    return result


def _of_servers(chief: str, addresses: Sequence[str]) -> list[Opening]:
    place = "127.0.0.1" if all(map(is_loopback, addresses)) else "all; 127.0.0.1 if all turn out to be on one machine"
    port = f"{host_and_port(chief)[1]} of the chief"
    return [
        Opening(port, "the listener of the chief", _at(chief), _PROOF),
        Opening("free ports of each task", "Ray", place, f"processes with Ray's token, derived from {TOKEN}"),
    ]


def _at(address: str) -> str:
    if is_loopback(address):
        return "127.0.0.1"
    return f"the address {host_and_port(address)[0]}; all if that name resolves to a loopback address"
