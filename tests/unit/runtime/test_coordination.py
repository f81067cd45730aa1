"""The names of JAX that are not public: they exist, and do what Phalanx expects of them."""

import contextlib
import inspect
import os
import socket
import subprocess
import sys

import jax
import pytest
from jax._src import distributed, lib, xla_bridge
from tests.filters import takes_filters

from phalanx._src.cluster.connections.ports import listening_ports
from phalanx._src.launch.plan import free_ports
from phalanx._src.runtime import coordination

DEADLINE_S = 300

GROUP = """
import sys
import phalanx
import jax, numpy as np
from phalanx._src.cluster.connections.ports import sockets_of_process
from phalanx._src.runtime import coordination
from phalanx._src.typed_jax import set_config
set_config("jax_cpu_enable_async_dispatch", False)
rank, *services = int(sys.argv[1]), *sys.argv[2:]
def double(x):
    return 2 * x
double.__name__ = f"double_{rank}"
print("ready", flush=True)
input()
coordination.listen_at(f"127.0.0.{rank + 2}")
for service in services:
    coordination.connect(service, rank, 2, 100)
    ports = coordination._group.ports
    hosts = {each.getsockname()[0] for each in sockets_of_process() if each.getsockname()[1] in ports}
    jax.jit(double)(np.ones(3))
    shared = coordination.share(f"{service}".encode() if rank == 1 else None) == service.encode()
    shared = shared and coordination.share_each(b"%d" % rank, "ranks") == [b"0", b"1"]
    print(jax.process_index(), jax.process_count(), len(jax.devices()), len(ports), shared, hosts, flush=True)
    coordination.disconnect()
    coordination.drop_devices()
print(jax.process_count(), len(jax.devices()), flush=True)
"""


SERVER = """
import runpy
from jax._src import lib
service = lib._jax.get_distributed_runtime_service
# As `python -m phalanx._src.runtime.coordination`, but processes of a busy machine have more time to register.
lib._jax.get_distributed_runtime_service = lambda *given, **kwargs: service(*given, **kwargs | {"cluster_register_timeout": 100})
runpy.run_module("phalanx._src.runtime.coordination", run_name="__main__")
"""

ALONE = """
import os, sys, threading, time
import jax
from jax._src import distributed, lib
from phalanx._src.cluster.connections.ports import cut
from phalanx._src.runtime import coordination
first, second, third = sys.argv[1:]
kept = [
    lib._jax.get_distributed_runtime_service(address, 2, cluster_register_timeout=timeout_s, recoverable=True)
    for address, timeout_s in ((first, 1), (second, 100), (third, 100))
]
try:
    coordination.connect(first, 0, 2, 1)
except RuntimeError:
    print("does not connect", flush=True)
coordination.disconnect()
def come(address):
    kept.append(lib._jax.get_distributed_runtime_client(address, 1, init_timeout=100))
    kept[-1].connect()
def other():
    come(second)
    while distributed.global_state.client is None:
        time.sleep(0.05)
    time.sleep(0.5)
    coordination.break_off()
threading.Thread(target=other, daemon=True).start()
try:
    coordination.connect(second, 0, 2, 100)
except RuntimeError:
    print("finds no devices", flush=True)
coordination.disconnect()
coordination.drop_devices()
collectives = coordination._collectives
def lose_service(*given):
    tunnel = coordination._group.tunnel
    tunnel._target = "127.0.0.1:1"
    for far in filter(None, [*tunnel._far_ends.values()]):
        cut(far)
    while any(tunnel._far_ends.values()):
        time.sleep(0.05)
    threading.Timer(0.5, coordination.break_off).start()
    return collectives(*given)
coordination._collectives = lose_service
coordination.listen_at("127.0.0.1")
threading.Thread(target=come, args=(third,), daemon=True).start()
try:
    coordination.connect(third, 0, 2, 100)
except RuntimeError:
    print("has no service", flush=True)
coordination.disconnect()
coordination.drop_devices()
coordination._collectives = collectives
print(jax.process_count(), "process", flush=True)
os._exit(0)
"""

ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS", "TF_CONFIG")} | {
    "JAX_PLATFORMS": "cpu"
}


def start_service(server, *machines):
    """Returns the address of a new service, which admits only these machines, if there are any."""
    server.stdin.write(" ".join(["127.0.0.1 2", *machines]) + "\n")
    server.stdin.flush()
    word, address = server.stdout.readline().split()
    assert word == "started"
    return address


def is_admitted(machine, service):
    """Whether a connection to a service gets an answer if it comes from an address, which stands for a machine."""
    host, port = service.split(":")
    with socket.socket() as client:
        client.bind((machine, 0))
        client.settimeout(0.3)
        return client.connect_ex((host, int(port))) == 0


VISITED = """
import os, socket
from phalanx._src.runtime import coordination
from phalanx._src.typed_jax import runtime
service = runtime.get_distributed_runtime_service("ADDRESS", 1)
client = runtime.get_distributed_runtime_client("ADDRESS", 0)
client.connect()
ports, visitors, admit_only = [], [], coordination.admit_only
def come_first(port, machines):
    ports.append(port)
    if len(ports) <= 30:
        visitors.append(socket.create_connection(("127.0.0.1", port)))
    return admit_only(port, machines)
coordination.admit_only = come_first
kept = coordination._collectives(client, "127.0.0.1", ["127.0.0.2"])
print(len(ports), coordination.is_visited(ports[-1]), ports[-1] in coordination.listening_ports(), flush=True)
os._exit(0)
"""


def test_ports_of_gloo_that_a_stranger_has_visited_are_given_up(run_python):
    """However often he is there first."""
    (port,) = free_ports(1)
    assert run_python(VISITED.replace("ADDRESS", f"127.0.0.1:{port}")).split() == ["31", "False", "True"]


def test_private_names_exist():
    """With the parameters that Phalanx sets, and the fields that it writes."""
    assert {"client", "process_id", "num_processes", "coordinator_address"} <= set(vars(distributed.State)) | set(
        distributed.State.__annotations__
    )
    service = lib._jax.get_distributed_runtime_service.__doc__
    names = "num_nodes heartbeat_timeout shutdown_timeout recoverable cluster_register_timeout"
    assert all(name in service for name in names.split())
    client = lib._jax.get_distributed_runtime_client.__doc__
    names = "node_id init_timeout shutdown_timeout heartbeat_timeout use_compression missed_heartbeat_callback"
    assert all(name in client for name in names.split())
    names = "connect shutdown key_value_set blocking_key_value_get key_value_set_bytes blocking_key_value_get_bytes"
    assert all(hasattr(lib._jax.DistributedRuntimeClient, name) for name in names.split())
    assert "hostname: " in lib._jax.make_gloo_tcp_collectives.__doc__
    assert [*inspect.signature(xla_bridge.make_cpu_client).parameters] == ["collectives"]
    assert {"jax_cpu_collectives_implementation", "jax_check_proxy_envs"} <= set(jax.config.values)
    assert inspect.isdatadescriptor(distributed.State.client) or hasattr(distributed.global_state, "client")


@pytest.mark.slow
def test_two_groups_one_after_the_other(tmp_path):
    """Two processes join a service, leave it, join another one, and are alone in the end.

    In each group, one shares bytes with the other. Each keeps what it has compiled. A service that cannot listen says so, and the
    next one starts. One that knows the machines of its group gives strangers from other machines no answer.
    """
    environment = ENVIRONMENT | {
        "PHALANX_CPU_DEVICES": "1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }

    with contextlib.ExitStack() as stack:

        def start(*arguments):
            pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
            process = stack.enter_context(
                subprocess.Popen([sys.executable, "-c", *arguments], env=environment, text=True, **pipes)
            )
            stack.callback(process.kill)
            return process

        server = start(SERVER)
        server.stdin.write("192.0.2.77 2\n")  # An address of documentation (RFC 5737), which no machine has.
        server.stdin.flush()
        assert server.stdout.readline().startswith("failed: [Errno")
        services = [start_service(server) for _ in range(2)]
        processes = [start(GROUP, str(rank), *services) for rank in range(2)]
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("\n")
            process.stdin.flush()
        for rank, process in enumerate(processes):
            output, _ = process.communicate(timeout=DEADLINE_S)
            lines = [line for line in output.splitlines() if not line.startswith("[Gloo]")]
            told = f"{rank} 2 2 2 True { {f'127.0.0.{rank + 2}'} }"
            assert lines == [told, told, "1 1"]
        assert all(list((tmp_path / "compiled").glob(f"jit_double_{rank}-*")) for rank in range(2))
        if takes_filters():
            address = start_service(server, "127.0.0.2", "127.0.0.4")
            assert [is_admitted(f"127.0.0.{number}", address) for number in (2, 3, 4)] == [True, False, True]
        server.stdin.close()
        assert server.wait(DEADLINE_S) == 0


def test_connections_of_the_group_are_broken_off(monkeypatch):
    """Sockets at its ports can no longer be read, others can."""
    with socket.create_server(("127.0.0.1", 0)) as ours, socket.create_server(("127.0.0.1", 0)) as other:
        monkeypatch.setattr(coordination._group, "ports", {ours.getsockname()[1]})
        assert {ours.getsockname()[1], other.getsockname()[1]} <= listening_ports()
        with (
            socket.create_connection(ours.getsockname()) as first,
            socket.create_connection(other.getsockname()) as second,
            ours.accept()[0] as theirs,
            other.accept()[0] as unknown,
        ):
            coordination.break_off()
            assert first.recv(1) == b""
            assert theirs.recv(1) == b""
            unknown.sendall(b"x")
            assert second.recv(1) == b"x"


def test_exchange_that_fails():
    """It raises the error that those who form a group expect. gloo's is a ValueError."""

    def lose():
        raise ValueError("UNKNOWN: Gloo all-reduce failed")

    with pytest.raises(RuntimeError, match="Gloo all-reduce failed"):
        coordination.exchange_twice(lose)


APART = """
import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from phalanx._src.runtime import coordination
coordination.keep_all_reduces_apart()
coordination.keep_all_reduces_apart()
jax.config.update("jax_num_cpu_devices", 2)
rows = NamedSharding(jax.make_mesh((2,), ("x",)), PartitionSpec("x"))
arrays = [jax.ShapeDtypeStruct((2, n), jnp.float32, sharding=rows) for n in (8, 1)]
compiled = jax.jit(lambda x, y: (x.sum(0), y.sum(0))).lower(*arrays).compile().as_text()
print(*(line.split("=")[1].split("{")[0].strip() for line in compiled.splitlines() if " all-reduce(" in line))
"""


@pytest.mark.slow
def test_all_reduces_stay_apart():
    """No operation reduces two arrays: it would begin with the second one after the loss of a process in the first. Flags of the user stay."""
    environment = ENVIRONMENT | {"XLA_FLAGS": "--xla_disable_hlo_passes=some --xla_cpu_enable_fast_math=false"}
    done = subprocess.run(
        [sys.executable, "-c", APART], env=environment, capture_output=True, text=True, timeout=DEADLINE_S
    )
    assert done.stdout.split() == ["f32[8]", "f32[1]"], done.stderr


@pytest.mark.slow
def test_process_that_does_not_come():
    """The other one gets an error and does not end. One that waits for devices gets it when the loss is known, even if the service is lost too."""
    command = [sys.executable, "-c", ALONE, *(f"127.0.0.1:{port}" for port in free_ports(3))]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["does not connect", "finds no devices", "has no service", "1 process"], (
        done.stderr
    )
