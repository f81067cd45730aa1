"""tf.data: the datasets of those who come from tf.distribute."""

from contextlib import nullcontext

import keras
import numpy as np
import pytest
from evaluation import BATCH, ROWS, X, Y
from laws import SourceLaws, batches, rows, strategy_of

import phalanx
from phalanx.errors import InputError

tf = pytest.importorskip("tensorflow", reason="TensorFlow is not installed: make test-sources")


def records():
    """All rows, one at a time."""
    return tf.data.Dataset.from_tensor_slices((X, Y.astype("int64")))


def from_generator():
    """Of which TensorFlow knows neither the number of rows nor that of each batch."""
    spec = {"x": tf.TensorSpec((None, X.shape[1]), tf.float32), "y": tf.TensorSpec((None,), tf.int32)}
    slices = [slice(i, i + BATCH) for i in range(0, ROWS, BATCH)]
    return tf.data.Dataset.from_generator(lambda: ({"x": X[s], "y": Y[s]} for s in slices), output_signature=spec)


class TestTensorFlow(SourceLaws):
    """Batched and not, with batch dims that are known and that are not."""

    SOURCES = {
        "batches": batches(lambda _: records().batch(BATCH)),
        "batches_of_static_shape": batches(lambda _: records().batch(40, drop_remainder=True)),
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


def test_cardinality():
    """As tf.data tells it."""
    distribute = strategy_of(2).experimental_distribute_dataset
    assert distribute(records().batch(BATCH)).cardinality == 21
    assert distribute(records(), batch_size=BATCH).cardinality == 21
    assert distribute(records().batch(BATCH).repeat()).cardinality == phalanx.data.INFINITE_CARDINALITY
    assert distribute(from_generator()).cardinality == phalanx.data.UNKNOWN_CARDINALITY


def test_static_batch_dim_needs_no_mask():
    """Where the replicas divide it, no batch can be short."""
    dataset = strategy_of(2).experimental_distribute_dataset(records().batch(40, drop_remainder=True))
    assert [x.rows for x, _ in dataset] == [None] * 25


def test_static_batch_dim_that_the_replicas_do_not_divide():
    """Every row once, with a mask on every batch."""
    dataset = strategy_of(3).experimental_distribute_dataset(records().batch(40, drop_remainder=True))
    got = [np.concatenate([np.asarray(p) for p in y.values]) for _, y in dataset]
    assert np.concatenate(got).tolist() == Y.tolist()
    assert [len(x) for x in got] == [40] * 25


def test_rows_without_batch_size():
    """The error says what is missing."""
    with pytest.raises(InputError, match=r"(?s)a batch of shapes \[\(\)\].*HINT: .*batch_size="):
        list(strategy_of(2).experimental_distribute_dataset(tf.data.Dataset.range(10)))


def test_text():
    """Cannot be placed on devices; the error says so."""
    texts = tf.data.Dataset.from_tensor_slices(["a", "b", "c"]).batch(2)
    with pytest.raises(InputError, match="encode the text first"):
        list(strategy_of(2).experimental_distribute_dataset(texts))


def test_ragged_batches():
    """One typed error."""
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [2, 3], [4]])).batch(3)
    with pytest.raises(InputError, match="HINT: "):
        list(strategy_of(2).experimental_distribute_dataset(ragged))


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
def test_export(tmp_path, inside):
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
