"""What errors say that no other test asks for."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorboardX  # noqa: F401  (It sets a variable of the environment, which no test may.)
from bad_values import deleted, yielding

import phalanx
import phalanx.testing

STRATEGY = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
ONE = phalanx.OneDeviceStrategy("cpu:0")


def iterator():
    return iter(STRATEGY.experimental_distribute_dataset(np.arange(8.0), batch_size=2))


def components(value):
    """Returns a value of which each replica has the same."""
    return STRATEGY.experimental_distribute_values_from_function(lambda context: value)


def returned(value):
    """Returns what a step returns that returns a value."""
    return STRATEGY.run(lambda: value)


def all_reduced(value):
    return STRATEGY.run(lambda: phalanx.get_replica_context().all_reduce("SUM", value))


def leaked():
    """A value that was kept while another function was traced."""
    values = []
    jax.jit(values.append)(1.0)
    return values[0]


async def awaiting():
    """A call runs nothing of it."""


MASKED, KEY = np.ma.masked_array([1.0, 2.0], [True, False]), jax.random.key(0)


VERBS = {
    r"container_strategy='x': must be a strategy.*HINT: strategy.extended": lambda: phalanx.StrategyExtended("x"),
    r"strategy='x': must be a strategy.*HINT: phalanx.exp": lambda: phalanx.experimental_set_strategy("x"),
    r"strategy='x': must be a strategy.*HINT: phalanx.get": lambda: phalanx.ReplicaContext("x", 0),
    r"id_in_sync_group=.*key<fry>.*: must be the number of a replica": lambda: phalanx.ReplicaContext(STRATEGY, KEY),
    r"id_in_sync_group=2: must be the number of a replica, from 0 to 1": lambda: phalanx.ReplicaContext(STRATEGY, 2),
    r"batches=\[\]: must be a tuple of the rows of this replica": lambda: phalanx.ReplicaContext(STRATEGY, 0, []),
    r"fn='x': is not callable.*HINT: strategy.run_steps": lambda: STRATEGY.run_steps("x", iterator(), 2),
    r"steps=2147483648: must be an integer of at least 1": lambda: STRATEGY.run_steps(abs, iterator(), 2**31),
    r"variable='x': must be a Keras variable.*HINT: strategy.held": lambda: STRATEGY.held("x"),
    r"args\[0\] that is a deleted array": lambda: STRATEGY.run(abs, args=(deleted(),)),
    r"args\[0\]\['x'\] that is a deleted array": lambda: ONE.run(len, args=({"x": deleted()},)),
    r"kwargs\['x'\] that is a deleted array": lambda: STRATEGY.run(lambda x: x, kwargs={"x": deleted()}),
    r"the result of a step that is a deleted array": lambda: returned(deleted()),
    r"a step returned PerReplica\(\('a', 'b'\)\)": lambda: STRATEGY.run(lambda: phalanx.PerReplica(("a", "b"))),
    r"value_fn: it returned a Mirrored": lambda: components(phalanx.Mirrored(jnp.ones(2))),
    r"value_fn's result that is a deleted array": lambda: components(deleted()),
    r"value='x': is not an array of numbers": lambda: ONE.reduce("SUM", "x", axis=None),
    r"axis=None: must be an integer": lambda: ONE.gather(jnp.ones(2), axis=None),
    r"axis=2: the value has dims 0 to 0": lambda: ONE.gather(jnp.ones(2), axis=2),
    r"a value that is a masked array: .*\nHINT: x.filled": lambda: STRATEGY.replicate({"x": MASKED}),
    r"a value that is a structured array": lambda: STRATEGY.replicate(np.zeros(2, [("a", "f4"), ("b", "i4")])),
    r"a value with the number 1099511627776 .*: it does not fit": lambda: STRATEGY.replicate(np.array([2**40])),
    r"a value with the number 1e\+300: it does not fit": lambda: returned(all_reduced(1e300)),
    r"a value of dtype key<fry>: random keys have no sum or mean.\nHINT: strategy.exp": lambda: ONE.reduce(
        "SUM", KEY, axis=None
    ),
    r"the step yielding: it has `yield` or `async`.*\nHINT: def yielding": lambda: STRATEGY.run(yielding),
    r"the step awaiting: it has `yield` or `async`": lambda: phalanx.get_strategy().run(awaiting),
    r"the step yielding: it has `yield`": lambda: phalanx.function(yielding),
    r"a value from another trace: .*\nHINT: return the value": lambda: STRATEGY.replicate(leaked()),
}


def test_deleted_argument_of_a_known_program():
    """A program that has run before names the argument too."""
    step = phalanx.function(lambda x: x * 2)
    step(jnp.ones(3))
    with pytest.raises(phalanx.errors.InputError, match=r"args\[0\] that is a deleted array"):
        step(deleted())


def test_replicate_takes_what_acts_as_an_array():
    """It copies a variable, whose own array belongs to the next step."""
    with STRATEGY.scope():
        variable = keras.Variable([1.0, 2.0], aggregation="mean")
    tree = STRATEGY.replicate({"v": variable, "r": range(2)})
    STRATEGY.run(lambda: variable.assign_add([1.0, 1.0]))
    assert tree.value["v"].tolist() == [1.0, 2.0]
    assert tree.value["r"].tolist() == [0, 1]


def test_components_may_be_arrays_of_text():
    """They are Python objects, as text is."""
    assert components(np.array(["a"])).values[1].tolist() == ["a"]


FLOAT = keras.Variable(2.0)


def gradient(**given):
    def step():
        with phalanx.GradientTape() as tape:
            y = FLOAT * FLOAT
        return tape.gradient(**{"target": y, "sources": FLOAT, **given})

    return phalanx.function(step)()


def variable():
    with STRATEGY.scope():
        return keras.Variable([1.0, 2.0], name="v", trainable=False)


FUNCTIONS = {
    r"f='x': is not callable.*HINT: phalanx.scan": lambda: phalanx.scan("x", 0.0, jnp.ones(2)),
    r"reverse=1: must be True or False": lambda: phalanx.scan(max, 0.0, jnp.ones(2), reverse=1),
    r"unroll=-1: must be 0 or more": lambda: phalanx.scan(max, 0.0, jnp.ones(2), unroll=-1),
    r"xs=1.0: a scalar has no dim of steps": lambda: phalanx.scan(max, 0.0, 1.0),
    r"xs=None and length=None: the number of steps is unknown": lambda: phalanx.scan(max, 0.0),
    r"length=2: they give different numbers of steps: \[2, 3\]": lambda: phalanx.scan(max, 0.0, jnp.ones(3), length=2),
    r"length=-1: must be 0 or more": lambda: phalanx.scan(max, 0.0, length=-1),
    r"value='x': is not an array of numbers": lambda: phalanx.scan(max, "x", jnp.ones(3)),
    r"true_fun='x': is not callable": lambda: phalanx.cond(True, "x", abs, 1.0),
    r"pred=.*must be a real scalar, not an array of shape \(2,\)": lambda: phalanx.cond(jnp.ones(2), abs, abs, 1.0),
    r"pred=1j: .*complex64": lambda: phalanx.cond(1j, abs, abs, 1.0),
    r"value=.*key<fry>.* random keys are not numbers.*\nHINT: one key": lambda: phalanx.cond(KEY, abs, abs, 1.0),
    r"a value that is a masked array: .*\nHINT: x.filled": lambda: phalanx.cond(True, abs, abs, MASKED),
    r"body_fun='x': is not callable": lambda: phalanx.while_loop(bool, "x", 1.0),
    r"fn='x': is not callable.*HINT: phalanx.remat": lambda: phalanx.remat("x"),
    r"value='y': is not an array": lambda: phalanx.remat(abs)("y"),
    r"sources='x': must be a variable or a watched array": lambda: gradient(sources="x"),
    r"value='x': is not an array of numbers.*HINT: pass arrays": lambda: gradient(target="x"),
    r"2 output_gradients: the number of targets is 1": lambda: gradient(output_gradients=[1.0, 2.0]),
    r"output_gradients of the shapes \[\(3,\)\]": lambda: gradient(output_gradients=jnp.ones(3)),
    r"fn='x': is not callable.*HINT: phalanx.value_and": lambda: phalanx.value_and_grad("x", [FLOAT]),
    r"variables=None: must be a list of variables": lambda: phalanx.value_and_grad(abs, None),
    r"a variable of value_and_grad='x': must be": lambda: phalanx.value_and_grad(abs, ["x"]),
    r"returns 1.0: the function must return a tuple \(loss, aux\)": lambda: phalanx.value_and_grad(
        lambda: 1.0, [FLOAT], True
    )(),
    r"an array int32\[\]: the function must return a floating": lambda: phalanx.value_and_grad(lambda: 1, [FLOAT])(),
    r"sample_weight of shape \(2,\): does not broadcast": lambda: average(jnp.ones(3), jnp.ones(2)),
    r"sample_weight=1j: must be real": lambda: average(jnp.ones(3), 1j),
    r"a value of dtype bool": lambda: average(jnp.ones(3) > 0),
    r"console=1: must be a Console": lambda: phalanx.describe(STRATEGY, console=1),
    r"strategy=1: must be a strategy": lambda: phalanx.describe(1),
    r"assign\('x'\) of variable 'v': text is not a number": lambda: variable().assign("x"),
    r"assign_add\('3'\) of variable 'v': text is": lambda: STRATEGY.run(
        lambda v: v.assign_add("3"), args=(variable(),)
    ),
    r"assign\(.*variable 'v': JAX arrays cannot carry a mask": lambda: variable().assign(MASKED),
    r"assign\(.*variable 'v': a complex number": lambda: variable().assign(np.ones(2, "complex64")),
    r"assign\(.*variable 'v': The shape of the target.*HINT: an array of numbers of shape \(2,\)": lambda: (
        variable().assign(jnp.ones(3))
    ),
    r"assign_add\(.* of variable 'v': dates": lambda: variable().assign_add(np.array(["2020-01-01"], "M8[D]")),
    r"assign_sub\(1j\) of variable 'v': a complex number": lambda: variable().assign_sub(1j),
}


def average(loss, weight=None):
    return phalanx.nn.compute_average_loss(loss, weight, global_batch_size=3)


def test_scan_of_no_steps():
    """The carry is returned, and results of no steps."""
    carry, ys = phalanx.scan(lambda c, x: (c + x, x), 1.0, jnp.zeros((0, 2))[:, 0])
    assert float(carry) == 1.0
    assert ys.shape == (0,)


def test_variables_outside_strategies_are_as_in_keras():
    """Their errors too."""
    with pytest.raises(ValueError, match="must match") as error:
        keras.Variable([1.0, 2.0]).assign([1.0])
    assert not isinstance(error.value, phalanx.errors.PhalanxError)


SIDECAR = {"data": None, "checkpoint_dir": "folder"}


def model():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


HELPERS = {
    r"batch_size=2147483648: must be an integer of at least 1": lambda: phalanx.explain_sharding(
        [1], ONE, None, batch_size=2**31
    ),
    r"drop_remainder=1: must be True": lambda: STRATEGY.make_experimental_numpy_dataset([1]).batch(1, drop_remainder=1),
    r"the dataset \[\[1\], \[2, 3\]\]: cannot be converted to an array": lambda: ONE.make_experimental_numpy_dataset(
        [[1], [2, 3]]
    ),
    r"dataset_fn='x': is not callable": lambda: STRATEGY.distribute_datasets_from_function("x"),
    r"reduce_func='x': is not callable": lambda: DATASET.reduce(0, "x"),
    r"pattern=1: must be a path": lambda: phalanx.data.from_files(1, open),
    r"pattern=array\(3.\): must be a path": lambda: phalanx.data.from_files(np.array(3.0), open),
    r"a path of pattern=1: must be a path": lambda: phalanx.data.from_files([1], open),
    r"reader='x': is not callable": lambda: phalanx.data.from_files(__file__, "x"),
    r"interleave=0: must be a positive integer": lambda: phalanx.data.from_files(__file__, open, interleave=0),
    r"dataset=1: must be a DistributedDataset": lambda: phalanx.testing.assert_restores_everywhere(1),
    r"context=1: must be an InputContext": lambda: phalanx.keras.DatasetCreator(abs)(1),
    r"every=0: must be 1 or more batches": lambda: phalanx.keras.SyncCheck(0),
    r"log_dir=1: must be a path": lambda: phalanx.keras.TensorBoard(1),
    r"update_freq=True: must be .epoch.": lambda: phalanx.keras.TensorBoard("logs", update_freq=True),
    r"model=None: must be a Model": lambda: phalanx.keras.SidecarEvaluator(None, **SIDECAR),
    r"steps=0: must be positive": lambda: phalanx.keras.SidecarEvaluator(model(), **SIDECAR, steps=0),
    r"poll_s=None: must be a number of seconds": lambda: phalanx.keras.SidecarEvaluator(
        model(), **SIDECAR, poll_s=None
    ),
    r"timeout_s=0: must be more than 0": lambda: phalanx.keras.SidecarEvaluator(model(), **SIDECAR, timeout_s=0),
    r"input_dim=0: must be a positive integer": lambda: phalanx.keras.ShardedEmbedding(0, 1),
    r"mask_zero=1: must be True": lambda: phalanx.keras.ShardedEmbedding(1, 1, mask_zero=1),
    r"initializer='no'.*rejects these arguments: ValueError": lambda: phalanx.keras.ShardedEmbedding(1, 1, "no"),
    r"workers=True: must be an integer of at least 1": lambda: phalanx.ParameterServerStrategy(workers=True),
    r"worker_timeout_s=inf: must be more than 0": lambda: phalanx.ParameterServerStrategy(worker_timeout_s=np.inf),
    r"worker_timeout_s=True: must be": lambda: phalanx.ParameterServerStrategy(worker_timeout_s=True),
    r"dashboard=1: must be True": lambda: phalanx.ParameterServerStrategy(dashboard=1),
    r"max_staleness=-1: must be an integer of at least 0": lambda: phalanx.ParameterServerStrategy(max_staleness=-1),
    r"experimental_spmd_xla_partitioning=1: must": lambda: phalanx.TPUStrategy(experimental_spmd_xla_partitioning=1),
    r"config_proto=1: must be None": lambda: RESOLVER.num_accelerators(config_proto=1),
    r"model_axis=\[\[1\], 2\]: must be a pair of a name and a size": lambda: phalanx.MirroredStrategy(
        model_axis=[[1], 2]
    ),
}
DATASET = STRATEGY.experimental_distribute_dataset(np.arange(8.0), batch_size=2)
RESOLVER = phalanx.cluster_resolver.SimpleClusterResolver(phalanx.cluster_resolver.ClusterSpec({"worker": ["a:1"]}))


MESSAGES = VERBS | FUNCTIONS | HELPERS


@pytest.mark.parametrize("message", MESSAGES)
def test_bad_values_have_their_message(message):
    with pytest.raises(phalanx.errors.PhalanxError, match=f"(?s){message}"):
        MESSAGES[message]()
