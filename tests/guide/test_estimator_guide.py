"""The calls of TensorFlow's guide to Estimators and of its tutorials, with the imports changed."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from estimator_data import digits, irises, network, passengers

import phalanx
from phalanx.estimator import tf1

pytestmark = pytest.mark.usefixtures("scikit_learn")


@pytest.mark.exhaustive("tests/estimator/test_recorded.py, test_guide_with_image_model")
def test_premade_estimators_tutorial(scikit_learn, tmp_path):
    """A deep network for irises: what it evaluates and predicts is what NumPy computes from its variables."""
    (train, train_y), (test, test_y) = irises()

    def input_fn(features, labels, training=True, batch_size=64):
        dataset = tf1.data.Dataset.from_tensor_slices((dict(features), labels))
        if training:
            dataset = dataset.shuffle(1000).repeat()
        return dataset.batch(batch_size)

    my_feature_columns = [tf1.feature_column.numeric_column(key=key) for key in train]
    classifier = tf1.estimator.DNNClassifier(
        feature_columns=my_feature_columns, hidden_units=[30, 10], n_classes=3, model_dir=tmp_path
    )
    classifier.train(input_fn=lambda: input_fn(train, train_y, training=True), steps=50)
    eval_result = classifier.evaluate(input_fn=lambda: input_fn(test, test_y, training=False))

    # Columns are in the order of their names.
    wanted = network(classifier, np.stack([test[name] for name in sorted(test)], axis=1), 2)
    assert "{accuracy:0.3f}".format(**eval_result) == f"{np.mean(wanted.argmax(axis=1) == test_y):0.3f}"
    probabilities = np.exp(wanted) / np.exp(wanted).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(eval_result["average_loss"], scikit_learn.log_loss(test_y, probabilities), rtol=1e-4)
    assert eval_result["global_step"] == 50

    predict_x = {"SepalLength": [5.1, 5.9, 6.9], "SepalWidth": [3.3, 3.0, 3.1]}
    predict_x |= {"PetalLength": [1.7, 4.2, 5.4], "PetalWidth": [0.5, 1.5, 2.1]}

    def predict_input_fn(features, batch_size=256):
        return tf1.data.Dataset.from_tensor_slices(dict(features)).batch(batch_size)

    predictions = list(classifier.predict(input_fn=lambda: predict_input_fn(predict_x)))
    wanted = network(classifier, np.stack([predict_x[name] for name in sorted(predict_x)], axis=1), 2)
    assert [pred_dict["class_ids"][0] for pred_dict in predictions] == wanted.argmax(axis=1).tolist()
    probabilities = np.exp(wanted) / np.exp(wanted).sum(axis=1, keepdims=True)
    np.testing.assert_allclose([pred_dict["probabilities"] for pred_dict in predictions], probabilities, rtol=1e-4)


@pytest.mark.exhaustive("tests/estimator/test_recorded.py")
def test_linear_model_tutorial(scikit_learn, tmp_path):
    """Metrics with and without a cross of ages and sexes are those of the probabilities, computed by scikit-learn."""
    (dftrain, y_train), (dfeval, y_eval), fc = passengers(600, 1), passengers(300, 2), tf1.feature_column
    feature_columns = [
        fc.categorical_column_with_vocabulary_list(name, np.unique(dftrain[name]))
        for name in ("sex", "n_siblings_spouses", "parch", "class", "deck", "embark_town", "alone")
    ] + [fc.numeric_column(name, dtype=tf1.float32) for name in ("age", "fare")]

    def make_input_fn(data, labels, num_epochs=5, shuffle=True, batch_size=32):
        def input_function():
            ds = tf1.data.Dataset.from_tensor_slices((dict(data), labels))
            ds = ds.shuffle(1000) if shuffle else ds
            return ds.batch(batch_size).repeat(num_epochs)

        return input_function

    train_input_fn = make_input_fn(dftrain, y_train)
    eval_input_fn = make_input_fn(dfeval, y_eval, num_epochs=1, shuffle=False)

    ds = make_input_fn(dftrain, y_train, batch_size=10)()
    ((feature_batch, label_batch),) = ds.take(1)
    assert set(feature_batch) == set(dftrain)
    assert label_batch.shape == (10,)
    age_column, gender_column = feature_columns[7], feature_columns[0]
    ages = fc.DenseFeatures([age_column])(feature_batch)
    np.testing.assert_array_equal(ages[:, 0], feature_batch["age"].astype("float32"))
    genders = fc.DenseFeatures([fc.indicator_column(gender_column)])(feature_batch)
    np.testing.assert_array_equal(genders, np.stack([feature_batch["sex"] == s for s in ("female", "male")], axis=1))

    age_x_gender = fc.crossed_column(["age", "sex"], hash_bucket_size=100)
    for name, derived_feature_columns in (("plain", []), ("crossed", [age_x_gender])):
        linear_est = tf1.estimator.LinearClassifier(
            feature_columns=feature_columns + derived_feature_columns, model_dir=tmp_path / name
        )
        linear_est.train(train_input_fn)
        result = linear_est.evaluate(eval_input_fn)
        probs = np.array([pred["probabilities"][1] for pred in linear_est.predict(eval_input_fn)])
        assert result["global_step"] == 95
        assert result["auc"] > 0.65
        female, male = linear_est.get_variable_value("linear/linear_model/sex/weights")[:, 0]
        assert female > male
        np.testing.assert_allclose(result["accuracy"], np.mean((probs > 0.5) == y_eval), rtol=1e-6)
        np.testing.assert_allclose(result["auc"], scikit_learn.roc_auc_score(y_eval, probs), atol=0.01)
        np.testing.assert_allclose(result["average_loss"], scikit_learn.log_loss(y_eval, probs), rtol=1e-4)


def test_keras_model_tutorial(tmp_path):
    """A Keras model as an Estimator: its evaluation is that of Keras with the trained weights."""
    hidden, output = keras.layers.Dense(16, activation="relu"), keras.layers.Dense(3)
    model = keras.models.Sequential([hidden, keras.layers.Dropout(0.2), output])
    model.build((None, 4))
    model.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer="adam")
    (columns, species), _ = irises()
    rows = np.stack(list(columns.values()), axis=1)

    def input_fn():
        dataset = tf1.data.Dataset.from_tensor_slices((rows, species))
        dataset = dataset.map(lambda features, labels: ({"dense_input": features}, labels))
        return dataset.batch(32).repeat()

    keras_estimator = tf1.estimator.model_to_estimator(keras_model=model, model_dir=tmp_path)
    keras_estimator.train(input_fn=input_fn, steps=50)
    eval_result = keras_estimator.evaluate(input_fn=input_fn, steps=4)
    before = model.evaluate(rows, species, verbose=0)
    names = [f"{layer.name}/{part}" for layer in (hidden, output) for part in ("kernel", "bias")]
    model.set_weights([keras_estimator.get_variable_value(name) for name in names])
    # The mean over batches, of which the last has 24 rows.
    wanted = np.mean([model.evaluate(rows[i : i + 32], species[i : i + 32], verbose=0) for i in range(0, 120, 32)])
    np.testing.assert_allclose(eval_result["loss"], wanted, rtol=1e-5)
    assert eval_result["loss"] < before


def test_guide_with_image_model(tmp_path):
    """A frozen convolution and a new layer, as an Estimator: only the new layer is trained."""
    (images, numbers), _ = digits()
    convolution = keras.Sequential([keras.Input((8, 8, 1)), keras.layers.Conv2D(8, 3, name="convolution")])
    convolution.trainable = False
    new = keras.layers.Dense(1, name="new")
    estimator_model = keras.Sequential([convolution, keras.layers.GlobalAveragePooling2D(), new])
    estimator_model.build((None, 8, 8, 1))
    loss = keras.losses.BinaryCrossentropy(from_logits=True)
    estimator_model.compile(optimizer="adam", loss=loss, metrics=["accuracy"])
    est_convolution = tf1.estimator.model_to_estimator(keras_model=estimator_model, model_dir=tmp_path)

    def train_input_fn(batch_size):
        data = tf1.data.Dataset.from_tensor_slices((images[:300, :, :, None], (numbers[:300, None] > 4) * 1.0))
        return data.map(lambda image, label: (image * 2 - 1, label)).shuffle(500).batch(batch_size)

    est_convolution.train(input_fn=lambda: train_input_fn(32), steps=5)
    result = est_convolution.evaluate(input_fn=lambda: train_input_fn(32), steps=10)
    assert set(result) == {"accuracy", "loss", "global_step"}
    (kernel,) = (n for n in est_convolution.get_variable_names() if n.endswith("convolution/kernel"))
    np.testing.assert_array_equal(est_convolution.get_variable_value(kernel), convolution.get_weights()[0])
    assert not np.array_equal(est_convolution.get_variable_value("new/kernel"), new.get_weights()[0])


class Net(keras.Model):
    def __init__(self):
        super().__init__()
        self.l1 = keras.layers.Dense(5)

    def call(self, x):
        return self.l1(x)


def test_guide_with_object_based_checkpoint(tmp_path):
    """A tape and an optimizer of Keras in the model function: what it saves is restored by attributes."""

    def toy_dataset():
        inputs = np.arange(1, 11, dtype="float32")[:, None]
        labels = inputs * 5.0 + np.arange(5, dtype="float32")[None, :]
        return tf1.data.Dataset.from_tensor_slices({"x": inputs, "y": labels}).repeat().batch(2)

    def model_fn(features, labels, mode):
        net = Net()
        opt = keras.optimizers.Adam(0.1)
        ckpt = tf1.train.Checkpoint(step=tf1.train.get_global_step(), optimizer=opt, net=net)
        with phalanx.GradientTape() as tape:
            output = net(features["x"])
            loss = jnp.mean(jnp.abs(output - features["y"]))
        variables = net.trainable_variables
        gradients = tape.gradient(loss, variables)
        return tf1.estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=tf1.group(opt.apply_gradients(zip(gradients, variables, strict=True)), ckpt.step.assign_add(1)),
            scaffold=tf1.train.Scaffold(saver=ckpt),
        )

    est = tf1.estimator.Estimator(model_fn, tmp_path)
    est.train(toy_dataset, steps=10)

    first, opt, net = Net(), keras.optimizers.Adam(0.1), Net()
    ckpt = tf1.train.Checkpoint(step=keras.Variable(1, dtype="int32"), optimizer=opt, net=net)
    ckpt.restore(tf1.train.latest_checkpoint(tmp_path))
    net(np.zeros((1, 1), "float32"))
    assert ckpt.step.numpy() == 10
    first(np.zeros((1, 1), "float32"))
    tf1.train.Checkpoint(net=first).restore(str(tmp_path / "model.ckpt-0"))
    by_keras, rows = keras.optimizers.Adam(0.1), np.arange(1, 11, dtype="float32")[:, None]
    for step in range(10):
        x = rows[2 * step % 10 : 2 * step % 10 + 2]
        # By hand: the slope of the mean absolute error.
        slope = np.sign(np.asarray(first(x)) - (x * 5 + np.arange(5))) / 10
        by_keras.apply([jnp.asarray(x.T @ slope), jnp.asarray(slope.sum(axis=0))], first.trainable_variables)
    for wanted, found in zip(first.get_weights(), net.get_weights(), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def test_guide_exports_saved_model(tmp_path):
    """An exported linear model predicts what NumPy computes from its weight."""
    input_column = tf1.feature_column.numeric_column("x")
    estimator = tf1.estimator.LinearClassifier(feature_columns=[input_column], model_dir=tmp_path / "model")

    def input_fn():
        rows = tf1.data.Dataset.from_tensor_slices(({"x": [1.0, 2.0, 3.0, 4.0]}, [1, 1, 0, 0]))
        return rows.repeat(200).shuffle(64).batch(16)

    estimator.train(input_fn)
    spec = {"x": jax.ShapeDtypeStruct((1,), "float32")}
    serving_input_fn = tf1.estimator.export.build_parsing_serving_input_receiver_fn(spec)
    estimator_path = estimator.export_saved_model(tmp_path / "from_estimator", serving_input_fn)
    imported = tf1.estimator.load_saved_model(estimator_path)
    weight = estimator.get_variable_value("linear/linear_model/x/weights")[0, 0]
    bias = estimator.get_variable_value("linear/linear_model/bias_weights")[0]
    found = imported.predict({"x": [[1.5], [3.5]]})
    np.testing.assert_allclose(found["logits"][:, 0], np.array([1.5, 3.5]) * weight + bias, rtol=1e-5)
    assert found["class_ids"][:, 0].tolist() == [1, 0]


def test_guide_with_strategy(tmp_path):
    """All devices train and evaluate a regressor: 10 steps of SGD on equal rows, by hand."""
    mirrored_strategy = tf1.distribute.MirroredStrategy()
    config = tf1.estimator.RunConfig(train_distribute=mirrored_strategy, eval_distribute=mirrored_strategy)
    columns = [tf1.feature_column.numeric_column("feats")]
    regressor = tf1.estimator.LinearRegressor(columns, optimizer="SGD", config=config, model_dir=tmp_path)

    def input_fn():
        dataset = tf1.data.Dataset.from_tensors(({"feats": [1.0]}, [1.0]))
        return dataset.repeat(1000).batch(10)

    regressor.train(input_fn=input_fn, steps=10)
    weight = bias = 0.0
    for _ in range(10):
        slope = 2 * (weight + bias - 1)
        weight, bias = weight - 0.2 * slope, bias - 0.2 * slope
    found = regressor.evaluate(input_fn=input_fn, steps=10)
    np.testing.assert_allclose(regressor.get_variable_value("linear/linear_model/feats/weights"), [[weight]], rtol=1e-5)
    np.testing.assert_allclose(found["average_loss"], (weight + bias - 1) ** 2, rtol=1e-4, atol=1e-9)
    assert found["global_step"] == 10
