# SPDX-License-Identifier: Apache-2.0
"""The steps that an expert writes in JAX: one jitted `shard_map`, state donated, one `psum` over all gradients."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import phalanx
from benchmarks.models import CASES, LEARNING_RATE, NUM_CLASSES

BETA_1, BETA_2, EPSILON = 0.9, 0.999, 1e-7
_PURE = ("mlp", "mlp_50_layers")

ReplicaStep = Callable[[Any, jax.Array, jax.Array], tuple[jax.Array, Any]]


class HandWritten:
    """A training step over all devices of this process.

    Args:
      case: the name of the model.
    """

    def __init__(self, case: str) -> None:
        devices = jax.devices()
        n = len(devices)
        mesh = Mesh(np.array(devices), (phalanx.REPLICA_AXIS,), axis_types=(AxisType.Auto,))
        whole, split = PartitionSpec(), PartitionSpec(phalanx.REPLICA_AXIS)
        sum_grads = functools.partial(jax.lax.psum, axis_name=phalanx.REPLICA_AXIS) if n > 1 else lambda grads: grads
        model = CASES[case].model(keras)
        rows = CASES[case].per_replica_batch * n
        make = pure_step if case in _PURE else _keras_step
        step, state = make(model, sum_grads, rows)
        if n > 1:
            step = jax.shard_map(
                step, mesh=mesh, in_specs=(whole, split, split), out_specs=(split, whole), check_vma=False
            )
        self.step = jax.jit(step, donate_argnums=0)
        self.state = jax.device_put(jax.tree.map(np.asarray, state), NamedSharding(mesh, whole))
        self.batch = jax.device_put(CASES[case].batch(n), NamedSharding(mesh, split))

    def __call__(self) -> jax.Array:
        """Does one step and returns the replicas' losses."""
        loss, self.state = self.step(self.state, *self.batch)
        return loss


def pure_step(
    model: Any, sum_grads: Callable[[Any], Any], rows: int, gather: Callable[[Any], Any] = lambda params: params
) -> tuple[ReplicaStep, Any]:
    """An MLP and Adam in jax.numpy; where a device holds parts of the weights, `gather` makes whole ones of them."""

    def loss_of(params: Any, x: jax.Array, y: jax.Array) -> jax.Array:
        for kernel, bias in params[:-1]:
            x = jax.nn.relu(x @ kernel + bias)
        kernel, bias = params[-1]
        log_probabilities = jax.nn.log_softmax(x @ kernel + bias)
        return -jnp.sum(jax.nn.one_hot(y, NUM_CLASSES) * log_probabilities) / rows

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        params, m, v, count = state
        loss, grads = jax.value_and_grad(loss_of)(gather(params), x, y)
        grads = sum_grads(grads)
        count = count + 1
        t = count.astype(jnp.float32)
        alpha = LEARNING_RATE * jnp.sqrt(1 - BETA_2**t) / (1 - BETA_1**t)
        m = jax.tree.map(lambda m, g: m + (g - m) * (1 - BETA_1), m, grads)
        v = jax.tree.map(lambda v, g: v + (g * g - v) * (1 - BETA_2), v, grads)
        params = jax.tree.map(lambda p, m, v: p - m * alpha / (jnp.sqrt(v) + EPSILON), params, m, v)
        return loss[None], (params, m, v, count)

    weights = model.get_weights()
    params = list(zip(weights[::2], weights[1::2], strict=True))
    zeros = lambda: jax.tree.map(np.zeros_like, params)  # noqa: E731
    return step, (params, zeros(), zeros(), np.int32(0))


def _keras_step(model: Any, sum_grads: Callable[[Any], Any], rows: int) -> tuple[ReplicaStep, Any]:
    """Any Keras model, through Keras's stateless calls."""
    optimizer = keras.optimizers.Adam(LEARNING_RATE)
    optimizer.build(model.trainable_variables)
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def loss_of(trained: Any, rest: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        logits, rest = model.stateless_call(trained, rest, x, training=True)
        return losses(y, logits).sum() / rows, rest

    def step(state: Any, x: jax.Array, y: jax.Array) -> tuple[jax.Array, Any]:
        trained, rest, own = state
        (loss, rest), grads = jax.value_and_grad(loss_of, has_aux=True)(trained, rest, x, y)
        trained, own = optimizer.stateless_apply(own, sum_grads(grads), trained)
        return loss[None], (trained, rest, own)

    groups = (model.trainable_variables, model.non_trainable_variables, optimizer.variables)
    return step, tuple([v.value for v in group] for group in groups)
