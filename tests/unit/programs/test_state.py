"""The arrays of a program's variables."""

import re

import jax.numpy as jnp
import numpy as np
import pytest
from steps import variable

import phalanx
from phalanx._src.compat import raw_value
from phalanx._src.programs.slots import slot_of
from phalanx._src.programs.state import State
from phalanx._src.programs.values import put_values
from phalanx.errors import StateLostError


def test_held_values_stay_alive(strategy, collect):
    """What a step has returned of a variable, `v.value`, a NumPy view of it, and local results survive the steps after them."""
    v = variable(strategy, np.float32([10.0, 20.0]))
    step = phalanx.function(lambda: (strategy.run(lambda: v.assign_add([1.0, 1.0])), v.value)[1])
    result = step()
    step()
    ref, array = v.value, np.asarray(v.value)
    local = strategy.experimental_local_results(v)
    for _ in range(3):
        step()
    collect()
    assert result.tolist() == [12, 22]
    assert ref.tolist() == array.tolist() == local[1].tolist() == [14, 24]
    assert v.numpy().tolist() == [20, 30]


def test_numpy_view_alone_stays_alive(strategy):
    """The array behind it may not be donated, though nobody holds the jax array."""
    v = variable(strategy, np.zeros(1000, "float32"))
    strategy.run(v_add := (lambda: v.assign_add(jnp.ones(1000))))
    view = np.asarray(v.value)
    for _ in range(3):
        strategy.run(v_add)
    assert view.tolist() == [2.0] * 1000


def test_target_assign_online(strategy):
    """Two variables that share an array part at the next step."""
    online, target = variable(strategy, 1.0), variable(strategy, 5.0)
    target.assign(online)
    train = lambda: online.assign_add(1.0)  # noqa: E731
    read = lambda: target.assign_add(0.5) * 1  # noqa: E731
    for _ in range(3):
        strategy.run(train)
    assert (online.numpy(), target.numpy()) == (7, 1)
    target.assign(online)
    strategy.run(read)
    strategy.run(train)
    assert (online.numpy(), target.numpy()) == (9, 8)


def test_lost_state_names_variable_and_remedy(strategy):
    """When a value that the program needs is gone, the error names the variable and the remedy."""
    v = variable(strategy, np.zeros(4, "float32"), name="lost")
    strategy.run(step := (lambda: v.assign_add(jnp.ones(4))))
    v.value.delete()
    with pytest.raises(StateLostError, match=r"a step that writes 1 variables: .* the values of 1 of them \(lost") as e:
        strategy.run(step)
    assert "load the last checkpoint" in e.value.hint
    v.assign(np.zeros(4))
    strategy.run(step)
    assert v.numpy().tolist() == [2] * 4


def test_every_variable_keeps_its_buffer(strategy):
    """Also one of the size of a result: XLA would give the buffer to whichever comes first."""
    count, weight = variable(strategy, 0, dtype="int32"), variable(strategy, [0.0] * 3)
    step = phalanx.function(lambda: strategy.run(lambda: (count.assign_add(1), weight.assign_add([1.0] * 3))[1].sum()))
    shared = re.findall(r"\{(\d+)\}: \((\d+), \{\}, may-alias\)", step.lower().compile().as_text())
    assert shared == [("0", "0"), ("1", "1")]


def test_lent_array_is_copied_until_a_step_has_stored_its_result(strategy):
    """A step that fails after it has taken the arrays leaves them lent, so the next one must not consume them either."""
    v = variable(strategy, np.float32([1.0]))
    strategy.run(lambda: v.assign_add([1.0]))
    state = State([v], [True], strategy.topology, strategy.topology)
    state.take()
    slot_of(v).lend()
    for _ in range(2):
        (taken,), _ = state.take()[0]
        assert taken is not raw_value(v)
    state.run(lambda donated, kept, inputs: (donated[0], []), ([raw_value(v)], []), ([], []), [])
    assert slot_of(v).owned


def test_values_are_put_on_the_devices(strategy):
    """The next program consumes the arrays without a copy, and does not write into the memory of the given values."""
    v = variable(strategy, np.zeros(1 << 10, "float32"))
    strategy.run(add := (lambda: v.assign_add(jnp.ones(1 << 10))))
    memory = np.zeros((1 << 10) + 16, "float32")
    start = -memory.ctypes.data % 64 // 4
    given = memory[start : start + (1 << 10)]  # XLA shares memory that begins at a multiple of 64 bytes.
    put_values([(v, given)], strategy.topology)
    state = State([v], [True], strategy.topology, strategy.topology)
    assert id(state.take()[0][0][0]) == id(raw_value(v))
    strategy.run(add)
    assert v.numpy().tolist() == [2.0] * (1 << 10)
    assert not given.any()
    put_values([(v, given)])
    assert v.numpy().tolist() == [0.0] * (1 << 10)


def test_variables_move_between_programs(strategy):
    """Two programs that write the same variable in turn, and one that writes another one too."""
    v, w = (variable(strategy, np.float32(0), aggregation="only_first_replica") for _ in range(2))

    def one():
        v.assign_add(1.0)

    def both():
        v.assign_add(10.0)
        w.assign_add(1.0)

    for _ in range(3):
        strategy.run(one)
        strategy.run(both)
        strategy.run(both)
    assert (float(v), float(w)) == (63.0, 6.0)
    v.assign(0.0)
    strategy.run(both)
    strategy.run(one)
    assert (float(v), float(w)) == (11.0, 7.0)
