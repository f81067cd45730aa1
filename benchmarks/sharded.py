# SPDX-License-Identifier: Apache-2.0
"""An MLP with Adam on a mesh, as an expert shards it in JAX."""

from collections.abc import Iterable
from typing import Any

import jax
import keras
import numpy as np
from jax import lax
from jax.experimental import multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from benchmarks.handwritten import pure_step
from benchmarks.models import NUM_CLASSES, initial

_FEATURES, _WIDTH, _ROWS = 512, 1024, 256
_AXES = ("replica", "model")


def model() -> keras.Model:
    """Two wide layers of which the first is divided by columns and the second by rows, and the one of the classes."""
    layers = [
        keras.layers.Dense(_WIDTH, activation="relu", name="expand"),
        keras.layers.Dense(_WIDTH, activation="relu", name="contract"),
        keras.layers.Dense(NUM_CLASSES, name="logits"),
    ]
    model = keras.Sequential([keras.layers.Input((_FEATURES,)), *layers])
    model.set_weights(initial(model.get_weights()))
    return model


def batch() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(0)
    return rng.random((_ROWS, _FEATURES), "float32"), rng.integers(NUM_CLASSES, size=_ROWS).astype("int32")


def bytes_of_a_device(arrays: Iterable[jax.Array]) -> int:
    device = jax.local_devices()[0]
    return sum(s.data.nbytes for x in arrays for s in x.addressable_shards if s.device == device)


class HandSharded:
    """A jitted `shard_map` over the replicas; a replica's devices are left to XLA, parts of replicas are gathered and scattered.

    Args:
      replicas: into how many parts the batch is divided.
      size: how many devices have each part.
      over: the axis over which kernels and their slots are divided; None for none.
    """

    def __init__(self, replicas: int, size: int, over: str | None) -> None:
        mesh = Mesh(np.array(jax.devices()).reshape(replicas, size), _AXES, axis_types=(AxisType.Auto,) * 2)
        of_leaf = {None: _whole, "model": _by_layer, "replica": _by_rows}[over]
        if over == "replica":
            step, state = pure_step(model(), _scattered, _ROWS, _gathered)
        else:
            # A sum over one replica is one that XLA cannot divide between its devices.
            sum_grads = (lambda grads: lax.psum(grads, "replica")) if replicas > 1 else (lambda grads: grads)
            step, state = pure_step(model(), sum_grads, _ROWS)
        specs = jax.tree.map_with_path(lambda path, x: of_leaf(_layer(path), x.shape), state)
        shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
        split, in_map = PartitionSpec("replica"), specs if over == "replica" else PartitionSpec()
        mapped = jax.shard_map(
            step,
            mesh=mesh,
            in_specs=(in_map, split, split),
            out_specs=(split, in_map),
            axis_names={"replica"},
            check_vma=False,
        )
        self._state: Any = jax.device_put(state, shardings)
        self._batch = jax.device_put(batch(), NamedSharding(mesh, split))
        outs = (NamedSharding(mesh, split), shardings)
        self._step = jax.jit(mapped, out_shardings=outs, donate_argnums=0)

    def __call__(self) -> jax.Array:
        """Does one step and returns the replicas' losses."""
        loss, self._state = self._step(self._state, *self._batch)
        return loss

    def loss(self) -> float:
        """Does one step and returns the loss as a number."""
        return float(multihost_utils.process_allgather(self(), tiled=True).sum())

    def bytes_of_a_device(self) -> int:
        """Returns what one device holds of weights and slots."""
        return bytes_of_a_device(jax.tree.leaves(self._state))


def _gathered(params: Any) -> Any:
    return [(lax.all_gather(kernel, "replica", tiled=True), bias) for kernel, bias in params]


def _scattered(grads: Any) -> Any:
    return [(lax.psum_scatter(kernel, "replica", tiled=True), lax.psum(bias, "replica")) for kernel, bias in grads]


def _layer(path: tuple[Any, ...]) -> int:
    """Returns the layer of a leaf of the state: `(params, m, v, count)`, each but the last a list of `(kernel, bias)`."""
    return path[1].idx if len(path) > 1 else -1


def _whole(layer: int, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec()


def _by_layer(layer: int, shape: tuple[int, ...]) -> PartitionSpec:
    if layer == 0:
        return PartitionSpec(*(None,) * (len(shape) - 1), "model")
    return PartitionSpec("model") if layer == 1 and len(shape) == 2 else PartitionSpec()


def _by_rows(layer: int, shape: tuple[int, ...]) -> PartitionSpec:
    return PartitionSpec("replica") if len(shape) == 2 else PartitionSpec()
