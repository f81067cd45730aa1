"""Law 5: a failure anywhere ends in an error, no weight is lost or changed, and training goes on afterwards."""

import os
import sys

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers
from strategy_table import on
from tests import forks

import phalanx
from phalanx.errors import CallError, InputError, InvalidArgumentError, NestedWriteError, PhalanxError, TraceError

BATCH = np.random.default_rng(5).normal(size=(8, 4)).astype("float32")


class Boom(Exception):
    """The user's own exception."""


class Training:
    """A model with state of every kind, and a step into which a failure can be put at several places."""

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            parts = [layers.Dense(4), layers.BatchNormalization(), layers.Dropout(0.2, seed=1), layers.Dense(1)]
            self.model = keras.Sequential([layers.Input((4,)), *parts])
            self.optimizer = keras.optimizers.Adam(0.01)
            self.optimizer.build(self.model.trainable_variables)
            self.metric = keras.metrics.Mean()
            on_read = {"synchronization": "on_read", "aggregation": "sum", "trainable": False}
            self.rows = keras.Variable(0, dtype="int32", **on_read)
        self.failures = {}

    @property
    def variables(self):
        """All of them."""
        return [*self.model.variables, *self.optimizer.variables, *self.metric.variables, self.rows]

    def step(self, batch):
        """One step; it fails where `failures` has a function."""
        self.fail("start")
        self.rows.assign_add(batch.shape[0])
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss((self.model(batch, training=True)[:, 0] - 1) ** 2)
            self.metric.update_state(loss)
            self.fail("tape")
        trained = self.model.trainable_variables
        gradients = tape.gradient(loss, trained)
        self.fail("gradient")
        self.optimizer.apply_gradients(zip(gradients, trained, strict=True))
        result = self.fail("end", loss)
        return loss if result is None else result

    def fail(self, place, *args):
        """Fails, if it is wanted here."""
        return self.failures.get(place, lambda *_: None)(*args)

    def run(self, batch=BATCH):
        """One step on one distributed batch."""
        (batch,) = self.strategy.experimental_distribute_dataset([batch])
        return self.strategy.reduce("SUM", self.strategy.run(self.step, args=(batch,)), axis=None)

    def bits(self):
        """Every variable, bit for bit, and the replicas' own components."""
        local = [self.strategy.experimental_local_results(v) for v in self.variables]
        return [
            np.array(x).tobytes() for v, parts in zip(self.variables, local, strict=True) for x in (v.value, *parts)
        ]


@pytest.fixture(scope="module")
def trainings():
    """One for each row: it lives through all failures of this file."""
    return {}


@pytest.fixture
def training(request, strategy, trainings):
    """One that has made a good step, so that its arrays are the engine's own and may be donated."""
    row = request.node.callspec.params["strategy"]
    if row not in trainings:
        trainings[row] = Training(strategy)
        trainings[row].run()
    return trainings[row]


PLACES = ("start", "tape", "gradient", "end")


def assert_survives(training, error, match, fail):
    """`fail` raises, nothing changed, and the next step is the step that would have come without the failure."""
    before = training.bits()
    with pytest.raises(error, match=match):
        fail()
    assert training.bits() == before
    training.failures.clear()
    loss = training.run()
    assert np.isfinite(loss)
    assert training.bits() != before


def raise_boom(*_):
    """A bug in the user's code."""
    raise Boom("mine")


@pytest.mark.cover(
    ["strategy", "place"], {("mirrored_x2", place) for place in PLACES} | {("default", "end"), ("central_x2", "tape")}
)
@pytest.mark.parametrize("place", PLACES)
@on("default", "one_device", "mirrored_x2", "mirrored_x8", "central_x2")
def test_exception_at_trace_time(training, place):
    """The user's exception comes out as it is, from whatever place in the step; another batch size retraces the step."""
    training.failures[place] = raise_boom
    assert_survives(training, Boom, "mine", lambda: training.run(BATCH[:5]))


@pytest.mark.cover(["strategy"], {"default", "mirrored_x2"})
@on("default", "one_device", "mirrored_x2", "mirrored_x3_hierarchical")
def test_exception_in_the_second_trace(training):
    """A step that makes a variable is traced twice: the first trace may go well, and the second fail."""
    made = []

    def make_or_fail(_):
        if made:
            raise_boom()
        made.append(keras.Variable("zeros", shape=(), trainable=False))
        _ = made[0].value

    training.failures["end"] = make_or_fail
    assert_survives(training, Boom, "mine", lambda: training.run(BATCH[:5]))


@on("default", "mirrored_x2")
def test_keyboard_interrupt_while_tracing_changes_nothing(training):
    """An interrupt while tracing leaves everything as it was, too."""

    def interrupt(*_):
        raise KeyboardInterrupt("stop")

    training.failures["gradient"] = interrupt
    assert_survives(training, KeyboardInterrupt, "stop", lambda: training.run(BATCH[:5]))


def failing_callback(loss):
    """A host callback that fails while the program runs."""
    return jax.pure_callback(raise_boom, jax.ShapeDtypeStruct((), jnp.float32), loss)


def run_with_a_callback(strategy):
    """A callback works after one that failed; JAX, which reports a failed one at its next barrier, forgets that one."""
    called = []
    echo = lambda x: called.append(x) or np.asarray(x)  # noqa: E731
    strategy.run(lambda: jax.pure_callback(echo, jax.ShapeDtypeStruct((), jnp.float32), 1.0))
    jax.effects_barrier()
    assert called


@pytest.mark.cover(["strategy"], {"mirrored_x2", "central_x2"})
@on("default", "one_device", "mirrored_x2", "mirrored_x2_one_device", "mirrored_x8", "central_x2")
def test_exception_in_a_callback_at_run_time(training):
    """A host callback that fails when the program has run half of the step."""
    training.failures["end"] = failing_callback
    assert_survives(training, jax.errors.JaxRuntimeError, "(?s)callback.*Boom: mine", lambda: training.run(BATCH[:5]))
    run_with_a_callback(training.strategy)


@pytest.mark.cover(["strategy"], {"mirrored_x2"})
@on("one_device", "mirrored_x2", "central_x2")
def test_debug_nans_leave_the_weights(strategy):
    """`jax.debug_nans` finds a NaN, and the weights survive it."""
    training = Training(strategy)
    training.run()

    def fail():
        with jax.debug_nans(True):
            training.run(BATCH * np.nan)

    assert_survives(training, FloatingPointError, "invalid value|NaN", fail)


@pytest.mark.cover(["strategy"], {"mirrored_x2", "central_x2"})
@on("one_device", "mirrored_x2", "central_x2")
def test_eager_run_fails_half_way(training):
    """`RunOptions(eager=True)` assigns everything at its end or nothing."""
    training.failures["end"] = raise_boom
    eager = phalanx.RunOptions(eager=True)
    assert_survives(training, Boom, "mine", lambda: training.strategy.run(training.step, (BATCH,), options=eager))


@pytest.mark.cover(["strategy"], {"default", "mirrored_x2"})
@on("default", "mirrored_x2", "mirrored_x4")
def test_exception_in_a_compiled_function(training):
    """An exception after `run` in a `phalanx.function` takes the run back."""

    @phalanx.function
    def whole(batch):
        training.strategy.run(training.step, args=(batch,))
        raise Boom("after")

    assert_survives(training, Boom, "after", lambda: whole(BATCH))


@on("mirrored_x2", "mirrored_x3")
def test_exception_in_a_merge_function(training):
    """An exception in cross-replica code inside a step."""
    merge = lambda: phalanx.get_replica_context().merge_call(raise_boom)  # noqa: E731
    training.failures["gradient"] = merge
    assert_survives(training, Boom, "mine", lambda: training.run(BATCH[:5]))


def number_of_replica():
    return phalanx.get_replica_context().replica_id_in_sync_group


def broken_after(count):
    """A source of data that breaks."""
    yield from [BATCH] * count
    raise Boom("disk")


@pytest.mark.cover(["strategy"], {"default", "mirrored_x2"})
@pytest.mark.parametrize("count", [0, 1, 3])
@on("default", "one_device", "mirrored_x2", "mirrored_x8", "central_x2")
def test_exception_in_the_data(training, count):
    """An exception of the data comes with the batch it belongs to, after all batches before it."""
    batches = iter(training.strategy.experimental_distribute_dataset(broken_after(count)))
    for _ in range(count):
        training.strategy.run(training.step, args=(next(batches),))
    assert_survives(training, Boom, "disk", lambda: next(batches))
    with pytest.raises(StopIteration):
        next(batches)


@on("mirrored_x2")
def test_ragged_batch_is_refused_repeatedly(training):
    """A batch whose leaves disagree is refused: of a list at once, of a stream when it is asked for, again and again."""
    ragged, message = [(BATCH, BATCH[:3])], r"its leaves have different numbers of rows: \[3, 8\]"
    distribute = training.strategy.experimental_distribute_dataset
    assert_survives(training, InputError, message, lambda: distribute(ragged))
    data = distribute(lambda: iter(ragged))
    for _ in range(2):
        assert_survives(training, InputError, message, lambda: next(iter(data)))


WRONG = {
    "args that are no tuple": (
        InvalidArgumentError,
        "must be a list or a tuple",
        lambda t: t.strategy.run(t.step, BATCH),
    ),
    "too many arguments": (TypeError, "positional argument", lambda t: t.strategy.run(t.step, (BATCH, 1))),
    "an unknown keyword": (
        CallError,
        "unexpected keyword",
        lambda t: t.strategy.run(t.step, (BATCH,), {"x": 1}),
    ),
    "a shape that does not fit": (ValueError, "expected axis -1|incompatible", lambda t: t.run(BATCH[:, :3])),
    "a function that is none": (InvalidArgumentError, "is not callable", lambda t: t.strategy.run(None)),
    "an unknown reduction": (PhalanxError, "not a ReduceOp", lambda t: t.strategy.reduce("MAX", 1.0, axis=None)),
    "Python components": (
        TraceError,
        "its components are Python objects",
        lambda t: t.strategy.run(t.step, (t.strategy.experimental_distribute_values_from_function(lambda c: str(c)),)),
    ),
    "values of another strategy": (
        PhalanxError,
        "replicas",
        lambda t: t.strategy.run(t.step, (phalanx.PerReplica(jnp.ones((5, 2, 4))),)),
    ),
    "values of a larger strategy": (
        PhalanxError,
        "replicas",
        lambda t: t.strategy.run(lambda x: x, (phalanx.PerReplica(jnp.ones((4, 2))),)),
    ),
    "a write in a raw scan": (
        NestedWriteError,
        "variable",
        lambda t: t.strategy.run(lambda: jax.lax.scan(lambda c, _: (c, t.rows.assign_add(1)), 0.0, None, 2)),
    ),
    "an assignment of another shape": (
        ValueError,
        "shape",
        lambda t: t.strategy.run(lambda: t.optimizer.iterations.assign(jnp.ones(3))),
    ),
    "a write that would make the replicas differ": (
        PhalanxError,
        "aggregation",
        lambda t: t.strategy.run(
            lambda: t.model.trainable_variables[0].assign(jnp.zeros((4, 4)) + number_of_replica())
        ),
    ),
    "too few gradients": (ValueError, ".", lambda t: t.strategy.run(lambda: t.optimizer.apply([1.0]))),
}


@pytest.mark.parametrize(("error", "match", "call"), WRONG.values(), ids=WRONG)
@on("mirrored_x2")
def test_wrong_call_changes_nothing(training, error, match, call):
    """A call that cannot work is refused, and changes nothing."""
    assert_survives(training, error, match, lambda: call(training))


@pytest.mark.cover(["strategy"], {"mirrored_x2"})
@on("default", "one_device", "mirrored_x2")
def test_failures_between_steps(training):
    """A training with failures in between has the bits of one without."""
    other = Training(training.strategy)
    training.metric.reset_state()  # Its replicas' own sums are rounded in another order than their total.
    for mine, theirs in zip(training.variables, other.variables, strict=True):
        theirs.assign(np.array(mine.value))
    for step in range(2):
        training.failures["end"] = [raise_boom, failing_callback][step]
        with pytest.raises(Exception, match="mine"):
            training.run(BATCH[: step + 1])
        training.failures.clear()
        assert float(training.run()) == float(other.run())
    for mine, theirs in zip(training.variables, other.variables, strict=True):
        assert np.array(mine.value).tobytes() == np.array(theirs.value).tobytes()
    run_with_a_callback(training.strategy)


@on("one_device", "mirrored_x2", "central_x2")
def test_out_of_memory(strategy):
    """A program that runs out of memory took the weights it was given: no later step goes on with wrong ones."""
    with strategy.scope():
        v = keras.Variable(1.0, trainable=False, aggregation="mean")

    def step(x, elements):
        huge = jax.lax.fori_loop(0, 2, lambda i, b: b * x + i, jnp.ones({"too many": 1 << 46, "one": 1}[elements]))
        v.assign(v * 2 + 0 * huge[0])
        return huge[0]

    for elements in ("too many", "one"):
        with pytest.raises(RuntimeError, match="(?i)out of memory|load the last checkpoint"):
            jax.block_until_ready(jax.tree.leaves([strategy.run(step, (2.0, elements)), v.value]))
    v.assign(3.0)
    strategy.run(step, (2.0, "one"))
    assert float(v.value) == 6


ONE_REPLICA_FAILS = """
import phalanx
phalanx.set_virtual_cpu_devices(2)
import jax, numpy as np
def fail(x):
    if x == 1:
        raise ValueError("replica 1 says no")
    return x
def step():
    context = phalanx.get_replica_context()
    x = jax.pure_callback(fail, jax.ShapeDtypeStruct((), "int32"), context.replica_id_in_sync_group)
    return context.all_reduce("SUM", x)
print(phalanx.MirroredStrategy().run(step))
"""


def test_callback_that_fails_on_one_replica(monkeypatch):
    """XLA ends a process whose replicas wait for one that failed; it does not hang, and stderr names the culprit."""
    timeouts = "--xla_cpu_collective_call_warn_stuck_timeout_seconds=1"
    timeouts += " --xla_cpu_collective_call_terminate_timeout_seconds=2"
    monkeypatch.setenv("XLA_FLAGS", f"{os.environ['XLA_FLAGS']} {timeouts}")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    done = forks.run([sys.executable, "-c", ONE_REPLICA_FAILS], capture_output=True, text=True, timeout=60)
    assert done.returncode != 0
    assert "replica 1 says no" in done.stderr
    assert not done.stdout
