"""`TPUEstimator`, its options, and what its model function returns."""

import keras
import numpy as np
import pytest
from one_weight import WEIGHT_AFTER, X, Y, model_fn
from refusals import refusals, refused

import phalanx
import phalanx.testing
from phalanx.errors import InvalidArgumentError
from phalanx.estimator import ModeKeys, Scaffold, StopAtStepHook, TaskType, tf1, tpu
from phalanx.estimator.config import RunConfig


@pytest.fixture
def resolver():
    """Eight virtual cores."""
    phalanx.testing.virtual_topology((2, 2, 2))
    yield phalanx.cluster_resolver.TPUClusterResolver(tpu="")
    phalanx.tpu.experimental.shutdown_tpu_system()


def made(folder, resolver, fn=model_fn, **options):
    """A quiet TPUEstimator for 16 rows."""
    config = tpu.RunConfig(cluster=resolver, save_summary_steps=None, log_step_count_steps=None)
    return tpu.TPUEstimator(fn, str(folder), config, **{"train_batch_size": 16, **options})


test_tpu_options_that_are_refused = refusals(
    InvalidArgumentError,
    ({"iterations_per_loop": 0}, ["iterations_per_loop=0", "positive"]),
    ({"iterations_per_loop": "10s"}, ["iterations_per_loop='10s'", "integer"]),
    ({"num_shards": 0}, ["num_shards=0", "positive"]),
    ({"num_cores_per_replica": 2}, ["num_cores_per_replica=2", "a device assignment"]),
    ({"per_host_input_for_training": False}, ["per_host_input_for_training=False", "a host calls"]),
    ({"per_host_input_for_training": 4}, ["per_host_input_for_training=4", "a host calls"]),
    ({"tpu_job_name": "worker"}, ["tpu_job_name='worker'", "the resolver"]),
    ({"initial_infeed_sleep_secs": 3}, ["initial_infeed_sleep_secs=3", "batches wait"]),
    ({"input_partition_dims": [[1, 2]]}, ["input_partition_dims=[[1, 2]]", "splits its arrays itself"]),
    ({"eval_training_input_configuration": 5}, ["eval_training_input_configuration=5", "its own batches"]),
    ({"experimental_host_call_every_n_steps": 2}, ["experimental_host_call_every_n_steps=2", "no host calls"]),
    ({"experimental_allow_per_host_v2_parallel_get_next": True}, ["parallel_get_next=True", "in order"]),
    ({"experimental_feed_hook": print}, ["experimental_feed_hook=", "the strategy feeds"]),
    call=lambda options: tpu.TPUConfig(**options),
)


RUN_OPTIONS = [
    ({"tpu_config": 3}, ["tpu_config=3", "must be a TPUConfig"]),
    ({"master": "grpc://a:1"}, ["master='grpc://a:1'", "a resolver"]),
    ({"evaluation_master": "grpc://a:1"}, ["evaluation_master=", "where the training does"]),
    ({"cluster": "local"}, ["cluster='local'", "must be a ClusterResolver"]),
    ({"session_config": 3}, ["session_config=3", "no session"]),
]
test_run_options_that_are_refused = refusals(
    InvalidArgumentError, *RUN_OPTIONS, call=lambda options: tpu.RunConfig(**options)
)
test_replacements_that_are_refused = refusals(
    InvalidArgumentError, *RUN_OPTIONS, call=lambda options: tpu.RunConfig().replace(**options)
)


def test_run_config_is_one_of_an_estimator():
    """It has the options of `RunConfig`, and keeps its own in `replace`."""
    config = tpu.RunConfig(model_dir="model", tpu_config=tpu.TPUConfig(7), save_checkpoints_steps=None)
    assert isinstance(config, RunConfig)
    # A host calls the input function once, whatever the name for it.
    for kind in (True, tpu.InputPipelineConfig.PER_HOST_V1, tpu.InputPipelineConfig.PER_HOST_V2):
        assert tpu.TPUConfig(per_host_input_for_training=kind).per_host_input_for_training == kind
    other = config.replace(save_checkpoints_steps=3)
    assert isinstance(other, tpu.RunConfig)
    assert (other.model_dir, other.save_checkpoints_steps, other.tpu_config.iterations_per_loop) == ("model", 3, 7)
    assert other.task_type == TaskType.WORKER


def test_arguments_that_are_refused(resolver, tmp_path):
    given = {"model_fn": model_fn, "model_dir": str(tmp_path), "config": tpu.RunConfig(cluster=resolver)}
    for options, words in (
        ({"batch_axis": (0, 0)}, ["batch_axis=(0, 0)", "only None"]),
        ({"export_to_tpu": False}, ["export_to_tpu=False", "only True"]),
        ({"export_to_cpu": False}, ["export_to_cpu=False", "only True"]),
        ({"embedding_config_spec": 3}, ["embedding_config_spec=3", "only None"]),
        ({"export_saved_model_api_version": 2}, ["export_saved_model_api_version=2", "only 1"]),
        ({"use_tpu": 1}, ["use_tpu=1", "True or False"]),
        ({"eval_on_tpu": None}, ["eval_on_tpu=None", "True or False"]),
        ({"config": RunConfig()}, ["config=RunConfig(", "must be a RunConfig"]),
        ({"params": {"batch_size": 3}}, ["params={'batch_size': 3}", "TPUEstimator sets"]),
        ({"train_batch_size": 12}, ["train_batch_size=12", "8 replicas", "train_batch_size=16"]),
        ({"eval_batch_size": 0}, ["eval_batch_size=0", "positive"]),
        ({"config": tpu.RunConfig(tpu_config=tpu.TPUConfig(num_shards=4))}, ["num_shards=4", "8 replicas"]),
    ):
        with refused(InvalidArgumentError, words):
            tpu.TPUEstimator(**{**given, **options})
    # The mode that needs a batch size says so.
    model = made(tmp_path, resolver, train_batch_size=None)
    for mode, call in (("train", model.train), ("eval", model.evaluate), ("predict", lambda fn: [*model.predict(fn)])):
        with refused(InvalidArgumentError, [f"{mode}_batch_size=None", "the input_fn needs it"]):
            call(lambda: [(X, Y)])


def test_batch_sizes_of_the_modes(resolver, tmp_path):
    """Functions get the rows per replica; a prediction runs on one device, and an export needs no size."""
    sizes = []

    def sized(features, labels, mode, params):
        sizes.append((mode, params.get("batch_size"), params["other"]))
        return model_fn(features, labels, mode)

    def input_fn(mode, params):
        rows = params["batch_size"] // 2
        return [({"x": np.tile(X["x"], rows)}, np.tile(Y, rows))] * 8

    options = {"fn": sized, "params": {"other": 1}, "eval_batch_size": 32, "predict_batch_size": 6}
    model = made(tmp_path, resolver, **options)
    model.train(input_fn, steps=1)
    np.testing.assert_allclose(model.get_variable_value("weight"), WEIGHT_AFTER[1])
    assert model.evaluate(input_fn, steps=1)["global_step"] == 1
    assert len([*model.predict(input_fn)]) == 48
    assert set(sizes) == {(ModeKeys.TRAIN, 2, 1), (ModeKeys.EVAL, 4, 1), (ModeKeys.PREDICT, 6, 1)}
    again = made(tmp_path, resolver, fn=sized, params={"other": 1})
    again.export_saved_model(tmp_path / "export", tf1.estimator.export.build_raw_serving_input_receiver_fn(X))
    assert sizes[-1] == (ModeKeys.PREDICT, None, 1)
    assert model.params == {"other": 1}


def test_devices_of_the_modes(resolver, tmp_path):
    """With `use_tpu=False` the first device trains; with `eval_on_tpu=False` it evaluates."""
    model = made(tmp_path, resolver, eval_on_tpu=False, eval_batch_size=4)
    assert model.config.train_distribute.num_replicas_in_sync == 8
    assert model.config.eval_distribute is None
    other = made(tmp_path, resolver, use_tpu=False)
    assert other.config.train_distribute is None
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    config = tpu.RunConfig(train_distribute=strategy)
    given = tpu.TPUEstimator(model_fn, str(tmp_path), config, train_batch_size=2)
    assert given.config.train_distribute is given.config.eval_distribute is strategy


def test_metrics_and_scaffold_of_a_spec():
    """Functions are called for the metrics of an evaluation, and for the scaffold; hooks are passed on."""
    loss = keras.ops.convert_to_tensor(1.0)
    metric_fn = lambda labels, logits: {"sum": keras.metrics.Sum(name=f"{labels}_{logits}")}  # noqa: E731
    for given in ({"labels": 1, "logits": 2}, [1, 2]):
        spec = tpu.TPUEstimatorSpec(ModeKeys.EVAL, loss=loss, eval_metrics=(metric_fn, given))
        assert spec.metrics["sum"].name == "1_2"
    scaffold, hook = Scaffold(), StopAtStepHook(3)
    spec = tpu.TPUEstimatorSpec(
        ModeKeys.TRAIN, None, loss, print, (metric_fn, [1, 2]), scaffold_fn=lambda: scaffold, training_hooks=[hook]
    )
    assert (spec.metrics, spec.scaffold, spec.training_hooks) == ({}, scaffold, (hook,))


test_spec_options_that_are_refused = refusals(
    InvalidArgumentError,
    ({"host_call": (print, [])}, ["host_call=", "does not call the host"]),
    ({"eval_metrics": print}, ["eval_metrics=", "must be a pair"]),
    ({"eval_metrics": (print, 3)}, ["eval_metrics=", "must be a pair"]),
    call=lambda options: tpu.TPUEstimatorSpec(ModeKeys.EVAL, loss=keras.ops.convert_to_tensor(1.0), **options),
)


def test_cross_shard_optimizer_is_the_optimizer():
    """A strategy averages gradients, so that nothing is left to do."""
    optimizer = tf1.train.AdagradOptimizer(0.05)
    assert tf1.tpu.CrossShardOptimizer(optimizer) is optimizer
    with refused(InvalidArgumentError, ["reduction='weighted_sum'", "averaged"]):
        tf1.tpu.CrossShardOptimizer(optimizer, tf1.losses.Reduction.SUM)
    with refused(InvalidArgumentError, ["group_assignment=[[0]]", "averaged"]):
        tf1.tpu.CrossShardOptimizer(optimizer, group_assignment=[[0]])
