# SPDX-License-Identifier: Apache-2.0
"""The gradients of one update of an optimizer, summed by an algorithm that compresses them."""

from collections.abc import Callable, Sequence
from typing import Any, final

import jax
import jax.numpy as jnp
import keras
from jax import lax

from phalanx._src import compat
from phalanx._src.collectives.compression import Compression
from phalanx._src.compat import Variable
from phalanx.errors import InvalidArgumentError


@final
class CompressedSum:
    """Sums the gradients of an optimizer. What the replicas have not sent is kept next to the variables, until the next step.

    Args:
      compression: the algorithm.
      whole: sums gradients that are sent whole. None with one replica, which sends nothing.
      optimizer: the optimizer.
      grads: one gradient per variable, or None.
      trained: the variables.

    Attributes:
      variables: what is kept between steps: for each compressed gradient what this replica has not sent, and then the hints.

    Raises:
      InvalidArgumentError: the optimizer scales its loss, or the rank is too high for all gradients.
    """

    def __init__(
        self,
        compression: Compression,
        whole: Callable[[Sequence[Any]], list[Any]] | None,
        optimizer: keras.optimizers.Optimizer,
        grads: Sequence[Any],
        trained: Sequence[Variable],
    ) -> None:
        if isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
            raise InvalidArgumentError(
                f"{type(optimizer).__name__} under a strategy with compression",
                "what the replicas keep for the next step would be wrong by a factor when the scale changes.",
                "the dtype policy mixed_bfloat16, whose losses need no scale",
            )
        self._compression, self._is_alone, self._whole = compression, whole is None, whole or list
        self._optimizer = optimizer
        self._taken = [i for i, g in enumerate(grads) if g is not None and _is_compressed(compression, g)]
        # A model without weights has nothing to compress, whatever the rank is.
        if not self._taken and grads and (why := compression.refusal):
            raise InvalidArgumentError(
                why,
                "no gradient of this step becomes shorter by it.",
                "a smaller rank, or CommunicationOptions() without compression",
            )
        variables = [trained[i] for i in self._taken]
        make = lambda v: compat.unsent(tuple(v.shape))  # noqa: E731
        self._unsent = compat.beside(optimizer, "unsent", variables, make) if compression.error_feedback else []
        hinted = [v for v in variables if compression.hint_shape(tuple(v.shape)) is not None]
        self._hints = compat.beside(
            optimizer, "hint", hinted, lambda v: _random(compression.hint_shape(tuple(v.shape)))
        )
        self.variables = [*self._unsent, *self._hints]

    def sum(self, grads: Sequence[Any], state: Sequence[jax.Array]) -> tuple[list[Any], list[jax.Array]]:
        """Returns the sums of gradients over the replicas, and the new values of `variables`.

        Args:
          grads: one gradient per variable, or None.
          state: the values of `variables`.
        """
        taken = set(self._taken)
        sums = self._whole([None if i in taken else g for i, g in enumerate(grads)])
        # In bfloat16, what was not sent would often be less than the last bit of the gradient to which it is added.
        gradients = [grads[i].astype(jnp.float32) for i in self._taken]
        totals, new = self._sum(gradients, list(state)) if gradients else ([], list(state))
        for i, total in zip(self._taken, totals, strict=True):
            sums[i] = total.astype(grads[i].dtype)
        return sums, new

    def _sum(self, arrays: list[jax.Array], state: list[jax.Array]) -> tuple[list[jax.Array], list[jax.Array]]:
        count = len(self._unsent)

        def compressed() -> tuple[list[jax.Array], list[jax.Array]]:
            unsent = state[:count]
            inputs = [x + e for x, e in zip(arrays, unsent, strict=True)] if unsent else arrays
            # A group that has shrunk to this replica may have left something unsent, which is applied now.
            if self._is_alone:
                return inputs, [*map(jnp.zeros_like, unsent), *state[count:]]
            output = self._compression.sum(inputs, state[count:])
            # What is not finite would stay in all later gradients. A step that has such numbers leaves everything as it was.
            is_finite = _are_finite([*output.totals, *output.hints])
            keeps = is_finite & _are_finite(output.unsent)  # Only this replica has `unsent`. All have equal hints.
            # Without error feedback, `unsent` is empty.
            new_unsent = [jnp.where(keeps, new, old) for new, old in zip(output.unsent, unsent, strict=False)]
            new_hints = [jnp.where(is_finite, new, old) for new, old in zip(output.hints, state[count:], strict=True)]
            return output.totals, [*new_unsent, *new_hints]

        if not self._compression.start_step:
            return compressed()
        is_early = keras.ops.convert_to_tensor(self._optimizer.iterations) < self._compression.start_step
        # All replicas count the same steps. If one took the other branch, its collectives would wait forever.
        result: tuple[list[jax.Array], list[jax.Array]] = lax.cond(
            is_early, lambda: (self._whole(arrays), state), compressed
        )
        return result


def _are_finite(arrays: Sequence[jax.Array]) -> jax.Array:
    return jnp.array([jnp.isfinite(x).all() for x in arrays], bool).all()


def _is_compressed(compression: Compression, gradient: jax.Array) -> bool:
    return jnp.issubdtype(gradient.dtype, jnp.floating) and compression.takes(gradient.shape)


def _random(shape: tuple[int, ...] | None) -> Variable:
    assert shape is not None
    hint = keras.Variable(
        keras.initializers.RandomNormal(stddev=1.0, seed=0), shape=shape, trainable=False, name="hint"
    )
    # Products with a hint add up to the product of the sum only if all replicas have the same hint.
    compat.keep_equal([hint])
    return hint
