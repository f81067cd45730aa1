# SPDX-License-Identifier: Apache-2.0
"""The loops of `fit`, `evaluate` and `predict` over the batches of a strategy."""

import importlib.util
import sys
import warnings
import weakref
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import keras
import numpy as np
from keras.callbacks import CallbackList

from phalanx._src import compat
from phalanx._src.checkpoint import background
from phalanx._src.cluster.watch import membership
from phalanx._src.collectives.local_updates import DiLoCo
from phalanx._src.elastic.training import GroupChange, Training, training_of
from phalanx._src.input.sources.base import State
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.programs.interrupts import Interrupts
from phalanx._src.programs.program import without_collections
from phalanx._src.programs.values import combine_on_demand
from phalanx._src.strategies.base import Strategy
from phalanx._src.tracing import context
from phalanx._src.tracing.policy import policy_of
from phalanx.errors import (
    ContextError,
    InvalidArgumentError,
    MissingDependencyError,
    PeerLostError,
    warn_of_slip,
)
from phalanx.keras import predictions, steps
from phalanx.keras.agreement import settle_epoch, stops
from phalanx.keras.backup import BackupAndRestore, FitProgress, informed
from phalanx.keras.callbacks import Callbacks, fills_log, runs_user_code
from phalanx.keras.data import EpochData, steps_in
from phalanx.keras.handover import WRITERS, Marks, Run, require_whole_weights
from phalanx.keras.pace import Pace, pace_of
from phalanx.keras.programs import ReplicaStep, StepProgram, WaitingSteps, is_single, steps_per_execution
from phalanx.keras.tensorboard import writing
from phalanx.typing import PyTree


class ModelTrainer:
    """Trains, evaluates and predicts with one model on the replicas of a strategy. Replaces Keras's trainer.

    Args:
      model: the model to train.
      strategy: the strategy that the model belongs to.
    """

    def __init__(self, model: keras.Model, strategy: Strategy) -> None:
        # Weak, because the table of trainers must not keep the model alive. The trainer is dropped with the model.
        self._reference, self._strategy = weakref.ref(model), strategy
        self._train = self._program(steps.train)
        self._test = self._program(steps.test)
        self._predict = self._program(steps.predict)
        self._hears_batches = False
        self._training: Training | None = None
        self._pace: Pace | None = None
        self._fresh: IdentityMap[Marks] = IdentityMap()
        self._fresh_data: IdentityMap[State] = IdentityMap()

    @property
    def _model(self) -> keras.Model:
        model = self._reference()
        assert model is not None
        return model

    def fit(
        self,
        x: PyTree = None,
        y: PyTree = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: int | str = "auto",
        callbacks: Callbacks = None,
        validation_split: float = 0.0,
        validation_data: PyTree = None,
        shuffle: bool | str = True,
        class_weight: PyTree = None,
        sample_weight: PyTree = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | Collection[int] = 1,
    ) -> keras.callbacks.History:
        """Implements `keras.Model.fit`."""
        model = self._ready("fit")
        if validation_split and validation_data is None:
            (x, y, sample_weight), validation_data = compat.validation_split((x, y, sample_weight), validation_split)
        with self._strategy.scope(), Interrupts(again_at_once=True) as interrupts:
            data = self._data(
                x,
                steps_per_epoch,
                y=y,
                sample_weight=sample_weight,
                batch_size=batch_size,
                shuffle=shuffle,
                class_weight=class_weight,
            )
            validation = None
            if validation_data is not None:
                validation = self._validation_data(
                    validation_data, validation_batch_size or batch_size, validation_steps
                )
            self._build(data, "train")
            data.restart()
            progress = FitProgress(data, validation, self._topology, self._settle)
            training = training_of(self._strategy, progress)
            # The other processes finished this call before this one joined them.
            if training is not None and training.is_over:
                model.history = keras.callbacks.History()
                return model.history
            with (
                self._calling(callbacks, verbose, epochs, *filter(None, (data, validation)), add_history=True) as hooks,
                informed(hooks.callbacks, progress),
            ):
                model.stop_training, logs = False, {}
                hooks.on_train_begin()
                # `on_train_begin` has restored the first process only, because the others run no callbacks that use files.
                if self._has_peers and _any_of(callbacks, keras.callbacks.BackupAndRestore):
                    compat.take_over_state(model, self._topology.from_chief)
                # `on_train_begin` may have restored an epoch: our backup into `progress`, and Keras's into the model.
                progress.begin(progress.epoch or compat.first_epoch(model, initial_epoch))
                most, fresh = _capped(epochs), self._fresh
                run = Run(
                    data, validation, hooks, _in_order(callbacks), progress, most, validation_freq, training, fresh
                )
                if _any_of(hooks.callbacks, BackupAndRestore):
                    run.restore_states()
                self._training, self._pace = training, pace_of(model, self._strategy, run)
                try:
                    logs = self._epochs(run, interrupts) if training is None else self._elastic_epochs(run, interrupts)
                finally:
                    if self._pace is not None:
                        self._pace.end()
                    self._training = self._pace = None  # They hold the data.
                    # Replaces the weights by their moving averages if the optimizer has `use_ema`, as Keras does.
                    if epochs > 0 and model.optimizer is not None:
                        compat.finalize(model.optimizer, model.trainable_weights)
                self._warn_of_no_synchronization()
                hooks.on_train_end(logs=logs)
        background.wait()  # A callback may have saved. Whoever gets the history can rely on it.
        return model.history

    def _epochs(self, run: Run, interrupts: Interrupts) -> dict[str, Any]:
        """Runs the epochs from the present one, and returns the results of the last."""
        model, progress = self._model, run.progress
        for epoch in range(progress.epoch, run.epochs):
            # After a loss, `progress` already has what was done of the first of these epochs: steps, validation or callbacks.
            if progress.epoch != epoch:
                progress.begin(epoch)
            if progress.logs is None:
                # In the middle of an epoch, the metrics of its first steps were restored or are still there.
                if is_whole := not run.data.is_within_epoch:
                    model.reset_metrics()
                run.begin_epoch(epoch)
                logs = self._epoch(run.data, self._train, run.hooks, "train", interrupts)
                if is_whole:
                    run.data.require_batch("fit")
                progress.logs = self._of_group(run, logs)
            if progress.results is None:
                results = {}
                if run.validation is not None and compat.is_evaluated(model, epoch, run.validation_freq):
                    results = self._evaluate(run.validation, run.hooks, interrupts)
                progress.results = progress.logs | {f"val_{name}": value for name, value in results.items()}
            # `pythonify_logs` of Keras 3.15 catches every exception of `float(value)`, including one that a signal
            # handler raises, so hold signals back until the callbacks have run.
            with interrupts.held():
                self._read_on_demand()
                run.end_epoch(epoch, progress.results)
            if run.training is not None:
                run.share_counters(self._topology)
            if settle_epoch(model, run.hooks.callbacks, self._topology, epoch):
                break
        return progress.results or {}

    def _of_group(self, run: Run, logs: dict[str, Any]) -> dict[str, Any]:
        """Returns logs, as numbers if another process may need them."""
        return logs if run.training is None else compat.to_python(logs)

    def _elastic_epochs(self, run: Run, interrupts: Interrupts) -> dict[str, Any]:
        """Runs the epochs in a group whose processes may die, leave and join."""
        training = run.training
        assert training is not None
        with training.leaving_when_told():
            return self._go_on(run, training, interrupts)

    def _go_on(self, run: Run, training: Training, interrupts: Interrupts) -> dict[str, Any]:
        is_new = membership.is_late()
        run.note_fresh()
        training.enter(lambda: self._prepare(run.data))
        logs: dict[str, Any] = {}
        while not training.is_over:
            try:
                if training.has_changed:
                    if self._topology.is_chief:
                        # Before the counters are shared: it takes those that the former chief has sent.
                        run.promote()
                    run.share_counters(self._topology, has_arrays=True)
                    if is_new or training.is_behind:
                        run.take_counters(is_new=is_new)
                    training.catch_up()
                    is_new = False
                logs = self._epochs(run, interrupts)
                training.finish()
                break
            except (PeerLostError, GroupChange) as e:
                training.survive(e)
        return logs

    def _prepare(self, data: EpochData) -> None:
        """Creates all variables of a training step."""
        for _, parts in data.epoch():
            self._train(*parts[0], runs=False)
            break

    def evaluate(
        self,
        x: PyTree = None,
        y: PyTree = None,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        sample_weight: PyTree = None,
        steps: int | None = None,
        callbacks: Callbacks = None,
        return_dict: bool = False,
    ) -> PyTree:
        """Implements `keras.Model.evaluate`."""
        model = self._ready("evaluate")
        with self._strategy.scope(), Interrupts(again_at_once=True) as interrupts:
            data = self._data(x, steps, y=y, sample_weight=sample_weight, batch_size=batch_size)
            self._build(data, "test")
            with self._calling(callbacks, verbose, 1, data) as hooks:
                logs = self._evaluate(data, hooks, interrupts)
        return logs if return_dict else compat.in_order(model, logs)

    def predict(
        self,
        x: PyTree,
        batch_size: int | None = None,
        verbose: int | str = "auto",
        steps: int | None = None,
        callbacks: Callbacks = None,
    ) -> PyTree:
        """Implements `keras.Model.predict`."""
        model = self._ready(None)
        with self._strategy.scope(), Interrupts(again_at_once=True) as interrupts:
            data = self._data(x, steps, batch_size=batch_size)
            self._build(data, "predict")
            with self._calling(callbacks, verbose, 1, data) as hooks:
                model.stop_predicting, outputs = False, predictions.Outputs(data.num_groups)
                hooks.on_predict_begin()
                begin, end = compat.batch_hooks(hooks, "predict")
                for first, parts in data.epoch():
                    begin(first)
                    with interrupts.held():
                        rows = [predictions.rows(self._predict(batches, n), self._stacked(n)) for batches, n in parts]
                    end(first + steps_in(parts) - 1, {"outputs": outputs.add(rows)})
                    if stops(model.stop_predicting, self._topology):
                        break
                hooks.on_predict_end()
        return outputs.result()

    def train_on_batch(
        self,
        x: PyTree,
        y: PyTree = None,
        sample_weight: PyTree = None,
        class_weight: PyTree = None,
        return_dict: bool = False,
    ) -> PyTree:
        """Implements `keras.Model.train_on_batch`."""
        if class_weight is not None:
            if sample_weight is not None:
                raise InvalidArgumentError(
                    "train_on_batch with class_weight and sample_weight",
                    "only one of the two arguments is allowed.",
                    "pass sample_weight only",
                )
            sample_weight = compat.weights_of_classes(y, class_weight)
        return self._on_batch("train_on_batch", self._train, (x, y, sample_weight), return_dict=return_dict)

    def test_on_batch(
        self, x: PyTree, y: PyTree = None, sample_weight: PyTree = None, return_dict: bool = False
    ) -> PyTree:
        """Implements `keras.Model.test_on_batch`."""
        return self._on_batch("test_on_batch", self._test, (x, y, sample_weight), return_dict=return_dict)

    def predict_on_batch(self, x: PyTree) -> PyTree:
        """Implements `keras.Model.predict_on_batch`."""
        model = self._ready(None)
        with self._strategy.scope(), Interrupts(again_at_once=True) as interrupts:
            if not compat.is_built(model):
                compat.build_layers(model, x)
            batch = self._one_batch((x,))
            with interrupts.held():
                return predictions.rows(self._predict(batch, None), None)

    @property
    def _topology(self) -> Topology:
        return self._strategy.topology

    @property
    def _has_peers(self) -> bool:
        """Whether other processes train the same model."""
        return self._topology.num_workers > 1

    def _warn_of_no_synchronization(self) -> None:
        local, optimizer = self._strategy.local_updates, self._model.optimizer
        updates = 0 if optimizer is None else int(optimizer.iterations)
        if isinstance(local, DiLoCo) and 0 < updates < local.every:
            warn_of_slip(
                f"fit ended after {updates} updates of DiLoCo(every={local.every}), so not all weights were synchronized, and the weights "
                "that you read are not trained.",
                f"more updates, or DiLoCo(every={max(1, updates // 10)})",
            )

    def _settle(self) -> None:
        """Waits until all steps so far have ended, so that the variables have their values."""

    def _read_on_demand(self) -> None:
        """Combines replica-local variables on all processes: accumulated gradients, and weights with local updates.

        A callback on the first process may save the model, and reading these variables is a collective call.
        """
        if not self._has_peers or (optimizer := self._model.optimizer) is None:
            return
        if self._strategy.local_updates is not None or compat.accumulation_steps(optimizer):
            variables = [v for v in (*self._model.variables, *optimizer.variables) if policy_of(v).on_demand]
            with self._topology.dispatching(is_step=False):
                combine_on_demand(variables)

    def _stacked(self, count: int) -> int | None:
        """Returns the number of steps stacked in the outputs of a program; None for a single step."""
        return None if self._is_single else count

    @property
    def _is_single(self) -> bool:
        """Whether a program runs one step."""
        return is_single(self._model, self._strategy)

    def _on_batch(self, method: str, program: Callable[..., Any], data: PyTree, *, return_dict: bool) -> PyTree:
        model = self._ready(method)
        with self._strategy.scope(), Interrupts(again_at_once=True) as interrupts:
            compat.build(model, data, has_own_step=steps.has_own(model, method.removesuffix("_on_batch")))
            batch = self._one_batch(data)
            model.reset_metrics()
            with interrupts.held():
                logs = compat.to_python(program(batch, None))
        return logs if return_dict else compat.in_order(model, logs)

    def _one_batch(self, data: PyTree) -> PyTree:
        # A dataset of one batch, so that a batch of any size is split and padded as in `fit`.
        dataset = self._strategy.experimental_distribute_dataset([jax.tree.map(np.asarray, data)])
        return next(iter(dataset))

    def _evaluate(self, data: EpochData, callbacks: CallbackList, interrupts: Interrupts) -> PyTree:
        model = self._model
        model.stop_evaluating = False
        data.restart()
        callbacks.on_test_begin()
        model.reset_metrics()
        logs = self._epoch(data, self._test, callbacks, "test", interrupts)
        data.require_batch("evaluate")
        with interrupts.held():
            logs = compat.to_python(logs)
            callbacks.on_test_end(logs)
        return logs

    def _epoch(
        self, data: EpochData, program: Callable[..., Any], callbacks: CallbackList, kind: str, interrupts: Interrupts
    ) -> dict[str, Any]:
        """Runs the steps of one epoch and returns the metrics."""
        model, training = self._model, self._training if kind == "train" else None
        # A backup at the last step of an epoch leaves no step for the rest of that epoch.
        logs: dict[str, Any] = model.get_metrics_result() if data.is_within_epoch else {}
        begin, end = compat.batch_hooks(callbacks, kind)
        has_peers = self._has_peers
        waiting: WaitingSteps | None = None
        pace = self._pace if kind == "train" else None
        if pace is not None:
            pace.begin()
        for first, parts in data.epoch():
            is_new = training is None or training.begin_steps(first + steps_in(parts))
            if is_new:
                begin(first)
            # As in `fit`: Keras would swallow an exception of a signal handler while it converts the logs.
            with interrupts.held():
                for batches, count in parts:
                    logs = program(batches, count)
                    waiting = waiting or WaitingSteps(batches)
                    waiting.add(logs)
                if kind == "train" and self._hears_batches:
                    self._read_on_demand()
                if training is not None:
                    training.end_steps(steps_in(parts))
                if is_new:
                    end(first + steps_in(parts) - 1, logs)
            if pace is not None and pace.add(steps_in(parts), logs):
                waiting = None  # The batches of the next execution have another size.
            is_wanted = model.stop_training if kind == "train" else model.stop_evaluating
            # One process asks nobody, which saves a call per step.
            if stops(is_wanted, self._topology) if has_peers else is_wanted:
                break
        return compat.logs_or_metrics(model, logs)

    def _program(self, step: ReplicaStep) -> Callable[..., Any]:
        """Returns a function of a batch and a number of steps, or None for one, that runs them on all replicas."""
        return StepProgram(self._reference, self._strategy, step)

    def _ready(self, method: str | None) -> keras.Model:
        """Returns the model, after checking the context, and that it is compiled unless `method` is None (predict).

        Raises:
          ContextError: called in replica context.
        """
        if context.depth() and context.current().replica is not None:
            raise ContextError(
                f"{method or 'predict'} in replica context",
                "the method runs all replicas itself.",
                "call it outside strategy.run",
            )
        if method is not None:
            compat.require_compiled(self._model, method)
        return self._model

    def _data(self, x: PyTree, num_steps: int | None, **data: PyTree) -> EpochData:
        group, is_stacked, fresh = steps_per_execution(self._model), not self._is_single, self._fresh_data
        return EpochData(self._strategy, x, steps=num_steps, group=group, is_stacked=is_stacked, fresh=fresh, **data)

    def _validation_data(self, data: PyTree, batch_size: int | None, num_steps: int | None) -> EpochData:
        x, y, sample_weight = compat.unpacked(data)
        return self._data(x, num_steps, y=y, sample_weight=sample_weight, batch_size=batch_size)

    def _build(self, data: EpochData, kind: str) -> None:
        """Creates the missing variables of the model. Reads a batch only if its shapes are needed."""
        model, only_model = self._model, kind == "predict"
        if only_model and compat.is_built(model):
            return
        spec = data.element_spec if only_model or compat.needs_batch(model) else None
        with without_collections():
            if only_model:
                x, _, _ = compat.unpacked(spec)
                compat.build_layers(model, x)
                data.restart()
            else:
                compat.build(model, spec, has_own_step=steps.has_own(model, kind))

    @contextmanager
    def _calling(
        self, callbacks: Callbacks, verbose: int | str, epochs: int, *data: EpochData, add_history: bool = False
    ) -> Iterator[CallbackList]:
        """Yields Keras's callback list, and ends its threads if an exception leaves the context.

        With several processes, only the first one writes to the terminal and to files.
        """
        user_callbacks = _in_order(callbacks)
        if _any_of(user_callbacks, keras.callbacks.TensorBoard) and importlib.util.find_spec("tensorflow") is None:
            raise MissingDependencyError(
                "keras.callbacks.TensorBoard",
                "it needs TensorFlow, which is not installed.",
                "phalanx.keras.TensorBoard(log_dir)",
            )
        require_whole_weights(user_callbacks, self._topology)
        if isinstance(self._strategy.local_updates, DiLoCo) and _any_of(user_callbacks, keras.callbacks.SwapEMAWeights):
            raise InvalidArgumentError(
                "keras.callbacks.SwapEMAWeights under a strategy with DiLoCo",
                "restoring the weights after an evaluation would undo the local updates of the replicas.",
                "use_ema=True in the optimizer, without the callback: the averages become the weights when fit ends",
            )
        # Code that runs between two batches may write to the arrays. An eager step is such code, too.
        if not (self._model.run_eagerly or runs_user_code(user_callbacks)):
            for each in data:
                each.read_beside()
        # Decide from the full list, before writers are removed on other processes: the result must be equal on all of them,
        # because it decides about a collective call.
        self._hears_batches = compat.listens(user_callbacks, "train", "end")
        if not self._topology.is_chief:
            user_callbacks, verbose = [c for c in user_callbacks if not isinstance(c, WRITERS)], 0
        if verbose == "auto" and fills_log(sys.stdout, has_peers=self._has_peers):
            verbose = 2  # One line per epoch.
        hooks = callbacks
        if not isinstance(hooks, CallbackList):
            hooks = CallbackList(
                user_callbacks,
                add_history=add_history,
                add_progbar=verbose != 0,
                verbose=verbose,
                epochs=epochs,
                steps=data[0].num_batches,
                model=self._model,
            )
        compat.call_in_order(hooks)
        try:
            with writing(hooks.callbacks):
                yield hooks
        except BaseException:
            compat.stop_callbacks(hooks)
            raise


def _in_order(callbacks: Callbacks) -> list[keras.callbacks.Callback]:
    """Returns the callbacks of the user in the order in which they are called."""
    flat = [c for c in keras.tree.flatten(callbacks) if c is not None]
    # A backup has the states of the other callbacks, and may end the program after a batch, so these must be called first.
    return sorted(flat, key=lambda c: isinstance(c, BackupAndRestore))


def _any_of(callbacks: Callbacks, kind: type) -> bool:
    return any(isinstance(c, kind) for c in keras.tree.flatten(callbacks))


def _capped(epochs: int) -> int:
    """Returns `epochs`, limited by `keras.config.max_epochs()`."""
    most: int | None = keras.config.max_epochs()
    if not most or epochs <= most:
        return epochs
    warnings.warn(f"Limiting epochs to {most}", stacklevel=3)
    return most
