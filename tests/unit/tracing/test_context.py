"""Scopes, contexts, and the error for each verb in the wrong one."""

import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import ContextError, InputError, InvalidArgumentError, MixedStrategyError, ReduceOpError
from phalanx.experimental import CommunicationOptions
from phalanx.tracing import context


@pytest.fixture
def strategy():
    """Two replicas."""
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


def state():
    """What the four questions answer: is there a strategy, is it cross-replica, is there a replica, how many."""
    replica = phalanx.get_replica_context()
    return (
        phalanx.has_strategy(),
        phalanx.in_cross_replica_context(),
        replica is not None,
        phalanx.get_strategy().num_replicas_in_sync,
    )


def test_default_strategy_is_in_replica_context():
    """Outside all scopes: the default strategy, in replica context, with replica 0 of 1."""
    assert state() == (False, False, True, 1)
    assert phalanx.get_replica_context().replica_id_in_sync_group == 0


def test_modes_of_a_strategy(strategy):
    """A scope is cross-replica, `run` is not, `merge_call` is again."""
    seen = []

    def replica_fn():
        seen.append(state())
        phalanx.get_replica_context().merge_call(lambda _: seen.append(state()))

    with strategy.scope() as entered:
        seen.append(state())
        strategy.run(replica_fn)
    assert entered is strategy
    assert seen[:3] == [(True, True, False, 2), (True, False, True, 2), (True, True, False, 2)]
    assert state() == (False, False, True, 1)


def test_scopes_of_one_strategy_nest(strategy):
    """Even the same context manager."""
    scope = strategy.scope()
    with scope, scope, strategy.scope():
        assert phalanx.get_strategy() is strategy
    assert not phalanx.has_strategy()


def test_scope_is_left_after_an_error(strategy):
    """Also one inside `run`."""
    with pytest.raises(KeyError), strategy.scope():
        strategy.run(lambda: {}["missing"])
    assert context.depth() == 0


def test_scope_is_not_seen_in_another_thread(strategy):
    """As in tf.distribute."""
    seen = []
    with strategy.scope():
        thread = threading.Thread(target=lambda: seen.append(phalanx.has_strategy()))
        thread.start()
        thread.join(timeout=10)
    assert seen == [False]


def test_another_strategys_scope(strategy):
    """Only one strategy can be current."""
    other = phalanx.MirroredStrategy(["cpu:2", "cpu:3"])
    with (
        strategy.scope(),
        pytest.raises(MixedStrategyError, match=r"the scope of .*cpu:2.* inside the scope of .*cpu:0"),
    ):
        other.scope().__enter__()
    with strategy.scope(), pytest.raises(MixedStrategyError, match="only one strategy can be current"):
        other.run(lambda: 1)


def test_default_scope_inside_another(strategy):
    """It cannot hide a strategy."""
    default = phalanx.get_strategy()
    with (
        strategy.scope(),
        pytest.raises(ContextError, match="the scope of the default strategy was entered: inside the scope of"),
    ):
        default.scope().__enter__()


def test_scope_in_replica_context(strategy):
    """The message names merge_call."""

    def replica_fn():
        with strategy.scope():
            pass

    with pytest.raises(
        ContextError, match="Strategy.scope was entered in replica context: it works only in cross-replica context"
    ):
        strategy.run(replica_fn)


CROSS_REPLICA_VERBS = {
    "run": lambda s: s.run(lambda: 1),
    "reduce": lambda s: s.reduce("SUM", 1.0, axis=None),
    "gather": lambda s: s.gather(1.0, axis=0),
    "experimental_distribute_values_from_function": lambda s: s.experimental_distribute_values_from_function(
        lambda c: 1
    ),
    "experimental_distribute_dataset": lambda s: s.experimental_distribute_dataset([np.ones(2)]),
    "replicate": lambda s: s.replicate(1.0),
    "reduce_to": lambda s: s.extended.reduce_to("SUM", 1.0, 1.0),
    "broadcast_to": lambda s: s.extended.broadcast_to(1.0, 1.0),
    "extended.update": lambda s: s.extended.update(keras.Variable(1.0), lambda v: v.assign(1.0)),
}


@pytest.mark.parametrize("verb", CROSS_REPLICA_VERBS)
def test_cross_replica_verbs_in_replica_context(strategy, verb):
    """Each says where it belongs and what to call instead."""
    with pytest.raises(
        ContextError, match=f"{verb} was called in replica context: it works only in cross-replica context"
    ) as e:
        strategy.run(lambda: CROSS_REPLICA_VERBS[verb](strategy))
    assert e.value.hint


@pytest.mark.parametrize("verb", CROSS_REPLICA_VERBS)
def test_cross_replica_verbs_under_another_strategy(strategy, verb):
    """Each names both strategies."""
    other = phalanx.MirroredStrategy(["cpu:2", "cpu:3"])
    with other.scope(), pytest.raises(MixedStrategyError, match=r"of .*cpu:0.* inside the scope of .*cpu:2"):
        CROSS_REPLICA_VERBS[verb](strategy)


@pytest.mark.parametrize("method", ["all_reduce", "all_gather", "merge_call"])
def test_replica_methods_outside(strategy, method):
    """A replica context belongs to its function."""
    held = []
    strategy.run(lambda: held.append(phalanx.get_replica_context()))
    arguments = {"all_reduce": ("SUM", 1.0), "all_gather": (1.0, 0), "merge_call": (print,)}[method]
    with pytest.raises(ContextError, match=f"ReplicaContext.{method} was called outside the replica function"):
        getattr(held[0], method)(*arguments)


def test_run_in_merge_call(strategy):
    """The replicas run already."""
    replica_fn = lambda: phalanx.get_replica_context().merge_call(lambda s: s.run(lambda: 1))  # noqa: E731
    with pytest.raises(ContextError, match="Strategy.run was called in merge_call: the replicas are already running"):
        strategy.run(replica_fn)


def test_set_strategy_holds_until_none(strategy):
    """Current from here on; None goes back."""
    phalanx.experimental_set_strategy(strategy)
    assert state() == (True, True, False, 2)
    other = phalanx.MirroredStrategy(["cpu:2"])
    phalanx.experimental_set_strategy(other)
    assert phalanx.get_strategy() is other
    phalanx.experimental_set_strategy(None)
    assert state() == (False, False, True, 1)


@pytest.mark.parametrize("value", ["strategy", None])
def test_set_strategy_in_a_scope(strategy, value):
    """Refused, as in tf.distribute."""
    with strategy.scope(), pytest.raises(ContextError, match="must be called outside all scopes and replica functions"):
        phalanx.experimental_set_strategy(strategy if value else None)


def test_variables_of_a_set_strategy(strategy):
    """A strategy that was set places variables as a scope does."""
    phalanx.experimental_set_strategy(strategy)
    v = keras.Variable(1.0)
    phalanx.experimental_set_strategy(None)
    assert len(v.value.devices()) == 2


@pytest.mark.parametrize("copier", [copy.copy, copy.deepcopy])
def test_default_strategy_is_not_copied(copier):
    """There is one."""
    with pytest.raises(ContextError, match="default strategy|two strategies"):
        copier(phalanx.get_strategy())


def test_default_strategy_is_made_once():
    """Its class makes no second one."""
    with pytest.raises(ContextError, match="there is only one default strategy"):
        type(phalanx.get_strategy())()


def test_copy_of_a_strategy(strategy):
    """A shallow copy would share the programs."""
    with pytest.raises(ContextError, match="two strategies would share the same programs"):
        copy.copy(strategy)


def test_deepcopy_of_a_strategy(strategy):
    """Another strategy over the same devices."""
    strategy.run(replica_sum)
    other = copy.deepcopy(strategy)
    assert other.extended.worker_devices == strategy.extended.worker_devices
    assert [float(x) for x in other.run(replica_sum).values] == [2, 2]


def test_pickle_of_a_strategy(strategy):
    """Devices belong to this process."""
    with pytest.raises(ContextError, match="pickle"):
        pickle.dumps(strategy)


def replica_sum():
    """The number of replicas, found by communicating."""
    return phalanx.get_replica_context().all_reduce("SUM", 1.0)


def test_replica_context_properties(strategy):
    """What a replica knows."""
    seen = []

    def replica_fn():
        replica = phalanx.get_replica_context()
        seen.append((replica.strategy, replica.num_replicas_in_sync, replica.devices, replica.example_mask))
        return replica.replica_id_in_sync_group

    ids = strategy.run(replica_fn).values
    assert seen[0] == (strategy, 2, ("cpu:0", "cpu:1"), None)
    assert [int(i) for i in ids] == [0, 1]
    assert ids[0].dtype == "int32"


def test_default_replica_context_has_no_devices():
    """Values stay where they are."""
    assert phalanx.get_replica_context().devices == ()


VALUE = {"a": [1.0, np.float32([2, 3])], "b": (4, None)}


@pytest.mark.parametrize(
    ("op", "expected"), [("SUM", {"a": [3, [6, 9]], "b": [12]}), ("mean", {"a": [1.5, [3, 4.5]], "b": [6]})]
)
@pytest.mark.parametrize(
    "options",
    [
        None,
        CommunicationOptions(bytes_per_pack=8),
        CommunicationOptions(wire_dtype="bfloat16"),
        CommunicationOptions(bytes_per_pack=8, wire_dtype="bfloat16"),
    ],
    ids=["plain", "packed", "narrow", "packed narrow"],
)
def test_all_reduce_takes_nests(strategy, op, expected, options):
    """Nests of arrays and numbers; every replica gets the result; options change nothing."""

    def replica_fn():
        replica = phalanx.get_replica_context()
        scaled = jax.tree.map(lambda x: x * (replica.replica_id_in_sync_group + 1), VALUE)
        return replica.all_reduce(op, scaled, options)

    result = strategy.run(replica_fn)
    assert result["b"][1] is None
    for i in range(2):
        a, b = result["a"], result["b"]
        assert [float(a[0].values[i]), a[1].values[i].tolist()] == expected["a"]
        assert [float(b[0].values[i])] == expected["b"]


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_works_along_any_dimension(strategy, axis):
    """Along any dim, in replica order."""

    def replica_fn():
        replica = phalanx.get_replica_context()
        return replica.all_gather({"x": jnp.ones((2, 3)) * replica.replica_id_in_sync_group}, axis)

    gathered = strategy.run(replica_fn)["x"].values
    expected = np.concatenate([np.zeros((2, 3)), np.ones((2, 3))], axis)
    for got in gathered:
        np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda r: r.all_reduce("MAX", 1.0), ReduceOpError, "The operations are SUM and MEAN"),
        (lambda r: r.all_reduce("SUM", True), ReduceOpError, "bools have no sum or mean"),
        (lambda r: r.all_reduce("SUM", "text"), ReduceOpError, "not an array of numbers"),
        (lambda r: r.all_gather(1.0, 0), ReduceOpError, "axis=0: a scalar has no dims"),
        (lambda r: r.all_gather(jnp.ones(2), 1), ReduceOpError, "axis=1: the value has dims 0 to 0"),
        (lambda r: r.all_gather(jnp.ones(2), None), ReduceOpError, "axis=None: must be an integer"),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_bad_collectives_leave_next_one_working(replicas, call, error, match):
    """The same errors with one replica and with two; the next collective works."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    with pytest.raises(error, match=match):
        strategy.run(lambda: call(phalanx.get_replica_context()))
    total = strategy.run(
        lambda: phalanx.Mirrored(phalanx.get_replica_context().all_reduce("SUM", jnp.float32(1)))
    ).value
    assert float(total) == replicas


@pytest.mark.parametrize("options", [None, CommunicationOptions(wire_dtype="bfloat16")], ids=["plain", "narrow"])
def test_gradient_of_all_reduce(strategy, options):
    """The all-reduce of the gradient with the same operation: x^2 of 1 and 2 gives 2*2x for SUM, 2x for MEAN."""

    def replica_fn():
        replica = phalanx.get_replica_context()
        x = replica.replica_id_in_sync_group + 1.0
        return [jax.grad(lambda x: replica.all_reduce(op, x * x, options))(x) for op in ("SUM", "MEAN")]  # noqa: B023

    total, mean = strategy.run(replica_fn)
    assert [float(g) for g in total.values] == [4, 8]
    assert [float(g) for g in mean.values] == [2, 4]


def test_tape_through_a_narrow_all_reduce(strategy):
    """A tape sees through what crosses: 2x times the sum 1 + 2 of the replicas' weights."""
    options = CommunicationOptions(wire_dtype="bfloat16")

    def replica_fn(x):
        replica = phalanx.get_replica_context()
        with phalanx.GradientTape() as tape:
            tape.watch(x)
            loss = (replica.replica_id_in_sync_group + 1) * replica.all_reduce("SUM", x * x, options).sum()
        return tape.gradient(loss, x)

    for gradient in strategy.run(replica_fn, args=(jnp.array([3.0, -5.0]),)).values:
        assert gradient.tolist() == [2 * 3 * 3, 2 * -5 * 3]


def test_gradient_of_all_gather(strategy):
    """The all-reduced gradient's own slice: weights 1 to 4 on 2 x 2 elements give [2, 4] and [6, 8]."""

    def replica_fn():
        replica = phalanx.get_replica_context()
        weights = jnp.arange(1.0, 5.0)
        return jax.grad(lambda x: (replica.all_gather(x, 0) * weights).sum())(jnp.ones(2))

    assert [g.tolist() for g in strategy.run(replica_fn).values] == [[2, 4], [6, 8]]


@pytest.mark.parametrize("inside", ["plain", "jit", "scan"])
def test_merge_call_works_inside_transformations(strategy, inside):
    """Also inside transformations of jax, where tf.distribute refuses it."""

    def merged(x):
        merge = lambda s, x, scale: (s.reduce("SUM", x, axis=None) * scale, x)  # noqa: E731
        return phalanx.get_replica_context().merge_call(merge, args=(x,), kwargs={"scale": 10})

    def replica_fn():
        x = phalanx.get_replica_context().replica_id_in_sync_group + 1.0
        if inside == "scan":
            return jax.lax.scan(lambda c, _: (c, merged(x)), 0.0, length=1)[1]
        return (jax.jit(merged) if inside == "jit" else merged)(x)

    total, own = strategy.run(replica_fn)
    assert [float(v.squeeze()) for v in total.values] == [30, 30]
    assert [float(v.squeeze()) for v in own.values] == [1, 2]


def test_merge_call_under_the_default_strategy():
    """Just calls the function."""
    assert phalanx.get_replica_context().merge_call(lambda s, x: (s, x), args=(3,)) == (phalanx.get_strategy(), 3)


def test_components_in_merge_call(strategy):
    """One program sees its own component only; the message says how to get the others."""
    replica_fn = lambda: phalanx.get_replica_context().merge_call(lambda _, x: x.values, args=(jnp.ones(2),))  # noqa: E731
    with pytest.raises(ContextError, match="the components of a value inside merge_call") as e:
        strategy.run(replica_fn)
    assert "all_gather" in e.value.hint


def test_example_mask_of_a_short_batch(strategy):
    """Three rows on two replicas: two and one; six places would be without a mask."""
    (batch,) = strategy.experimental_distribute_dataset([np.arange(3.0)])

    def replica_fn(x):
        replica = phalanx.get_replica_context()
        return replica.example_mask, replica.num_examples

    mask, count = strategy.run(replica_fn, args=(batch,))
    assert [m.tolist() for m in mask.data] == [[True, True], [True, False]]
    assert [int(c) for c in count.values] == [3, 3]


def test_two_different_masks(strategy):
    """Which one is meant cannot be known."""
    a, b = (next(iter(strategy.experimental_distribute_dataset([np.ones(n)]))) for n in (3, 5))
    with pytest.raises(InputError, match="2 batches with different padding were passed to run"):
        strategy.run(lambda a, b: phalanx.get_replica_context().example_mask, args=(a, b))


def test_all_gather_takes_options():
    """The hints of tf.distribute, which change nothing here; anything else is refused."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    options = phalanx.experimental.CommunicationOptions(bytes_per_pack=1)

    def gathered(options):
        return strategy.run(lambda: phalanx.get_replica_context().all_gather(jnp.ones(1), 0, options=options)).values[0]

    assert gathered(options).tolist() == [1.0, 1.0]
    with pytest.raises(InvalidArgumentError, match="options=1: must be CommunicationOptions"):
        gathered(1)
