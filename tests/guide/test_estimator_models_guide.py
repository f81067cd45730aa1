"""The calls of TensorFlow's guides for migration about models, columns and metrics of Estimators, with the imports changed."""

import math

import estimator_data as data
import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

from phalanx.estimator import tf1


def test_migrating_an_estimator(tmp_path):
    """Three steps of Adagrad and the loss of an evaluation, by hand."""
    estimator = tf1.estimator.Estimator(model_fn=data.linear_model_fn, model_dir=tmp_path)
    estimator.train(data.input_fn)
    found = estimator.evaluate(data.eval_input_fn)
    by_hand = data.Adagrad(tmp_path)
    for x, y in zip(data.FEATURES, data.LABELS, strict=True):
        by_hand.step([x], [y])
    np.testing.assert_allclose(estimator.get_variable_value("dense/kernel"), by_hand.weights[0], rtol=1e-5)
    np.testing.assert_allclose(found["loss"], by_hand.loss(data.EVAL_FEATURES, data.EVAL_LABELS), rtol=1e-5)
    assert found["global_step"] == 3


@pytest.mark.parametrize("devices", [None, ["cpu:0", "cpu:1"]])
def test_training_and_evaluation_in_one_call(devices, tmp_path):
    """On one device, or in two replicas: there the first step has two rows, the second one."""
    strategy = devices and tf1.distribute.MirroredStrategy(devices)
    config = tf1.estimator.RunConfig(train_distribute=strategy, eval_distribute=strategy)
    estimator = tf1.estimator.Estimator(model_fn=data.linear_model_fn, config=config, model_dir=tmp_path)
    train_spec = tf1.estimator.TrainSpec(input_fn=data.input_fn)
    eval_spec = tf1.estimator.EvalSpec(input_fn=data.eval_input_fn)
    found, exports = tf1.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
    by_hand, size = data.Adagrad(tmp_path), 2 if devices else 1
    for i in range(0, 3, size):
        by_hand.step(data.FEATURES[i : i + size], data.LABELS[i : i + size])
    np.testing.assert_allclose(estimator.get_variable_value("dense/kernel"), by_hand.weights[0], rtol=1e-5)
    # The mean over the batches of all replicas.
    np.testing.assert_allclose(found["loss"], by_hand.loss(data.EVAL_FEATURES, data.EVAL_LABELS), rtol=1e-5)
    assert (found["global_step"], exports) == (math.ceil(3 / size), [])


def test_multi_worker_tutorial(scikit_learn, tmp_path):
    """A convolution under MultiWorkerMirroredStrategy, with a sum over rows that is divided by the batch size, in one process."""
    batch_size, learning_rate = 64, 1e-4
    random = np.random.default_rng(0)
    images, numbers = random.integers(0, 256, (256, 12, 12, 1)).astype("uint8"), random.integers(0, 10, 256)

    def input_fn(mode, input_context=None):
        rows = slice(192) if mode == tf1.estimator.ModeKeys.TRAIN else slice(192, 256)
        dataset = tf1.data.Dataset.from_tensor_slices((images[rows], numbers[rows]))

        def scale(image, label):
            image = keras.ops.convert_to_numpy(keras.ops.cast(image, "float32"))
            return image / 255, label

        if input_context:
            dataset = dataset.shard(input_context.num_input_pipelines, input_context.input_pipeline_id)
        return dataset.map(scale).cache().shuffle(10000).batch(batch_size)

    def model_fn(features, labels, mode):
        convolution = [keras.layers.Conv2D(8, 3, activation="relu"), keras.layers.MaxPooling2D()]
        dense = [keras.layers.Flatten(), keras.layers.Dense(16, activation="relu"), keras.layers.Dense(10)]
        logits = keras.Sequential([*convolution, *dense])(features, training=False)
        if mode == tf1.estimator.ModeKeys.PREDICT:
            return tf1.estimator.EstimatorSpec(mode, predictions={"logits": logits})
        optimizer = tf1.train.GradientDescentOptimizer(learning_rate=learning_rate)
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction=None)(labels, logits)
        loss = keras.ops.sum(loss) * (1.0 / batch_size)
        if mode == tf1.estimator.ModeKeys.EVAL:
            return tf1.estimator.EstimatorSpec(mode, loss=loss)
        return tf1.estimator.EstimatorSpec(
            mode=mode, loss=loss, train_op=optimizer.minimize(loss, tf1.train.get_or_create_global_step())
        )

    strategy = tf1.distribute.experimental.MultiWorkerMirroredStrategy()
    config = tf1.estimator.RunConfig(train_distribute=strategy)
    classifier = tf1.estimator.Estimator(model_fn=model_fn, model_dir=tmp_path, config=config)
    train_spec, eval_spec = tf1.estimator.TrainSpec(input_fn=input_fn), tf1.estimator.EvalSpec(input_fn=input_fn)
    found, _ = tf1.estimator.train_and_evaluate(classifier, train_spec=train_spec, eval_spec=eval_spec)
    logits = np.array([row["logits"] for row in classifier.predict(lambda: [images[192:].astype("float32") / 255])])
    probabilities = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(
        found["loss"], scikit_learn.log_loss(numbers[192:], probabilities, labels=range(10)), rtol=1e-4
    )
    assert found["global_step"] == math.ceil(3 / strategy.num_replicas_in_sync)


def test_metrics_and_optimizers(tmp_path):
    """The accuracy of a model function, and a metric that was added to it."""
    eval_labels = [0, 1, 1]

    def _input_fn():
        return tf1.data.Dataset.from_tensor_slices((data.FEATURES, [0, 0, 1])).batch(1)

    def _eval_input_fn():
        return tf1.data.Dataset.from_tensor_slices((data.EVAL_FEATURES, eval_labels)).batch(1)

    def _model_fn(features, labels, mode):
        logits = tf1.layers.Dense(2)(features)
        predictions = jnp.argmax(logits, axis=1)
        loss = tf1.nn.sparse_softmax_cross_entropy_with_logits(labels=labels, logits=logits)
        optimizer = tf1.train.AdagradOptimizer(0.05)
        train_op = optimizer.minimize(loss, global_step=tf1.train.get_global_step())
        accuracy = tf1.metrics.accuracy(labels=labels, predictions=predictions)
        return tf1.estimator.EstimatorSpec(
            mode, predictions=predictions, loss=loss, train_op=train_op, eval_metric_ops={"accuracy": accuracy}
        )

    estimator = tf1.estimator.Estimator(model_fn=_model_fn, model_dir=tmp_path)
    estimator.train(_input_fn)
    found = estimator.evaluate(_eval_input_fn)
    kernel, bias = estimator.get_variable_value("dense/kernel"), estimator.get_variable_value("dense/bias")
    logits = np.array(data.EVAL_FEATURES) @ kernel + bias
    wanted = logits.argmax(axis=1)
    assert found["accuracy"] == np.float32(np.mean(wanted == eval_labels))
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(3), eval_labels]
    np.testing.assert_allclose(found["loss"], losses.mean(), rtol=1e-5)

    def mean_squared_error(labels, predictions):
        labels = keras.ops.cast(labels, predictions.dtype)
        return {"mean_squared_error": tf1.metrics.mean_squared_error(labels=labels, predictions=predictions)}

    estimator = tf1.estimator.add_metrics(estimator, mean_squared_error)
    more = estimator.evaluate(_eval_input_fn)
    assert more["mean_squared_error"] == np.float32(np.mean((wanted - eval_labels) ** 2.0))
    assert {name: more[name] for name in found} == found


@pytest.mark.exhaustive("tests/estimator/test_recorded.py, and test_estimator_columns_guide.py for features")
def test_ready_made_estimators(scikit_learn, tmp_path):
    """Linear, deep, and both: with Ftrl whose rate decays, metrics are those of the probabilities."""
    (x_train, y_train), (x_eval, y_eval) = data.passengers(600, 1), data.passengers(320, 2)
    for table in (x_train, x_eval):
        table["sex"], table["alone"] = (table["sex"] == "female") * 1, (table["alone"] == "y") * 1
        table["class"] = np.vectorize({"First": 1, "Second": 2, "Third": 3}.get)(table["class"])
        del table["embark_town"], table["deck"]

    def _input_fn():
        return tf1.data.Dataset.from_tensor_slices((dict(x_train), y_train)).batch(32).repeat(10)

    def _eval_input_fn():
        return tf1.data.Dataset.from_tensor_slices((dict(x_eval), y_eval)).batch(32)

    def create_sample_optimizer():
        return lambda: keras.optimizers.Ftrl(
            l1_regularization_strength=0.001,
            learning_rate=lambda: tf1.train.exponential_decay(
                learning_rate=0.1, global_step=tf1.train.get_global_step(), decay_steps=10000, decay_rate=0.9
            ),
        )

    feature_columns = [tf1.feature_column.numeric_column(name, dtype=tf1.float32) for name in x_train]
    linear_estimator = tf1.estimator.LinearEstimator(
        head=tf1.estimator.BinaryClassHead(),
        feature_columns=feature_columns,
        optimizer=create_sample_optimizer(),
        model_dir=tmp_path / "linear",
    )
    dnn_estimator = tf1.estimator.DNNEstimator(
        head=tf1.estimator.BinaryClassHead(),
        feature_columns=feature_columns,
        hidden_units=[16],
        activation_fn=tf1.nn.relu,
        optimizer=create_sample_optimizer(),
        model_dir=tmp_path / "dnn",
    )
    optimizer = create_sample_optimizer()
    combined_estimator = tf1.estimator.DNNLinearCombinedEstimator(
        head=tf1.estimator.BinaryClassHead(),
        linear_feature_columns=feature_columns,
        linear_optimizer=optimizer,
        dnn_feature_columns=feature_columns,
        dnn_hidden_units=[16],
        dnn_optimizer=optimizer,
        model_dir=tmp_path / "combined",
    )
    for estimator in (linear_estimator, dnn_estimator, combined_estimator):
        estimator.train(input_fn=_input_fn, steps=40)
        found = estimator.evaluate(input_fn=_eval_input_fn, steps=10)
        probabilities = [row["probabilities"][1] for row in estimator.predict(_eval_input_fn)]
        assert found["accuracy"] == np.float32(np.mean((np.array(probabilities) > 0.5) == y_eval))
        np.testing.assert_allclose(found["average_loss"], scikit_learn.log_loss(y_eval, probabilities), rtol=1e-3)
        assert found["global_step"] == 40
        np.testing.assert_allclose(found["auc"], scikit_learn.roc_auc_score(y_eval, probabilities), atol=0.01)


class SimpleModelWrapper:
    """The model function of the guide to debugging, and what a hook logs of it."""

    def __init__(self):
        self.logs = {"step": [], "lr": [], "loss": [], "grads_and_vars": [], "layer_out": []}

    def model_fn(self, features, labels, mode, params):
        out_1 = tf1.layers.dense(features, units=params["layer_1_size"])
        out_2 = tf1.layers.dense(out_1, units=params["layer_2_size"])
        logits = tf1.layers.dense(out_2, units=params["num_classes"])
        loss = tf1.losses.softmax_cross_entropy(labels, logits)
        assert mode == tf1.estimator.ModeKeys.TRAIN
        global_step = tf1.train.get_or_create_global_step()
        lr = tf1.train.polynomial_decay(
            learning_rate=params["init_lr"],
            global_step=global_step,
            decay_steps=params["decay_steps"],
            end_learning_rate=params["end_lr"],
            power=params["lr_power"],
        )
        optimizer = tf1.train.GradientDescentOptimizer(lr)
        grads_and_vars = optimizer.compute_gradients(loss=loss, var_list=None)
        train_op = optimizer.apply_gradients(grads_and_vars, global_step=global_step)
        layer_out = {"layer_1": out_1, "layer_2": out_2, "logits": logits}
        logged_ops = {"step": global_step, "lr": lr, "loss": loss, "grads_and_vars": grads_and_vars}
        hook = LogHook({**logged_ops, "layer_out": layer_out}, self)
        return tf1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=[hook])

    def update_logs(self, logs):
        for key in logs:
            self.logs[key].append(logs[key])


class LogHook(tf1.train.SessionRunHook):
    """Does what `sess.run(logged_ops)` does."""

    def __init__(self, ops, model):
        self.ops, self._update = ops, model.update_logs

    def before_run(self, run_context):
        return tf1.train.SessionRunArgs(self.ops)

    def after_run(self, run_context, run_values):
        self._update(run_values.results)


def test_debugging_of_a_migration(tmp_path):
    """Rates, losses, gradients and layers of three steps equal those of a Keras model that begins with the same weights."""
    params = {"layer_1_size": 2, "layer_2_size": 2, "num_classes": 3}
    params |= {"init_lr": 1e-3, "end_lr": 0.0, "decay_steps": 1000, "lr_power": 1.0}
    fake_x, fake_y = np.ones((2, 3), "float32"), np.zeros((2, 3), "int32")
    fake_y[0][0] = fake_y[1][1] = 1
    model_tf1 = SimpleModelWrapper()
    estimator = tf1.estimator.Estimator(model_tf1.model_fn, tmp_path, params=params)
    estimator.train(lambda: (fake_x, fake_y), steps=3)

    names = [f"{layer}/{part}" for layer in ("dense", "dense_1", "dense_2") for part in ("kernel", "bias")]
    weights = [*map(tf1.train.load_checkpoint(str(tmp_path / "model.ckpt-0")).get_tensor, names)]
    schedule = keras.optimizers.schedules.PolynomialDecay(1e-3, 1000, 0.0, 1.0)

    def by_hand(weights):
        out_1 = fake_x @ weights[0] + weights[1]
        out_2 = out_1 @ weights[2] + weights[3]
        logits = out_2 @ weights[4] + weights[5]
        loss = keras.ops.mean(keras.losses.categorical_crossentropy(fake_y, logits, from_logits=True))
        return loss, {"layer_1": out_1, "layer_2": out_2, "logits": logits}

    logs = model_tf1.logs
    for step in range(3):
        (loss, layer_out), grads = jax.value_and_grad(by_hand, has_aux=True)(weights)
        np.testing.assert_allclose(logs["lr"][step], schedule(step), rtol=1e-6)
        np.testing.assert_allclose(logs["loss"][step], loss, rtol=1e-5)
        for name, wanted in layer_out.items():
            np.testing.assert_allclose(logs["layer_out"][step][name], wanted, rtol=1e-5, atol=1e-7)
        for (found, _), wanted in zip(logs["grads_and_vars"][step], grads, strict=True):
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-7)
        weights = [w - schedule(step) * g for w, g in zip(weights, grads, strict=True)]
    assert [int(step) for step in logs["step"]] == [1, 2, 3]
