"""tf.data: the datasets of those who come from tf.distribute."""

from contextlib import nullcontext

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from evaluation import BATCH, ROWS, X, Y
from laws import SourceLaws, batches, rows, slices, strategy_of

import phalanx
from phalanx.errors import InputError, TraceError

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: make test-sources")


def records():
    return tf.data.Dataset.from_tensor_slices((X, Y.astype("int64")))


def from_generator():
    """Of which TensorFlow knows neither the number of rows nor that of each batch."""
    spec = {"x": tf.TensorSpec((None, X.shape[1]), tf.float32), "y": tf.TensorSpec((None,), tf.int32)}
    return tf.data.Dataset.from_generator(lambda: ({"x": X[s], "y": Y[s]} for s in slices()), output_signature=spec)


class TestTensorFlow(SourceLaws):
    """Batched and not, with batch dims that are known and that are not."""

    SOURCES = {
        "batches": batches(lambda _: records().batch(BATCH)),
        "batches_of_static_shape": batches(lambda _: records().batch(50, drop_remainder=True)),
        "batches_of_unknown_shape": batches(lambda _: from_generator()),
        "dicts": batches(lambda _: tf.data.Dataset.from_tensor_slices({"x": X, "y": Y}).batch(BATCH)),
        "rows": rows(lambda _: records()),
        "prefetched": batches(lambda _: records().cache().batch(BATCH).prefetch(tf.data.AUTOTUNE)),
        "shuffled_with_a_seed": batches(
            lambda _: records().shuffle(ROWS, seed=5, reshuffle_each_iteration=False).batch(BATCH)
        ),
        "mapped": batches(
            lambda _: (
                records().map(lambda x, y: {"x": x, "y": y}, num_parallel_calls=2, deterministic=True).batch(BATCH)
            )
        ),
        "rebatched": batches(lambda _: records().batch(100).rebatch(BATCH)),
    }


def test_cardinality_is_that_of_tf_data():
    distribute = strategy_of(2).experimental_distribute_dataset
    assert distribute(records().batch(BATCH)).cardinality == len(slices())
    assert distribute(records(), batch_size=BATCH).cardinality == len(slices())
    assert distribute(records().batch(BATCH).repeat()).cardinality == phalanx.data.INFINITE_CARDINALITY
    assert distribute(from_generator()).cardinality == phalanx.data.UNKNOWN_CARDINALITY


def test_static_batch_dim_needs_no_mask():
    """Where the replicas divide it, no batch can be short."""
    dataset = strategy_of(2).experimental_distribute_dataset(records().batch(50, drop_remainder=True))
    assert [x.rows for x, _ in dataset] == [None] * (ROWS // 50)


def test_static_batch_dim_that_the_replicas_do_not_divide():
    """Every row once, with a mask on every batch."""
    dataset = strategy_of(3).experimental_distribute_dataset(records().batch(50, drop_remainder=True))
    got = [np.concatenate([np.asarray(p) for p in y.values]) for _, y in dataset]
    assert np.concatenate(got).tolist() == Y.tolist()
    assert [len(x) for x in got] == [50] * (ROWS // 50)


def batches_of(tensor):
    return tf.data.Dataset.from_tensor_slices(tensor).batch(2)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: tf.data.Dataset.range(10), r"(?s)a batch of shapes \[\(\)\].*HINT: .*batch_size="),
        (lambda: batches_of(["a", "b", "c"]), "encode the text first"),
        (
            lambda: batches_of(tf.ragged.constant([[1], [2, 3]])),
            r"with rows of different lengths: .*\nHINT: .*x.to_tensor\(\)",
        ),
        (
            lambda: batches_of({"ids": tf.constant([2**40, 1], tf.int64)}),
            r"a batch\['ids'\] with the number 1099511627776 of dtype int64",
        ),
    ],
    ids=["rows", "text", "ragged", "wide"],
)
def test_what_cannot_be_placed(make, match):
    """One typed error, which says what to write."""
    with pytest.raises(InputError, match=match):
        list(strategy_of(2).experimental_distribute_dataset(make()))


def test_auto_shard_policy_of_the_dataset():
    """Its own option is heard where ours is AUTO; one worker reads all either way."""
    options = tf.data.Options()
    options.experimental_distribute.auto_shard_policy = tf.data.experimental.AutoShardPolicy.OFF
    (shard,) = phalanx.explain_sharding(records().batch(BATCH).with_options(options), strategy_of(2))
    assert shard.policy is phalanx.data.AutoShardPolicy.OFF


def test_tensors_are_a_list_of_batches():
    """Eager tensors in a plain list are batches as NumPy arrays are."""
    dataset = strategy_of(2).experimental_distribute_dataset([tf.range(4), tf.range(3)])
    assert [[p.tolist() for p in b.values] for b in dataset] == [[[0, 1], [2, 3]], [[0, 1], [2]]]


@pytest.mark.parametrize("inside", [True, False])
def test_exported_model_predicts_the_same(tmp_path, inside):
    """A model of two replicas is exported as a SavedModel that predicts the same, inside the scope and outside."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        model = keras.Sequential([keras.Input((8,)), keras.layers.BatchNormalization(), keras.layers.Dense(3)])
        model.compile("adam", "mse")
    x = np.random.default_rng(0).random((40, 8)).astype("float32")
    model.fit(x, x[:, :3], verbose=0)
    with strategy.scope() if inside else nullcontext():
        model.export(tmp_path / "exported", verbose=False)
    loaded = tf.saved_model.load(tmp_path / "exported")
    np.testing.assert_allclose(loaded.serve(x).numpy(), model.predict(x, verbose=0), rtol=1e-6, atol=1e-6)


def tape_of_tensorflow(x):
    """Records nothing of JAX."""
    with tf.GradientTape() as tape:
        loss = keras.ops.sum(x)
    return tape.gradient(loss, [x])


@pytest.mark.parametrize(
    ("step", "called", "hint"),
    [
        (lambda x: tf.reduce_mean(x), "tf.reduce_mean", "keras.ops.mean"),
        (lambda x: keras.ops.sum(tf.cast(x, "float32")), "tf.cast", "keras.ops.cast"),
        (lambda x: tf.linalg.matmul(x, x), "tf.linalg.matmul", "keras.ops.matmul"),
        (lambda x: tf.random.normal((2, 2)) + x, "tf.random.normal", "keras.random.normal"),
        (lambda x: x * tf.constant(2.0), "tf.constant", "jnp.asarray"),
        (lambda x: tf.nn.softmax(x), "tf.nn.softmax", "keras.ops.softmax"),
        (lambda x: tf.nn.compute_average_loss(x), "tf.nn.compute_average_loss", "phalanx.nn.compute_average_loss"),
        (tape_of_tensorflow, "tape.gradient", "with phalanx.GradientTape"),
    ],
)
def test_an_operation_of_tensorflow_in_a_step(step, called, hint):
    """The error names the call, the user's line, and what to write instead."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    found = rf"{called}\(\.\.\.\) in a traced function \({__file__}:\d+.*TensorFlow.*\nHINT: {hint}"
    with pytest.raises(TraceError, match=found):
        strategy.run(step, args=(np.ones((2, 2), "float32"),))


def test_the_reduce_op_of_tensorflow():
    """It is taken by its name, inside a step and outside."""
    strategy, op = phalanx.MirroredStrategy(["cpu:0", "cpu:1"]), tf.distribute.ReduceOp.MEAN
    value = strategy.run(lambda: phalanx.get_replica_context().replica_id_in_sync_group * 1.0)
    assert float(strategy.reduce(op, value, axis=None)) == 0.5
    assert float(strategy.run(lambda: phalanx.get_replica_context().all_reduce(op, 3.0)).values[1]) == 3


def test_the_input_signature_of_tensorflow():
    """Its TensorSpec is taken, with dims of any size and shapes of unknown rank."""
    for shape in ((None, 2), None, (3, 2)):
        step = phalanx.function(lambda x: x.sum(), input_signature=[tf.TensorSpec(shape, tf.float32)])
        assert float(step(np.ones((3, 2), "float32"))) == 6
        with pytest.raises(InputError.__base__, match=r"x=...\): it is int32"):
            step(np.ones((3, 2), "int32"))


@pytest.mark.parametrize("strategy", [strategy_of(1), strategy_of(2)], ids=["one", "two"])
def test_tensors_are_arguments_of_programs(strategy):
    """They are inputs of one program, which is compiled once, and not constants of many."""
    traces = []

    @phalanx.function
    def total(x, y):
        traces.append("function")
        return jnp.sum(x) + y["z"]

    def double(x):
        traces.append("run")
        return x * 2

    ids = [tf.constant([i, i + 1]) for i in range(4)]
    assert [int(total(x, {"z": tf.constant(1)})) for x in ids] == [2, 4, 6, 8]
    results = [strategy.experimental_local_results(strategy.run(double, args=(x,)))[0] for x in ids]
    assert [x.tolist() for x in results] == [[0, 2], [2, 4], [4, 6], [6, 8]]
    assert traces == ["function", "run"]
    (both, *_) = strategy.experimental_local_results(strategy.run(jnp.logical_not, args=(tf.constant(True),)))
    assert not bool(both)


def test_tensors_are_arguments_under_the_default_strategy():
    assert float(phalanx.get_strategy().run(jnp.sum, args=(tf.constant([1.0, 2.0]),))) == 3


def test_tensors_in_metrics():
    """The evaluation step of the tutorials: a function that updates a metric batch by batch."""
    strategy = strategy_of(2)
    with strategy.scope():
        accuracy = keras.metrics.SparseCategoricalAccuracy()
    traces = []

    @phalanx.function
    def evaluate(scores, labels):
        traces.append(1)
        accuracy.update_state(labels, scores)

    for scores, labels in batches_of(([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7], [0.4, 0.6]], [1, 0, 0, 1])):
        evaluate(scores, labels)
    assert float(accuracy.result()) == 0.75
    assert len(traces) == 1
    accuracy.reset_state()
    accuracy.update_state(tf.constant([1, 0]), tf.constant([[0.1, 0.9], [0.2, 0.8]]))
    assert float(accuracy.result()) == 0.5


def test_sparse_batches_become_dense():
    """They become dense, in distributed datasets, arguments, `fit`, `evaluate` and `predict`."""
    dense = np.float32([[1, 0, 2], [0, 0, 0], [0, 1, 0], [3, 0, 0]])
    tensor = tf.sparse.from_dense(dense)
    strategy = strategy_of(2)
    for dataset in (batches_of(tensor), [tensor]):
        got = [strategy.gather(x, axis=0) for x in strategy.experimental_distribute_dataset(dataset)]
        np.testing.assert_array_equal(np.concatenate(got), dense)
    np.testing.assert_array_equal(strategy.run(jnp.asarray, args=(tensor,)).values[1], dense)
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    data = batches_of((tensor, dense[:, :1]))
    model.fit(data, shuffle=False, verbose=0)
    expected = model.evaluate(dense, dense[:, :1], verbose=0)
    assert model.evaluate(data, verbose=0) == pytest.approx(expected, rel=1e-6)
    np.testing.assert_allclose(model.predict(data, verbose=0), model.predict(dense, verbose=0), rtol=1e-6)


def test_ragged_arguments_are_refused():
    with pytest.raises(InputError, match=r"args\[0\] that is a tf.RaggedTensor: .*\nHINT: x.to_tensor\(\)"):
        strategy_of(2).run(jnp.sum, args=(tf.ragged.constant([[1], [2, 3]]),))
