# SPDX-License-Identifier: Apache-2.0
"""Assertions, virtual devices and a virtual network for your tests."""

import hashlib
import math
import numbers
import secrets
import subprocess
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, NamedTuple, Self, final

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding

from phalanx._src.compat import raw_value
from phalanx._src.input.distributed import DistributedDataset
from phalanx._src.input.iterator import DistributedIterator
from phalanx._src.input.state import from_text, to_text
from phalanx._src.mesh import arrays, device_assignment, tpu_system
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.topology import Topology
from phalanx._src.mesh.values import PerReplica, is_distributed
from phalanx._src.programs.slots import slot_of
from phalanx._src.tools.describe import variables_of
from phalanx._src.tracing.update_sharding import sharding_of
from phalanx.errors import DivergenceError, InvalidArgumentError, StartupError, arguments, shown
from phalanx.errors.names import suggest_names
from phalanx.typing import PyTree

__all__ = ["VirtualNetwork", "assert_in_sync", "assert_restores_everywhere", "virtual_topology"]

# Two numbers of 32 bits, because JAX exchanges no wider ones unless x64 is on.
_DIGEST_BYTES = 8
_BURST = "64kb"


def virtual_topology(mesh_shape: Sequence[int]) -> device_assignment.TPUTopology:
    """Makes the CPU devices of this process emulate a TPU system. Call it outside all scopes.

    `initialize_tpu_system` and `TPUStrategy` use the emulated system until `shutdown_tpu_system` is called.

    Args:
      mesh_shape: number of cores along each dim, for example `(2, 2, 2)`. The dims of real TPUs are x, y, z and the
        core within a chip.

    Returns:
      The topology. Consecutive devices are adjacent along the last dim.

    Raises:
      DeviceError: this process has fewer CPU devices.
      InvalidArgumentError: `mesh_shape` is not a sequence of positive integers.

    Example:
      >>> import phalanx, phalanx.testing
      >>> phalanx.testing.virtual_topology((2, 2, 2)).num_tpus_per_task
      8
    """
    return tpu_system.declare_virtual(device_assignment.positive_integers("mesh_shape", mesh_shape))


@final
class VirtualNetwork:
    """Machines on this one with cables to one switch, to try a cluster on a slow network. A context manager.

    Each is a Linux network namespace with its own address. The processes of a machine run in it, and everything else (files,
    cores, memory) they share. May be used in any context.

    Args:
      megabits_per_second: the rate of each cable in each direction. None for no limit.
      machines: the number of machines, from 2 to 99.

    Attributes:
      addresses: the addresses of the machines.

    Raises:
      InvalidArgumentError: `megabits_per_second` is not a number above 0, or `machines` is outside its range.
      StartupError: this machine cannot make namespaces.

    Example:
      >>> import phalanx.testing
      >>> network = phalanx.testing.VirtualNetwork(megabits_per_second=100)
      >>> network.command(1, ["phalanx", "run", "--in-cluster", "train.py"])[-1]
      'train.py'
    """

    # Of two machines. For documentation (RFC 5737), so no other machine has them.
    addresses: tuple[str, ...] = ("192.0.2.1", "192.0.2.2")

    def __init__(self, megabits_per_second: float | None = None, machines: int = 2) -> None:
        rate = megabits_per_second
        is_number = isinstance(rate, numbers.Real) and not isinstance(rate, bool)
        if rate is not None and not (is_number and 0 < rate < math.inf):
            raise InvalidArgumentError(
                f"megabits_per_second={shown(rate)}", "must be a number above 0, or None.", "megabits_per_second=100"
            )
        machines = arguments.integer("machines", machines, least=2, most=99, kind="an integer from 2 to 99")
        self._rate = rate
        self.addresses = tuple(f"192.0.2.{1 + machine}" for machine in range(machines))
        # Each machine has the name of both ends of its cable, which have at most 15 characters.
        token = secrets.token_hex(3)
        self._switch = f"phalanx{token}s"
        self._names = [f"phalanx{token}{machine}" for machine in range(machines)]

    def __enter__(self) -> Self:
        try:
            _call("ip", "netns", "add", self._switch)
            _call("ip", "-n", self._switch, "link", "add", "bridge", "up", "type", "bridge")
            for name, address in zip(self._names, self.addresses, strict=True):
                _call("ip", "netns", "add", name)
                # Nothing else deletes the cable: it ends with the namespace of either end.
                cable = ["link", "add", name, "netns", name, "type", "veth", "peer", name, "netns", self._switch]
                _call("ip", *cable)
                _call("ip", "-n", self._switch, "link", "set", name, "master", "bridge", "up")
                _call("ip", "-n", name, "addr", "add", f"{address}/24", "dev", name)
                _call("ip", "-n", name, "link", "set", "lo", "up")
                _call("ip", "-n", name, "link", "set", name, "up")
                if self._rate is not None:
                    limit = ["rate", f"{self._rate:g}mbit", "burst", _BURST, "latency", "100ms"]
                    for end in (name, self._switch):
                        _call("tc", "-n", end, "qdisc", "add", "dev", name, "root", "tbf", *limit)
        except (OSError, subprocess.CalledProcessError) as e:
            # Python does not call `__exit__` after an error in `__enter__`, and some of it exists already.
            self.__exit__()
            why = e.stderr.decode().strip() if isinstance(e, subprocess.CalledProcessError) else f"{e}"
            raise StartupError(
                "a VirtualNetwork",
                f"this machine cannot make it: {why}.",
                "root on Linux, with iproute2",
            ) from e
        return self

    def __exit__(self, *_: object) -> None:
        for name in (self._switch, *self._names):
            # A namespace may not have been created, and `ip` may not be installed.
            with suppress(OSError):
                subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def command(self, machine: int, command: Sequence[str]) -> list[str]:
        """Returns a command that runs another one on a machine.

        Args:
          machine: the index of the machine.
          command: the other command.

        Raises:
          InvalidArgumentError: `machine` is not an index of a machine, or `command` is not a list of texts.
        """
        name = self._name(machine)
        if not isinstance(command, (list, tuple)) or not all(isinstance(word, str) for word in command):
            raise InvalidArgumentError(
                f"command={shown(command)}", "must be a list of texts.", 'command=["python", "train.py"]'
            )
        return ["ip", "netns", "exec", name, *command]

    def pull_cable(self, machine: int = 1) -> None:
        """Disconnects a machine from all others. Its connections stay open, and nothing arrives.

        Args:
          machine: the index of the machine.

        Raises:
          InvalidArgumentError: `machine` is not an index of a machine.
        """
        self._switch_cable(machine, "down")

    def plug_cable(self, machine: int = 1) -> None:
        """Reconnects a machine.

        Args:
          machine: the index of the machine.

        Raises:
          InvalidArgumentError: `machine` is not an index of a machine.
        """
        self._switch_cable(machine, "up")

    def _switch_cable(self, machine: int, state: str) -> None:
        _call("ip", "-n", self._switch, "link", "set", self._name(machine), state)

    def _name(self, machine: int) -> str:
        last = len(self._names) - 1
        kind = f"an integer from 0 to {last}"
        return self._names[arguments.integer("machine", machine, least=0, most=last, kind=kind)]


def _call(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def assert_in_sync(*objects: object) -> None:
    """Asserts that all replicas hold bitwise equal values of variables and arrays.

    Call it outside all programs, in all processes. It skips variables that no program has used yet: their values may
    differ between processes until the first program copies the values of the first process. It skips arrays that no
    strategy has placed on its replicas.

    Args:
      objects: variables; models, layers, optimizers and metrics with variables; JAX arrays and `Mirrored` values; or pytrees
        of these.

    Raises:
      DivergenceError: a value differs. The message names the variable or array, and the ranks and replicas that differ from
        most replicas. If no value has a majority, it names those that differ from replica 0.
      InvalidArgumentError: an object is neither a variable nor an array, and has no variables.

    Example:
      >>> import keras, phalanx, phalanx.testing
      >>> with phalanx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
      ...     model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
      >>> phalanx.testing.assert_in_sync(model)
    """
    homes: dict[int, tuple[Topology, list[_Value]]] = {}
    meshes: dict[Mesh, list[_Value]] = {}
    # None is allowed inside a pytree, because optimizer states contain it.
    if any(x is None for x in objects):
        variables_of("assert_in_sync", None)
    arrays.flattened(objects)  # Its error names dicts that JAX cannot sort.
    for path, leaf in jax.tree_util.tree_leaves_with_path(objects, is_leaf=lambda x: isinstance(x, PerReplica)):
        # `variables_of` refuses what has no variables, and so a deleted array too.
        if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer) or leaf.is_deleted():
            for variable in variables_of("assert_in_sync", leaf):
                home, value = slot_of(variable).home, raw_value(variable)
                if home is not None and home.has_devices and value is not None:
                    values = homes.setdefault(id(home), (home, []))[1]
                    values.append(_Value(variable.path, value, sharding_of(home, variable)))
        elif (
            isinstance(sharding := leaf.sharding, NamedSharding)
            and isinstance(mesh := sharding.mesh, Mesh)
            and mesh.axis_names[:1] == (REPLICA_AXIS,)
        ):
            name = f"objects{jax.tree_util.keystr(path)}"
            meshes.setdefault(mesh, []).append(_Value(name, leaf, sharding))
    for home, values in homes.values():
        hint = "assign only values that all processes compute identically, or assign inside strategy.run"
        _assert_equal_everywhere(values, home, "variable", hint)
    for mesh, values in meshes.items():
        # An array knows its mesh, but not the topology of the strategy that placed it.
        axes = tuple(zip(mesh.axis_names[1:], mesh.devices.shape[1:], strict=True))
        hint = "all_reduce the gradients in the replica function, and return phalanx.Mirrored only of values that are equal"
        _assert_equal_everywhere(values, Topology(tuple(mesh.devices.flat), axes), "array", hint)


class _Value(NamedTuple):
    """A value that the replicas hold.

    Args:
      name: its name in messages.
      value: the array, or what a variable holds.
      sharding: the placement on the devices of its strategy.
    """

    name: str
    value: object
    sharding: NamedSharding


def _assert_equal_everywhere(values: list[_Value], topology: Topology, noun: str, hint: str) -> None:
    local_digests = np.array([[_digest(c) for c in _copies(v, topology)] for v in values])
    everywhere = np.concatenate(topology.exchange(local_digests), axis=1)
    # Shape: (values, replicas, devices_per_replica, words of a digest).
    everywhere = everywhere.reshape(len(values), topology.num_replicas, topology.devices_per_replica, -1)
    all_odd = {i: odd for i, digests in enumerate(everywhere) if (odd := _odd_replicas(digests)).replicas}
    if not all_odd:
        return
    first, odd = next(iter(all_odd.items()))
    ranks = sorted({topology.first_devices[replica].process_index for replica in odd.replicas})
    where = ", ".join(f"rank {rank}" for rank in ranks)
    replicas = f"replica{'s' * (len(odd.replicas) > 1)} {', '.join(map(str, odd.replicas))}"
    raise DivergenceError(
        f"assert_in_sync of {_counted(len(values), noun)}",
        f"{values[first].name!r} on {where} ({replicas} of {topology.num_replicas}) differs from {odd.reference}; "
        f"{_counted(len(all_odd), noun)} {'differs' if len(all_odd) == 1 else 'differ'} in total.",
        hint,
    )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}{'s' * (count != 1)}"


def _copies(of: _Value, topology: Topology) -> list[Any]:
    """Returns the copy of a value on each local device, replica by replica."""
    value, devices = of.value, topology.devices_here
    if REPLICA_AXIS in of.sharding.spec:
        # Each replica holds a different shard, so there are no copies to compare.
        return [np.zeros(0)] * len(devices)
    # A value that was assigned outside of steps is placed at the next step. Until then, each process has one value.
    if not isinstance(value, jax.Array) or value.sharding != of.sharding:
        return [value] * len(devices)
    shards = {s.device: s.data for s in value.addressable_shards}
    return [shards[d] for d in devices]


def _digest(value: object) -> np.ndarray:
    array = np.ascontiguousarray(value)
    return np.frombuffer(hashlib.blake2b(array.tobytes(), digest_size=_DIGEST_BYTES).digest(), np.uint32)


class _Odd(NamedTuple):
    """The replicas whose copy of a value differs from a reference.

    Args:
      replicas: their ids.
      reference: what they were compared with, for the message.
    """

    replicas: list[int]
    reference: str


def _odd_replicas(digests: np.ndarray) -> _Odd:
    """Returns the replicas whose digests differ from the digests of most replicas, or of replica 0 if there is no majority.

    Args:
      digests: uint32 array (replicas, devices_per_replica, words).
    """
    texts = [of_replica.tobytes() for of_replica in digests]
    usual, count = Counter(texts).most_common(1)[0]
    has_majority = 2 * count > len(texts)
    expected = usual if has_majority else texts[0]
    return _Odd(
        [i for i, text in enumerate(texts) if text != expected], "most replicas" if has_majority else "replica 0"
    )


def assert_restores_everywhere(dataset: DistributedDataset, *, steps: int | None = None) -> None:
    """Asserts that an iterator of `dataset` can be saved and restored after every batch. Call it outside all programs.

    It reads the dataset once, and then again from the position after each batch. It converts each saved state to text
    and back, as a checkpoint does.

    Args:
      dataset: the result of `Strategy.experimental_distribute_dataset`. Each pass must give the same batches.
      steps: number of batches to read. None reads all batches.

    Raises:
      InvalidArgumentError: `dataset` is not a distributed dataset, or `steps` is neither a positive integer nor None.
      AssertionError: a batch after a restored position differs. The message names the position and the batch.

    Example:
      >>> import numpy as np, phalanx, phalanx.testing
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> dataset = strategy.experimental_distribute_dataset(np.arange(10), batch_size=4)
      >>> phalanx.testing.assert_restores_everywhere(dataset)
    """
    arguments.instance(
        "dataset", dataset, DistributedDataset, "strategy.experimental_distribute_dataset(dataset, batch_size=64)"
    )
    if steps is not None:
        arguments.integer("steps", steps)
    iterator = iter(dataset)
    states = [to_text(iterator.get_state())]
    batches: list[Any] = []
    while (steps is None or len(batches) < steps) and (batch := next(iterator, None)) is not None:
        batches.append(_content(batch))
        states.append(to_text(iterator.get_state()))
    for position, text in enumerate(states):
        restored = iter(dataset)
        restored.set_state(from_text(text))
        _assert_goes_on(restored, batches, position, is_whole=steps is None)


def _assert_goes_on(iterator: DistributedIterator, batches: list[Any], position: int, *, is_whole: bool) -> None:
    for number in range(position, len(batches)):
        batch = next(iterator, None)
        where = f"batch {number}, read after restoring the position behind batch {position - 1},"
        assert batch is not None, f"{where} is missing"
        equal = jax.tree.map(np.array_equal, _content(batch), batches[number])
        assert all(jax.tree.leaves(equal)), f"{where} is {_content(batch)}, not {batches[number]}"
    assert not is_whole or next(iterator, None) is None, f"there is an extra batch after restoring position {position}"


def _content(batch: PyTree) -> PyTree:
    """Returns the real rows of each local replica, as NumPy arrays."""
    return jax.tree.map(
        lambda x: [np.asarray(v) for v in x.values] if is_distributed(x) else [np.asarray(x)],
        batch,
        is_leaf=is_distributed,
    )


suggest_names(__name__)
