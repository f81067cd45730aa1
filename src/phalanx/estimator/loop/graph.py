# SPDX-License-Identifier: Apache-2.0
"""The graph of a mode: the variables that a model function creates, and the program of its step.

A model function creates its layers and its optimizer at each call, as in TensorFlow 1. Phalanx traces a function several times, so
the variables are found by their names: each trace uses those of the first.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import keras
from jax.typing import ArrayLike

from phalanx._src import compat
from phalanx._src.programs.function import Function
from phalanx._src.strategies.base import Strategy
from phalanx._src.tracing import context
from phalanx._src.tracing.scope import innermost
from phalanx._src.tracing.tape import GradientTape
from phalanx.errors import ContextError, InvalidArgumentError, TraceError, shown
from phalanx.estimator.loop.session import SessionRunHook
from phalanx.estimator.loop.spec import EstimatorSpec, ModeKeys, UpdatedMetric
from phalanx.typing import PyTree

GLOBAL_STEP = "global_step"
T = TypeVar("T")

# A context variable: get_global_step() takes no argument in TensorFlow, and two Estimators may train in two threads.
_current: ContextVar["Graph | None"] = ContextVar("phalanx_estimator_graph", default=None)


@dataclass
class Trace:
    """What one trace of a model function has created.

    Args:
      spec: what the model function returned. None while it runs.
      tape: the tape that records the model function. None if the mode is not training.
      metrics: metrics of an evaluation, by name.
      named: arrays that the model function has named with `identity`.
      counts_itself: whether the model function has changed the number of steps.
      has_records: whether the model function records summaries.
      arrays: arrays that hooks ask for, in the order in which the step returns them.
    """

    spec: EstimatorSpec | None = None
    tape: GradientTape | None = None
    metrics: dict[str, keras.metrics.Metric] = field(default_factory=dict)
    named: dict[str, Any] = field(default_factory=dict)
    counts_itself: bool = False
    has_records: bool = False
    # A list and no set: arrays that are being traced can be compared only by identity.
    arrays: list[Any] = field(default_factory=list)


class Graph:
    """The variables and the step of one mode of an Estimator under one strategy.

    Args:
      model_fn: function of features and labels. Returns an `EstimatorSpec`.
      mode: a value of `ModeKeys`.
      strategy: the strategy that holds the variables and runs the step.
      seed: seed of all initializers and random layers that have none. None for a new seed per graph.

    Attributes:
      checkpoint: path of the checkpoint that was last saved or restored here, or None.
    """

    def __init__(
        self, model_fn: Callable[[PyTree, PyTree], EstimatorSpec], mode: str, strategy: Strategy, seed: int | None
    ) -> None:
        self._model_fn, self.mode, self.strategy = model_fn, mode, strategy
        self._store = compat.VariableStore(seed)
        with strategy.scope(), self._store.reusing():
            self.global_step = _new_step()
        self.checkpoint: str | None = None
        # JAX traces again for each new shape of a batch. Hooks hold arrays of one
        # trace, so the first one is pinned for them.
        self._pinned: Trace | None = None
        self._latest = Trace()
        self.program = Function(self._run)

    @property
    def is_traced(self) -> bool:
        """Whether the model function was called."""
        return self._pinned is not None

    @property
    def trace(self) -> Trace:
        """The first trace, whose hooks run.

        Raises:
          ContextError: the model function was not traced yet.
        """
        if self._pinned is None:
            raise ContextError(
                "the graph of an Estimator", "the model function was not called yet.", "estimator.train(...)"
            )
        return self._pinned

    @property
    def spec(self) -> EstimatorSpec:
        """What the model function returned in the first trace."""
        assert self.trace.spec is not None
        return self.trace.spec

    @property
    def variables(self) -> dict[str, keras.Variable]:
        """All variables by name, without those of metrics."""
        # A checkpoint of tf.estimator has no state of metrics (they are local
        # variables there), and metrics start at 0 anyway.
        hidden = {id(v) for metric in self.trace.metrics.values() for v in metric.variables}
        return {name: v for name, v in self._store.variables.items() if id(v) not in hidden}

    @property
    def trainable_variables(self) -> list[keras.Variable]:
        """The trainable variables, in the order of their creation."""
        return [v for v in self._store.variables.values() if v.trainable]

    @contextmanager
    def as_default(self) -> Iterator[None]:
        """Makes this the current graph inside the `with` block."""
        # Graphs nest: `train_and_evaluate` evaluates in a saving listener, which runs inside the loop of the training.
        token = _current.set(self)
        try:
            yield
        finally:
            _current.reset(token)

    def prepare(self, batch: PyTree) -> None:
        """Traces the step for a batch, so that all variables exist."""
        with self.strategy.scope():
            self.program.prepare(batch)
        if self._pinned is None:
            self._pinned = self._latest

    def find(self, name: str) -> keras.Variable | None:
        """Returns the variable of a name, which may end with an output number as in TensorFlow. None if there is none."""
        # TensorFlow names tensors "dense/kernel:0". Old programs pass such names to hooks and to get_variable_value.
        return self._store.variables.get(name.partition(":")[0])

    def place_of(self, fetch: object) -> int | None:
        """Returns the place of an array, or of a name, among the arrays that the step returns. None if it is not there."""
        if isinstance(fetch, str):
            named = self.trace.named.get(fetch.partition(":")[0])
            return None if named is None else self.place_of(named)
        # `==` on traced arrays would add an operation to the program instead of an answer.
        return next((i for i, x in enumerate(self.trace.arrays) if x is fetch), None)

    def identity(self, value: T, name: str | None) -> T:
        """Names an array of the model function."""
        if name is not None:
            self._latest.named[name] = value
        return value

    @property
    def is_training(self) -> bool:
        """Whether the mode is training."""
        return self.mode == ModeKeys.TRAIN

    @property
    def tape(self) -> GradientTape:
        """The tape that records the model function that is being traced.

        Raises:
          ContextError: no model function is being traced.
        """
        if self._latest.tape is None:
            raise ContextError(
                "gradients outside a model function",
                "only a model function is recorded.",
                "minimize(...) in the model_fn",
            )
        return self._latest.tape

    def _run(self, batch: PyTree) -> PyTree:
        """Runs one step on all replicas. Returns the global loss and the outputs that hooks and callers request."""
        # The loss is summed, not averaged: each replica has weighted its share by its rows already (`_share`).
        loss, *outputs = self.strategy.run(self.replica_step, args=(batch,))
        return (loss if loss is None else self.strategy.reduce("SUM", loss, axis=None), *outputs)

    def replica_step(self, batch: PyTree) -> PyTree:
        """Runs one step on one replica. Returns its share of the loss, the arrays for hooks, and the predictions."""
        features, labels = batch
        self._latest = Trace()
        with self.as_default(), self._store.reusing():
            if self.is_training:
                return self._train(features, labels)
            with context.averaging():
                with self._unchanged():
                    spec = self._call(features, labels)
                # Only `predict` reads predictions: an evaluation would copy them to the host for nothing.
                outputs = spec.predictions if self.mode == ModeKeys.PREDICT else None
                return _share(spec.loss), self._arrays(spec), outputs

    def predictions(self, features: PyTree) -> PyTree:
        """Returns the predictions of the model function, in the scope of the caller."""
        with self.as_default(), self._store.reusing():
            return self._call(features, None).predictions

    @contextmanager
    def _unchanged(self) -> Iterator[None]:
        """Undoes what the `with` block assigns to the step and to weights, because only a training runs a `train_op`."""
        # Only these: metrics must keep what an evaluation assigns to them.
        before = [(v, v.value) for v in (self.global_step, *self.trainable_variables)]
        yield
        for variable, value in before:
            if variable.value is not value:
                variable.assign(value)

    def _train(self, features: PyTree, labels: PyTree) -> PyTree:
        # TensorFlow 1 leaves counting to `minimize(loss, global_step)`. A model
        # function that does so must not count twice.
        before = self.global_step.value
        with context.averaging():
            # Persistent: a model with two optimizers (wide and deep) asks for gradients twice.
            with GradientTape(persistent=True) as self._latest.tape:
                spec = self._call(features, labels)
            loss, arrays = _share(spec.loss), self._arrays(spec)
        # Outside of the tape and of the averaging scope: the update is not
        # differentiated, and its loss was weighted above.
        _apply(spec.train_op)
        self._latest.counts_itself = self.global_step.value is not before
        if not self._latest.counts_itself:
            self.global_step.assign_add(1)
        return loss, arrays, None

    def _call(self, features: PyTree, labels: PyTree) -> EstimatorSpec:
        spec = self._model_fn(features, labels)
        if not isinstance(spec, EstimatorSpec):
            raise InvalidArgumentError(
                f"a model_fn that returns {shown(spec)}",
                "must return an EstimatorSpec.",
                "return estimator.EstimatorSpec(...)",
            )
        if spec.mode != self.mode:
            raise InvalidArgumentError(
                f"a model_fn that returns EstimatorSpec(mode={spec.mode!r})",
                f"it was called with mode={self.mode!r}.",
                "estimator.EstimatorSpec(mode, ...)",
            )
        self._latest.spec = spec
        scope = innermost()
        self._latest.has_records = scope is not None and bool(scope.records)
        self._latest.metrics = {name: _metric_of(name, metric) for name, metric in spec.metrics.items()}
        if self.mode == ModeKeys.EVAL:
            assert spec.loss is not None
            self._latest.metrics.setdefault("loss", _mean_of("loss", spec.loss))
        return spec

    def _arrays(self, spec: EstimatorSpec) -> list[Any]:
        """Returns the arrays that hooks of the model function hold, and the named ones."""
        # A hook keeps arrays as attributes (LoggingTensorHook, a user's hook).
        # Only those become outputs of the program.
        held = [*self._latest.named.values(), *(x for hook in hooks_of(spec) for x in jax.tree.leaves(vars(hook)))]
        arrays: list[Any] = []
        for x in held:
            if isinstance(x, jax.core.Tracer) and not any(x is known for known in arrays):
                arrays.append(x)
        # Hooks find their arrays by place. Another number of arrays would silently hand them other values.
        if self._pinned is not None and len(arrays) != len(self._pinned.arrays):
            raise TraceError(
                f"a model_fn whose hooks hold {len(arrays)} arrays",
                f"they held {len(self._pinned.arrays)} arrays when the function was called for another batch.",
                "do not branch on Python state in the model_fn",
            )
        self._latest.arrays = arrays
        return arrays


def _share(loss: jax.Array | None) -> jax.Array | None:
    """Returns a replica's share of a loss. The sum of the shares is the loss of the global batch."""
    return None if loss is None else loss * jnp.asarray(context.require_replica().weight, loss.dtype)


def hooks_of(spec: EstimatorSpec) -> list[SessionRunHook]:
    """Returns all hooks of a model function."""
    groups = (spec.training_hooks, spec.training_chief_hooks, spec.evaluation_hooks, spec.prediction_hooks)
    return [hook for group in groups for hook in group or ()]


def _metric_of(name: str, metric: PyTree) -> keras.metrics.Metric:
    """Returns a metric. For a pair of a value and its update, the mean of the value over all batches."""
    if isinstance(metric, UpdatedMetric):
        return metric.metric
    if isinstance(metric, keras.metrics.Metric):
        return metric
    return _mean_of(name, metric[0])


def _mean_of(name: str, value: ArrayLike) -> keras.metrics.Metric:
    """Returns the mean of a value over all batches. Each batch of each replica counts as much as the others."""
    mean = keras.metrics.Mean(name=name.replace("/", "_"))
    # A replica whose batch is only padding has no batch, so that it must not count as one.
    has_rows = jnp.asarray(context.require_replica().weight) > 0
    # `update_state` would count a batch by its rows.
    mean.total.assign_add(jnp.where(has_rows, jnp.asarray(value, mean.dtype), 0))
    mean.count.assign_add(has_rows.astype(mean.dtype))
    return mean


def _apply(train_op: PyTree) -> None:
    """Runs what a model function has left for the end of the step."""
    for op in train_op if isinstance(train_op, (list, tuple)) else [train_op]:
        if isinstance(op, (list, tuple)):
            _apply(op)
        # Variables and arrays are results of updates that have run already.
        elif callable(op) and not isinstance(op, (keras.Variable, jax.Array)):
            op()


def _new_step() -> keras.Variable:
    # JAX counts in 32 bits unless it is told otherwise.
    return keras.Variable(0, dtype="int32", trainable=False, aggregation="only_first_replica", name=GLOBAL_STEP)


def current_graph() -> Graph | None:
    """Returns the graph of the model function or the hook that runs, or None outside an Estimator."""
    return _current.get()


def require_graph(call: str) -> Graph:
    """Returns the current graph.

    Raises:
      ContextError: no model function runs.
    """
    graph = current_graph()
    if graph is None:
        raise ContextError(
            f"{call} outside a model function", "it belongs to a graph of an Estimator.", "call it in the model_fn"
        )
    return graph


def get_global_step(graph: None = None) -> keras.Variable | None:
    """Returns the number of training steps so far. Call it in a model function or a hook.

    Args:
      graph: must be None; for programs of TensorFlow 1.

    Returns:
      A scalar integer variable, or None outside an Estimator.

    Source: tf.compat.v1.train.get_global_step.

    Example:
      >>> import phalanx.estimator as estimator
      >>> estimator.get_global_step() is None
      True
    """
    current = current_graph()
    return None if current is None else current.global_step


def get_or_create_global_step(graph: None = None) -> keras.Variable:
    """Returns the number of training steps so far. May be called in any context.

    Args:
      graph: must be None; for programs of TensorFlow 1.

    Returns:
      A scalar integer variable. Outside an Estimator, a new one.

    Source: tf.compat.v1.train.get_or_create_global_step.

    Example:
      >>> import phalanx.estimator as estimator
      >>> int(estimator.get_or_create_global_step())
      0
    """
    current = get_global_step()
    return _new_step() if current is None else current


def identity(value: T, name: str | None = None) -> T:
    """Names an array of a model function, so that hooks can fetch it by its name. Call it in a model function.

    Args:
      value: array that the model function has computed.
      name: the name. None gives none.

    Returns:
      `value`.

    Raises:
      ContextError: called outside a model function.

    Source: tf.identity.

    Example:
      >>> import phalanx.estimator as estimator
      >>> def model_fn(features, labels, mode):
      ...     loss = estimator.identity((features - labels).mean(), name="difference")
    """
    return require_graph("estimator.identity").identity(value, name)
