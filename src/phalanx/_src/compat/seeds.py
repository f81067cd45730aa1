# SPDX-License-Identifier: Apache-2.0
"""Random seeds of Keras: distinct per replica in programs, and equal between processes."""

from collections.abc import Callable
from typing import Any

import jax
import keras
import numpy as np
from keras import Variable
from keras.src.backend.common import global_state
from keras.src.random import seed_generator as _seed_generator
from keras.src.utils.rng_utils import GLOBAL_RANDOM_SEED
from keras.src.utils.rng_utils import get_random_seed as _get_random_seed

from phalanx._src.compat.facts import facts_of, note_facts
from phalanx._src.compat.hooks import extend
from phalanx._src.compat.scope import active_scope, surrounding_scope
from phalanx.typing import PyTree


@extend(keras.random.SeedGenerator, "next")
def _next_seed(
    original: Callable[..., Any], self: keras.random.SeedGenerator, *args: PyTree, **kwargs: PyTree
) -> jax.Array:
    seed, scope = original(self, *args, **kwargs), surrounding_scope()
    folded: jax.Array = seed if scope is None else scope.fold_seed(seed, self.state)
    return folded


@extend(_seed_generator, "global_seed_generator")
def _global_seed_generator(original: Callable[[], keras.random.SeedGenerator]) -> keras.random.SeedGenerator:
    """Returns Keras's global generator inside a traced step too.

    Keras raises there or returns a constant seed. Here the state of the generator is an input of the program, like any
    other variable.
    """
    if surrounding_scope() is None:
        return original()
    generator = global_state.get_global_attribute(_seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is None:
        # Keras creates the generator at its first use. Hide our scope and leave the trace, so that its state is concrete.
        scope = active_scope()
        global_state.set_global_attribute("stateless_scope", None)
        try:
            with jax.ensure_compile_time_eval():
                generator = original()
        finally:
            global_state.set_global_attribute("stateless_scope", scope)
    note_facts(generator.state).is_global_seed = True
    return generator


def is_global_seed(state: Variable) -> bool:
    """Whether `state` belongs to a global generator that a traced step has used."""
    return facts_of(state).is_global_seed


def continue_global_seed(state: Variable) -> None:
    """Makes `state` the state of the global generator again if `keras.utils.set_random_seed` has replaced that since the trace.

    The state takes over the seed of the new generator, so that a compiled step follows a new seed without a new trace.
    """
    generator = _seed_generator.global_seed_generator()
    if generator.state is not state:
        state.assign(generator.state.value)
        generator.state = state


def global_seed() -> np.ndarray | int | None:
    """Returns the state of Keras's global generator; the seed that it will begin with if nobody has used it yet; None if it is lost."""
    generator = global_state.get_global_attribute(_seed_generator.GLOBAL_SEED_GENERATOR)
    if generator is None:
        seed: int | None = _get_random_seed()
        return seed
    array = generator.state.value
    return np.array(array) if isinstance(array, jax.Array) and not array.is_deleted() else None


def set_global_seed(state: np.ndarray | int | None) -> None:
    """Sets Keras's global generator to what `global_seed` has returned, perhaps in another process."""
    current = global_seed()
    if isinstance(state, np.ndarray):
        if not isinstance(current, np.ndarray) or not np.array_equal(current, state):
            _seed_generator.global_seed_generator().state.assign(state)
    elif state is not None and (isinstance(current, np.ndarray) or current != state):
        global_state.set_global_attribute(GLOBAL_RANDOM_SEED, state)
        global_state.set_global_attribute(_seed_generator.GLOBAL_SEED_GENERATOR, None)


def agree_on_seed(agree: Callable[[np.ndarray], Any]) -> None:
    """Sets the same random seed in all processes that have not set one.

    Args:
      agree: returns one process's int32 array on all processes. A collective call, so processes with a seed make it too.
    """
    seed = _get_random_seed()
    # Processes without a seed draw one of an int32, the dtype of the exchange.
    agreed = agree(np.array(np.random.default_rng().integers(2**31 - 1) if seed is None else seed, np.int32))
    if seed is None:
        keras.utils.set_random_seed(int(agreed))
