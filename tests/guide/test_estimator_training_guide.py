"""The calls of TensorFlow's guides for migration about hooks, checkpoints, exports and TPUs of Estimators, with the imports changed."""

import logging
import time

import event_files
import keras
import numpy as np
import pytest
from estimator_data import FEATURES, LABELS, Adagrad, digits, mean_squared_error

import phalanx
import phalanx.testing
from phalanx.estimator import tf1


def ready_made(path, config=None, dropout=0.2):
    """A deep network for digits, and the input functions of its training and its test, as four of the guides create them."""
    (x_train, y_train), (x_test, y_test) = digits()
    feature_columns = [tf1.feature_column.numeric_column("x", shape=[8, 8])]
    classifier = tf1.estimator.DNNClassifier(
        feature_columns=feature_columns,
        hidden_units=[256, 32],
        optimizer=tf1.train.AdamOptimizer(0.001),
        n_classes=10,
        dropout=dropout,
        model_dir=path,
        config=config,
    )
    train_input_fn = tf1.estimator.inputs.numpy_input_fn(
        x={"x": x_train},
        y=y_train.astype(np.int32),
        num_epochs=10,
        batch_size=50,
        shuffle=True,
    )
    test_input_fn = tf1.estimator.inputs.numpy_input_fn(
        x={"x": x_test}, y=y_test.astype(np.int32), num_epochs=10, shuffle=False
    )
    return classifier, train_input_fn, test_input_fn


def train_and_evaluate(classifier, train_input_fn, test_input_fn):
    """Ten steps, and evaluations after each checkpoint."""
    train_spec = tf1.estimator.TrainSpec(input_fn=train_input_fn, max_steps=10)
    eval_spec = tf1.estimator.EvalSpec(input_fn=test_input_fn, steps=10, throttle_secs=0)
    return tf1.estimator.train_and_evaluate(estimator=classifier, train_spec=train_spec, eval_spec=eval_spec)


@pytest.mark.slow
def test_checkpoint_saver_and_tensorboard(tmp_path):
    """Each step has a checkpoint, of which five are kept, and summaries; each checkpoint has been evaluated."""
    config = tf1.estimator.RunConfig(save_summary_steps=1, save_checkpoints_steps=1)
    classifier, train_input_fn, test_input_fn = ready_made(tmp_path, config, dropout=0.1)
    result, _ = train_and_evaluate(classifier, train_input_fn, test_input_fn)
    kept = sorted(path.name for path in tmp_path.glob("model.ckpt-*.safetensors"))
    assert kept == sorted(f"model.ckpt-{step}.safetensors" for step in range(6, 11))
    training, evaluation = event_files.written(tmp_path), event_files.written(tmp_path / "eval")
    assert [step for step, _ in training["loss"]] == list(range(1, 11))
    assert "dnn/hiddenlayer_0/activation" in training
    assert [step for step, _ in evaluation["accuracy"]] == list(range(1, 11))
    assert evaluation["accuracy"][-1][1] == result["accuracy"]
    assert result["global_step"] == 10


def test_evaluation_at_the_end(tmp_path):
    """One evaluation at the end: 10 of 24 batches, whose metrics NumPy computes from the variables."""
    classifier, train_input_fn, test_input_fn = ready_made(tmp_path)
    result, _ = train_and_evaluate(classifier, train_input_fn, test_input_fn)
    _, (images, numbers) = digits()
    rows = np.resize(np.arange(len(images)), 10 * 128)
    hidden = images.reshape(-1, 64)[rows]
    for layer in ("hiddenlayer_0", "hiddenlayer_1", "logits"):
        kernel, bias = (classifier.get_variable_value(f"dnn/{layer}/{name}") for name in ("kernel", "bias"))
        logits = hidden @ kernel + bias
        hidden = np.maximum(logits, 0)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(rows)), numbers[rows]]
    np.testing.assert_allclose(result["average_loss"], losses.mean(), rtol=1e-4)
    np.testing.assert_allclose(result["loss"], losses.mean(), rtol=1e-4)
    np.testing.assert_allclose(result["accuracy"], np.mean(logits.argmax(axis=1) == numbers[rows]), atol=1e-3)


class InterruptHook(tf1.train.SessionRunHook):
    """Interrupts the training in its sixth step."""

    def begin(self):
        """Begins to count."""
        self._step = -1

    def before_run(self, run_context):
        """Counts."""
        self._step += 1

    def after_run(self, run_context, run_values):
        """Interrupts."""
        if self._step == 5:
            raise RuntimeError("Interruption")


def test_fault_tolerance_of_a_training(tmp_path):
    """After an error in the sixth step, which TensorFlow saves too, a new estimator goes on with the seventh."""
    config = tf1.estimator.RunConfig(save_summary_steps=1, save_checkpoints_steps=1)
    classifier, train_input_fn, _ = ready_made(tmp_path, config)
    with pytest.raises(RuntimeError, match="Interruption"):
        classifier.train(input_fn=train_input_fn, hooks=[InterruptHook()], max_steps=10)
    assert tf1.train.latest_checkpoint(tmp_path).endswith("model.ckpt-6")
    saved = classifier.get_variable_value("dnn/logits/kernel")
    classifier, train_input_fn, _ = ready_made(tmp_path, config)
    seen = WatchHook("dnn/logits/kernel")
    classifier.train(input_fn=train_input_fn, max_steps=10, hooks=[seen])
    assert tf1.train.latest_checkpoint(tmp_path).endswith("model.ckpt-10")
    np.testing.assert_array_equal(seen.first, saved)
    assert seen.steps == [7, 8, 9, 10]


class WatchHook(tf1.train.SessionRunHook):
    """Notes the first value of a variable, and the steps."""

    def __init__(self, name):
        self.name, self.steps = name, []

    def after_create_session(self, session, coord):
        """Notes the value."""
        self.first = session.run(self.name)

    def before_run(self, run_context):
        """Asks for the step."""
        return tf1.train.SessionRunArgs(tf1.train.get_global_step())

    def after_run(self, run_context, run_values):
        """Notes it."""
        self.steps.append(int(run_values.results))


def test_early_stopping_by_time(tmp_path):
    """The training ends once the function says so, although the data would go on."""
    (images, numbers), (test_images, test_numbers) = digits()

    def normalize_img(image, label):
        return keras.ops.convert_to_numpy(keras.ops.cast(image, "float32")) / 255.0, label

    def _input_fn():
        ds_train = tf1.data.Dataset.from_tensor_slices((images[:128] * 16, numbers[:128]))
        ds_train = ds_train.map(normalize_img, num_parallel_calls=tf1.data.AUTOTUNE)
        ds_train = ds_train.batch(128)
        return ds_train.repeat(100000)

    def _eval_input_fn():
        ds_test = tf1.data.Dataset.from_tensor_slices((test_images * 16, test_numbers))
        ds_test = ds_test.map(normalize_img, num_parallel_calls=tf1.data.AUTOTUNE)
        return ds_test.batch(128)

    def _model_fn(features, labels, mode):
        flatten = tf1.layers.Flatten()(features)
        features = tf1.layers.Dense(128, "relu")(flatten)
        logits = tf1.layers.Dense(10)(features)
        loss = tf1.losses.sparse_softmax_cross_entropy(labels=labels, logits=logits)
        optimizer = tf1.train.AdagradOptimizer(0.005)
        train_op = optimizer.minimize(loss, global_step=tf1.train.get_global_step())
        return tf1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)

    estimator = tf1.estimator.Estimator(model_fn=_model_fn, model_dir=tmp_path)
    calls = []

    def should_stop_fn():
        calls.append(time.time())
        return len(calls) == 3

    early_stopping_hook = tf1.estimator.experimental.make_early_stopping_hook(
        estimator=estimator, should_stop_fn=should_stop_fn, run_every_secs=0.2, run_every_steps=None
    )
    train_spec = tf1.estimator.TrainSpec(input_fn=_input_fn, hooks=[early_stopping_hook])
    eval_spec = tf1.estimator.EvalSpec(input_fn=_eval_input_fn)
    result, _ = tf1.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
    assert len(calls) == 3
    assert calls[2] - calls[0] >= 0.35
    assert 0 < result["global_step"] < 100000
    assert estimator.latest_checkpoint().endswith(f"-{result['global_step']}")


def _input_fn():
    return tf1.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(1)


def test_logging_and_stop_hooks(tmp_path, caplog):
    """The model function's own hooks: the training ends after two steps, and each logs the weights; the first logs the loss."""

    def _model_fn(features, labels, mode):
        dense = tf1.layers.Dense(1)
        logits = dense(features)
        loss = tf1.losses.mean_squared_error(labels=labels, predictions=logits)
        optimizer = tf1.train.AdagradOptimizer(0.05)
        train_op = optimizer.minimize(loss, global_step=tf1.train.get_global_step())
        stop_hook = tf1.train.StopAtStepHook(num_steps=2)
        kernel_name = tf1.identity(dense.weights[0])
        bias_name = tf1.identity(dense.weights[1])
        logging_weight_hook = tf1.train.LoggingTensorHook(tensors=[kernel_name, bias_name], every_n_iter=1)
        logging_loss_hook = tf1.train.LoggingTensorHook({"loss from LoggingTensorHook": loss}, every_n_secs=3)
        return tf1.estimator.EstimatorSpec(
            mode,
            loss=loss,
            train_op=train_op,
            training_hooks=[stop_hook, logging_weight_hook, logging_loss_hook],
        )

    estimator = tf1.estimator.Estimator(model_fn=_model_fn, model_dir=tmp_path)
    with caplog.at_level(logging.INFO, "phalanx"):
        estimator.train(_input_fn)
    assert estimator.get_variable_value("global_step") == 2
    first = tf1.train.load_checkpoint(str(tmp_path / "model.ckpt-0"))
    by_hand = Adagrad(first.get_tensor("dense/kernel"), first.get_tensor("dense/bias"), 0.05)
    losses = [by_hand.step([x], [y]) for x, y in zip(FEATURES[:2], LABELS[:2], strict=True)]
    np.testing.assert_allclose(estimator.get_variable_value("dense/kernel"), by_hand.weights[0], rtol=1e-5)
    weights = [line for line in caplog.messages if line.startswith("dense/kernel = ")]
    assert len(weights) == 2
    assert f"dense/bias = {estimator.get_variable_value('dense/bias')}" in weights[-1]
    (logged,) = (line for line in caplog.messages if line.startswith("loss from LoggingTensorHook = "))
    np.testing.assert_allclose(float(logged.split()[-1]), losses[0], rtol=1e-4)


def test_hook_that_measures(tmp_path, capsys):
    """The hook of the user is called around each of the 300 steps, in order."""

    def _input_fn():
        return tf1.data.Dataset.from_tensor_slices((FEATURES, LABELS)).batch(1).repeat(100)

    class LoggerHook(tf1.train.SessionRunHook):
        """Prints the time of each tenth step."""

        def begin(self):
            self._step = -1
            self._start_time = time.time()
            self.log_frequency = 10

        def before_run(self, run_context):
            self._step += 1

        def after_run(self, run_context, run_values):
            if self._step % self.log_frequency == 0:
                current_time = time.time()
                duration = current_time - self._start_time
                self._start_time = current_time
                print("Step #:", self._step, ", Examples per second:", self.log_frequency / duration)

    estimator = tf1.estimator.Estimator(model_fn=_linear_model_fn, model_dir=tmp_path)
    estimator.train(_input_fn, hooks=[LoggerHook()])
    lines = [line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("Step #:")]
    assert [int(words[2]) for words in lines] == list(range(0, 300, 10))
    assert all(float(words[-1]) > 0 for words in lines)
    assert estimator.get_variable_value("global_step") == 300


def _linear_model_fn(features, labels, mode):
    logits = tf1.layers.Dense(1)(features)
    loss = tf1.losses.mean_squared_error(labels=labels, predictions=logits)
    optimizer = tf1.train.AdagradOptimizer(0.05)
    train_op = optimizer.minimize(loss, global_step=tf1.train.get_global_step())
    return tf1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)


def test_saved_model_that_adds(tmp_path):
    """A model that adds 2 is trained, exported, loaded and called."""

    def model_fn(features, labels, mode):
        output = features["input"] + 2
        step = tf1.train.get_global_step()
        return tf1.estimator.EstimatorSpec(
            mode, predictions=output, train_op=step.assign_add(1), loss=keras.ops.convert_to_tensor(0.0)
        )

    est = tf1.estimator.Estimator(model_fn, tmp_path / "estimator-checkpoints")

    def train_fn():
        return tf1.data.Dataset.from_tensors({"input": 3.0}).batch(1)

    est.train(train_fn, steps=1)
    assert est.get_variable_value("global_step") == 1
    assert est.evaluate(train_fn)["global_step"] == 1
    serving_input_fn = tf1.estimator.export.build_raw_serving_input_receiver_fn({"input": np.float32(3.0)})
    estimator_path = est.export_saved_model(tmp_path / "exported-estimator", serving_input_fn)
    assert tf1.estimator.load_saved_model(estimator_path).predict({"input": [10.0]}).tolist() == [12]


def test_migrating_checkpoints_by_name(tmp_path):
    """A checkpoint of variables by name warms up a model that saves by attributes."""

    def model_fn_tf1_ckpt(features, labels, mode):
        train_step = tf1.train.get_or_create_global_step()
        v = keras.Variable(0.0, shape=[], dtype="float32", name="var")
        return tf1.estimator.EstimatorSpec(
            mode,
            predictions=v,
            train_op=tf1.group(v.assign_add(2), train_step.assign_add(1)),
            loss=keras.ops.convert_to_tensor(1.0),
            scaffold=None,
        )

    def model_fn_tf2_ckpt(features, labels, mode):
        train_step = tf1.train.get_or_create_global_step()
        v = keras.Variable(0.0, shape=[], dtype="float32", name="var")
        ckpt = tf1.train.Checkpoint(var_list={"var": v}, step=train_step)
        return tf1.estimator.EstimatorSpec(
            mode,
            predictions=v,
            train_op=tf1.group(v.assign_add(2), train_step.assign_add(1)),
            loss=keras.ops.convert_to_tensor(1.0),
            scaffold=tf1.train.Scaffold(saver=ckpt),
        )

    def train_fn():
        return tf1.data.Dataset.from_tensor_slices(([1, 2, 3], [4, 5, 6])).batch(1)

    est = tf1.estimator.Estimator(model_fn_tf1_ckpt, str(tmp_path / "est-tf1"))
    est.train(train_fn, steps=1)
    reader = tf1.train.load_checkpoint(tf1.train.latest_checkpoint(tmp_path / "est-tf1"))
    assert (reader.get_tensor("var"), reader.get_tensor("global_step")) == (2, 1)
    assert est.evaluate(train_fn) == {"loss": 1, "global_step": 1}
    est = tf1.estimator.Estimator(
        model_fn_tf2_ckpt, str(tmp_path / "est-tf2"), warm_start_from=str(tmp_path / "est-tf1")
    )
    est.train(train_fn, steps=1)
    assert est.get_variable_value("var_list/var") == 4
    assert est.get_variable_value("step") == 1


@pytest.fixture
def virtual_tpus():
    """Eight cores."""
    phalanx.testing.virtual_topology((2, 2, 1, 2))
    yield
    phalanx.tpu.experimental.shutdown_tpu_system()


def test_tpu_estimator_on_eight_cores(tmp_path, virtual_tpus):
    """A step and an evaluation of eight cores with one row each: Adagrad on eight equal rows, by hand."""
    features, labels = [[1.0, 1.5]], [[0.3]]
    eval_features, eval_labels = [[4.0, 4.5]], [[0.8]]
    sizes = []

    def _input_fn(params):
        sizes.append(params["batch_size"])
        dataset = tf1.data.Dataset.from_tensor_slices((features, labels))
        dataset = dataset.repeat()
        return dataset.batch(params["batch_size"], drop_remainder=True)

    def _eval_input_fn(params):
        dataset = tf1.data.Dataset.from_tensor_slices((eval_features, eval_labels))
        dataset = dataset.repeat()
        return dataset.batch(params["batch_size"], drop_remainder=True)

    def _model_fn(features, labels, mode, params):
        logits = tf1.layers.Dense(1)(features)
        loss = tf1.losses.mean_squared_error(labels=labels, predictions=logits)
        optimizer = tf1.train.AdagradOptimizer(0.05)
        train_op = optimizer.minimize(loss, global_step=tf1.train.get_global_step())
        return tf1.estimator.tpu.TPUEstimatorSpec(mode, loss=loss, train_op=train_op)

    cluster_resolver = tf1.distribute.cluster_resolver.TPUClusterResolver(tpu="")
    tpu_config = tf1.estimator.tpu.TPUConfig(iterations_per_loop=10)
    config = tf1.estimator.tpu.RunConfig(cluster=cluster_resolver, save_checkpoints_steps=None, tpu_config=tpu_config)
    estimator = tf1.estimator.tpu.TPUEstimator(
        model_fn=_model_fn, config=config, train_batch_size=8, eval_batch_size=8, model_dir=tmp_path
    )
    estimator.train(_input_fn, steps=1)
    found = estimator.evaluate(_eval_input_fn, steps=1)
    first = tf1.train.load_checkpoint(str(tmp_path / "model.ckpt-0"))
    by_hand = Adagrad(first.get_tensor("dense/kernel"), first.get_tensor("dense/bias"), 0.05)
    by_hand.step(features * 8, labels * 8)
    assert sizes == [1]
    np.testing.assert_allclose(estimator.get_variable_value("dense/kernel"), by_hand.weights[0], rtol=1e-5)
    np.testing.assert_allclose(
        found["loss"], mean_squared_error(by_hand.weights, eval_features, eval_labels), rtol=1e-5
    )
    assert found["global_step"] == 1
