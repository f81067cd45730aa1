# SPDX-License-Identifier: Apache-2.0
"""The public names of `tf.compat.v1.estimator.tpu`: an Estimator that trains and evaluates under `TPUStrategy`."""

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, final

import jax
from typing_extensions import override

from phalanx._src.cluster.resolvers.base import ClusterResolver
from phalanx._src.strategies.base import Strategy
from phalanx._src.strategies.tpu import TPUStrategy
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.errors.names import suggest_names
from phalanx.estimator import config as estimator_config
from phalanx.estimator.estimator import Estimator
from phalanx.estimator.loop.session import SessionRunHook
from phalanx.estimator.loop.spec import EstimatorSpec, ModeKeys, Scaffold
from phalanx.estimator.loop.warm_start import WarmStartSettings
from phalanx.typing import PyTree

__all__ = ["InputPipelineConfig", "RunConfig", "TPUConfig", "TPUEstimator", "TPUEstimatorSpec"]

# The key by which tf.estimator's TPUEstimator passes the number of rows, which an input_fn needs for static shapes.
_BATCH_SIZE = "batch_size"


@final
class InputPipelineConfig:
    """How the input function of a `TPUEstimator` feeds the replicas. May be used in any context.

    Source: tf.compat.v1.estimator.tpu.InputPipelineConfig.

    Example:
      >>> import phalanx.estimator as estimator
      >>> estimator.tpu.InputPipelineConfig.PER_HOST_V2
      3
    """

    # The numbers of tpu_config.py: programs compare with them and store them.
    PER_SHARD_V1 = 1
    PER_HOST_V1 = 2
    PER_HOST_V2 = 3
    BROADCAST = 4
    SLICED = 5


@final
@dataclass(frozen=True)
class TPUConfig:
    """Options of a `TPUEstimator`. May be created in any context.

    Args:
      iterations_per_loop: has no effect, because hooks see each step. In TensorFlow, a number of steps that run without them.
      num_shards: number of replicas, which must equal that of the strategy. None for any.
      num_cores_per_replica: must be None.
      per_host_input_for_training: True, `PER_HOST_V1` or `PER_HOST_V2`. In each case, a host calls the input function once, and
        each replica takes its own batch.
      tpu_job_name: must be None.
      initial_infeed_sleep_secs: must be None.
      input_partition_dims: must be None.
      eval_training_input_configuration: must be `PER_HOST_V1`.
      experimental_host_call_every_n_steps: must be 1.
      experimental_allow_per_host_v2_parallel_get_next: must be False.
      experimental_feed_hook: must be None.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value, or is not supported.

    Source: tf.compat.v1.estimator.tpu.TPUConfig.

    Example:
      >>> import phalanx.estimator as estimator
      >>> estimator.tpu.TPUConfig(iterations_per_loop=100).num_shards is None
      True
    """

    iterations_per_loop: int = 2
    num_shards: int | None = None
    num_cores_per_replica: None = None
    per_host_input_for_training: bool | int = True
    tpu_job_name: None = None
    initial_infeed_sleep_secs: None = None
    input_partition_dims: None = None
    eval_training_input_configuration: int = InputPipelineConfig.PER_HOST_V1
    experimental_host_call_every_n_steps: int = 1
    experimental_allow_per_host_v2_parallel_get_next: bool = False
    experimental_feed_hook: None = None

    def __post_init__(self) -> None:
        arguments.integer("iterations_per_loop", self.iterations_per_loop)
        if self.num_shards is not None:
            arguments.integer("num_shards", self.num_shards)
        pipeline = self.per_host_input_for_training
        # BROADCAST, SLICED and PER_SHARD_V1 feed replicas in other ways, and a
        # program that asks for them relies on that.
        if pipeline is not True and pipeline not in (InputPipelineConfig.PER_HOST_V1, InputPipelineConfig.PER_HOST_V2):
            raise InvalidArgumentError(
                f"per_host_input_for_training={shown(pipeline)}",
                "a host calls the input function once.",
                "per_host_input_for_training=InputPipelineConfig.PER_HOST_V2",
            )
        estimator_config.refuse_options("TPUConfig", self, _REFUSED)


# Options that change results or placement are refused. Those that only tune TensorFlow's infeed are accepted above.
_REFUSED = {
    "num_cores_per_replica": (
        "a device assignment sets the cores per replica.",
        "RunConfig(train_distribute=phalanx.TPUStrategy(resolver, assignment))",
    ),
    "tpu_job_name": ("the resolver names the hosts.", "RunConfig(cluster=TPUClusterResolver(tpu))"),
    "initial_infeed_sleep_secs": ("batches wait for the program.", "omit initial_infeed_sleep_secs"),
    "input_partition_dims": (
        "a program splits its arrays itself.",
        "strategy.experimental_split_to_logical_devices(x, dims) in the model_fn",
    ),
    "eval_training_input_configuration": (
        "each replica takes its own batches.",
        "omit eval_training_input_configuration",
    ),
    "experimental_host_call_every_n_steps": ("there are no host calls.", "a hook, and SessionRunArgs(arrays)"),
    "experimental_allow_per_host_v2_parallel_get_next": ("batches are read ahead in order.", "omit it"),
    "experimental_feed_hook": ("the strategy feeds the replicas.", "omit experimental_feed_hook"),
}
_REFUSED_OF_RUN = {
    "evaluation_master": ("evaluation runs where the training does.", "omit evaluation_master"),
    "master": ("a resolver has the addresses.", "cluster=TPUClusterResolver(tpu)"),
}


@final
@dataclass(frozen=True)
class RunConfig(estimator_config.RunConfig):
    """Options of an Estimator, and of TPUs. May be created in any context.

    Args:
      tpu_config: options of TPUs. None for the defaults.
      evaluation_master: must be None.
      master: must be None.
      cluster: describes the hosts. None for `TPUClusterResolver()`.

    The other arguments are those of `phalanx.estimator.RunConfig`.

    Raises:
      InvalidArgumentError: an argument has the wrong type or value, or is not supported.

    Source: tf.compat.v1.estimator.tpu.RunConfig.

    Example:
      >>> import phalanx.estimator as estimator
      >>> config = estimator.tpu.RunConfig(tpu_config=estimator.tpu.TPUConfig(iterations_per_loop=10))
      >>> config.tpu_config.iterations_per_loop
      10
    """

    # Keywords only: `tpu_config` comes first in tpu_config.py, `model_dir` in
    # the base class, and a dataclass has one order.
    _: KW_ONLY
    tpu_config: TPUConfig | None = None
    evaluation_master: None = None
    master: None = None
    cluster: ClusterResolver | None = None

    @override
    def __post_init__(self) -> None:
        super().__post_init__()
        estimator_config.refuse_options("RunConfig", self, _REFUSED_OF_RUN)
        if self.tpu_config is None:
            object.__setattr__(self, "tpu_config", TPUConfig())
        arguments.instance("tpu_config", self.tpu_config, TPUConfig, "tpu_config=TPUConfig()")
        if self.cluster is not None:
            hint = "cluster=TPUClusterResolver(tpu)"
            arguments.instance("cluster", self.cluster, ClusterResolver, hint)  # type: ignore[type-abstract]


class TPUEstimator(Estimator):
    """An Estimator that trains and evaluates under `TPUStrategy`. May be created outside all scopes.

    The model function and the input function get `params["batch_size"]`: the number of rows per replica.

    Args:
      model_fn: see `Estimator`. It may return a `TPUEstimatorSpec`.
      model_dir: see `Estimator`.
      config: a `phalanx.estimator.tpu.RunConfig`.
      params: see `Estimator`.
      use_tpu: whether to train under `TPUStrategy`, instead of the strategy of `config` or the first device.
      train_batch_size: number of rows per step of all replicas.
      eval_batch_size: number of rows per step of an evaluation. None if there is none.
      predict_batch_size: number of rows per batch of a prediction, which runs on one device. None if there is none.
      batch_axis: must be None.
      eval_on_tpu: whether to evaluate under the same strategy.
      export_to_tpu: must be True.
      export_to_cpu: must be True. A model is exported for the platform of the process that exports it.
      warm_start_from: see `Estimator`.
      embedding_config_spec: must be None.
      export_saved_model_api_version: must be 1.

    Raises:
      DeviceError: there is no TPU.
      InvalidArgumentError: an argument has the wrong type or value, or is not supported.

    Source: tf.compat.v1.estimator.tpu.TPUEstimator.

    Example:
      >>> import phalanx.estimator as estimator
      >>> def made(model_fn, resolver):
      ...     config = estimator.tpu.RunConfig(cluster=resolver)
      ...     return estimator.tpu.TPUEstimator(model_fn, config=config, train_batch_size=128)
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        use_tpu: bool = True,
        train_batch_size: int | None = None,
        eval_batch_size: int | None = None,
        predict_batch_size: int | None = None,
        batch_axis: None = None,
        eval_on_tpu: bool = True,
        export_to_tpu: bool = True,
        export_to_cpu: bool = True,
        warm_start_from: str | WarmStartSettings | None = None,
        embedding_config_spec: None = None,
        export_saved_model_api_version: int = 1,
    ) -> None:
        _require("batch_axis", batch_axis, None, "keras.ops.moveaxis(x, axis, 0) in the input_fn")
        _require("export_to_tpu", export_to_tpu, True, "omit export_to_tpu")
        _require("export_to_cpu", export_to_cpu, True, "omit export_to_cpu")
        _require("embedding_config_spec", embedding_config_spec, None, "feature_column.embedding_column(column, 8)")
        _require("export_saved_model_api_version", export_saved_model_api_version, 1, "omit it")
        arguments.flag("use_tpu", use_tpu)
        arguments.flag("eval_on_tpu", eval_on_tpu)
        hint = "config=phalanx.estimator.tpu.RunConfig(cluster=resolver)"
        config = arguments.instance("config", config, RunConfig, hint)
        # tf.estimator reserves the key as well: a silent replacement would train with another size than the user gave.
        if params is not None and _BATCH_SIZE in params:
            raise InvalidArgumentError(
                f"params={shown(params)}", "TPUEstimator sets the batch size.", "TPUEstimator(train_batch_size=64)"
            )
        # With use_tpu=False the same program runs on CPUs and GPUs, which is how TPU programs are usually tested.
        if use_tpu:
            strategy = config.train_distribute or TPUStrategy(config.cluster)
            evaluates = strategy if eval_on_tpu and config.eval_distribute is None else config.eval_distribute
            config = config.replace(train_distribute=strategy, eval_distribute=evaluates)
        super().__init__(model_fn, model_dir, config, params, warm_start_from)
        _check_shards(config)
        self._sizes = {
            ModeKeys.TRAIN: _per_replica("train_batch_size", train_batch_size, self._train_strategy),
            ModeKeys.EVAL: _per_replica("eval_batch_size", eval_batch_size, config.eval_distribute),
            ModeKeys.PREDICT: _per_replica("predict_batch_size", predict_batch_size, None),
        }

    @override
    def _params_for(self, mode: str) -> dict[str, Any]:
        size = self._sizes[mode]
        return self.params if size is None else {**self.params, _BATCH_SIZE: size}

    @override
    def _dataset_fn(self, input_fn: Callable[..., Any], mode: str) -> Callable[[Any], Any]:
        if self._sizes[mode] is None:
            name = {ModeKeys.TRAIN: "train", ModeKeys.EVAL: "eval", ModeKeys.PREDICT: "predict"}[mode]
            raise InvalidArgumentError(
                f"{name}_batch_size=None", "the input_fn needs it.", f"TPUEstimator({name}_batch_size=64)"
            )
        return super()._dataset_fn(input_fn, mode)


def _require(name: str, value: object, default: object, hint: str) -> None:
    if value is not default and value != default:
        raise InvalidArgumentError(f"TPUEstimator({name}={shown(value)})", f"only {default} is supported.", hint)


def _check_shards(config: RunConfig) -> None:
    shards = config.tpu_config.num_shards if config.tpu_config else None
    replicas = 1 if config.train_distribute is None else config.train_distribute.num_replicas_in_sync
    if shards not in (None, replicas):
        raise InvalidArgumentError(
            f"num_shards={shards}", f"the strategy has {replicas} replicas.", f"num_shards={replicas}"
        )


def _per_replica(name: str, size: int | None, strategy: Strategy | None) -> int | None:
    """Returns the number of rows per replica."""
    if size is None:
        return None
    replicas = 1 if strategy is None else strategy.num_replicas_in_sync
    # The sizes are global, as in tpu_estimator.py, and a TPU program needs equal static shapes on all replicas.
    if arguments.integer(name, size) % replicas:
        raise InvalidArgumentError(
            f"{name}={size}", f"the strategy has {replicas} replicas.", f"{name}={-(-size // replicas) * replicas}"
        )
    return size // replicas


def TPUEstimatorSpec(
    mode: str,
    predictions: PyTree = None,
    loss: jax.Array | None = None,
    train_op: PyTree = None,
    eval_metrics: tuple[Callable[..., Mapping[str, Any]], Any] | None = None,
    export_outputs: Mapping[str, Any] | None = None,
    scaffold_fn: Callable[[], Scaffold] | None = None,
    host_call: None = None,
    training_hooks: Iterable[SessionRunHook] | None = None,
    evaluation_hooks: Iterable[SessionRunHook] | None = None,
    prediction_hooks: Iterable[SessionRunHook] | None = None,
) -> EstimatorSpec:
    """Returns the operations that a model function defines for one mode. Call it in a model function.

    Args:
      mode: see `EstimatorSpec`.
      predictions: see `EstimatorSpec`.
      loss: see `EstimatorSpec`.
      train_op: see `EstimatorSpec`.
      eval_metrics: pair of a function and its arguments, a list or a dict. The function returns a dict like `eval_metric_ops`.
      export_outputs: see `EstimatorSpec`.
      scaffold_fn: function without arguments that returns a `Scaffold`.
      host_call: must be None.
      training_hooks: see `EstimatorSpec`.
      evaluation_hooks: see `EstimatorSpec`.
      prediction_hooks: see `EstimatorSpec`.

    Raises:
      InvalidArgumentError: see `EstimatorSpec`; or `eval_metrics` is something else, or `host_call` is not None.

    Source: tf.compat.v1.estimator.tpu.TPUEstimatorSpec.

    Example:
      >>> import jax.numpy as jnp
      >>> import phalanx.estimator as estimator
      >>> spec = estimator.tpu.TPUEstimatorSpec(estimator.ModeKeys.EVAL, loss=jnp.float32(0.5))
    """
    # A host_call leaves the program in the middle of a step. Summaries, for
    # which most programs use it, leave it at the end.
    if host_call is not None:
        raise InvalidArgumentError(
            f"host_call={shown(host_call)}", "a program does not call the host.", "phalanx.summary.scalar(tag, value)"
        )
    return EstimatorSpec(
        mode,
        predictions,
        loss,
        train_op,
        _metrics_of(eval_metrics) if mode == ModeKeys.EVAL else None,
        export_outputs,
        training_hooks=training_hooks,
        scaffold=None if scaffold_fn is None else scaffold_fn(),
        evaluation_hooks=evaluation_hooks,
        prediction_hooks=prediction_hooks,
    )


def _metrics_of(eval_metrics: tuple[Callable[..., Mapping[str, Any]], Any] | None) -> Mapping[str, Any] | None:
    if eval_metrics is None:
        return None
    is_pair = isinstance(eval_metrics, (tuple, list)) and len(eval_metrics) == 2
    if not is_pair or not callable(eval_metrics[0]) or not isinstance(eval_metrics[1], (Mapping, tuple, list)):
        raise InvalidArgumentError(
            f"eval_metrics={shown(eval_metrics)}",
            "must be a pair of a function and its arguments.",
            "eval_metrics=(metric_fn, [labels, logits])",
        )
    # A function and its arguments: in TensorFlow the function runs on the
    # host, with outputs of the TPU. Here it is traced.
    metric_fn, args = eval_metrics
    metrics: Mapping[str, Any] = metric_fn(**args) if isinstance(args, Mapping) else metric_fn(*args)
    return metrics


suggest_names(__name__)
