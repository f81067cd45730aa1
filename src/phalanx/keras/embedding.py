# SPDX-License-Identifier: Apache-2.0
"""`ShardedEmbedding`: a table of which no process needs to have the whole."""

from typing import Any

import jax
import keras
import numpy as np
from typing_extensions import override

from phalanx import compat
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.servers.homes import Homes
from phalanx.strategies.parameter_server import ParameterServerStrategy
from phalanx.tracing import context
from phalanx.tracing.scope import innermost


@keras.saving.register_keras_serializable(package="phalanx")
class ShardedEmbedding(keras.layers.Embedding):
    """`keras.layers.Embedding` whose rows are divided between the parameter servers. May be made in any context.

    Made in the scope of a `ParameterServerStrategy`, the servers make the rows themselves; a step takes the rows of its batch and pushes the
    gradients of these, and the optimizer updates them and no others. So momentum and the like stand still for the rows that
    no batch has. Under other strategies it is what it is called after. Ids must be computed from the batch alone.

    Args:
      input_dim: the number of rows; ids are less.
      output_dim: the length of a row.
      embeddings_initializer: as there.
      mask_zero: as there.
      **kwargs: `name`, `dtype` and the like.

    Raises:
      InvalidArgumentError: a regularizer or a constraint, which need the whole table, or weights, lora and quantization; or what keras.layers.Embedding refuses.

    Source: keras.layers.Embedding; tf.distribute's ShardedVariable.

    Example:
      >>> import numpy as np, phalanx
      >>> layer = phalanx.keras.ShardedEmbedding(1000, 8)
      >>> layer(np.array([[1, 2, 3]])).shape
      (1, 3, 8)
    """

    def __init__(
        self,
        input_dim: int,
        output_dim: int,
        embeddings_initializer: Any = "uniform",
        mask_zero: bool = False,
        **kwargs: Any,
    ) -> None:
        whole = ("embeddings_regularizer", "embeddings_constraint", "weights", "lora_rank", "quantization_config")
        given = {name: kwargs.pop(name) for name in whole if name in kwargs}
        kwargs.pop("lora_alpha", None)
        if wrong := [name for name, value in given.items() if value is not None]:
            raise InvalidArgumentError(
                f"ShardedEmbedding({wrong[0]}={shown(given[wrong[0]], 40)})",
                "it would need the whole table at each step.",
                "keras.layers.Embedding; or layer.embeddings.assign(weights)",
            )
        for name, size in (("input_dim", input_dim), ("output_dim", output_dim)):
            arguments.integer(name, size, most=2**31 - 1, kind="a positive integer below 2**31", hint=f"{name}=16")
        arguments.flag("mask_zero", mask_zero)
        try:
            super().__init__(input_dim, output_dim, embeddings_initializer, mask_zero=mask_zero, **kwargs)
        except Exception as e:
            raise InvalidArgumentError(
                f"ShardedEmbedding(embeddings_initializer={shown(embeddings_initializer)}, {shown(kwargs)})",
                f"keras.layers.Embedding refuses it: {type(e).__name__}.",
                'embeddings_initializer="uniform"',
            ) from e
        self._homes: Homes | None = None

    @override
    def build(self, input_shape: Any = None) -> None:
        strategy = context.get_strategy()
        if self.built or not isinstance(strategy, ParameterServerStrategy):
            super().build(input_shape)
            return
        compat.make_table(lambda: self._made(input_shape))
        self._homes = strategy.homes
        self._homes.add_table(self._embeddings)

    @override
    def call(self, inputs: Any) -> Any:
        if self._homes is None:
            return super().call(inputs)
        ids = keras.ops.cast(inputs, "int32")
        scope = innermost()
        rows = self._fetched(ids) if scope is None else scope.lookup(self._embeddings, ids)
        return keras.ops.cast(rows, self.compute_dtype)

    def _fetched(self, ids: jax.Array) -> jax.Array:
        """Returns rows outside of steps, as they are on the servers."""
        homes = self._homes
        assert homes is not None
        if not isinstance(ids, jax.core.Tracer):
            return homes.rows(self._embeddings, np.asarray(ids))
        shape = jax.ShapeDtypeStruct((*ids.shape, self.output_dim), compat.dtype_of(self._embeddings))
        return jax.pure_callback(lambda x: np.asarray(homes.rows(self._embeddings, np.asarray(x))), shape, ids)

    def _made(self, input_shape: Any) -> keras.Variable:
        super().build(input_shape)
        return self._embeddings
