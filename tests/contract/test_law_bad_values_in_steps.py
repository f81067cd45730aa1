"""Law 5, for arguments in a step: what is called in a replica, or in a branch of one, ends in an error of Phalanx or in a result."""

import functools

import jax.numpy as jnp
import keras
import pytest
from bad_groups import GROUPS
from bad_values import FEW, FUNCTIONS, VALUES, Hung, limited

import phalanx
from phalanx.errors import PhalanxError


@pytest.fixture(scope="module")
def training():
    """A step of one variable on two replicas, which calls something else before or in a branch."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        variable = keras.Variable(0.0, aggregation="mean")

    def in_replica(call):
        call()
        variable.assign_add(1.0)

    def in_branch(call):
        def branch():
            call()
            return variable + 1.0

        rank = phalanx.get_replica_context().replica_id_in_sync_group
        variable.assign(phalanx.cond(jnp.asarray(rank) >= 0, branch, lambda: variable + 2.0))

    places = {"replica": in_replica, "branch": in_branch}
    return variable, lambda place, call: strategy.run(functools.partial(places[place], call))


def outcome(run, case, name, parameter, value):
    """Returns the raw error of one bad value in a step; None if it is an error of Phalanx, or a result."""
    try:
        with limited():
            run(lambda: case.call(**{**case.good, parameter: VALUES[value]()}))
    except PhalanxError:
        return None
    except Hung:
        return f"{name}({parameter}={value}) hangs"
    except Exception as e:
        # What another function raises when it is called with other arguments than it takes is its own, and so is what data raise.
        is_own = value in FUNCTIONS or value == "unshown" or str(e) == "no"
        return None if is_own else f"{name}({parameter}={value}): {e!r:.200}"
    return None


@pytest.mark.usefixtures("whole_tracebacks")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("values", ["few", "all"])
@pytest.mark.parametrize("place", ["replica", "branch"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.cover(["group", "place", "values"], {("control_flow", "branch", "few")})
def test_bad_values_in_steps(group, place, values, training):
    """And the variable that the step trains has the right value after each call."""
    variable, run = training
    wrong = []
    for name, case in GROUPS[group]().items():
        for parameter in case.good:
            for value in VALUES if values == "all" else FEW:
                variable.assign(0.0)
                wrong.append(outcome(functools.partial(run, place), case, name, parameter, value))
                if float(variable.value) not in (0.0, 1.0):
                    wrong.append(f"{name}({parameter}={value}): the variable is {variable.value}")
        run(place, lambda: None)
    assert [text for text in wrong if text] == []
