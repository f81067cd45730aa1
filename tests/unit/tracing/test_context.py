"""Scopes, contexts, and the error for each verb in the wrong one."""

import contextvars
import copy
import pickle
import threading

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.strategies.base import strategy_on
from phalanx._src.tracing import context
from phalanx.errors import ContextError, InputError, InvalidArgumentError, MixedStrategyError, ReduceOpError
from phalanx.experimental import CommunicationOptions

REPLICA, DEFAULT = phalanx.get_replica_context, phalanx.get_strategy()


def state():
    """What the four questions answer: is there a strategy, is it cross-replica, is there a replica, how many."""
    replicas = phalanx.get_strategy().num_replicas_in_sync
    return phalanx.has_strategy(), phalanx.in_cross_replica_context(), REPLICA() is not None, replicas


def test_default_strategy_is_in_replica_context():
    """Outside all scopes: the default strategy, in replica context, with replica 0 of 1, whose values stay where they are."""
    assert state() == (False, False, True, 1)
    assert (REPLICA().replica_id_in_sync_group, REPLICA().devices) == (0, ())
    assert REPLICA().merge_call(lambda s, x: (s, x), args=(3,)) == (phalanx.get_strategy(), 3)


def test_modes_of_a_strategy(strategy):
    """A scope is cross-replica, `run` is not, `merge_call` is again. Another thread is in none, as in tf.distribute."""
    seen = []

    def replica_fn():
        seen.append(state())
        REPLICA().merge_call(lambda _: seen.append(state()))

    with strategy.scope() as entered:
        seen.append(state())
        strategy.run(replica_fn)
        thread = threading.Thread(target=lambda: seen.append(state()))
        thread.start()
        thread.join()
    assert entered is strategy
    assert seen[:3] == [(True, True, False, 2), (True, False, True, 2), (True, True, False, 2)]
    assert state() == seen[-1] == (False, False, True, 1)


def test_scopes_of_one_strategy_nest(strategy):
    """Even the same context manager."""
    scope = strategy.scope()
    with scope, scope, strategy.scope():
        assert phalanx.get_strategy() is strategy
    assert not phalanx.has_strategy()


@pytest.mark.parametrize("leave", [lambda close: close(), contextvars.copy_context().run], ids=["here", "elsewhere"])
def test_scope_of_a_generator_ends_after_that_of_its_caller(strategy, leave):
    """A generator that waits inside a scope may leave it later, and in another thread."""

    def numbers():
        with strategy.scope():
            yield from range(3)

    with strategy.scope():
        waiting = numbers()
        next(waiting)
    assert context.depth() == 0
    leave(waiting.close)
    assert context.depth() == 0


def test_scope_is_left_after_an_error(strategy):
    """Also one inside `run`."""
    with pytest.raises(KeyError), strategy.scope():
        strategy.run(lambda: {}["missing"])
    assert context.depth() == 0


CROSS_REPLICA_VERBS = {
    "scope": lambda s: s.scope().__enter__(),
    "run": lambda s: s.run(lambda: 1),
    "reduce": lambda s: s.reduce("SUM", 1.0, axis=None),
    "gather": lambda s: s.gather(1.0, axis=0),
    "experimental_distribute_values_from_function": lambda s: s.experimental_distribute_values_from_function(print),
    "experimental_distribute_dataset": lambda s: s.experimental_distribute_dataset([np.ones(2)]),
    "replicate": lambda s: s.replicate(1.0),
    "reduce_to": lambda s: s.extended.reduce_to("SUM", 1.0, 1.0),
    "broadcast_to": lambda s: s.extended.broadcast_to(1.0, 1.0),
    "extended.update": lambda s: s.extended.update(keras.Variable(1.0), lambda v: v.assign(1.0)),
}


@pytest.mark.parametrize("verb", CROSS_REPLICA_VERBS)
def test_cross_replica_verbs_in_other_contexts(strategy, verb):
    """Each says where it belongs and what to call instead, and names both strategies if another one is current."""
    call, did = CROSS_REPLICA_VERBS[verb], "entered" if verb == "scope" else "called"
    match = f"(?s){verb} was {did} in replica context: it works only in cross-replica context.*HINT: "
    with pytest.raises(ContextError, match=match):
        strategy.run(lambda: call(strategy))
    other = phalanx.MirroredStrategy(["cpu:2", "cpu:3"])
    match = r"of .*cpu:0.* inside the scope of .*cpu:2.* only one strategy can be current"
    with other.scope(), pytest.raises(MixedStrategyError, match=match):
        call(strategy)


def after_its_function(method, *arguments):
    """Calls a method of the context of a replica whose function has returned."""

    def call(strategy):
        held = []
        strategy.run(lambda: held.append(REPLICA()))
        getattr(held[0], method)(*arguments)

    return call


def in_scope(call):
    def scoped(strategy):
        with strategy.scope():
            call(strategy)

    return scoped


LATE, SET = "was called outside the replica function", "must be called outside all scopes and replica functions"
MISUSES = {
    "late all_reduce": (after_its_function("all_reduce", "SUM", 1.0), f"ReplicaContext.all_reduce {LATE}"),
    "late all_gather": (after_its_function("all_gather", 1.0, 0), f"ReplicaContext.all_gather {LATE}"),
    "late merge_call": (after_its_function("merge_call", print), f"ReplicaContext.merge_call {LATE}"),
    "run in merge_call": (
        lambda s: s.run(lambda: REPLICA().merge_call(lambda s: s.run(lambda: 1))),
        "Strategy.run was called in merge_call: the replicas are already running",
    ),
    "components": (
        lambda s: s.run(lambda: REPLICA().merge_call(lambda _, x: x.values, args=(jnp.ones(2),))),
        "(?s)the components of a value inside merge_call.*HINT: .*all_gather",
    ),
    "default scope": (
        in_scope(lambda _: DEFAULT.scope().__enter__()),
        "the scope of the default strategy was entered: inside the scope of",
    ),
    "set in a scope": (in_scope(phalanx.experimental_set_strategy), SET),
    "unset in a scope": (in_scope(lambda _: phalanx.experimental_set_strategy(None)), SET),
    "copy of the default": (lambda _: copy.copy(DEFAULT), "default strategy|two strategies"),
    "deepcopy of the default": (lambda _: copy.deepcopy(DEFAULT), "default strategy|two strategies"),
    "second default": (lambda _: type(DEFAULT)(), "there is only one default strategy"),
    "copy": (copy.copy, "two strategies would share the same programs"),
    "pickle": (pickle.dumps, "pickle"),
}


@pytest.mark.parametrize(("call", "match"), MISUSES.values(), ids=MISUSES)
def test_misuse_of_strategies_is_refused(strategy, call, match):
    with pytest.raises(ContextError, match=match):
        call(strategy)


def test_two_batches_of_different_sizes(strategy):
    """Each replica has its rows of both. Whose number of rows is meant cannot be known."""
    a, b = (next(iter(strategy.experimental_distribute_dataset([np.ones(n)]))) for n in (3, 5))
    sizes = strategy.run(lambda a, b: (a.shape[0], b.shape[0], a.sum() + b.sum()), args=(a, b))
    assert [[int(x) for x in size.values] for size in sizes] == [[2, 1], [3, 2], [5, 3]]
    with pytest.raises(InputError, match="2 batches with different numbers of rows per replica were passed to run"):
        strategy.run(lambda a, b: REPLICA().num_examples, args=(a, b))


def test_set_strategy_holds_until_none(strategy):
    """Current from here on, and places variables as a scope does; None goes back."""
    phalanx.experimental_set_strategy(strategy)
    assert state() == (True, True, False, 2)
    assert len(keras.Variable(1.0).value.devices()) == 2
    other = phalanx.MirroredStrategy(["cpu:2"])
    phalanx.experimental_set_strategy(other)
    assert phalanx.get_strategy() is other
    phalanx.experimental_set_strategy(None)
    assert state() == (False, False, True, 1)


def test_deepcopy_of_a_strategy(strategy):
    """Another strategy over the same devices."""
    replica_sum = lambda: REPLICA().all_reduce("SUM", 1.0)  # noqa: E731
    strategy.run(replica_sum)
    other = copy.deepcopy(strategy)
    assert other.extended.worker_devices == strategy.extended.worker_devices
    assert [float(x) for x in other.run(replica_sum).values] == [2, 2]


def test_deepcopy_is_among_the_living(collect):
    """`fit` outside all scopes looks there for the strategy of its dataset, also after the original has gone."""
    other = copy.deepcopy(phalanx.MirroredStrategy(["cpu:0", "cpu:1"]))
    collect()
    assert strategy_on(other.topology) is other


def test_replica_context_properties(strategy):
    """What a replica knows."""
    seen = []

    def replica_fn():
        replica = REPLICA()
        seen.append((replica.strategy, replica.num_replicas_in_sync, replica.devices, replica.example_mask))
        return replica.replica_id_in_sync_group

    ids = strategy.run(replica_fn).values
    assert seen[0] == (strategy, 2, ("cpu:0", "cpu:1"), None)
    assert [int(i) for i in ids] == [0, 1]
    assert ids[0].dtype == "int32"


VALUE = {"a": [1.0, np.float32([2, 3])], "b": (4, None)}
PLAIN, NARROW = CommunicationOptions(), CommunicationOptions(wire_dtype="bfloat16")
PACKED = CommunicationOptions(bytes_per_pack=8)


@pytest.mark.parametrize(
    "options", [None, PACKED, NARROW, PACKED.merge(NARROW)], ids=["plain", "packed", "narrow", "packed narrow"]
)
def test_all_reduce_takes_nests(strategy, options):
    """Nests of arrays and numbers; every replica gets the result; options change nothing."""

    def replica_fn():
        replica = REPLICA()
        scaled = jax.tree.map(lambda x: x * (replica.replica_id_in_sync_group + 1), VALUE)
        return [replica.all_reduce(op, scaled, options) for op in ("SUM", "mean")]

    for result, factor in zip(strategy.run(replica_fn), (3, 1.5), strict=True):
        (number, array), (integer, none) = result["a"], result["b"]
        assert none is None
        assert [float(v) for v in (*number.values, *integer.values)] == [factor] * 2 + [4 * factor] * 2
        assert [v.tolist() for v in array.values] == [[2 * factor, 3 * factor]] * 2


@pytest.mark.parametrize("axis", [0, 1, -1])
def test_all_gather_works_along_any_dimension(strategy, axis):
    """Along any dim, in replica order. Options change nothing."""

    def replica_fn():
        rows = {"x": jnp.ones((2, 3)) * REPLICA().replica_id_in_sync_group}
        return [REPLICA().all_gather(rows, axis, **options) for options in ({}, {"options": PACKED})]

    expected = np.concatenate([np.zeros((2, 3)), np.ones((2, 3))], axis)
    for gathered in strategy.run(replica_fn):
        for got in gathered["x"].values:
            np.testing.assert_array_equal(got, expected)


@pytest.mark.parametrize(
    ("call", "error", "match"),
    [
        (lambda r: r.all_reduce("MAX", 1.0), ReduceOpError, "The operations are SUM and MEAN"),
        (lambda r: r.all_reduce("SUM", True), ReduceOpError, "bools have no sum or mean"),
        (lambda r: r.all_reduce("SUM", "text"), ReduceOpError, "not an array of numbers"),
        (lambda r: r.all_reduce("SUM", jax.random.key(0)), ReduceOpError, "random keys have no sum or mean"),
        (lambda r: r.all_gather(1.0, 0), ReduceOpError, r"axis=0: a scalar has no dims.\nHINT: jnp.reshape\(x, 1\)"),
        (lambda r: r.all_gather(jnp.ones(2), 1), ReduceOpError, "axis=1: the value has dims 0 to 0"),
        (lambda r: r.all_gather(jnp.ones(2), None), ReduceOpError, "axis=None: must be an integer"),
        (lambda r: r.all_gather(jnp.ones(2), 0, 1), InvalidArgumentError, "options=1: must be CommunicationOptions"),
    ],
)
@pytest.mark.parametrize("replicas", [1, 2])
def test_bad_collectives_leave_next_one_working(replicas, call, error, match):
    """The same errors with one replica and with two; the next collective works."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])
    with pytest.raises(error, match=match):
        strategy.run(lambda: call(REPLICA()))
    total = strategy.run(lambda: phalanx.Mirrored(REPLICA().all_reduce("SUM", jnp.float32(1)))).value
    assert float(total) == replicas


@pytest.mark.parametrize("options", [None, NARROW], ids=["plain", "narrow"])
def test_gradient_of_all_reduce(strategy, options):
    """The all-reduce of the gradient with the same operation: x^2 of 1 and 2 gives 2*2x for SUM, 2x for MEAN."""

    def replica_fn():
        replica = REPLICA()
        x = replica.replica_id_in_sync_group + 1.0
        return [jax.grad(lambda x: replica.all_reduce(op, x * x, options))(x) for op in ("SUM", "MEAN")]  # noqa: B023

    total, mean = strategy.run(replica_fn)
    assert [float(g) for g in total.values] == [4, 8]
    assert [float(g) for g in mean.values] == [2, 4]


def test_tape_through_a_narrow_all_reduce(strategy):
    """A tape sees through what crosses: 2x times the sum 1 + 2 of the replicas' weights."""

    def replica_fn(x):
        with phalanx.GradientTape() as tape:
            tape.watch(x)
            loss = (REPLICA().replica_id_in_sync_group + 1) * REPLICA().all_reduce("SUM", x * x, NARROW).sum()
        return tape.gradient(loss, x)

    for gradient in strategy.run(replica_fn, args=(jnp.array([3.0, -5.0]),)).values:
        assert gradient.tolist() == [2 * 3 * 3, 2 * -5 * 3]


def test_gradient_of_all_gather(strategy):
    """The all-reduced gradient's own slice: weights 1 to 4 on 2 x 2 elements give [2, 4] and [6, 8]."""
    weights = jnp.arange(1.0, 5.0)
    replica_fn = lambda: jax.grad(lambda x: (REPLICA().all_gather(x, 0) * weights).sum())(jnp.ones(2))  # noqa: E731
    assert [g.tolist() for g in strategy.run(replica_fn).values] == [[2, 4], [6, 8]]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit], ids=["plain", "jit"])
def test_merge_call_returns_each_replicas_own_values(strategy, wrap):
    """Also inside transformations of jax, where tf.distribute refuses it."""

    def merged(x):
        merge = lambda s, x, scale: (s.reduce("SUM", x, axis=None) * scale, x)  # noqa: E731
        return REPLICA().merge_call(merge, args=(x,), kwargs={"scale": 10})

    total, own = strategy.run(lambda: wrap(merged)(REPLICA().replica_id_in_sync_group + 1.0))
    assert [float(v) for v in total.values] == [30, 30]
    assert [float(v) for v in own.values] == [1, 2]
