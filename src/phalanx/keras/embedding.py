# SPDX-License-Identifier: Apache-2.0
"""`ShardedEmbedding`: an embedding table that is sharded over parameter servers."""

import jax
import keras
import numpy as np
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.parameter_server.variables.homes import Homes
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx._src.tracing import context
from phalanx._src.tracing.scope import innermost
from phalanx._src.typed_jax import shape_dtype
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.typing import PyTree


@keras.saving.register_keras_serializable(package="phalanx")
class ShardedEmbedding(keras.layers.Embedding):
    """A `keras.layers.Embedding` whose rows are sharded over the parameter servers. May be created in any context.

    In the scope of a `ParameterServerStrategy`, the servers initialize the rows, so no process holds the whole table. A step
    pulls only the rows of its batch and pushes only their gradients. The optimizer updates only these rows, so the momentum
    of all other rows stays unchanged. The ids must be computed from the batch alone, without variables.

    Under other strategies the layer is a plain `keras.layers.Embedding`.

    Args:
      input_dim: number of rows. Ids are less than it.
      output_dim: length of a row.
      embeddings_initializer: see `keras.layers.Embedding`.
      mask_zero: see `keras.layers.Embedding`.
      **kwargs: `name`, `dtype` and other arguments of a Keras layer.

    Raises:
      InvalidArgumentError: a regularizer, a constraint, weights, LoRA or quantization is requested, which need the whole
        table; or `keras.layers.Embedding` rejects an argument.

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
        embeddings_initializer: str | keras.initializers.Initializer = "uniform",
        mask_zero: bool = False,
        **kwargs: PyTree,
    ) -> None:
        whole = ("embeddings_regularizer", "embeddings_constraint", "weights", "lora_rank", "quantization_config")
        # The config of a saved layer has some of them, as None.
        options = {name: kwargs.pop(name) for name in whole if name in kwargs}
        kwargs.pop("lora_alpha", None)  # Only scales what `lora_rank` adds.
        if wrong := [name for name, value in options.items() if value is not None]:
            raise InvalidArgumentError(
                f"ShardedEmbedding({wrong[0]}={shown(options[wrong[0]], 40)})",
                "the argument needs the whole table at each step, but the servers hold only shards.",
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
                f"keras.layers.Embedding rejects these arguments: {type(e).__name__}.",
                'embeddings_initializer="uniform"',
            ) from e
        self._homes: Homes | None = None

    @override
    def build(self, input_shape: tuple[int | None, ...] | None = None) -> None:
        strategy = context.get_strategy()
        if self.built or not isinstance(strategy, ParameterServerStrategy):
            super().build(input_shape)
            return
        compat.make_table(lambda: self._made(input_shape))
        self._homes = strategy.homes
        self._homes.add_table(self._embeddings)

    @override
    def call(self, inputs: PyTree) -> PyTree:
        if self._homes is None:
            return super().call(inputs)
        # Enough for `input_dim`, and JAX has no int64 unless `jax_enable_x64` is set.
        ids = keras.ops.cast(inputs, "int32")
        scope = innermost()
        rows = self._fetched(ids) if scope is None else scope.lookup(self._embeddings, ids)
        return keras.ops.cast(rows, self.compute_dtype)

    def _fetched(self, ids: jax.Array) -> jax.Array:
        """Returns the current rows from the servers, outside traced steps. Inside a user's `jax.jit`, by a callback."""
        homes = self._homes
        assert homes is not None
        if not isinstance(ids, jax.core.Tracer):
            return homes.rows(self._embeddings, np.asarray(ids))
        shape = shape_dtype((*ids.shape, self.output_dim), compat.dtype_of(self._embeddings))
        rows: jax.Array = jax.pure_callback(
            lambda x: np.asarray(homes.rows(self._embeddings, np.asarray(x))), shape, ids
        )
        return rows

    def _made(self, input_shape: tuple[int | None, ...] | None) -> keras.Variable:
        """Builds the layer as Keras does, and returns its table."""
        super().build(input_shape)
        return self._embeddings
