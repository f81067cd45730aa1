"""`strategy.extended`: the names that older code calls."""

import jax.numpy as jnp
import keras
import pytest
from replica_values import per_replica, replica_id

import phalanx
from phalanx import Mirrored
from phalanx.errors import ContextError, InvalidArgumentError, ReduceOpError


def test_extended_devices_are_in_replica_order(strategy):
    """What old code asks on one machine. The default strategy places nothing."""
    extended = strategy.extended
    assert extended.worker_devices == extended.parameter_devices == ("cpu:0", "cpu:1")
    assert (extended.should_checkpoint, extended.should_save_summary) == (True, True)
    assert not extended.experimental_require_static_shapes
    assert strategy.cluster_resolver is None
    with pytest.raises(
        ContextError, match="worker_devices of the default strategy: the default strategy has no devices"
    ):
        phalanx.get_strategy().extended.worker_devices  # noqa: B018


def test_variable_created_in_scope(strategy):
    """By whose scope it was made, even if another strategy is over the same devices. Only such variables have neighbours."""
    twin, other = phalanx.MirroredStrategy(["cpu:0", "cpu:1"]), phalanx.MirroredStrategy(["cpu:2", "cpu:3"])
    with strategy.scope():
        v = keras.Variable(1.0)
        with strategy.extended.colocate_vars_with(v):
            assert len(keras.Variable(1.0).value.devices()) == 2
    with twin.scope():
        of_twin = keras.Variable(1.0, name="v")
    variables = [v, keras.Variable(1.0, name="w"), of_twin]
    made = [
        [s.extended.variable_created_in_scope(x) for x in variables]
        for s in (strategy, twin, other, phalanx.get_strategy())
    ]
    assert made == [[True, False, False], [False, False, True], [False, False, False], [False, True, False]]
    assert strategy.extended.value_container(v) is v
    for x in variables[1:]:
        match = rf"colocate_vars_with\(variable '{x.name}' .*was not created in the scope of this strategy"
        with pytest.raises(InvalidArgumentError, match=match):
            strategy.extended.colocate_vars_with(x)


@pytest.mark.parametrize("bad", [None, 1, "x", [], object()])
def test_extended_wants_variables(strategy, bad):
    """One check for all methods that take one."""
    extended = strategy.extended
    for call in (
        lambda: extended.update(bad, lambda v: v),
        lambda: extended.variable_created_in_scope(bad),
        lambda: extended.colocate_vars_with(bad),
    ):
        with pytest.raises(InvalidArgumentError, match="must be a Keras variable"):
            call()


def test_variable_for_a_list(strategy):
    """What would loop for ever if it were taken for a list of arguments."""
    with strategy.scope():
        v = keras.Variable([1.0, 2.0])
    with pytest.raises(InvalidArgumentError, match=r"args=<Variable.*must be a list or a tuple.\nHINT: args=\(x,\)"):
        strategy.extended.update(v, lambda v, x: v.assign(x), args=v)
    with pytest.raises(InvalidArgumentError, match=r"value_destination_pairs=<Variable.*: must be a list of pairs"):
        strategy.extended.batch_reduce_to("SUM", v)


@pytest.mark.parametrize(("op", "expected"), [("SUM", 3.0), ("MEAN", 1.5)])
def test_reduce_to_gives_mirrored_results(strategy, op, expected):
    """A mirrored result, for one value or several."""
    value = per_replica(strategy, 1.0, 2.0)
    one = strategy.extended.reduce_to(op, value, "cpu:0")
    two = strategy.extended.batch_reduce_to(op, [(value, value)] * 2)
    assert [float(v) for x in (one, *two) for v in x.values] == [expected] * 6


def test_reduce_to_of_what_all_replicas_share(strategy):
    """A mean is the value, also beside one that differs; a sum is ambiguous."""
    assert strategy.extended.reduce_to("MEAN", 4.0, "cpu:0") == 4.0
    pairs = [(per_replica(strategy, 1.0, 2.0), "cpu:0"), (5.0, "cpu:0")]
    one, two = strategy.extended.batch_reduce_to("MEAN", pairs)
    assert (float(jnp.asarray(one)), float(jnp.asarray(two))) == (1.5, 5.0)
    with pytest.raises(ReduceOpError, match="it is not a per-replica value"):
        strategy.extended.reduce_to("SUM", 4.0, "cpu:0")


@pytest.mark.parametrize("destinations", [None, [], ("cpu:0",)])
def test_reduce_to_nowhere(strategy, destinations):
    with pytest.raises(InvalidArgumentError, match="destinations=.*: must be a value, a variable or a device name"):
        strategy.extended.reduce_to("SUM", per_replica(strategy, 1.0, 2.0), destinations)


def test_broadcast_to_mirrors_arrays(strategy):
    """Numbers pass through; arrays become mirrored. `call_for_each_replica` is the older name of `run`."""
    assert strategy.extended.broadcast_to(3, "cpu:0") == 3
    assert len(strategy.extended.broadcast_to(jnp.ones(2), "cpu:0").values) == 2
    result = strategy.extended.call_for_each_replica(lambda x, *, y: x + y + replica_id(), (1.0,), {"y": 2.0})
    assert [float(v) for v in result.values] == [3, 4]


def test_update_passes_the_variable(strategy):
    """And values that are equal on all replicas; with others the variable would diverge."""
    with strategy.scope():
        v = keras.Variable(1.0, name="v")
    update = lambda v, x, *, y: float(v.assign(x + y))  # noqa: E731
    for group, expected in ((True, 7.0), (False, (7.0, 7.0))):
        assert strategy.extended.update(v, update, (Mirrored(3.0),), {"y": 4.0}, group=group) == expected
    assert v.numpy() == 7
    with pytest.raises(ContextError, match=r"extended.update\(variable 'v' .*: an argument differs between replicas"):
        strategy.extended.update(v, lambda v, x: v.assign(x), args=(per_replica(strategy, 1.0, 2.0),))
