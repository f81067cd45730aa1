"""What several tests of programs call: variables, ways to run a function, and a function that counts."""

import jax.numpy as jnp
import keras

import phalanx


def variable(strategy, value=0.0, **kwargs):
    """A variable of the strategy, summed over the replicas."""
    with strategy.scope():
        return keras.Variable(value, **({"aggregation": "sum", "trainable": False} | kwargs))


def run_by(strategy, how):
    """`run` of a strategy, plain or inside `phalanx.function`."""
    if how == "run":
        return lambda fn, *args: strategy.run(fn, args=args)
    functions = {}

    def call(fn, *args):
        step = functions.setdefault(fn, phalanx.function(lambda *a: strategy.run(fn, args=a)))
        return step(*args)

    return call


class Counted:
    """A replica function that counts how often Python runs its body, and adds up what can be added."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args):
        self.calls += 1
        return sum(jnp.asarray(a, "float32").sum() for a in args if not isinstance(a, (str, bool, type(None))))
