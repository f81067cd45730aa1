"""What errors of JAX, flax and Python become when a step cannot be traced, and which frames they show."""

import collections
import functools
import traceback

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import CallError, ContextError, InvalidArgumentError, TraceError

CONTEXT = phalanx.get_replica_context


def replica_id():
    return CONTEXT().replica_id_in_sync_group


@pytest.mark.parametrize(
    "step",
    [
        lambda: jnp.ones([replica_id() + 1]),
        lambda: np.ones(replica_id()),
        lambda: jnp.arange(4)[: replica_id()],
        lambda: jnp.reshape(jnp.ones(4), (replica_id(), -1)),
    ],
    ids=["jnp.ones", "np.ones", "slice", "reshape"],
)
def test_shapes_that_depend_on_values(strategy, step):
    """The message names the user's line; the hint works."""
    with pytest.raises(TraceError, match=rf"a shape, or the bound .*{__file__}:\d+: `lambda.*\nHINT: jnp.where"):
        strategy.run(step)
    x, n = jnp.arange(4.0) + 1, replica_id
    kept = strategy.run(lambda: jnp.where(jnp.arange(4) < n(), x, 0).sum())
    assert [float(k) for k in kept.values] == [0, 1]


@pytest.mark.parametrize(
    ("batch", "message"),
    [((np.ones(8),), "Invalid input shape"), ((np.ones((2, 4)),) * 4, "Data is expected to be in format")],
)
def test_errors_of_keras_about_its_inputs_stay(strategy, batch, message):
    """They name the arrays of the trace, but are about what the user passes."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    with pytest.raises(ValueError, match=message) as caught:
        model.predict((x for x in [batch] * 2), verbose=0)
    assert not isinstance(caught.value, TraceError)


def test_numpy_of_a_traced_value(strategy):
    """As in every tutorial of tf.distribute."""
    with pytest.raises(TraceError, match=r"by `.numpy\(\)`.*\nHINT: return the array from the step, and call float"):
        strategy.run(lambda: replica_id().numpy())


@pytest.mark.parametrize("how", ["run", "function"])
def test_a_value_that_leaks(strategy, how, tmp_path):
    """It never had a value in another step. JAX's own error, outside all steps, says which function it comes from."""
    leaked = []

    def leaking_step():
        leaked.append(jnp.zeros((), "int32") + replica_id())

    strategy.run(leaking_step) if how == "run" else phalanx.function(leaking_step)()
    with pytest.raises(TraceError, match=r"a value from another trace: .*kept in a list.*\nHINT: return the value"):
        strategy.run(lambda: leaked[-1] + 1)
    found = rf"traced|leaking_step at {__file__}"
    with pytest.raises(jax.errors.JAXTypeError, match=found) as caught:
        jnp.asarray([1, 2])[int(leaked[-1])]
    assert f"leaking_step at {__file__}" in str(caught.value)
    with strategy.scope():
        v = keras.Variable(0, dtype="int32")
    w = keras.Variable(0, dtype="int32")
    uses = {
        "argument": lambda: strategy.run(lambda x: x, args=(leaked[-1],)),
        "function": lambda: phalanx.function(lambda x: x)(leaked[-1]),
        "reduce": lambda: strategy.reduce("SUM", leaked[-1], axis=None),
        "gather": lambda: strategy.gather(leaked[-1], axis=0),
        "assign": lambda: v.assign(leaked[-1]),
        "assign outside all scopes": lambda: w.assign(leaked[-1]),
        "assign_add": lambda: v.assign_add(leaked[-1]),
        "assign_sub": lambda: v.assign_sub(leaked[-1]),
        "scalar": lambda: phalanx.summary.scalar("x", leaked[-1], step=1),
        "histogram": lambda: phalanx.summary.histogram("x", leaked[-1], step=1),
    }
    with phalanx.summary.create_file_writer(tmp_path).as_default():
        for use in uses.values():
            with pytest.raises(TraceError, match=r"a value from another trace: .*\nHINT: return the value"):
                use()
    assert int(v) == 0


FIXED = {
    "reshape": lambda x: keras.ops.reshape(x, (8, 3)),
    "add": lambda x: x + jnp.ones((8, 3)),
    "concatenate": lambda x: keras.ops.concatenate([x, np.ones((8, 1))], axis=1),
}


@pytest.mark.parametrize("name", FIXED)
@pytest.mark.parametrize("weights", [None, [3, 1]])
def test_a_fixed_batch_size(name, weights):
    """A function that is written for the rows of all replicas. What no number of rows mends stays what it is."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], replica_weights=weights)
    (batch,) = strategy.experimental_distribute_dataset([np.ones((8, 3), "float32")])
    match = rf"in a replica function \({__file__}:\d+: .*\): it takes the rows of the global batch.*\nHINT: write -1.* in `.*{name}|\+"
    with pytest.raises(TraceError, match=match):
        strategy.run(FIXED[name], args=(batch,))
    with pytest.raises(TypeError, match="reshape"):
        strategy.run(lambda x: jnp.reshape(x, (5, 3)), args=(batch,))


@pytest.mark.parametrize(
    "call",
    [
        lambda s, step, batch: s.run(step, args=batch),
        lambda s, step, batch: s.run(step, batch),
        lambda s, step, batch: s.run(phalanx.function(step), args=batch),
        lambda s, step, batch: s.run(step, args=list(batch)),
        lambda s, step, batch: s.run(step),
    ],
)
@pytest.mark.parametrize("default", [True, False])
def test_a_batch_in_place_of_args(strategy, call, default):
    """A tuple of features and labels is not the tuple of the arguments."""

    def step(batch):
        return batch[0].sum()

    batch = (np.ones((4, 2), "float32"), np.ones(4, "float32"))
    with pytest.raises(InvalidArgumentError, match=r"step\(\) .*argument.*\nHINT: strategy.run\(step, args=\(batch,\)"):
        call(phalanx.get_strategy() if default else strategy, step, batch)


def test_a_step_of_several_arguments(strategy):
    """The hint is what fits its parameters: a tuple of so many elements is `args` itself."""
    x, y = np.ones((4, 2), "float32"), np.ones(4, "float32")

    def step(x, y):
        return x.sum() + y.sum()

    for args, hint in ((((x, y),), "batch"), ((x,), r"\(x, y\)")):
        match = rf"missing 1 required.*\nHINT: strategy.run\(step, args={hint}\)(\n|$)"
        with pytest.raises(InvalidArgumentError, match=match):
            strategy.run(step, args=args)


def test_a_type_error_inside_the_step(strategy):
    """It stays what it is, although it is about arguments."""
    with pytest.raises(TypeError, match="takes 0 positional arguments but 1 was given"):
        strategy.run(lambda: replica_id(1))


@pytest.mark.parametrize("how", ["run", "run of a traced value", "function"])
def test_jit_around_a_program(strategy, how):
    """jax.jit knows nothing of the variables, and would keep tracers in them."""
    with strategy.scope():
        v = keras.Variable(1.0, aggregation="sum")
    step = {
        "run": lambda x: strategy.run(lambda: v.assign_add(1.0)),
        "run of a traced value": lambda x: strategy.run(lambda: v.assign_add(x)),
        "function": phalanx.function(lambda x: v.assign_add(x)),
    }[how]
    with pytest.raises(TraceError, match=r"a phalanx program was called .*inside jax.jit.*\nHINT: @phalanx.function"):
        jax.jit(step)(1.0)
    assert float(v) == 1
    held = v.value
    with pytest.raises(TraceError, match="inside jax.jit"):
        jax.jit(step)(1.0)
    strategy.run(lambda: v.assign_add(1.0))
    assert (float(held), float(v)) == (1, 3)


def failing_step(x):
    """Raises in the user's code, below Keras and JAX."""
    return keras.ops.vectorized_map(lambda row: {}["key"], x)


def frames_of(error):
    files = []
    while error is not None:
        files += [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
        error = error.__cause__
    return files


@pytest.mark.parametrize("step", [failing_step, lambda x: float(x[0, 0]), lambda: 1])
@pytest.mark.parametrize("how", ["run", "function"])
@pytest.mark.parametrize("shown", ["", "full"])
def test_frames_of_phalanx_are_hidden(strategy, monkeypatch, step, how, shown):
    """A traceback goes from the user's call to the user's line, unless all of it is asked for."""
    monkeypatch.setenv("PHALANX_TRACEBACK", shown)
    call = phalanx.function(strategy.run) if how == "function" else strategy.run
    with pytest.raises(Exception, match=r"key|in a traced function|argument") as caught:
        call(step, args=(np.ones((2, 2), "float32"),))
    files = frames_of(caught.value)
    assert any("/phalanx/" in name for name in files) == (shown == "full")
    assert files[0] == __file__
    assert not any("contextlib" in name or "shard_map" in name for name in files) or shown == "full"


def test_reduce_hides_its_frames(strategy, monkeypatch):
    monkeypatch.delenv("PHALANX_TRACEBACK")
    for call in (
        lambda: strategy.reduce("AVG", 1.0, axis=None),
        lambda: strategy.gather(1.0, axis="0"),
        lambda: strategy.run_steps(len, [], 1),
    ):
        with pytest.raises(Exception, match="HINT") as caught:
            call()
        assert set(frames_of(caught.value)) == {__file__}


def test_a_flax_module_in_a_closure(strategy):
    """flax refuses it; the hint says how its state goes in and out."""
    nnx = pytest.importorskip("flax.nnx", reason="flax is not installed")
    model = nnx.Linear(2, 2, rngs=nnx.Rngs(0))

    def step(x):
        def loss(model):
            return model(x).sum()

        model.count = nnx.Variable(jnp.zeros(()))
        return nnx.grad(loss)(model).kernel.get_value().sum()

    with pytest.raises(TraceError, match=r"a flax module that the function closes over.*\nHINT: graphdef, state"):
        strategy.run(step, args=(np.ones((2, 2), "float32"),))


@pytest.mark.parametrize("use", [lambda x: jnp.add(x, 1), lambda x: x + 1, keras.ops.sum], ids=["jnp", "+", "keras"])
def test_a_per_replica_in_a_closure(strategy, use):
    """The hint works: as an argument it is this replica's component."""
    value = strategy.run(replica_id)

    def step():
        return use(value)

    found = rf"a PerReplica that a replica function closes over \({__file__}.*\nHINT: strategy.run\(step, args="
    with pytest.raises(ContextError, match=found):
        strategy.run(step)
    assert [int(x) - int(use(jnp.int32(0))) for x in strategy.run(use, args=(value,)).values] == [0, 1]


def test_a_metric_of_a_per_replica_in_a_closure(strategy):
    """It runs in a replica already, so the hint is about the arguments."""
    value = strategy.run(replica_id)
    with strategy.scope():
        mean = keras.metrics.Mean()

    def step():
        mean.update_state(value)

    with pytest.raises(ContextError, match=r"closes over.*\nHINT: strategy.run\(step, args="):
        strategy.run(step)


def test_a_typed_error_has_no_note_of_jax(strategy, monkeypatch):
    """JAX adds one about its frames to every error that passes through it."""
    monkeypatch.delenv("PHALANX_TRACEBACK", raising=False)
    with pytest.raises(InvalidArgumentError) as caught:
        strategy.run(lambda x, y: x, args=(1.0,))
    assert caught.value.__notes__ == []


class Box:
    def __init__(self, content):
        self.content = content


HOLDERS = {
    "object": Box,
    "in a list": lambda x: Box([x]),
    "deque": lambda x: collections.deque([x]),
    "partial": lambda x: functools.partial(max, x),
    "error": ValueError,
}


@pytest.mark.parametrize("compiles", [True, False], ids=["function", "run"])
@pytest.mark.parametrize("case", HOLDERS)
def test_objects_that_hold_traced_arrays(strategy, case, compiles):
    """They would leave the trace with them. Objects that hold other things are returned as they are."""
    step = lambda x: HOLDERS[case](x * 1)  # noqa: E731
    call = phalanx.function(step) if compiles else lambda x: strategy.run(step, args=(x,))
    hint = r"a step returned .*\nHINT: return the arrays in a dict, a tuple or a NamedTuple; or jax.tree_util.register"
    with pytest.raises(TraceError, match=hint):
        call(jnp.ones(2))
    box = Box(1)
    assert strategy.run(lambda: box) is box


def test_a_format_of_a_traced_value(strategy):
    with pytest.raises(TraceError, match="(?s)the value of an array .*HINT: .*jax.debug.print"):
        strategy.run(lambda: f"{replica_id():.2f}")


@pytest.mark.parametrize(
    ("name", "hint"),
    [("get_scaled_loss", r"optimizer.scale_loss\(loss\)"), ("get_unscaled_gradients", "optimizer.apply")],
)
def test_methods_that_only_older_optimizers_have(strategy, name, hint):
    with strategy.scope():
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())
    with pytest.raises(TraceError, match=rf"LossScaleOptimizer.{name} in a traced function.*\nHINT: {hint}"):
        strategy.run(lambda: getattr(optimizer, name)([jnp.ones(())]))


def test_wrong_arguments_of_a_call_in_the_step(strategy):
    """The call is not that of the step, so the error is Python's."""
    with strategy.scope():
        optimizer = keras.optimizers.SGD()
    with pytest.raises(TypeError, match="unexpected keyword argument 'names'") as e:
        strategy.run(lambda x: optimizer.apply_gradients([], names=x), args=(1.0,))
    assert not isinstance(e.value, CallError)


@pytest.mark.parametrize("use", [jnp.sum, jnp.exp, jax.nn.relu, lambda v: jax.lax.add(v, v)])
def test_functions_of_jax_take_no_variables(strategy, use):
    with strategy.scope():
        v = keras.Variable([1.0, 2.0])
    with pytest.raises(TraceError, match="(?s)a variable, .* passed to a JAX function.*HINT: variable.value instead"):
        strategy.run(lambda: use(v))
    assert strategy.run(lambda: use(v.value)) is not None
