# SPDX-License-Identifier: Apache-2.0
"""`Estimator`: trains, evaluates, predicts and exports a model function."""

import copy
import functools
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from phalanx import summary
from phalanx._src.input.sources.functions import InputContext
from phalanx._src.strategies.base import Strategy
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx.errors import CheckpointError, InvalidArgumentError, arguments, shown
from phalanx.estimator.checks import model_dir_of, parameters_of, settings_of
from phalanx.estimator.config import RunConfig, TaskType
from phalanx.estimator.exporting.writing import export_graph
from phalanx.estimator.hooks.basic import StopAtStepHook
from phalanx.estimator.hooks.saving import CheckpointSaverListener, checked_listeners, writing_to_the_end
from phalanx.estimator.hooks.standard import train_hooks
from phalanx.estimator.loop import batches
from phalanx.estimator.loop.graph import GLOBAL_STEP, Graph
from phalanx.estimator.loop.loop import AbstractSteps, GraphSession, ScheduledSteps, SynchronousSteps, run_loop
from phalanx.estimator.loop.predictions import chosen, rows_of
from phalanx.estimator.loop.recorder import Recorder, write_results
from phalanx.estimator.loop.saver import names_in, restore, step_in
from phalanx.estimator.loop.session import SessionRunHook, checked_hooks
from phalanx.estimator.loop.spec import EstimatorSpec, ModeKeys
from phalanx.estimator.loop.warm_start import WarmStartSettings
from phalanx.estimator.strategies import default_strategy, local_strategy
from phalanx.train import latest_checkpoint, load_checkpoint
from phalanx.typing import PyTree

_log = logging.getLogger("phalanx")


class Estimator:
    """Trains, evaluates, predicts and exports a model function, under any strategy. May be created outside all scopes.

    The model function creates layers, losses and a Keras optimizer, and returns an `EstimatorSpec`. It is traced: its
    Python code runs a few times per mode, and its variables are found by their names.

    A training run continues from the latest checkpoint in `model_dir`. Evaluation and prediction read it.

    Args:
      model_fn: function with the parameters `features` and, as needed, `labels`, `mode`, `params` and `config`.
      model_dir: folder for checkpoints and summaries. None for the folder in `config`, or else a temporary one.
      config: options.
      params: dict that the model function receives. Feature columns in it compute the numbers of categories.
      warm_start_from: a checkpoint, or `WarmStartSettings`, for the first values of variables.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or `model_fn` has other parameters.

    Source: tf.estimator.Estimator.

    Example:
      >>> import keras, numpy as np, tempfile
      >>> import phalanx.estimator as estimator
      >>> def model_fn(features, labels, mode):
      ...     predictions = keras.layers.Dense(1)(features)
      ...     if mode == estimator.ModeKeys.PREDICT:
      ...         return estimator.EstimatorSpec(mode, predictions={"y": predictions})
      ...     loss = keras.losses.MeanSquaredError()(labels, predictions)
      ...     train_op = estimator.minimize(keras.optimizers.SGD(0.1), loss)
      ...     return estimator.EstimatorSpec(mode, loss=loss, train_op=train_op)
      >>> x = np.ones((8, 2), "float32")
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     model = estimator.Estimator(model_fn, folder)
      ...     _ = model.train(lambda: [(x, x[:, :1])] * 10)
      ...     int(model.evaluate(lambda: [(x, x[:, :1])])["global_step"])
      10
    """

    def __init__(
        self,
        model_fn: Callable[..., EstimatorSpec],
        model_dir: str | os.PathLike[str] | None = None,
        config: RunConfig | None = None,
        params: Mapping[str, Any] | None = None,
        warm_start_from: str | WarmStartSettings | None = None,
    ) -> None:
        arguments.function("model_fn", model_fn, "Estimator(model_fn)")
        config = (
            RunConfig() if config is None else arguments.instance("config", config, RunConfig, "config=RunConfig()")
        )
        if params is not None and not isinstance(params, Mapping):
            raise InvalidArgumentError(f"params={shown(params)}", "must be a dict.", 'params={"units": 10}')
        # Checked here, since the model function is called much later, in `train`, and then in the middle of a trace.
        self._parameters = parameters_of(model_fn, params)
        self._model_fn, self._params = model_fn, dict(params or {})
        self._config = config.replace(model_dir=model_dir_of(model_dir, config))
        # Set by the ready-made models, whose heads turn text labels into numbers and back. A model_fn has numbers only.
        self._labels_fn: Callable[[PyTree], PyTree] | None = None
        self._predictions_fn: Callable[[dict[str, Any]], dict[str, Any]] | None = None
        self._classes: list[str] | None = None
        self._first_values: Callable[[Graph], None] | None = None
        self._warm_start = settings_of(warm_start_from)
        # Columns in `params` are found without the user's help: their text
        # must be numbers before a device sees a batch.
        self._columns = batches.columns_in(self._params)
        # Once per Estimator and not per call: to create a strategy may mean to connect to a cluster.
        self._train_strategy = config.train_distribute or default_strategy(config)
        # One graph per mode, kept between calls: `train_and_evaluate` would
        # otherwise compile again for each evaluation.
        self._graphs: dict[str, Graph] = {}
        # One event file per folder and Estimator: a file per evaluation would make TensorBoard slow.
        self._writer = functools.cache(summary.create_file_writer)

    @property
    def model_dir(self) -> str:
        """The folder of checkpoints and summaries."""
        return str(self._config.model_dir)

    @property
    def config(self) -> RunConfig:
        """The options."""
        return self._config

    @property
    def params(self) -> dict[str, Any]:
        """A copy of the dict that the model function receives."""
        # A deep copy, as in tf.estimator: model functions change their params, and the next mode must not see it.
        return copy.deepcopy(self._params)

    @property
    def model_fn(self) -> Callable[..., EstimatorSpec]:
        """The model function, as a function of `features`, `labels`, `mode` and `config`."""

        def public_model_fn(features: PyTree, labels: PyTree, mode: str, config: RunConfig) -> EstimatorSpec:
            return self._call_model_fn(features, labels, mode)

        return public_model_fn

    def train(
        self,
        input_fn: Callable[..., Any],
        hooks: Iterable[SessionRunHook] | None = None,
        steps: int | None = None,
        max_steps: int | None = None,
        saving_listeners: Iterable[CheckpointSaverListener] | None = None,
    ) -> "Estimator":
        """Trains, starting from the latest checkpoint. Call it outside all scopes, in all processes that train.

        Args:
          input_fn: function that returns a dataset of batches `(features, labels)`: one batch per replica and step. It may have
            parameters `input_context`, `mode`, `params` and `config`.
          hooks: code that runs between steps.
          steps: number of steps of this call. None for the length of the dataset.
          max_steps: total number of training steps, over all calls. Does nothing if that many have run already.
          saving_listeners: code that runs before and after each checkpoint.

        Returns:
          This object.

        Raises:
          InvalidArgumentError: both `steps` and `max_steps` are given, or an argument has the wrong type.
          InputError: there is no data, or its batches differ.
          CheckpointMismatchError: the latest checkpoint does not fit the model function.
          NanLossDuringTrainingError: a loss is NaN.
        """
        _require_trainer(self._config.task_type)
        batches.check_input_fn(input_fn)
        user_hooks, listeners = checked_hooks("hooks", hooks), checked_listeners(saving_listeners)
        if steps is not None and max_steps is not None:
            raise InvalidArgumentError(
                f"train(steps={shown(steps)}, max_steps={shown(max_steps)})",
                "only one of them can be given.",
                "train(input_fn, max_steps=1000)",
            )
        batches.require_steps("steps", steps)
        batches.require_steps("max_steps", max_steps)
        path = self.latest_checkpoint()
        # Read from the file, before a graph is built: a training run that has ended
        # already costs nothing when a job restarts.
        if max_steps is not None and (done := step_in(path)) >= max_steps:
            _log.info("Skipping training, because the latest checkpoint has %d steps.", done)
            return self
        # `steps` counts from this call and `max_steps` over all calls. A hook does
        # both, so that the loop needs no case for them.
        stops = [StopAtStepHook(steps, max_steps)] if steps or max_steps else []
        graph = self._graph(ModeKeys.TRAIN, path)
        with graph.as_default():
            session = GraphSession(graph, _steps_of(graph, self._dataset_fn(input_fn, graph.mode)))
            writes = self._config.save_summary_steps or self._config.log_step_count_steps
            writer = self._writer(self.model_dir) if writes else None
            recorder = Recorder(writer, self._config.save_summary_steps, graph)
            # The trace must see whether summaries are on, because recording them is a part of the program.
            with recorder.step(0):
                session.prepare()
            all_hooks = train_hooks(self._config, graph, writer, listeners, [*user_hooks, *stops])
            with writing_to_the_end(all_hooks):
                self._begin(graph, session, all_hooks, path)
                for _ in run_loop(session, all_hooks, recorder=recorder):
                    pass
        if writer is not None:
            writer.flush()
        _log.info("Trained %d steps.", session.step)
        return self

    def evaluate(
        self,
        input_fn: Callable[..., Any],
        steps: int | None = None,
        hooks: Iterable[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        name: str | None = None,
    ) -> dict[str, Any]:
        """Evaluates the latest checkpoint, or a new model if there is none. Call it outside all scopes.

        Args:
          input_fn: function that returns a dataset of batches `(features, labels)`, as for `train`.
          steps: number of batches per replica. None for all.
          hooks: code that runs between batches.
          checkpoint_path: another checkpoint.
          name: name of the evaluation, if there are several. Its summaries are in `eval_<name>`.

        Returns:
          The metrics by name, `loss` (the mean over the batches) and `global_step`.

        Raises:
          InvalidArgumentError: an argument has the wrong type.
          InputError: there is no data, or its batches differ.
          CheckpointMismatchError: the checkpoint does not fit the model function.
        """
        batches.check_input_fn(input_fn)
        batches.require_steps("steps", steps)
        user_hooks = checked_hooks("hooks", hooks)
        path = _checkpoint_of(self, checkpoint_path)
        graph = self._graph(ModeKeys.EVAL, path)
        with graph.as_default():
            session = GraphSession(graph, _steps_of(graph, self._dataset_fn(input_fn, graph.mode)))
            session.prepare()
            for metric in graph.trace.metrics.values():
                # The graph is kept between evaluations, and with it the metrics.
                metric.reset_state()
            all_hooks = [*user_hooks, *(graph.spec.evaluation_hooks or ())]
            self._begin(graph, session, all_hooks, path)
            for _ in run_loop(session, all_hooks, steps):
                pass
            values = {key: np.asarray(metric.result()) for key, metric in graph.trace.metrics.items()}
            # `[()]` makes NumPy scalars of arrays without dims: tf.estimator returns these.
            results: dict[str, Any] = {key: value[()] for key, value in values.items()}
            results[GLOBAL_STEP] = np.int64(graph.global_step)
        write_results(self._writer(self.eval_dir(name)), results, path)
        return results

    def predict(
        self,
        input_fn: Callable[..., Any],
        predict_keys: Sequence[str] | str | None = None,
        hooks: Iterable[SessionRunHook] | None = None,
        checkpoint_path: str | None = None,
        yield_single_examples: bool = True,
    ) -> Iterator[Any]:
        """Yields the predictions for each row, with the latest checkpoint, on one device. Iterate outside all scopes.

        Args:
          input_fn: function that returns a dataset of batches of features, or of pairs `(features, labels)`.
          predict_keys: names of the predictions to yield. None for all.
          hooks: code that runs between batches.
          checkpoint_path: another checkpoint.
          yield_single_examples: whether to yield one row at a time instead of one batch at a time.

        Yields:
          Dicts of NumPy arrays; or arrays, if the model function returns an array.

        Raises:
          InvalidArgumentError: a name is unknown, a prediction has another number of rows, or an argument has the wrong type.
          InputError: there is no data, or its batches differ.
          CheckpointMismatchError: the checkpoint does not fit the model function.
        """
        batches.check_input_fn(input_fn)
        # Checked here and not in the generator: it runs only when the caller asks for the first row.
        arguments.flag("yield_single_examples", yield_single_examples)
        user_hooks = checked_hooks("hooks", hooks)
        path = _checkpoint_of(self, checkpoint_path)
        keys = [predict_keys] if isinstance(predict_keys, str) else predict_keys
        return self._predictions(input_fn, keys, user_hooks, path, is_single=yield_single_examples)

    def export_saved_model(
        self,
        export_dir_base: str | os.PathLike[str],
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        checkpoint_path: str | None = None,
        experimental_mode: str = ModeKeys.PREDICT,
    ) -> str:
        """Exports the program of the predictions with its variables. Call it outside all scopes.

        Args:
          export_dir_base: folder. The export is in a new folder inside, named by the time in seconds.
          serving_input_receiver_fn: function that returns a `ServingInputReceiver`.
          assets_extra: dict from paths in `assets.extra` to files to copy there.
          as_text: whether to write the text of the program too, as `program.txt`.
          checkpoint_path: another checkpoint.
          experimental_mode: must be `ModeKeys.PREDICT`.

        Returns:
          The path of the export, for `phalanx.estimator.load_saved_model`.

        Raises:
          CheckpointError: there is no checkpoint.
          InvalidArgumentError: an argument has the wrong type.
        """
        base = arguments.local_path("export_dir_base", export_dir_base)
        arguments.function("serving_input_receiver_fn", serving_input_receiver_fn, "a function without arguments")
        arguments.flag("as_text", as_text)
        if experimental_mode != ModeKeys.PREDICT:
            raise InvalidArgumentError(
                f"experimental_mode={shown(experimental_mode)}", "only predictions are exported.", "omit it"
            )
        path = _checkpoint_of(self, checkpoint_path)
        if path is None:
            path = _require_checkpoint(self, "export_saved_model")
        graph = self._graph(ModeKeys.PREDICT, path)
        with graph.as_default():
            return export_graph(
                graph,
                base,
                serving_input_receiver_fn(),
                lambda: restore(graph, path),
                columns=self._columns,
                classes=self._classes,
                assets=assets_extra,
                as_text=as_text,
            )

    def latest_checkpoint(self) -> str | None:
        """Returns the path of the latest checkpoint, or None. May be called in any context."""
        return latest_checkpoint(self.model_dir)

    def get_variable_names(self) -> list[str]:
        """Returns the names of the variables in the latest checkpoint. May be called in any context.

        Raises:
          CheckpointError: there is no checkpoint.
        """
        return names_in(_require_checkpoint(self, "get_variable_names()"))

    def get_variable_value(self, name: str) -> np.ndarray:
        """Returns the value of a variable in the latest checkpoint. May be called in any context.

        Args:
          name: one of `get_variable_names()`.

        Raises:
          CheckpointError: there is no checkpoint, or no such variable.
        """
        return load_checkpoint(_require_checkpoint(self, f"get_variable_value({shown(name)})")).get_tensor(name)

    def eval_dir(self, name: str | None = None) -> str:
        """Returns the folder of the summaries of an evaluation. May be called in any context."""
        return os.path.join(self.model_dir, "eval" if not name else f"eval_{name}")

    def extended(self, model_fn: Callable[..., EstimatorSpec]) -> "Estimator":
        """Returns an Estimator like this one with another model function. May be called outside all scopes.

        Args:
          model_fn: function with the parameters `features`, `labels`, `mode` and `config`.
        """
        # An Estimator and not type(self): a subclass has a constructor with other arguments.
        other = Estimator(model_fn, config=self._config, warm_start_from=self._warm_start)
        other._columns, other._labels_fn = self._columns, self._labels_fn
        other._predictions_fn, other._classes = self._predictions_fn, self._classes
        other._first_values, other._params = self._first_values, self._params
        return other

    def _params_for(self, mode: str) -> dict[str, Any]:
        """Returns the `params` of the model function and the input function."""
        return self.params

    def _call_model_fn(self, features: PyTree, labels: PyTree, mode: str) -> EstimatorSpec:
        # A model function without labels would train on nothing that the user
        # has labelled. tf.estimator refuses it, too.
        if labels is not None and "labels" not in self._parameters:
            raise InvalidArgumentError(
                "a model_fn without the parameter labels",
                "the input_fn returns labels.",
                "def model_fn(features, labels, mode)",
            )
        kwargs = {"labels": labels, "mode": mode, "params": self._params_for(mode), "config": self._config}
        return self._model_fn(features, **{k: v for k, v in kwargs.items() if k in self._parameters})

    def _graph(self, mode: str, path: str | None) -> Graph:
        """Returns the graph of a mode. Without a checkpoint, a new one."""
        known = self._graphs.get(mode)
        # Without a checkpoint, variables must get their initial values again, so the old graph cannot be used.
        if known is not None and path is not None:
            return known
        strategies: dict[str, Strategy | None] = {
            ModeKeys.TRAIN: self._train_strategy,
            ModeKeys.EVAL: self._config.eval_distribute,
            ModeKeys.PREDICT: None,
        }
        model_fn = functools.partial(self._call_model_fn, mode=mode)
        self._graphs[mode] = Graph(model_fn, mode, strategies[mode] or local_strategy(), self._config.tf_random_seed)
        return self._graphs[mode]

    def _dataset_fn(self, input_fn: Callable[..., Any], mode: str) -> Callable[[InputContext], Any]:
        values = {"mode": mode, "params": self._params_for(mode), "config": self._config}
        columns, labels_fn = self._columns, self._labels_fn

        def dataset_fn(input_context: InputContext) -> batches.Batches:
            return batches.dataset_of(input_fn, {**values, "input_context": input_context}, columns, labels_fn)

        return dataset_fn

    def _begin(self, graph: Graph, session: GraphSession, hooks: Sequence[SessionRunHook], path: str | None) -> None:
        """Calls `begin` of hooks, and gives the variables their values."""
        for hook in hooks:
            hook.begin()
        if path is not None:
            restore(graph, path)
        else:
            # In this order: weights of a Keras model first, then what a warm start replaces.
            for give_values in (self._first_values, self._warm_start and self._warm_start.warm_start):
                if give_values is not None:
                    give_values(graph)
        session.start()

    def _predictions(
        self,
        input_fn: Callable[..., Any],
        keys: Sequence[str] | None,
        hooks: Sequence[SessionRunHook],
        path: str | None,
        *,
        is_single: bool,
    ) -> Iterator[Any]:
        graph = self._graph(ModeKeys.PREDICT, path)
        with graph.as_default():
            dataset = self._dataset_fn(input_fn, graph.mode)(InputContext())
            # Labels are dropped: the program of the predictions has no input for them.
            steps = SynchronousSteps(graph, ((features, None) for features, _ in dataset))
            if steps.is_empty:
                return
            session = GraphSession(graph, steps)
            session.prepare()
            all_hooks = [*hooks, *(graph.spec.prediction_hooks or ())]
            self._begin(graph, session, all_hooks, path)
            loop = run_loop(session, all_hooks)
        while True:
            # The graph is not current while the caller has the predictions.
            with graph.as_default():
                outputs = next(loop, None)
            if outputs is None:
                return
            predictions = jax.tree.map(np.asarray, outputs[2])
            predictions = chosen(
                predictions if self._predictions_fn is None else self._predictions_fn(predictions), keys
            )
            yield from rows_of(predictions) if is_single else [predictions]


def _steps_of(graph: Graph, dataset_fn: Callable[[InputContext], Any]) -> AbstractSteps:
    if isinstance(graph.strategy, ParameterServerStrategy):
        return ScheduledSteps(graph, dataset_fn)
    return SynchronousSteps(graph, iter(graph.strategy.distribute_datasets_from_function(dataset_fn)))


def _checkpoint_of(estimator: Estimator, checkpoint_path: str | None) -> str | None:
    """Returns the checkpoint that the user has given, or the latest one. None if there is none."""
    if checkpoint_path is not None:
        return arguments.path("checkpoint_path", checkpoint_path)
    path = estimator.latest_checkpoint()
    if path is None:
        _log.info("There is no checkpoint in %s: the variables have their initial values.", estimator.model_dir)
    return path


def _require_checkpoint(estimator: Estimator, call: str) -> str:
    path = estimator.latest_checkpoint()
    if path is None:
        raise CheckpointError(
            f"{call} of {estimator.model_dir}", "there is no checkpoint.", "estimator.train(input_fn) first"
        )
    return path


def _require_trainer(task_type: str) -> None:
    if task_type in (TaskType.EVALUATOR, TaskType.PS):
        raise InvalidArgumentError(
            f"train in the task {task_type!r}",
            "this process does not train.",
            "estimator.train_and_evaluate(model, train_spec, eval_spec) in all processes",
        )
