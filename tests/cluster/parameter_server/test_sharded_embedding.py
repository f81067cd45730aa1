"""Tables whose rows are divided between two parameter servers, trained by one worker, beside `keras.layers.Embedding`."""

import jax
import keras
import numpy as np
import pytest
from processes import DIVIDED
from server_training import assert_same

import phalanx
from phalanx.errors import InputError, InvalidArgumentError, TraceError
from phalanx.keras import ShardedEmbedding

ROWS, WIDTH, BATCH = 11, 4, 8  # Eleven rows: one server has six, the other five.
RANDOM = np.random.RandomState(3)
# No batch has the last row, and the last batch has two rows.
IDS = RANDOM.randint(0, ROWS - 1, (50, 3)).astype("int32")
ALL_ROWS = np.stack([RANDOM.permutation(ROWS) for _ in range(50)]).astype("int32")
Y = RANDOM.rand(50, 1).astype("float32")


@pytest.fixture
def strategy(strategy_of):
    return strategy_of(**DIVIDED)


def scored(embedding, ids_each, optimizer):
    """A compiled model of one table, made in the current scope."""
    layers = [keras.Input((ids_each,), dtype="int32"), embedding, keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(optimizer, "mse")
    return model


def twins(strategy, optimizer, ids_each=3, **given):
    """The model over servers, and plain Keras's with the same weights."""
    with strategy.scope():
        ours = scored(ShardedEmbedding(ROWS, WIDTH, **given), ids_each, optimizer())
    theirs = scored(keras.layers.Embedding(ROWS, WIDTH, **given), ids_each, optimizer())
    theirs.set_weights(ours.get_weights())
    return ours, theirs


def slots(model):
    """What the optimizer keeps beside the table."""
    return [v for v in model.optimizer.variables if tuple(v.shape) == (ROWS, WIDTH)]


TRAININGS = {
    "sgd": (lambda: keras.optimizers.SGD(0.5), IDS),
    "adagrad": (lambda: keras.optimizers.Adagrad(0.3), IDS),
    "adam_all_rows": (lambda: keras.optimizers.Adam(0.05), ALL_ROWS),
}


@pytest.mark.cover(["name"], {"adagrad"})
@pytest.mark.parametrize("name", TRAININGS)
def test_fit_equals_dense(strategy, name):
    """Two epochs with repeated ids and a short batch: weights, slots, losses and predictions are Keras's."""
    optimizer, ids = TRAININGS[name]
    ours, theirs = twins(strategy, optimizer, ids.shape[1])
    before = ours.get_weights()[0]
    histories = [m.fit(ids, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history for m in (ours, theirs)]
    assert_same([h["loss"] for h in histories[:1]], [h["loss"] for h in histories[1:]])
    assert_same(ours.get_weights(), theirs.get_weights())
    assert_same(slots(ours), slots(theirs))
    assert_same([ours.predict(ids, batch_size=BATCH, verbose=0)], [theirs.predict(ids, verbose=0)])
    assert np.abs(ours.get_weights()[0] - before).max() > 1e-2, "the table has not been trained"


def test_clipnorm_is_of_the_gradient_of_all_rows(strategy):
    """Each server has only its rows of the gradient."""
    ours, theirs = twins(strategy, lambda: keras.optimizers.SGD(1.0, clipnorm=0.01))
    for model in (ours, theirs):
        model.fit(IDS, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(ours.get_weights(), theirs.get_weights())


def test_two_lookups_of_one_table_in_a_tape(strategy, coordinator):
    """Gradients of a row that is looked up twice add up, in a scheduled step of one's own."""

    def pair(embedding):
        a, b = keras.Input((3,), dtype="int32"), keras.Input((), dtype="int32")
        return keras.Model([a, b], keras.ops.sum(embedding(a), axis=1) * embedding(b))

    with strategy.scope():
        ours, optimizer = pair(ShardedEmbedding(ROWS, WIDTH)), keras.optimizers.SGD(3.0)
    theirs = pair(keras.layers.Embedding(ROWS, WIDTH))
    theirs.set_weights(ours.get_weights())
    theirs.compile(keras.optimizers.SGD(3.0), keras.losses.MeanSquaredError())

    def step(a, b, y):
        with phalanx.GradientTape() as tape:
            loss = ((ours([a, b]) - y) ** 2).mean()
        gradients = tape.gradient(loss, ours.trainable_variables)
        optimizer.apply_gradients(zip(gradients, ours.trainable_variables, strict=True))
        return loss

    for i in range(0, 48, BATCH):
        a, b, y = IDS[i : i + BATCH], IDS[i : i + BATCH, 0], np.repeat(Y[i : i + BATCH], WIDTH, axis=1)
        loss = coordinator.schedule(step, args=(a, b, y))
        assert loss.fetch() == pytest.approx(theirs.train_on_batch([a, b], y), rel=1e-4)
    assert_same(ours.get_weights(), theirs.get_weights())


def test_mask_zero_leaves_out_padding(strategy):
    """Id 0 is padding, which a layer behind the table leaves out."""
    both = []
    for embedding in (ShardedEmbedding, keras.layers.Embedding):
        with strategy.scope() if embedding is ShardedEmbedding else phalanx.OneDeviceStrategy("cpu:0").scope():
            model = keras.Sequential([embedding(ROWS, WIDTH, mask_zero=True), keras.layers.GlobalAveragePooling1D()])
            model.build((None, 3))
            both.append(model)
    both[1].set_weights(both[0].get_weights())
    assert (IDS == 0).any()
    assert_same([both[0].predict(IDS, verbose=0)], [both[1].predict(IDS, verbose=0)])


def test_rows_of_no_batch_stay(strategy):
    """Under Adam a row that is not looked up keeps its value, and its slots stay zero, where Keras's dense ones move on."""
    ours, _ = twins(strategy, lambda: keras.optimizers.Adam(0.1))
    before = ours.get_weights()[0]
    ours.fit(IDS, Y, batch_size=BATCH, verbose=0)
    np.testing.assert_array_equal(ours.get_weights()[0][-1], before[-1])
    for slot in slots(ours):
        assert not slot.numpy()[-1].any()
        assert slot.numpy()[:-1].all()


def test_ids_out_of_range(strategy):
    """The error names the row and the rows that there are; the next step is as good as before."""
    ours, theirs = twins(strategy, keras.optimizers.SGD)
    for wrong in (ROWS, -1):
        ids = IDS[:BATCH].copy()
        ids[2, 1] = wrong
        words = rf"row {wrong} of variable '.*' .*: the table has the rows 0 to {ROWS - 1}"
        with pytest.raises(InputError, match=words):
            ours.fit(ids, Y[:BATCH], verbose=0)
        with pytest.raises(InputError, match=rf"row {wrong} of variable '"):
            ours.layers[0](ids)
        for model in (ours, theirs):
            model.fit(IDS[:BATCH], Y[:BATCH], verbose=0)
        assert_same(ours.get_weights(), theirs.get_weights())


def built(strategy, rows=ROWS, **given):
    """The layer with its table over servers."""
    with strategy.scope():
        layer = ShardedEmbedding(rows, WIDTH, **given)
        layer.build()
    return layer


def test_made_by_the_servers(strategy):
    """Each server's rows are drawn anew, from the initializer's distribution."""
    initializer = keras.initializers.RandomNormal(mean=1.0, stddev=0.5)
    rows = built(strategy, 600, embeddings_initializer=initializer).embeddings.numpy()
    assert rows.shape == (600, WIDTH)
    assert len(np.unique(rows)) > 0.99 * rows.size
    for half in (rows[:300], rows[300:]):
        assert half.mean() == pytest.approx(1.0, abs=0.1)
        assert half.std() == pytest.approx(0.5, abs=0.1)


def test_a_seed_repeats(strategy):
    """Tables of one seed are equal, and have no row in common with those of another seed or of none; so is set_random_seed."""

    def table(initializer):
        return built(strategy, 6, embeddings_initializer=initializer).embeddings.numpy()

    seeds = (5, 5, 6, None, None, keras.random.SeedGenerator(5))
    first, again, *others = (table(keras.initializers.RandomUniform(seed=seed)) for seed in seeds)
    np.testing.assert_array_equal(first, again)
    assert len(np.unique(np.concatenate([first, *others]))) == 5 * 6 * WIDTH
    tables = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        tables.append(table("uniform"))
    np.testing.assert_array_equal(*tables)


def test_assign_and_read(strategy):
    """Before the table is made and after it."""
    values = np.arange(ROWS * WIDTH, dtype="float32").reshape(ROWS, WIDTH)
    layer = built(strategy)
    for x in (values, -values):
        layer.embeddings.assign(x)
        np.testing.assert_array_equal(layer.embeddings.numpy(), x)
        np.testing.assert_array_equal(np.asarray(layer(IDS)), x[IDS])


def test_save_and_load(strategy, tmp_path):
    """Weights go from the servers to plain Keras, where the layer is an Embedding, and back."""
    ours, _ = twins(strategy, keras.optimizers.SGD)
    theirs = scored(ShardedEmbedding(ROWS, WIDTH), 3, "sgd")
    ours.fit(IDS, Y, verbose=0)
    ours.save_weights(tmp_path / "a.weights.h5")
    theirs.load_weights(tmp_path / "a.weights.h5")
    assert_same(theirs.get_weights(), ours.get_weights())
    theirs.set_weights([w + 1 for w in theirs.get_weights()])
    theirs.save_weights(tmp_path / "b.weights.h5")
    ours.load_weights(tmp_path / "b.weights.h5")
    assert_same(ours.get_weights(), theirs.get_weights())
    assert_same([ours.predict(IDS, verbose=0)], [theirs.predict(IDS, verbose=0)])
    losses = [model.evaluate(IDS, Y, batch_size=BATCH, verbose=0) for model in (ours, theirs)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert_same(ours.get_weights(), theirs.get_weights())  # Evaluation trains nothing.


@pytest.mark.exhaustive("test_save_and_load")
def test_saved_model_loads_with_and_without_strategy(strategy, tmp_path):
    """Loaded without a strategy the layer is an Embedding; loaded in the scope its rows are on the servers."""
    ours, _ = twins(strategy, keras.optimizers.Adagrad)
    ours.fit(IDS, Y, verbose=0)
    ours.save(tmp_path / "model.keras")
    alone = keras.saving.load_model(tmp_path / "model.keras")
    with strategy.scope():
        again = keras.saving.load_model(tmp_path / "model.keras")
    expected = ours.predict(IDS, verbose=0)
    assert_same([alone.predict(IDS, verbose=0), again.predict(IDS, verbose=0)], [expected, expected])
    for model in (ours, alone, again):
        model.fit(IDS, Y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same([*ours.get_weights(), *slots(ours)], [*alone.get_weights(), *slots(alone)])
    assert_same([*ours.get_weights(), *slots(ours)], [*again.get_weights(), *slots(again)])


def test_what_needs_the_whole_table():
    """It is refused where the layer is made."""
    refused = {
        "embeddings_regularizer": "l2",
        "embeddings_constraint": "max_norm",
        "weights": [np.zeros((ROWS, WIDTH))],
    }
    for name, given in {**refused, "lora_rank": 2}.items():
        with pytest.raises(InvalidArgumentError, match="the argument needs the whole table at each step"):
            ShardedEmbedding(ROWS, WIDTH, **{name: given})


def test_steps_that_a_table_cannot_serve(strategy, coordinator):
    """What it looks up is not known before the step is computed, or cannot be told beforehand; it has no other rows to assign."""
    layer = built(strategy)
    with strategy.scope():
        offset = keras.Variable(1, dtype="int32", trainable=False)

    def loops(ids):
        return jax.lax.scan(lambda total, x: (total + keras.ops.sum(layer(x)), None), 0.0, ids)[0]

    def assigns(ids):
        rows = layer(ids)
        layer.embeddings.assign(layer.embeddings * 2.0)
        return rows

    for step, words in (
        (lambda ids: layer(ids + offset), "the ids depend on a variable, or on other rows"),
        (loops, "the ids are computed inside the body of a loop or branch"),
        (assigns, "the variable is a table, and a step has only the rows that it looks up"),
    ):
        with pytest.raises(TraceError, match=words):
            coordinator.schedule(step, args=(IDS,))


def test_under_other_strategies_it_is_an_embedding():
    """Under MirroredStrategy a model with it is trained as with Keras's own layer."""
    mirrored = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    ours, theirs = twins(mirrored, lambda: keras.optimizers.Adam(0.1))
    for model in (ours, theirs):
        model.fit(IDS, Y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    assert_same(ours.get_weights(), theirs.get_weights())
    assert np.asarray(ours.layers[0].embeddings.value).shape == (ROWS, WIDTH)
