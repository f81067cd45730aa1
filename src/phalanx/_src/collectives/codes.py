# SPDX-License-Identifier: Apache-2.0
"""Codes in which arrays of floats are sent with fewer bytes, and the sum over the replicas of arrays that are sent in a code."""

from abc import ABC, abstractmethod
from typing import final

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from typing_extensions import override

from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.typed_jax import all_to_all


class Code(ABC):
    """A code for arrays (parts, elements) of floats. The coded array has the same number of parts, and is one message.

    Attributes:
      block: the number of elements must be a multiple of it.
    """

    block = 1

    @abstractmethod
    def encode(self, x: jax.Array) -> jax.Array:
        """Returns an array of integers, which XLA sends as they are. On CPUs it would send narrow floats as float32."""

    @abstractmethod
    def decode(self, coded: jax.Array, dtype: DTypeLike) -> jax.Array:
        """Returns the floats."""


@final
class Rounded(Code):
    """Floats of 16 bits, for example bfloat16."""

    def __init__(self, dtype: str) -> None:
        self._dtype = dtype

    @override
    def encode(self, x: jax.Array) -> jax.Array:
        return lax.bitcast_convert_type(x.astype(self._dtype), jnp.uint16)

    @override
    def decode(self, coded: jax.Array, dtype: DTypeLike) -> jax.Array:
        return lax.bitcast_convert_type(coded, jnp.dtype(self._dtype)).astype(dtype)


@final
class Int8(Code):
    """Integers from -127 to 127, with one scale of float32 behind each block. A block with a number that is not finite becomes NaN."""

    block = 256
    """The scale then adds 1.6% to the bytes."""
    _most = 127.0

    @override
    def encode(self, x: jax.Array) -> jax.Array:
        blocks = x.reshape(x.shape[0], -1, self.block)
        scales = jnp.abs(blocks).max(axis=-1) / self._most
        # A block of zeros has the scale 0, and 0 / 0 would be NaN.
        codes = jnp.round(blocks / jnp.where(scales > 0, scales, 1)[..., None]).astype(jnp.int8)
        return jnp.concatenate([codes, lax.bitcast_convert_type(scales.astype(jnp.float32), jnp.int8)], axis=-1)

    @override
    def decode(self, coded: jax.Array, dtype: DTypeLike) -> jax.Array:
        codes, scales = coded[..., : self.block], lax.bitcast_convert_type(coded[..., self.block :], jnp.float32)
        return (codes.astype(dtype) * scales.astype(dtype)[..., None]).reshape(coded.shape[0], -1)


def coded_sum(code: Code, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Sums arrays over the replicas. Each replica sums one shard of all arrays, and sends the result to all other replicas.

    Args:
      code: the code in which shards and results are sent.
      x: the array of this replica, of any shape.

    Returns:
      The total, with the same bits on all replicas, and the rounding errors of this replica: of its array, and of the shard that it
      sums. Summed over all replicas, they are the error of the total.
    """
    n = lax.axis_size(REPLICA_AXIS)
    parts = jnp.pad(x.ravel(), (0, -x.size % (n * code.block))).reshape(n, -1)
    sent = code.encode(parts)
    arrived = all_to_all(sent, REPLICA_AXIS, split_axis=0, concat_axis=0)
    shard = code.decode(arrived, x.dtype).sum(axis=0, keepdims=True)
    result = code.encode(shard)
    total = code.decode(lax.all_gather(result, REPLICA_AXIS, tiled=True), x.dtype)
    # The error of a summed shard must be kept once, not once per replica. The replica that has summed it keeps it.
    is_own = jnp.arange(n)[:, None] == lax.axis_index(REPLICA_AXIS)
    unsent = parts - code.decode(sent, x.dtype) + jnp.where(is_own, shard - code.decode(result, x.dtype), 0)
    return total.ravel()[: x.size].reshape(x.shape), unsent.ravel()[: x.size].reshape(x.shape)
