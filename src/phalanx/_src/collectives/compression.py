# SPDX-License-Identifier: Apache-2.0
"""Sums of gradients over the replicas that send fewer bytes than the gradients have.

Each algorithm tells which part of its array a replica has not sent. With error feedback, the replica adds it to its next gradient, so
that it is sent later (Karimireddy et al. 2019, https://arxiv.org/abs/1901.09847). What is received and what all replicas have not sent
always add up to the sum of the gradients.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, final

import jax
import jax.numpy as jnp
from jax import lax
from typing_extensions import override

from phalanx._src.collectives.codes import Code, Int8, Rounded, coded_sum
from phalanx._src.collectives.primitives import joined, split
from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.options import CommunicationOptions, PowerSGD, TopK
from phalanx._src.typed_jax import psum

_SMALL = 1024
"""Gradients with fewer elements are sent whole: what they cost is the latency of a message."""


class Sum(NamedTuple):
    """The result of a compressed sum of some arrays.

    Args:
      totals: the sum of each array over the replicas, with the same bits on all of them.
      unsent: the part of each array of this replica that is not in the total.
      hints: what helps the next sum, with the same bits on all replicas.
    """

    totals: list[jax.Array]
    unsent: list[jax.Array]
    hints: list[jax.Array]


class Compression(ABC):
    """An algorithm that sums gradients over the replicas. `sum` runs inside a program, on the arrays of one replica.

    Attributes:
      error_feedback: whether what was not sent is added to the next gradient.
      start_step: number of steps of the optimizer during which all gradients are sent whole.
      refusal: how to call an algorithm that must compress something. Empty if it need not.
    """

    error_feedback = True
    start_step = 0
    refusal = ""

    def takes(self, shape: Sequence[int]) -> bool:
        """Whether a gradient of this shape is compressed. Others are sent whole."""
        return math.prod(shape) >= _SMALL

    def hint_shape(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Returns the shape of the hint for a gradient of this shape, which begins as random numbers. None if there are no hints."""
        return None

    @abstractmethod
    def sum(self, arrays: list[jax.Array], hints: list[jax.Array]) -> Sum:
        """Sums arrays of float32.

        Args:
          arrays: the arrays.
          hints: the hint for each array, if there are hints.
        """


@final
class CodedSum(Compression):
    """Sends all arrays in a code. Every element is rounded twice: when it is sent, and when the sum is."""

    def __init__(self, code: Code) -> None:
        self._code = code

    @override
    def sum(self, arrays: list[jax.Array], hints: list[jax.Array]) -> Sum:
        total, unsent = coded_sum(self._code, joined(arrays))
        return Sum(split(total, arrays), split(unsent, arrays), [])


@final
class LargestSum(Compression):
    """Sends the elements with the largest magnitudes of all arrays, and their places.

    Source: Aji and Heafield 2017, https://arxiv.org/abs/1704.05021.
    """

    def __init__(self, fraction: float) -> None:
        self._fraction = fraction

    @override
    def sum(self, arrays: list[jax.Array], hints: list[jax.Array]) -> Sum:
        x = joined(arrays)
        _, places = lax.top_k(jnp.abs(x), max(1, round(self._fraction * x.size)))
        # One message.
        message = jnp.stack([lax.bitcast_convert_type(x[places], jnp.int32), places])
        # No sum over the replicas, because each chooses other places.
        arrived = lax.all_gather(message, REPLICA_AXIS)
        total = jnp.zeros_like(x).at[arrived[:, 1]].add(lax.bitcast_convert_type(arrived[:, 0], x.dtype))
        return Sum(split(total, arrays), split(x.at[places].set(0), arrays), [])


@final
class LowRankSum(Compression):
    """Sends each matrix as the product of two narrow ones, which one step of a power iteration from the last step finds.

    Source: PowerSGD, Vogels et al. 2019, https://arxiv.org/abs/1905.13727.
    """

    def __init__(self, rank: int) -> None:
        self._rank, self.refusal = rank, f"PowerSGD of rank {rank}"

    @override
    def takes(self, shape: Sequence[int]) -> bool:
        rows, columns = _matrix(shape)
        return super().takes(shape) and self._rank * (rows + columns) < rows * columns

    @override
    def hint_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return _matrix(shape)[1], self._rank

    @override
    def sum(self, arrays: list[jax.Array], hints: list[jax.Array]) -> Sum:
        matrices = [x.reshape(_matrix(x.shape)) for x in arrays]
        left = _sums([m @ q for m, q in zip(matrices, hints, strict=True)])
        # For an orthonormal basis p, the factor m.T @ p is the best one: p @ (m.T @ p).T is the projection of m.
        bases = [jnp.linalg.qr(p)[0] for p in left]
        factors = [m.T @ p for m, p in zip(matrices, bases, strict=True)]
        right = _sums(factors)
        totals = [(p @ q.T).reshape(x.shape) for p, q, x in zip(bases, right, arrays, strict=True)]
        # With its own factor: what this replica has put into the total is the projection of its own matrix, because sums are linear.
        unsent = [x - (p @ q.T).reshape(x.shape) for p, q, x in zip(bases, factors, arrays, strict=True)]
        return Sum(totals, unsent, right)


def compression_of(options: CommunicationOptions) -> Compression | None:
    """Returns the algorithm that options choose, if they choose one."""
    choice = options.compression
    if choice is None:
        return None
    compression: Compression
    if isinstance(choice, PowerSGD):
        compression = LowRankSum(choice.rank)
        compression.start_step = choice.start_step
    elif isinstance(choice, TopK):
        compression = LargestSum(choice.fraction)
    else:
        compression = CodedSum(Int8() if choice == "int8" else Rounded(choice))
    compression.error_feedback = options.error_feedback
    return compression


def _matrix(shape: Sequence[int]) -> tuple[int, int]:
    """Returns the shape of an array as a matrix, whose columns are its last dim."""
    return (math.prod(shape[:-1]), shape[-1]) if shape else (1, 1)


def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    """Returns the sums of some arrays over the replicas, which one message carries."""
    return split(psum(joined(arrays), REPLICA_AXIS), arrays)
