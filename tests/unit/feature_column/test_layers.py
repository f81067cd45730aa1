"""The layers of columns: in `fit` under a strategy, saved and loaded, compiled, and in half precision."""

import jax
import keras
import numpy as np
import pytest
from refusals import refusals, refused

import phalanx
from phalanx import errors, feature_column

AGE = feature_column.numeric_column("age")
AGES = feature_column.bucketized_column(AGE, [10, 20])
SIZE = feature_column.categorical_column_with_vocabulary_list("size", ["small", "large"], num_oov_buckets=1)
TOWN = feature_column.categorical_column_with_hash_bucket("town", 10)
CROSS = feature_column.crossed_column([SIZE, "town"], 20)
DENSE = [
    AGE,
    AGES,
    feature_column.indicator_column(SIZE),
    feature_column.embedding_column(TOWN, 4),
    *feature_column.shared_embeddings([SIZE], 2),
]
FEATURES = {
    "age": np.arange(24.0),
    "size": np.array([["small", "huge"], ["large", ""]] * 12),
    "town": ["Cherbourg", "Queenstown", "", "Southampton"] * 6,
}
Y = np.linspace(0, 1, 24, dtype=np.float32)[:, None]


@keras.saving.register_keras_serializable(package="tests")
def halved(x):
    return x / 2


def test_functions_of_tensorflow_1_make_layers():
    """`input_layer` returns the rows of its columns, and `linear_model` starts at 0."""
    rows = feature_column.input_layer({"age": [5, 15]}, [AGE, AGES])
    assert rows.tolist() == [[5, 1, 0, 0], [15, 0, 1, 0]]
    sums = feature_column.linear_model(FEATURES, [AGE, SIZE, CROSS], units=3)
    assert sums.tolist() == np.zeros((24, 3)).tolist()


def test_variables_have_the_names_of_tensorflow():
    """The name of the layer, of the column and of the variable."""
    layer = feature_column.LinearFeatures([AGE, CROSS, DENSE[3]], units=2, name="linear_model")
    layer(FEATURES)
    assert {variable.path: variable.shape for variable in layer.weights} == {
        "linear_model/age/weights": (1, 2),
        "linear_model/size_X_town/weights": (20, 2),
        "linear_model/town_embedding/weights": (4, 2),
        "linear_model/town_embedding/embedding_weights": (10, 4),
        "linear_model/bias_weights": (2,),
    }


def test_compiled_layer_computes_what_the_eager_one_does():
    """Prepared features in a compiled function, raw ones outside."""
    layer = feature_column.DenseFeatures(DENSE)
    eager = layer(FEATURES)
    prepared = feature_column.prepare(FEATURES, DENSE)
    np.testing.assert_allclose(jax.jit(layer)(prepared), eager, rtol=1e-6)
    assert [column.width for column in DENSE] == [1, 3, 3, 4, 2]
    assert eager.shape == (24, 13)


def trained(layer, prepared, strategy):
    """Returns the losses and the weights of a model of a layer that is trained for two epochs."""
    keras.utils.set_random_seed(0)
    with strategy.scope():
        model = keras.Sequential([layer(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.001), "mse")
    losses = model.fit(prepared, Y, batch_size=9, epochs=2, shuffle=False, verbose=0).history["loss"]
    return losses, model.get_weights()


@pytest.mark.cover(["kind"], {feature_column.LinearFeatures})
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "columns"),
    [(feature_column.DenseFeatures, DENSE), (feature_column.LinearFeatures, [AGE, AGES, SIZE, CROSS, *DENSE[2:]])],
)
def test_two_replicas_train_as_one_device_does(kind, columns):
    """`fit` on prepared features, in batches that two replicas cannot divide evenly."""
    prepared = feature_column.prepare(FEATURES, columns)
    strategies = phalanx.OneDeviceStrategy("cpu:0"), phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    one, two = (trained(lambda: kind(columns), prepared, strategy) for strategy in strategies)
    assert one[0][1] < one[0][0]
    np.testing.assert_allclose(two[0], one[0], rtol=1e-5)
    for weight, expected in zip(two[1], one[1], strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
def test_saved_models_are_loaded_with_their_columns(tmp_path):
    """All kinds of columns, a function among them; the shared table is one again."""
    towns = [feature_column.categorical_column_with_identity(key, 5) for key in ("origin", "target")]
    columns = [
        *DENSE[1:],
        feature_column.numeric_column("age", normalizer_fn=halved),
        feature_column.indicator_column(feature_column.weighted_categorical_column(towns[0], "count")),
        feature_column.indicator_column(CROSS),
        *feature_column.shared_embeddings(towns, 3, initializer="uniform"),
    ]
    features = FEATURES | {"origin": np.arange(24) % 5, "target": np.arange(24) % 3, "count": np.ones(24)}
    prepared = feature_column.prepare(features, columns)
    inputs = {key: keras.Input(value.shape[1:], dtype=value.dtype.name, name=key) for key, value in prepared.items()}
    dense = feature_column.DenseFeatures(columns)(inputs)
    linear = feature_column.LinearFeatures([SIZE, CROSS], units=2, sparse_combiner="mean")(inputs)
    model = keras.Model(inputs, keras.layers.Concatenate()([keras.layers.Dense(2)(dense), linear]))
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras")
    np.testing.assert_array_equal(loaded(prepared), model(prepared))
    assert [variable.path for variable in loaded.weights] == [variable.path for variable in model.weights]


def test_columns_keep_single_precision_in_a_mixed_policy():
    """Boundaries and rows are float32 whatever the policy of the layer is."""
    column = feature_column.bucketized_column(AGE, [2049])
    layer = feature_column.DenseFeatures([AGE, column], dtype="mixed_float16")
    rows = layer({"age": np.array([2048.9, 2049.0], np.float32)})
    assert rows.dtype == np.float32
    np.testing.assert_allclose(rows, [[2048.9, 1, 0], [2049, 0, 1]], rtol=1e-7)


test_bad_arguments_are_refused = refusals(
    errors.InvalidArgumentError,
    (
        lambda: feature_column.DenseFeatures([AGE, SIZE]),
        r"feature_columns with Voc.*: a categorical column is not dense.\nHINT: indicator_column\(column\) or embedding",
    ),
    (
        lambda: feature_column.LinearFeatures([AGE], units=0),
        r"units=0: must be an integer from 1 to 2\*\*31 - 1.\nHINT: units=1",
    ),
)


def test_tables_of_one_name_must_be_one():
    options = {"dimension": 2, "shared_embedding_collection_name": "table"}
    columns = [table for column in (SIZE, TOWN) for table in feature_column.shared_embeddings([column], **options)]
    match = r"two tables with the name 'table': their columns differ in size .*\nHINT: shared_embeddings\("
    with refused(errors.InvalidArgumentError, match):
        feature_column.DenseFeatures(columns)(FEATURES)
