"""Law 4a: whatever interrupts a step, the variables are those of the last finished step, all of them."""

import dis
import functools
import signal
import subprocess
import sys
import threading

import jax
import keras
import numpy as np
import pytest
from strategy_table import on

import phalanx
from phalanx._src.programs import body, program, state
from phalanx._src.programs.interrupts import raise_what_is_ignored

FILES = (body.__file__, program.__file__, state.__file__)
ONE_PROGRAM = on("default", "one_device", "mirrored_x2", "sharded_x2")


class Counting:
    """A step that adds 1 to some variables of each kind, so that a lost or half step shows.

    Args:
      strategy: the strategy.
    """

    def __init__(self, strategy):
        self.strategy = strategy
        with strategy.scope():
            self.variables = [
                keras.Variable(np.zeros(8, "float32"), trainable=False),
                keras.Variable(np.zeros((), "int32"), trainable=False, aggregation="only_first_replica"),
                keras.Variable(np.zeros(8, "float32"), trainable=False, synchronization="on_read", aggregation="mean"),
            ]
            self.weight = keras.Variable(np.zeros(8, "float32"))
            self.optimizer = keras.optimizers.SGD(1.0)
            self.optimizer.build([self.weight])
        self.replicas = strategy.num_replicas_in_sync

    def __call__(self):
        """What a replica does."""
        for variable in self.variables:
            variable.assign_add(np.ones(variable.shape, variable.dtype))
        self.optimizer.apply_gradients([(-jax.numpy.ones(8) / self.replicas, self.weight)])

    def steps(self):
        """Returns how many steps each variable says were made; all agree unless a step was lost or halved."""
        return {
            float(n) for v in (*self.variables, self.weight, self.optimizer.iterations) for n in np.ravel(v.numpy())
        }


@pytest.fixture
def counting(strategy):
    """The step, which has run twice: its program is compiled."""
    step = Counting(strategy)
    for _ in range(2):
        strategy.run(step)
    assert step.steps() == {2.0}
    return step


INTERRUPTIBLE = {"CALL", "CALL_FUNCTION_EX", "CALL_KW", "RESUME", "JUMP_BACKWARD"}
"""The bytecodes after which Python's interpreter runs the handlers of signals."""


@functools.cache
def names_of_bytecodes(code):
    """Returns the name of the bytecode at each offset of a function."""
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


def interrupt_at(number, run):
    """Calls `run`, and raises KeyboardInterrupt where a signal handler could for the `number`-th time.

    Counts the places in the modules that run programs, deterministically and without omission.

    Returns:
      Whether there are as many places.
    """
    seen, last = 0, {}

    def trace(frame, event, _):
        nonlocal seen
        frame.f_trace_opcodes = True
        # Callbacks of weak references are lambdas; what they raise Python ignores.
        if frame.f_code.co_filename not in FILES or frame.f_code.co_name == "<lambda>":
            return None
        if event == "opcode":
            seen += last.get(frame) in INTERRUPTIBLE
            last[frame] = names_of_bytecodes(frame.f_code)[frame.f_lasti]
            if seen == number:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        run()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


@ONE_PROGRAM
def test_interrupt_in_every_place_of_a_step(counting):
    """Wherever the handler of a signal raises, no variable is lost and no step is halved."""
    run = lambda: counting.strategy.run(counting)  # noqa: E731
    finished, number = 2, 1
    while interrupt_at(number, run):
        steps = counting.steps()
        assert len(steps) == 1, f"half a step at place {number}"
        assert steps <= {finished, finished + 1.0}
        (finished,) = steps
        number += 1
    assert counting.steps() == {finished + 1.0}
    assert counting.strategy.num_replicas_in_sync == 1 or number > 20


class Alarm(BaseException):
    """What the handler of a signal raises. No `Exception`: JAX catches some of those, and raises others."""


@pytest.fixture
def alarm(monkeypatch):
    """A handler of SIGALRM that raises. pytest has replaced the hook that importing Phalanx had installed."""
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    raise_what_is_ignored()

    def handle(*_):
        raise Alarm

    before = signal.signal(signal.SIGALRM, handle)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


def kinds_of_loops(counting):
    """Returns the ways in which a custom loop does a step."""
    whole = phalanx.function(lambda: counting.strategy.run(counting))
    batch_step = lambda _: counting()  # noqa: E731
    # One iterator for all steps: an exception while it reads ahead is raised by its next call.
    batches = iter(counting.strategy.experimental_distribute_dataset(np.zeros(1_000_000, "int8"), batch_size=2))
    return {
        "run": lambda: counting.strategy.run(counting),
        "function": whole,
        "run_steps": lambda: counting.strategy.run_steps(batch_step, batches, 3),
    }


@pytest.mark.cover(
    ["strategy", "kind"],
    {("one_device", "run"), ("mirrored_x2", "run"), ("mirrored_x2", "run_steps"), ("central_x2", "function")},
)
@pytest.mark.usefixtures("alarm")
@pytest.mark.parametrize("kind", ["run", "function", "run_steps"])
@on("one_device", "mirrored_x2", "sharded_x2", "central_x2")
def test_alarms_at_random_moments_of_a_loop(counting, kind):
    """Real signals: none is swallowed, and after each all variables agree."""
    step, rng, heard = kinds_of_loops(counting)[kind], np.random.default_rng(0), 0
    step()
    for _ in range(20):
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(0.001, 0.02))
            while True:
                step()
        except Alarm:
            heard += 1
        assert len(counting.steps()) == 1
    assert heard == 20


@on("central_x2")
def test_update_that_fails_takes_its_step_back(counting, monkeypatch):
    """Under central storage the update follows the step: if it raises, the step has not happened."""

    def fail(update):
        raise Alarm

    with monkeypatch.context() as patch:
        patch.setattr(counting.strategy, "apply_update", fail)
        with pytest.raises(Alarm):
            counting.strategy.run(counting)
    assert counting.steps() == {2.0}
    counting.strategy.run(counting)
    assert counting.steps() == {3.0}


@on("mirrored_x2")
def test_update_outside_a_program_is_whole_or_absent(strategy):
    """An exception in the middle of `optimizer.apply_gradients` takes back what it had assigned."""
    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(2)])
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build(model.trainable_variables)
    pairs = [(np.ones(v.shape, "float32"), v) for v in model.trainable_variables]
    optimizer.apply_gradients(pairs)
    watched = [*model.variables, *optimizer.variables]
    before, assigned = [v.numpy() for v in watched], []

    class Failing(keras.Variable):
        """A variable of which every assignment fails."""

        def _direct_assign(self, value):
            assigned.append(value)
            raise KeyboardInterrupt

    model.trainable_variables[-1].__class__ = Failing
    with pytest.raises(KeyboardInterrupt):
        optimizer.apply_gradients(pairs)
    assert assigned
    for variable, value in zip(watched, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def parts_of(array):
    """Returns the parts of an array that users can hold."""
    device = next(iter(array.sharding.device_set))
    return {
        "addressable_data": array.addressable_data(0),
        "addressable_shards": array.addressable_shards[0].data,
        "global_shards": array.global_shards[0].data,
        "device_put": jax.device_put(array, device),
    }


@pytest.mark.parametrize("part", ["addressable_data", "addressable_shards", "global_shards", "device_put"])
@on("default", "one_device", "mirrored_x2", "sharded_x2", "central_x2")
def test_a_part_that_the_user_holds_is_never_donated(counting, part):
    """A copy of a weight by its shards, for a teacher or for the best weights, survives the next steps."""
    held = parts_of(counting.weight.value)[part]
    for _ in range(2):
        counting.strategy.run(counting)
    assert set(np.asarray(held).tolist()) == {2.0}
    assert counting.steps() == {4.0}


@on("mirrored_x2", "one_device")
def test_program_in_a_host_callback_is_refused(strategy):
    """A step waits for its callback, which would wait for the step for ever."""

    def callback(x):
        strategy.run(lambda: x)
        return x

    def step(x):
        return jax.pure_callback(callback, jax.ShapeDtypeStruct((), "float32"), x)

    failed = []

    def run():
        try:
            strategy.run(step, args=(np.float32(1),))
        except Exception as e:
            failed.append(str(e))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert "called in a host callback" in failed[0]
    assert float(strategy.reduce("SUM", strategy.run(lambda x: x, args=(np.float32(1),)), axis=None)) >= 1


ENDS = """
import sys, types
early = sys.modules["early"] = types.ModuleType("early")
import phalanx._src.programs.interrupts as interrupts
class Late:
    def __del__(self):
        raise ValueError("late")
early.late = Late()
sys.keeps = [early, interrupts]
del early, interrupts
"""


def test_error_while_the_interpreter_ends_is_shown():
    """After it has set the names of our module to None."""
    ended = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True, timeout=600, check=True)
    assert "ValueError: late" in ended.stderr
    assert "TypeError" not in ended.stderr
