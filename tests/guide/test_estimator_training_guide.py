"""The calls of TensorFlow's guides for migration about hooks, checkpoints, exports and TPUs of Estimators, with the imports changed."""

import logging
import types

import estimator_data as data
import event_files
import keras
import numpy as np
import pytest

import phalanx
import phalanx.testing
from phalanx.estimator import tf1
from phalanx.estimator.hooks import timer

pytestmark = pytest.mark.usefixtures("scikit_learn")


def ready_made(path, config):
    """A deep network for digits, and the input functions of its training and its test, as the guides create them."""
    (x_train, y_train), (x_test, y_test) = data.digits()
    classifier = tf1.estimator.DNNClassifier(
        feature_columns=[tf1.feature_column.numeric_column("x", shape=[8, 8])],
        hidden_units=[32, 16],
        optimizer=tf1.train.AdamOptimizer(0.001),
        n_classes=10,
        dropout=0.2,
        model_dir=path,
        config=config,
    )
    train_input_fn = tf1.estimator.inputs.numpy_input_fn(
        x={"x": x_train}, y=y_train.astype(np.int32), num_epochs=10, batch_size=50, shuffle=True
    )
    test_input_fn = tf1.estimator.inputs.numpy_input_fn(
        x={"x": x_test}, y=y_test.astype(np.int32), num_epochs=10, shuffle=False
    )
    return classifier, train_input_fn, test_input_fn


@pytest.mark.slow
def test_checkpoint_saver_and_tensorboard(tmp_path):
    """Each step has a checkpoint, of which five are kept, and summaries; each checkpoint has been evaluated.

    Each evaluation reads 10 of 24 batches. NumPy computes the metrics of the last one from the variables.
    """
    config = tf1.estimator.RunConfig(save_summary_steps=1, save_checkpoints_steps=1)
    classifier, train_input_fn, test_input_fn = ready_made(tmp_path, config)
    train_spec = tf1.estimator.TrainSpec(input_fn=train_input_fn, max_steps=10)
    eval_spec = tf1.estimator.EvalSpec(input_fn=test_input_fn, steps=10, throttle_secs=0)
    result, _ = tf1.estimator.train_and_evaluate(classifier, train_spec, eval_spec)
    kept = sorted(path.name for path in tmp_path.glob("model.ckpt-*.safetensors"))
    assert kept == sorted(f"model.ckpt-{step}.safetensors" for step in range(6, 11))
    training, evaluation = event_files.written(tmp_path), event_files.written(tmp_path / "eval")
    assert [step for step, _ in training["loss"]] == list(range(1, 11))
    assert "dnn/hiddenlayer_0/activation" in training
    assert [step for step, _ in evaluation["accuracy"]] == list(range(1, 11))
    assert evaluation["accuracy"][-1][1] == result["accuracy"]
    assert result["global_step"] == 10
    _, (images, numbers) = data.digits()
    rows = np.resize(np.arange(len(images)), 10 * 128)
    logits = data.network(classifier, images.reshape(-1, 64)[rows], 2)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(rows)), numbers[rows]]
    np.testing.assert_allclose([result["average_loss"], result["loss"]], [losses.mean()] * 2, rtol=1e-4)
    np.testing.assert_allclose(result["accuracy"], np.mean(logits.argmax(axis=1) == numbers[rows]), atol=1e-3)


class InterruptHook(tf1.train.SessionRunHook):
    """Interrupts the training in its sixth step."""

    def begin(self):
        self._step = -1

    def before_run(self, run_context):
        self._step += 1

    def after_run(self, run_context, run_values):
        if self._step == 5:
            raise RuntimeError("Interruption")


class WatchHook(tf1.train.SessionRunHook):
    """Notes the first value of a variable, and the steps."""

    def __init__(self, name):
        self.name, self.steps = name, []

    def after_create_session(self, session, coord):
        self.first = session.run(self.name)

    def before_run(self, run_context):
        return tf1.train.SessionRunArgs(tf1.train.get_global_step())

    def after_run(self, run_context, run_values):
        self.steps.append(int(run_values.results))


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


def test_early_stopping_by_time(tmp_path, monkeypatch):
    """The training asks the function every 0.2 s, and ends once it says so, although the data would go on."""
    watch, calls = WatchHook("dense/kernel"), []
    # A step takes 0.06 s.
    monkeypatch.setattr(timer, "time", types.SimpleNamespace(monotonic=lambda: 0.06 * len(watch.steps)))

    def should_stop_fn():
        calls.append(len(watch.steps))
        return len(calls) == 3

    estimator = tf1.estimator.Estimator(model_fn=data.linear_model_fn, model_dir=tmp_path)
    early_stopping_hook = tf1.estimator.experimental.make_early_stopping_hook(
        estimator=estimator, should_stop_fn=should_stop_fn, run_every_secs=0.2, run_every_steps=None
    )
    train_spec = tf1.estimator.TrainSpec(
        input_fn=lambda: data.input_fn().repeat(1000), hooks=[watch, early_stopping_hook]
    )
    eval_spec = tf1.estimator.EvalSpec(input_fn=data.input_fn)
    result, _ = tf1.estimator.train_and_evaluate(estimator, train_spec, eval_spec)
    assert calls == [1, 5, 9]
    assert result["global_step"] == 9
    assert estimator.latest_checkpoint().endswith("-9")


def test_logging_and_stop_hooks(tmp_path, caplog):
    """The model function's own hooks: the training ends after two steps, and each logs the weights; the first logs the loss."""

    def _model_fn(features, labels, mode):
        dense = tf1.layers.Dense(1)
        logits = dense(features)
        loss = tf1.losses.mean_squared_error(labels=labels, predictions=logits)
        optimizer = tf1.train.AdagradOptimizer(0.05)
        train_op = optimizer.minimize(loss, global_step=tf1.train.get_global_step())
        stop_hook = tf1.train.StopAtStepHook(num_steps=2)
        names = [tf1.identity(weight) for weight in dense.weights]
        logging_weight_hook = tf1.train.LoggingTensorHook(tensors=names, every_n_iter=1)
        logging_loss_hook = tf1.train.LoggingTensorHook({"loss from LoggingTensorHook": loss}, every_n_secs=3)
        hooks = [stop_hook, logging_weight_hook, logging_loss_hook]
        return tf1.estimator.EstimatorSpec(mode, loss=loss, train_op=train_op, training_hooks=hooks)

    estimator = tf1.estimator.Estimator(model_fn=_model_fn, model_dir=tmp_path)
    with caplog.at_level(logging.INFO, "phalanx"):
        estimator.train(data.input_fn)
    assert estimator.get_variable_value("global_step") == 2
    by_hand = data.Adagrad(tmp_path)
    losses = [by_hand.step([x], [y]) for x, y in zip(data.FEATURES[:2], data.LABELS[:2], strict=True)]
    np.testing.assert_allclose(estimator.get_variable_value("dense/kernel"), by_hand.weights[0], rtol=1e-5)
    weights = [line for line in caplog.messages if line.startswith("dense/kernel = ")]
    assert len(weights) == 2
    assert f"dense/bias = {estimator.get_variable_value('dense/bias')}" in weights[-1]
    (logged,) = (line for line in caplog.messages if line.startswith("loss from LoggingTensorHook = "))
    np.testing.assert_allclose(float(logged.split()[-1]), losses[0], rtol=1e-4)


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

    def spec_of(mode, make_saver=None):
        train_step = tf1.train.get_or_create_global_step()
        v = keras.Variable(0.0, shape=[], dtype="float32", name="var")
        return tf1.estimator.EstimatorSpec(
            mode,
            predictions=v,
            train_op=tf1.group(v.assign_add(2), train_step.assign_add(1)),
            loss=keras.ops.convert_to_tensor(1.0),
            scaffold=make_saver and tf1.train.Scaffold(saver=make_saver(var_list={"var": v}, step=train_step)),
        )

    def model_fn_tf1_ckpt(features, labels, mode):
        return spec_of(mode)

    def model_fn_tf2_ckpt(features, labels, mode):
        return spec_of(mode, tf1.train.Checkpoint)

    def train_fn():
        return tf1.data.Dataset.from_tensor_slices(([1, 2, 3], [4, 5, 6])).batch(1)

    est = tf1.estimator.Estimator(model_fn_tf1_ckpt, str(tmp_path / "est-tf1"))
    est.train(train_fn, steps=1)
    reader = tf1.train.load_checkpoint(tf1.train.latest_checkpoint(tmp_path / "est-tf1"))
    assert (reader.get_tensor("var"), reader.get_tensor("global_step")) == (2, 1)
    assert est.evaluate(train_fn) == {"loss": 1, "global_step": 1}
    warm_start = str(tmp_path / "est-tf1")
    est = tf1.estimator.Estimator(model_fn_tf2_ckpt, str(tmp_path / "est-tf2"), warm_start_from=warm_start)
    est.train(train_fn, steps=1)
    assert est.get_variable_value("var_list/var") == 4
    assert est.get_variable_value("step") == 1


@pytest.fixture
def virtual_tpus():
    phalanx.testing.virtual_topology((2, 2, 1, 2))
    yield
    phalanx.tpu.experimental.shutdown_tpu_system()


def test_tpu_estimator_on_eight_cores(tmp_path, virtual_tpus):
    """A step and an evaluation of eight cores with one row each: Adagrad on eight equal rows, by hand."""
    sizes = []

    def _input_fn(params):
        sizes.append(params["batch_size"])
        dataset = tf1.data.Dataset.from_tensor_slices((data.FEATURES[:1], data.LABELS[:1]))
        return dataset.repeat().batch(params["batch_size"], drop_remainder=True)

    def _eval_input_fn(params):
        dataset = tf1.data.Dataset.from_tensor_slices((data.EVAL_FEATURES[:1], data.EVAL_LABELS[:1]))
        return dataset.repeat().batch(params["batch_size"], drop_remainder=True)

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
    by_hand = data.Adagrad(tmp_path)
    by_hand.step(data.FEATURES[:1] * 8, data.LABELS[:1] * 8)
    assert sizes == [1]
    np.testing.assert_allclose(estimator.get_variable_value("dense/kernel"), by_hand.weights[0], rtol=1e-5)
    np.testing.assert_allclose(found["loss"], by_hand.loss(data.EVAL_FEATURES[:1], data.EVAL_LABELS[:1]), rtol=1e-5)
    assert found["global_step"] == 1
