# SPDX-License-Identifier: Apache-2.0
"""JAX's coordination service outside all workers, and the clients that join one service after another.

`jax.distributed.initialize` starts the service in the process of rank 0, so that nobody survives the end of that process.

As a module (`python -m phalanx._src.runtime.coordination`) it serves: each line of its input is `HOST SIZE ADDRESSES`, or `unix:PATH SIZE`, and
starts a service for a group of that size, whose processes come from these addresses. Each line of its output is `started ADDRESS`, or says why it has failed. It ends with its input.
"""

import contextlib
import functools
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import jax.extend
import numpy as np

from phalanx._src.cluster.connections.filters import admit_only, is_visited
from phalanx._src.cluster.connections.hosts import is_private
from phalanx._src.cluster.connections.ports import HeldPort, listening_ports, sockets_of_process, stop_reading
from phalanx._src.cluster.connections.tunnel import Tunnel
from phalanx._src.cluster.spec import host_and_port
from phalanx._src.typed_jax import distributed_state, make_cpu_client, partition_spec, runtime

_HEARTBEAT_S = 100
"""Time in seconds after which the service gives up a silent client. The watchdog notices it earlier."""
_REGISTER_S = 3
"""Time in seconds in which all processes of a group must come. They have met just before."""
_SHUTDOWN_S = 5
_SHARE_S = 600
"""Time to wait for what another process shares, in seconds. If that one is lost, `break_off` ends the wait."""
_KEPT_SERVICES = 2
_ATTEMPTS = 5
_PORTS = 200
"""Ports of gloo to try. A stranger who looks for ports all the time is at four of five before the kernel drops his packets, if the machine is busy."""
_APART = "--xla_disable_hlo_passes=cpu-all-reduce-combiner"


class _Client(Protocol):
    def shutdown(self) -> None: ...


@dataclass
class _Group:
    """The group of this process.

    Attributes:
      ports: ports at which gloo listens in the processes of the group.
      is_broken: whether it has lost a process.
      tunnel: the way to its service. None if the service is on this machine.
    """

    ports: set[int] = field(default_factory=set)
    is_broken: bool = False
    tunnel: Tunnel | None = None


_group = _Group()


def keep_all_reduces_apart() -> None:
    """Makes XLA run each all-reduce on CPUs for itself. It must not have compiled anything yet.

    By default, XLA joins all-reduces that are independent into one operation. If gloo fails with one array, this operation continues with the next
    (jaxlib 0.10.2). A process next to a lost one then receives into the next array what another process still sends of the array that has failed, and
    gloo aborts this process, because the sizes differ. Joined or not, gloo reduces one array after the other.
    """
    flags = os.environ.get("XLA_FLAGS", "").split()
    if _APART not in flags:
        os.environ["XLA_FLAGS"] = " ".join([*flags, _APART])


def connect(address: str, rank: int, size: int, timeout_s: float) -> set[int]:
    """Connects this process to the coordination service of its group and finds all devices. JAX must have none before.

    Args:
      address: address of the service. The machine of a `host:port` may be lost later.
      rank: rank of this process.
      size: number of processes in the group.
      timeout_s: time to wait for the service, in seconds.

    Returns:
      The ports at which gloo listens in this process.

    Raises:
      RuntimeError: the service, or a process of the group, does not answer.
    """
    if not is_private(address):
        _group.tunnel = Tunnel(address)
        address = _group.tunnel.address
    client = runtime.get_distributed_runtime_client(
        address,
        rank,
        init_timeout=max(1, int(timeout_s)),
        shutdown_timeout=_SHUTDOWN_S,
        heartbeat_timeout=_HEARTBEAT_S,
        # Without it, JAX ends this process if another one does not come. It cannot convert the status that it passes, so it raises.
        missed_heartbeat_callback=lambda _: None,
        shutdown_on_destruction=False,
        use_compression=True,
    )
    client.connect()
    state = distributed_state
    state.client, state.process_id, state.num_processes, state.coordinator_address = client, rank, size, address
    ports = find_devices()
    client.key_value_set(f"phalanx/ports/{rank}", json.dumps(sorted(ports)))
    _group.ports.clear()
    for other in range(size):
        _group.ports.update(json.loads(client.blocking_key_value_get(f"phalanx/ports/{other}", int(1000 * timeout_s))))
    return ports


def listen_at(host: str, machines: Sequence[str] = ()) -> None:
    """Makes gloo, by which processes exchange arrays on CPUs, listen at an address of this machine. JAX must have no devices yet.

    By default it listens where the name of the machine leads.

    Args:
      host: the address.
      machines: the addresses of all machines, from which alone processes come. Empty if they are unknown.

    Raises:
      RuntimeError: JAX has found its devices already.
    """
    factory = functools.partial(_cpu_client, host, machines)
    jax.extend.backend.register_backend_factory("cpu", factory, fail_quietly=False)


def _cpu_client(host: str, machines: Sequence[str]) -> object:
    """Does what JAX does, and passes the host."""
    client = distributed_state.client
    is_gloo = client is not None and jax.config.values["jax_cpu_collectives_implementation"] == "gloo"
    return make_cpu_client(_collectives(client, host, machines) if is_gloo else None)


def _collectives(client: object, host: str, machines: Sequence[str]) -> object:
    """Opens a port of gloo, to which nobody has connected when the kernel begins to drop the connections of strangers."""
    for _ in range(_PORTS):
        before = listening_ports()
        collectives = runtime.make_gloo_tcp_collectives(distributed_client=client, hostname=host)
        ports = listening_ports() - before
        for port in ports if machines else ():
            admit_only(port, machines)
        # The group does not know the port yet. Whoever knows it would keep the place of a process, even if his connection ended.
        if not any(map(is_visited, ports)):
            break
    return collectives


def find_devices() -> set[int]:
    """Finds the devices of all processes. Returns the ports at which gloo listens in this one from now on.

    Raises:
      RuntimeError: a process of the group does not answer.
    """
    before = listening_ports()
    _find_devices()
    # Only process 0 writes compiled programs into JAX's cache. But on CPUs each rank has separate entries, and machines have separate
    # folders, so all others would compile again each time. JAX reads this number for nothing else once the devices are known.
    distributed_state.process_id = 0
    return listening_ports() - before


def exchange_twice(between: Callable[[], None]) -> None:
    """Makes gloo connect all processes with each other, by two exchanges of arrays that hold nothing.

    Args:
      between: is called between them. If it ends a connection where a process should be, the second exchange fails.

    Raises:
      RuntimeError: a process of the group does not answer.
    """
    devices = jax.devices()
    rows = jax.NamedSharding(jax.make_mesh((len(devices),), ("device",), devices=devices), partition_spec("device"))
    nothing = jax.make_array_from_callback((len(devices),), rows, lambda _: np.zeros(1, np.int8))
    exchange = jax.jit(lambda x: x.sum(dtype=np.int8), out_shardings=jax.NamedSharding(rows.mesh, partition_spec()))
    try:
        exchange(nothing).block_until_ready()
        between()
        exchange(nothing).block_until_ready()
    except ValueError as e:  # That is what JAX raises if gloo fails.
        raise RuntimeError(f"{e}") from e


def _find_devices() -> None:
    for attempt in range(_ATTEMPTS):
        try:
            if _group.is_broken:
                raise RuntimeError("the group has lost a process before it was complete")
            jax.devices()
        except RuntimeError:
            # gloo asks for the address of this machine's name. That fails at times while connections of an earlier group are closed.
            if attempt + 1 == _ATTEMPTS or _group.is_broken:
                raise
        else:
            return


def break_off() -> None:
    """Closes the connections of gloo, so that a collective that waits for other processes ends with an error. May be called in any thread.

    A process that has died closes its own connections, but a third one may wait for a process that has left the group. If gloo is not
    connected yet, a process waits for the service, which may be lost too: for minutes, unless its own connection with the service ends.
    """
    _group.is_broken = True
    # Those of this group, even if the process has entered another one before the end.
    tunnel, client = _group.tunnel, distributed_state.client
    for connection in sockets_of_process():
        with connection, contextlib.suppress(OSError):
            if {connection.getsockname()[1], connection.getpeername()[1]} & _group.ports:
                stop_reading(connection)
    _end_client(client)
    # The end of its connection makes a client abort this process, unless it has left. What it asks the service has failed then, but what it
    # tells a service whose machine is lost would wait forever.
    if client is not None and tunnel is not None:
        tunnel.end()


def share(data: bytes | None, name: str = "state") -> bytes:
    """Returns the bytes that one process of the group passes, sent through the service. The others pass None.

    Args:
      data: the bytes.
      name: what they are. Each group shares it once.

    Raises:
      RuntimeError: the group has lost a process.
    """
    client = distributed_state.client
    if data is not None:
        client.key_value_set_bytes(f"phalanx/shared/{name}", data)
    shared: bytes = client.blocking_key_value_get_bytes(f"phalanx/shared/{name}", 1000 * _SHARE_S)
    return shared


def share_each(data: bytes, name: str) -> list[bytes]:
    """Returns the bytes that each process of the group passes, by rank. See `share`."""
    ranks = range(jax.process_count())
    return [share(data if rank == jax.process_index() else None, f"{name}/{rank}") for rank in ranks]


def _end_client(client: _Client | None) -> None:
    if client is not None:
        # The service reports missing processes here, or the connection has already ended.
        with contextlib.suppress(RuntimeError):
            client.shutdown()


def disconnect() -> None:
    """Leaves the group, whose other processes may have died. The devices stay usable until `drop_devices`."""
    state = distributed_state
    _end_client(state.client)
    _group.is_broken = False
    if _group.tunnel is not None:
        _group.tunnel.close()
        _group.tunnel = None
    state.client, state.process_id, state.num_processes = None, 0, 1


def drop_devices() -> None:
    """Drops all devices, programs and JAX arrays, so that the next call of JAX finds the devices of another group."""
    clears: list[Any] = [jax.clear_caches, jax.extend.backend.clear_backends]
    for clear in clears:
        clear()


def _serve() -> None:
    # The clients of a group that has ended have left its service, but may be in the middle of a call.
    services: deque[Any] = deque()
    for line in sys.stdin:
        host, size, *machines = line.split()
        try:
            # JAX 0.10.2 would end this process with a segmentation fault, more often than not, if another user took the port.
            with contextlib.ExitStack() as stack:
                address = host if is_private(host) else stack.enter_context(HeldPort(host)).address
                service = runtime.get_distributed_runtime_service(
                    address,
                    int(size),
                    heartbeat_timeout=_HEARTBEAT_S,
                    cluster_register_timeout=_REGISTER_S,
                    shutdown_timeout=_SHUTDOWN_S,
                    recoverable=True,
                )
        except (OSError, RuntimeError) as e:
            print(f"failed: {e}".partition("\n")[0], flush=True)
            continue
        if machines:
            admit_only(host_and_port(address)[1], machines)
        services.append(service)
        print(f"started {address}", flush=True)
        while len(services) > _KEPT_SERVICES:
            services.popleft().shutdown()
    os._exit(0)  # Without waiting for clients that have not left.


if __name__ == "__main__":
    _serve()
