# SPDX-License-Identifier: Apache-2.0
"""Windows of an array: what a pooling or a convolution reads for each place of its result."""

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from phalanx._src.typed_jax import shape_dtype


@dataclass(frozen=True)
class Windows:
    """Windows that move over some dims of an array.

    Args:
      dims: the dims, in increasing order.
      sizes: size of a window in each of these dims.
      strides: distance of two windows in each dim.
      padding: number of elements that are added before and after each dim.
    """

    dims: tuple[int, ...]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]

    @classmethod
    def over(
        cls, shape: Sequence[int], dims: Sequence[int], sizes: Sequence[int], strides: Sequence[int], padding: str
    ) -> "Windows":
        """Returns windows with padding "valid" or "same", as JAX defines them."""
        lengths = [shape[d] for d in dims]
        pads = lax.padtype_to_pads(lengths, sizes, strides, padding.upper())
        return cls(tuple(dims), tuple(sizes), tuple(strides), tuple((int(a), int(b)) for a, b in pads))

    def counts(self, shape: Sequence[int]) -> tuple[int, ...]:
        """Returns the number of windows in each dim, for an array of this shape."""
        return tuple(
            (shape[d] + before + after - size) // stride + 1
            for d, size, stride, (before, after) in zip(self.dims, self.sizes, self.strides, self.padding, strict=True)
        )

    def places(self, x: jax.Array, fill: float) -> list[jax.Array]:
        """Returns one array per position in a window, with that element of all windows.

        Args:
          x: the array.
          fill: value of the padding.
        """
        counts, slices = self.counts(x.shape), []
        x = self._padded(x, fill, counts)
        for place in self._offsets():
            start, limit, step = [0] * x.ndim, list(x.shape), [1] * x.ndim
            for d, at, count, stride in zip(self.dims, place, counts, self.strides, strict=True):
                start[d], limit[d], step[d] = at, at + (count - 1) * stride + 1, stride
            slices.append(lax.slice(x, start, limit, step))
        return slices

    def linear_places(self, x: jax.Array) -> list[jax.Array]:
        """Returns the same as `places(x, 0)`, by operations with a fast transpose.

        The transpose of a slice with a stride adds zeros between all elements. Instead, the array is split into one part per
        offset below the stride, and the transpose joins the parts.
        """
        if all(stride == 1 for stride in self.strides):
            return self.places(x, 0)
        counts, slices = self.counts(x.shape), []
        parts = self._split(self._padded(x, 0, counts))
        for place in self._offsets():
            part = parts[tuple(at % stride for at, stride in zip(place, self.strides, strict=True))]
            start, limit = [0] * x.ndim, list(part.shape)
            for d, at, count, stride in zip(self.dims, place, counts, self.strides, strict=True):
                start[d], limit[d] = at // stride, at // stride + count
            slices.append(lax.slice(part, start, limit))
        return slices

    def overlap_add(self, places: Sequence[jax.Array], shape: Sequence[int]) -> jax.Array:
        """Adds overlapping windows into an array of this shape. The transpose of `linear_places`."""
        like = shape_dtype(tuple(shape), places[0].dtype)
        (total,) = jax.linear_transpose(self.linear_places, like)(list(places))
        return jnp.asarray(total)

    def _offsets(self) -> Iterator[tuple[int, ...]]:
        return itertools.product(*map(range, self.sizes))

    def _padded(self, x: jax.Array, fill: float, counts: Sequence[int]) -> jax.Array:
        """Pads an array, or cuts it, to a multiple of the strides that contains all windows."""
        config = [(0, 0, 0)] * x.ndim
        for d, count, size, stride, (before, _) in zip(
            self.dims, counts, self.sizes, self.strides, self.padding, strict=True
        ):
            length = -(-((count - 1) * stride + size) // stride) * stride
            config[d] = (before, length - x.shape[d] - before, 0)  # Negative for elements after the last window.
        return lax.pad(x, jnp.asarray(fill, x.dtype), config) if any(map(any, config)) else x

    def _split(self, x: jax.Array) -> dict[tuple[int, ...], jax.Array]:
        """Returns the elements at each offset below the strides, by these offsets."""
        shape: list[int] = []
        for d, length in enumerate(x.shape):
            stride = self.strides[self.dims.index(d)] if d in self.dims else 1
            shape += [length // stride, stride] if d in self.dims else [length]
        parts: dict[tuple[int, ...], jax.Array] = {(): x.reshape(shape)}
        for number, stride in enumerate(self.strides):
            dim = self.dims[number] + number + 1
            parts = {
                (*offset, at): one
                for offset, part in parts.items()
                for at, one in enumerate(lax.split(part, (1,) * stride, dim))
            }
        lengths = [n // self.strides[self.dims.index(d)] if d in self.dims else n for d, n in enumerate(x.shape)]
        return {offset: part.reshape(lengths) for offset, part in parts.items()}
