"""Slips that were found in trials, each with the error or the warning that it gets: one table."""

import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import (
    CheckpointError,
    InputError,
    InvalidArgumentError,
    MissingDependencyError,
    RecompilationWarning,
    SlipWarning,
    TraceError,
)

STRATEGY = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
X = np.ones((4, 2), "float32")


def model():
    with STRATEGY.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    return model


def optimizer():
    with STRATEGY.scope():
        variable, optimizer = keras.Variable(1.0), keras.optimizers.SGD(0.1)
        optimizer.build([variable])
    return variable, optimizer


def run(fn, *args):
    return STRATEGY.run(fn, args=args)


def leaked():
    kept = []
    run(kept.append, 1.0)
    return run(lambda: phalanx.nn.scale_regularization_loss(kept[0]))


def minimize(optimizer):
    run(lambda: optimizer.minimize(lambda: 0.0, []))


def attention():
    query = keras.ops.ones((2, 4, 1, 8), "float16")
    return keras.ops.dot_product_attention(query, query, query)


def foreign(folder):
    (folder / "model.ckpt.index").write_bytes(b"x")
    (folder / "checkpoint").write_text('model_checkpoint_path: "model.ckpt"')
    phalanx.train.Checkpoint(v=keras.Variable(1.0)).restore(folder / "model.ckpt")


TRUE = lambda: np.float32(1) + keras.ops.zeros(()) > 0  # noqa: E731

ERRORS = {
    "no data": (InputError, "they contain no array", lambda _: model().fit(None, verbose=0)),
    "no validation data": (
        InputError,
        "they contain no array",
        lambda _: model().fit(X, X[:, :1], validation_data=(None, None), verbose=0),
    ),
    "rows that are scalars": (
        InputError,
        "pass batch_size=64",
        lambda _: next(iter(STRATEGY.experimental_distribute_dataset([np.float32(1)]))),
    ),
    "a tuple as a dataset": (
        InputError,
        "pass batch_size=64",
        lambda _: STRATEGY.experimental_distribute_dataset((X, X)),
    ),
    "branches of two structures": (
        InvalidArgumentError,
        "must have the same pytree structure",
        lambda _: run(lambda: phalanx.cond(TRUE(), lambda: (1.0, 2.0), lambda: 1.0)),
    ),
    "a condition that is no bool": (
        InvalidArgumentError,
        "functions that return a bool",
        lambda _: run(lambda: phalanx.while_loop(lambda i: i, lambda i: i + 1, 0)),
    ),
    "keys of two kinds": (InvalidArgumentError, "keys have one type", lambda _: run(lambda x: x, {1: 1.0, "a": 2.0})),
    "a negative batch size": (
        InvalidArgumentError,
        "global_batch_size=64",
        lambda _: run(lambda: phalanx.nn.compute_average_loss(keras.ops.ones(2), global_batch_size=-1)),
    ),
    "a value of another trace": (TraceError, "return the value from the step", lambda _: leaked()),
    "minimize in a step": (TraceError, "phalanx.value_and_grad", lambda _: minimize(optimizer()[1])),
    "attention in float16 on a CPU": (TraceError, 'dtype="bfloat16"', lambda _: run(attention)),
    "local updates by name": (
        InvalidArgumentError,
        "DiLoCo",
        lambda _: phalanx.MirroredStrategy(["cpu:0", "cpu:1"], local_updates="diloco"),
    ),
    "a misspelt class": (AttributeError, "HINT: phalanx.train.Checkpoint", lambda _: phalanx.train.CheckPoint),
    "a checkpoint of TensorFlow": (CheckpointError, "TensorFlow", foreign),
    "TensorBoard of Keras": (
        MissingDependencyError,
        "phalanx.keras.TensorBoard",
        lambda folder: model().fit(X, X[:, :1], callbacks=[keras.callbacks.TensorBoard(folder)], verbose=0),
    ),
}


@pytest.mark.parametrize("slip", ERRORS)
def test_slip_is_an_error_with_a_hint(slip, tmp_path):
    kind, words, call = ERRORS[slip]
    with pytest.raises(kind) as raised:
        call(tmp_path)
    assert "HINT: " in str(raised.value)
    assert words in str(raised.value)


def applied_in_a_branch():
    variable, sgd = optimizer()
    one = keras.ops.ones(())
    run(lambda: phalanx.cond(TRUE(), lambda: sgd.apply_gradients([(one, variable)]), lambda: sgd.iterations))
    return int(sgd.iterations.value)


def local_results():
    first, second = STRATEGY.experimental_local_results(run(lambda: keras.ops.ones(())))
    return float(first + second)


RIGHT = {
    "a variable from a branch": (applied_in_a_branch, 1),
    "a sum of local results": (local_results, 2.0),
    "an axis that is an array": (
        lambda: STRATEGY.gather(run(lambda: keras.ops.ones(1)), axis=np.array(0)).tolist(),
        [1, 1],
    ),
    "axes of NumPy and JAX": (
        lambda: float(STRATEGY.reduce("SUM", run(lambda: keras.ops.ones((1, 3))), axis=(np.int64(0), jnp.asarray(1)))),
        6,
    ),
    "an array of int4": (lambda: STRATEGY.reduce("MEAN", jnp.full(3, 7, "int4"), axis=0).item(), 7),
    "a sum of int4": (lambda: STRATEGY.reduce("SUM", jnp.full(3, 7, "int4"), axis=0).item(), 42),
    "a complex constant": (lambda: all_reduced(np.ones(2, "complex64")), [2, 2]),
    "a gradient of zeros of complex numbers": (lambda: all_reduced(jnp.zeros(2, "complex64")), [0, 0]),
    "a model outside the scope": (lambda: len(outside().history["loss"]), 1),
}


def all_reduced(value):
    return run(lambda: phalanx.get_replica_context().all_reduce("SUM", value)).values[1].tolist()


def outside():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    with STRATEGY.scope():
        return model.fit(X, X[:, :1], verbose=0)


@pytest.mark.parametrize("slip", RIGHT)
def test_what_looks_like_a_slip_is_right(slip):
    call, expected = RIGHT[slip]
    assert call() == expected


def test_new_function_for_each_call_is_noticed():
    call = lambda: [STRATEGY.run(lambda: keras.ops.ones(())) for _ in range(3)]  # noqa: E731
    with pytest.warns(RecompilationWarning, match="created at each call.*\nHINT: define it once"):
        call()


def test_checkpoint_of_other_names_is_told(tmp_path, caplog):
    """What the file has and the program lacks, and the reverse."""
    path = phalanx.train.Checkpoint(model=model()).save(tmp_path / "c")
    phalanx.train.Checkpoint(net=model()).restore(path)
    assert "it contains what the program lacks: model; the program has what it does not contain: net" in caplog.text


class Largest(keras.metrics.Metric):
    def __init__(self):
        super().__init__(name="largest")
        self.largest = self.add_weight(name="value", initializer="zeros")

    def update_state(self, y):
        self.largest.assign(keras.ops.maximum(self.largest, keras.ops.max(y)))

    def result(self):
        return self.largest


class Hits(keras.metrics.Metric):
    def __init__(self):
        super().__init__()
        self.hits = self.add_weight(name="hits", initializer="zeros")

    def update_state(self, y):
        self.hits.assign_add(keras.ops.sum(keras.ops.cast(keras.ops.argmax(y, -1) == 1, "float32")))

    def result(self):
        return self.hits


def test_metric_of_a_loop_whose_states_do_not_add_up_is_noticed():
    """Its hint gives the result of one device. Sums over rows are quiet."""
    rows = np.arange(14, dtype="float32").reshape(7, 2)
    with STRATEGY.scope():
        largest, gathered, hits = Largest(), Largest(), Hits()

    def step(x):
        largest.update_state(x)
        hits.update_state(x)
        return x

    def train():
        for batch in STRATEGY.experimental_distribute_dataset(rows, batch_size=4):
            gathered.update_state(STRATEGY.gather(run(step, batch), axis=0))

    with pytest.warns(
        SlipWarning, match="(?s)the metric 'largest' has on the replicas are added.*HINT: return the rows"
    ):
        train()
    assert (float(gathered.result()), float(hits.result())) == (13, 7)
