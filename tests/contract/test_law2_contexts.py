"""Law 2: every public verb says in which context it may be called, and elsewhere raises an error that names the right one."""

import inspect
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import keras
import numpy as np
import pytest
from strategy_table import DEVICES, on

import phalanx
from phalanx.errors import ContextError, MixedStrategyError, PhalanxError

multi = on("mirrored_x1", "mirrored_x2", "mirrored_x4", "central_x2")
"""The contexts of `default` are those of every script without a strategy, and have a test of their own."""


@dataclass
class Stage:
    """What a verb can be called on."""

    strategy: phalanx.Strategy
    variable: keras.Variable
    replica: phalanx.ReplicaContext | None = None


def per_replica(stage):
    """A per-replica value that is made anew where that is possible."""
    strategy = stage.strategy
    return strategy.experimental_distribute_values_from_function(lambda c: np.ones(2, "float32"))


REPLICA, CROSS, MERGE, OUTSIDE, OTHER = "replica", "cross-replica", "merge_call", "outside", "another scope"
EVERYWHERE = {REPLICA, CROSS, MERGE, OUTSIDE, OTHER}
FOR_ALL = {CROSS, OUTSIDE}

# Verb -> the contexts in which it may be called, and a call of it.
VERBS: dict[str, tuple[set[str], Callable[[Stage], Any]]] = {
    "Strategy.num_replicas_in_sync": (EVERYWHERE, lambda s: s.strategy.num_replicas_in_sync),
    "Strategy.cluster_resolver": (EVERYWHERE, lambda s: s.strategy.cluster_resolver),
    "Strategy.extended": (EVERYWHERE, lambda s: s.strategy.extended),
    "Strategy.scope": (FOR_ALL | {MERGE}, lambda s: s.strategy.scope().__enter__() and None),
    "Strategy.run": (FOR_ALL, lambda s: s.strategy.run(lambda: 1)),
    "Strategy.reduce": (FOR_ALL | {MERGE}, lambda s: s.strategy.reduce("MEAN", 1.0, axis=None)),
    "Strategy.gather": (FOR_ALL | {MERGE}, lambda s: s.strategy.gather(jnp.ones(2), axis=0)),
    "Strategy.experimental_local_results": (
        FOR_ALL | {MERGE},
        lambda s: s.strategy.experimental_local_results(s.variable),
    ),
    "Strategy.experimental_distribute_values_from_function": (FOR_ALL, per_replica),
    "Strategy.experimental_distribute_dataset": (
        FOR_ALL,
        lambda s: s.strategy.experimental_distribute_dataset([np.ones(4, "float32")]),
    ),
    "Strategy.replicate": (FOR_ALL, lambda s: s.strategy.replicate(np.ones(2, "float32"))),
    "StrategyExtended.reduce_to": (FOR_ALL | {MERGE}, lambda s: s.strategy.extended.reduce_to("MEAN", 1.0, s.variable)),
    "StrategyExtended.batch_reduce_to": (
        FOR_ALL | {MERGE},
        lambda s: s.strategy.extended.batch_reduce_to("MEAN", [(1.0, s.variable)]),
    ),
    "StrategyExtended.broadcast_to": (
        FOR_ALL | {MERGE},
        lambda s: s.strategy.extended.broadcast_to(np.ones(2), s.variable),
    ),
    "StrategyExtended.call_for_each_replica": (FOR_ALL, lambda s: s.strategy.extended.call_for_each_replica(lambda: 1)),
    "StrategyExtended.update": (
        FOR_ALL | {MERGE},
        lambda s: s.strategy.extended.update(s.variable, lambda v: v.assign(v * 1.0)),
    ),
    "ReplicaContext.all_reduce": ({REPLICA}, lambda s: s.replica.all_reduce("SUM", 1.0)),
    "ReplicaContext.all_gather": ({REPLICA}, lambda s: s.replica.all_gather(jnp.ones(2), axis=0)),
    "ReplicaContext.merge_call": ({REPLICA}, lambda s: s.replica.merge_call(lambda strategy: 1)),
    "get_strategy": (EVERYWHERE, lambda s: phalanx.get_strategy() and None),
    "has_strategy": (EVERYWHERE, lambda s: phalanx.has_strategy()),
    "in_cross_replica_context": (EVERYWHERE, lambda s: phalanx.in_cross_replica_context()),
    "get_replica_context": (EVERYWHERE, lambda s: phalanx.get_replica_context() and None),
    "experimental_set_strategy": ({OUTSIDE}, lambda s: phalanx.experimental_set_strategy(None)),
    "nn.compute_average_loss": ({REPLICA, OUTSIDE}, lambda s: phalanx.nn.compute_average_loss(jnp.ones(2))),
    "nn.scale_regularization_loss": ({REPLICA, OUTSIDE}, lambda s: phalanx.nn.scale_regularization_loss(1.0)),
    "scan": (EVERYWHERE, lambda s: phalanx.scan(lambda c, x: (c, x), 0.0, jnp.ones(2))),
    "cond": (EVERYWHERE, lambda s: phalanx.cond(jnp.bool_(True), lambda: 1.0, lambda: 2.0)),
    "while_loop": (EVERYWHERE, lambda s: phalanx.while_loop(lambda n: n < 2, lambda n: n + 1, 0)),
    "remat": (EVERYWHERE, lambda s: phalanx.remat(lambda x: x)(1.0)),
    "value_and_grad": (EVERYWHERE, lambda s: phalanx.value_and_grad(lambda: s.variable * 2.0, [s.variable])()),
}


def call_in(context: str, strategy: phalanx.Strategy, variable: keras.Variable, call: Callable[[Stage], Any]) -> None:
    """Calls a verb in one of the contexts."""
    stage = Stage(strategy, variable)

    def replica_fn():
        stage.replica = phalanx.get_replica_context()
        if context == REPLICA:
            call(stage)
        if context == MERGE:
            stage.replica.merge_call(lambda _: (call(stage), None)[1])

    if context in (REPLICA, MERGE):
        return strategy.run(replica_fn)
    strategy.run(replica_fn)
    with scope_of(context, strategy):
        call(stage)
    return None


def scope_of(context, strategy):
    """The scope that makes `context`."""
    if context == OUTSIDE:
        return phalanx.get_strategy().scope()
    return strategy.scope() if context == CROSS else phalanx.OneDeviceStrategy(DEVICES[-1]).scope()


ALIASES = {"StrategyExtended.call_for_each_replica": "run", "StrategyExtended.batch_reduce_to": "reduce_to"}
ALLOWED = [pytest.param(v, c, id=f"{v}-{c}") for v, (where, _) in VERBS.items() for c in sorted(where)]
REFUSED = [pytest.param(v, c, id=f"{v}-{c}") for v, (where, _) in VERBS.items() for c in sorted(EVERYWHERE - where)]


@pytest.fixture
def variable(strategy):
    """A variable of the strategy."""
    with strategy.scope():
        return keras.Variable(1.0, aggregation="mean")


# Each verb and context once, and each verb on both rows.
COVER = {(("mirrored_x2", "central_x2")[i % 2], *cell.values) for i, cell in enumerate(ALLOWED)}


@pytest.mark.cover(["strategy", "verb", "context"], COVER)
@multi
@pytest.mark.parametrize(("verb", "context"), ALLOWED)
def test_verb_is_allowed_in_context(strategy, variable, verb, context):
    """A verb works where it may be called."""
    if verb == "Strategy.scope":
        call_in(context, strategy, variable, _enter_and_leave)
    else:
        call_in(context, strategy, variable, VERBS[verb][1])


def _enter_and_leave(stage):
    with stage.strategy.scope():
        assert phalanx.get_strategy() is stage.strategy


@pytest.mark.cover(["strategy"], {"mirrored_x2"})
@multi
@pytest.mark.parametrize(("verb", "context"), REFUSED)
def test_verb_is_refused_in_context(strategy, variable, verb, context):
    """Elsewhere it raises an error of the ContextError family that says what to write instead."""
    wanted = MixedStrategyError if context == OTHER and verb.startswith("Strategy") else ContextError
    with pytest.raises(wanted, match=r"(?s)\w+.*(context|scope|replica function|merge_call).*HINT: \w+") as caught:
        call_in(context, strategy, variable, VERBS[verb][1])
    assert isinstance(caught.value, RuntimeError), "code for tf.distribute catches RuntimeError"
    short = ALIASES.get(verb, verb.split(".")[-1])
    assert short in caught.value.asked, f"{caught.value.asked!r} does not name {short}"
    assert float(variable.value) == 1


def test_default_strategy_allows_everything():
    """A script without a strategy is one replica and its own cross-replica context at once."""
    default, v = phalanx.get_strategy(), keras.Variable(1.0)
    stage = Stage(default, v, phalanx.get_replica_context())
    for verb, (_, call) in VERBS.items():
        if verb != "Strategy.scope":
            call(stage)
            default.run(call, args=(stage,))


@on("mirrored_x2")
def test_refused_in_eager_run_too(strategy):
    """`RunOptions(eager=True)` has the contexts of the compiled program."""
    with pytest.raises(ContextError, match="(?s)Strategy.run was called in replica context.*HINT: call fn"):
        strategy.run(lambda: strategy.run(lambda: 1), options=phalanx.RunOptions(eager=True))


@on("mirrored_x2")
def test_next_batch_in_a_step(strategy):
    """A batch is fetched outside the step that uses it."""
    batches = iter(strategy.experimental_distribute_dataset([np.ones((4, 1), "float32")]))
    with pytest.raises(ContextError, match=r"(?s)next\(iterator\) was called in a traced step.*HINT: pass the batch"):
        strategy.run(lambda: next(batches))
    assert next(batches) is not None


@on("mirrored_x2")
def test_scope_of_another_strategy(strategy):
    """Two strategies in each other are refused, and after the error each works alone."""
    other = phalanx.OneDeviceStrategy(DEVICES[0])
    with strategy.scope(), pytest.raises(MixedStrategyError, match=r"(?s)OneDeviceStrategy.*inside the scope of.*HINT"):
        other.scope().__enter__()
    with other.scope():
        assert phalanx.get_strategy() is other


@on("mirrored_x2")
def test_scope_in_a_replica(strategy):
    """Also of the same strategy."""
    with pytest.raises(ContextError, match=r"(?s)scope was entered in replica context.*HINT: .*merge_call"):
        strategy.run(lambda: strategy.scope().__enter__())


@on("mirrored_x2")
def test_errors_survive_in_programs_of_many_kinds(strategy):
    """A refused verb inside `phalanx.function`, a scan or a merge function is the same typed error."""
    wraps = [
        lambda f: phalanx.function(lambda: strategy.run(f))(),
        lambda f: strategy.run(lambda: phalanx.scan(lambda c, _: (c, f()), 0.0, None, 2)[1]),
        lambda f: strategy.run(lambda: phalanx.value_and_grad(lambda: f(), [])()[0]),
    ]
    for wrap in wraps:
        with pytest.raises(ContextError, match="Strategy.reduce was called in replica context"):
            wrap(lambda: strategy.reduce("SUM", 1.0, axis=None))


def public_verbs():
    """Every function and method that users call."""
    for name in phalanx.__all__:
        thing = getattr(phalanx, name)
        if inspect.isfunction(thing):
            yield name, thing.__doc__
    for name in ("compute_average_loss", "scale_regularization_loss"):
        yield name, getattr(phalanx.nn, name).__doc__
    for cls in (phalanx.Strategy, phalanx.StrategyExtended, phalanx.ReplicaContext, phalanx.GradientTape):
        for name, thing in vars(cls).items():
            if not name.startswith("_") and inspect.isfunction(thing):
                yield (
                    f"{cls.__name__}.{name}",
                    f"{cls.__doc__ if cls is phalanx.StrategyExtended else ''}{thing.__doc__}",
                )


@pytest.mark.parametrize(("name", "doc"), [pytest.param(n, d, id=n) for n, d in public_verbs()])
def test_docstring_says_where(name, doc):
    """The docstring of a verb says in which context it may be called."""
    says = r"context|outside all scopes|[Ii]nside `|[Ii]nside a program|[Ii]nside the tape|in which the tape|before anything touches JAX"
    if name.split(".")[-1] not in {"topology", "cross_device_ops", "aggregate_gradients", "execute"}:
        assert re.search(says, doc), f"{name}: {doc}"


def test_context_errors_are_runtime_errors():
    """The family has one root that also is the builtin a user expects."""
    assert issubclass(MixedStrategyError, ContextError)
    assert issubclass(ContextError, RuntimeError)
    assert issubclass(ContextError, PhalanxError)
