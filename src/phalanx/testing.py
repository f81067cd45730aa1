# SPDX-License-Identifier: Apache-2.0
"""Laws that code of your own can be tested against."""

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from phalanx import compat
from phalanx.compat import Variable, raw_value
from phalanx.errors import DivergenceError, arguments
from phalanx.input.distributed import DistributedDataset
from phalanx.input.iterator import DistributedIterator
from phalanx.input.state import from_text, to_text
from phalanx.mesh import device_assignment, tpu_system
from phalanx.mesh.topology import Topology
from phalanx.mesh.values import is_distributed
from phalanx.programs.state import slot_of
from phalanx.strategies.describe import variables_of

_DIGEST_BYTES = 8


def virtual_topology(mesh_shape: Sequence[int]) -> device_assignment.Topology:
    """Lets this process's CPU devices stand for a TPU system. Outside all scopes.

    From here on `initialize_tpu_system` and `TPUStrategy` find it, until `shutdown_tpu_system`.

    Args:
      mesh_shape: how many cores there are along each dim: `(2, 2, 2)`, or x, y, z and the cores of a chip.

    Returns:
      The topology, of which the last dim goes from one device to the next.

    Raises:
      DeviceError: there are fewer CPU devices.
      InvalidArgumentError: `mesh_shape` is no sequence of positive integers.

    Example:
      >>> import phalanx, phalanx.testing
      >>> phalanx.testing.virtual_topology((2, 2, 2)).num_tpus_per_task
      8
    """
    return tpu_system.declare_virtual(device_assignment.positive_integers("mesh_shape", mesh_shape))


def assert_in_sync(*objects: Any) -> None:
    """Asserts that all replicas hold the same values of variables, to the last bit. Outside all programs, on all processes.

    Variables that no program has used yet are left out: each process may have other values, and all will take the first one's.

    Args:
      objects: variables, or models, layers, optimizers or metrics, whose variables are meant; or lists of them.

    Raises:
      DivergenceError: they differ; the message names the variable, and the ranks that are not like most.
      InvalidArgumentError: an object that neither is nor has variables.

    Example:
      >>> import keras, phalanx, phalanx.testing
      >>> with phalanx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
      ...     model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
      >>> phalanx.testing.assert_in_sync(model)
    """
    variables = [v for o in objects for v in variables_of("assert_in_sync", o)]
    by_home: dict[int, list[Variable]] = {}
    for variable in variables:
        if slot_of(variable).home is not None and raw_value(variable) is not None:
            by_home.setdefault(id(slot_of(variable).home), []).append(variable)
    for group in by_home.values():
        _assert_equal_everywhere(group, slot_of(group[0]).home)


def _assert_equal_everywhere(variables: list[Variable], topology: Topology) -> None:
    own = np.array([[_digest(c) for c in _copies(v, topology)] for v in variables])
    everywhere = np.concatenate(topology.exchange(own), axis=1)
    # (variables, replicas, devices of a replica, words)
    everywhere = everywhere.reshape(len(variables), topology.num_replicas, topology.devices_per_replica, -1)
    odd = {i: found for i, digests in enumerate(everywhere) if (found := _odd_replicas(digests))}
    if not odd:
        return
    first = next(iter(odd))
    ranks = sorted({topology.first_devices[replica].process_index for replica in odd[first]})
    where = ", ".join(f"rank {rank}" for rank in ranks)
    replicas = ", ".join(map(str, odd[first]))
    raise DivergenceError(
        f"assert_in_sync of {len(variables)} variables",
        f"{variables[first].path!r} on {where} (replica {replicas} of {topology.num_replicas}) differs from most; "
        f"{len(odd)} variable(s) differ in all.",
        "assign only what all processes compute alike, or assign it inside strategy.run",
    )


def _copies(variable: Variable, topology: Topology) -> list[Any]:
    """Returns what each local device of a replica holds."""
    value, devices = raw_value(variable), [d for i in topology.local_replicas for d in topology.devices_of(i)]
    path = compat.layout_path(variable)
    if topology.divided_dim(path, variable.shape) is not None:
        # Each replica holds another part.
        return [np.zeros(0)] * len(devices)
    if not isinstance(value, jax.Array) or value.sharding != topology.sharding_of(path, variable.shape):
        return [value] * len(devices)
    own = {s.device: s.data for s in value.addressable_shards}
    return [own[d] for d in devices]


def _digest(value: Any) -> np.ndarray:
    array = np.ascontiguousarray(value)
    return np.frombuffer(hashlib.blake2b(array.tobytes(), digest_size=_DIGEST_BYTES).digest(), np.uint32)


def _odd_replicas(digests: np.ndarray) -> list[int]:
    """Returns the replicas that do not hold on each of their devices what most do; where no value is usual, not what the first does."""
    texts = [[own.tobytes() for own in of_device] for of_device in digests.swapaxes(0, 1)]
    usual = [Counter(each).most_common(1)[0][0] for each in texts]
    return [i for i in range(len(digests)) if any(each[i] != most for each, most in zip(texts, usual, strict=True))]


def assert_restores_everywhere(dataset: DistributedDataset, *, steps: int | None = None) -> None:
    """Asserts that an iterator of `dataset` goes on equally from each of its positions. Outside all programs.

    It reads the dataset once, and once more from the position after each batch, which it passes through text as a file would.

    Args:
      dataset: what `Strategy.experimental_distribute_dataset` returned; each pass must give the same batches.
      steps: how many batches to read; None reads all.

    Raises:
      InvalidArgumentError: `dataset` is not a distributed dataset, or `steps` neither a positive integer nor None.
      AssertionError: a batch after a restored position differs; the message says from which position, and which batch.

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
        where = f"batch {number}, after the position behind batch {position - 1} was restored,"
        assert batch is not None, f"{where} is missing"
        equal = jax.tree.map(np.array_equal, _content(batch), batches[number])
        assert all(jax.tree.leaves(equal)), f"{where} is {_content(batch)}, not {batches[number]}"
    assert not is_whole or next(iterator, None) is None, f"a batch too many follows the position {position}"


def _content(batch: Any) -> Any:
    """Returns the real rows of each local replica, as NumPy arrays."""
    return jax.tree.map(
        lambda x: [np.asarray(v) for v in x.values] if is_distributed(x) else [np.asarray(x)],
        batch,
        is_leaf=is_distributed,
    )
