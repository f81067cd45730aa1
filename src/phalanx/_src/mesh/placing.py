# SPDX-License-Identifier: Apache-2.0
"""Places one array after another on the same devices."""

from collections.abc import Sequence
from types import EllipsisType
from typing import Any, final

import jax
import numpy as np
from jax.sharding import Sharding
from jax.typing import ArrayLike

from phalanx._src.typed_jax import batched_device_put, explicit_transfer

_NARROW_BYTES = 4
# A program with more shapes than these forgets them all, and then learns those again that it still uses.
_MOST_SHAPES = 4096


@final
class Placer:
    """Places arrays of the host with one sharding. `device_put` takes five times as long, because it derives each time what is known here.

    Any thread may use it.

    Args:
      sharding: the sharding.
      devices: the devices of this process, in the order of the mesh.
      parts: which part of an array of this process each of them gets.
    """

    def __init__(
        self, sharding: Sharding, devices: Sequence[jax.Device], parts: Sequence[slice | EllipsisType]
    ) -> None:
        self._sharding, self._devices, self._parts = sharding, list(devices), parts
        # Without a lock: if two threads add a shape at the same time, both add the same description.
        self._avals: dict[Any, Any] = {}

    def put(self, local: np.ndarray, shape: tuple[int, ...]) -> jax.Array:
        """Places an array. A CPU device shares its memory if that is aligned, as after `device_put`.

        Args:
          local: what this process has of the array.
          shape: shape of the whole array.
        """
        if local.dtype.itemsize > _NARROW_BYTES:
            local = local.astype(jax.dtypes.canonicalize_dtype(local.dtype), copy=False)
        key = shape, local.dtype
        aval, parts = self._avals.get(key), [local[part] for part in self._parts]
        if aval is not None:
            with explicit_transfer():
                return batched_device_put(aval, self._sharding, parts, self._devices)
        # The first array of a shape takes the public way, because no public function makes the description.
        placed = list(map(jax.device_put, parts, self._devices))
        whole = jax.make_array_from_single_device_arrays(shape, self._sharding, placed)
        if len(self._avals) >= _MOST_SHAPES:
            self._avals.clear()
        self._avals[key] = whole.aval
        return whole

    def put_whole(self, value: ArrayLike) -> jax.Array:
        """Places a whole value on each device. One that all devices hold already stays in its memory."""
        # Not a masked array, which `device_put` refuses.
        if type(value) is np.ndarray:
            return self.put(value, value.shape)
        here = self._unmoved(value)
        if here is not None:
            return here
        if self._sharding.is_fully_addressable:
            placed: jax.Array = jax.device_put(value, self._sharding)
            return placed
        # `device_put` would communicate with the other processes, to compare the values.
        parts = [jax.device_put(value, device) for device in self._devices]
        return jax.make_array_from_single_device_arrays(np.shape(value), self._sharding, parts)

    def _unmoved(self, value: object) -> jax.Array | None:
        """Returns an array that all devices hold whole, with this sharding. None for any other value."""
        if not isinstance(value, jax.Array) or isinstance(value, jax.core.Tracer) or value.is_deleted():
            return None
        actual, sharding = value.sharding, self._sharding
        if actual == sharding:
            return value
        is_there = actual.device_set == sharding.device_set and actual.memory_kind == sharding.memory_kind
        # The result would have no weak type. Keys never have one.
        if not is_there or not value.is_fully_replicated or getattr(value, "weak_type", False):
            return None
        parts = [value] if len(actual.device_set) == 1 else [shard.data for shard in value.addressable_shards]
        return jax.make_array_from_single_device_arrays(value.shape, sharding, parts)
