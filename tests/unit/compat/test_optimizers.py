"""Gradient accumulation: each replica sums its own gradients, and the replicas' sums meet at the step that applies them."""

import re

import keras
import numpy as np
import pytest
from twins import BATCH, FIT, X, Y, alone, compiled, mlp, replicas, same, same_fit, same_state, under

import phalanx

pytestmark = pytest.mark.slow

STEPS = 3


@pytest.fixture
def strategy():
    return replicas(2)


def accumulating(steps_per_execution=1, **given):
    """A model whose optimizer applies every third step; seven batches an epoch, so that one is left."""
    make = lambda: keras.optimizers.Adam(0.05, gradient_accumulation_steps=STEPS, **given)  # noqa: E731
    return compiled(optimizer=make, metrics=["accuracy"], steps_per_execution=steps_per_execution)


def step_of(model):
    losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    def step(batch):
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(losses(y, model(x, training=True)))
        grads = tape.gradient(loss, model.trainable_variables)
        model.optimizer.apply_gradients(zip(grads, model.trainable_variables, strict=True))

    return step


@pytest.mark.cover(["count"], {2})
@pytest.mark.parametrize(("count", "group"), [(1, 4), (2, 4), (3, 1)])
def test_accumulation_equals_keras_on_one_device(count, group):
    """History, weights and accumulators are those of one device, in the middle of a round too."""
    ours, theirs = under(replicas(count), accumulating(group)), alone(accumulating())
    expected = theirs.fit(X, Y, epochs=2, **FIT).history
    same(ours.fit(X, Y, epochs=2, **FIT).history, expected)
    assert any(v.numpy().any() for v in theirs.optimizer.variables if "accumulator" in v.path)
    same_state(ours, theirs)


def test_options_of_the_optimizer(strategy):
    """Clipping sees the sum over the replicas and the steps; averages of the weights are those of Keras."""
    same_fit(strategy, accumulating(global_clipnorm=0.1, use_ema=True, weight_decay=0.01))


def test_with_loss_scaling(strategy):
    """Whether gradients are finite is known at each step, so they are aggregated at each; the numbers are the same."""
    make = lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1, gradient_accumulation_steps=STEPS))  # noqa: E731
    same_fit(strategy, compiled(optimizer=make))


def test_all_reduce_is_skipped_between(strategy):
    """In the compiled step gradients are all-reduced in one branch of a conditional only, and nowhere else."""
    model = under(strategy, compiled(optimizer=lambda: keras.optimizers.SGD(0.1, gradient_accumulation_steps=STEPS)))
    model.optimizer.build(model.trainable_variables)
    replica_step = step_of(model)
    batch = next(iter(strategy.experimental_distribute_dataset((X, Y), batch_size=BATCH)))
    step = phalanx.function(lambda batch: strategy.run(replica_step, args=(batch,)))
    text = step.lower(batch).compile().as_text()
    computations = [c.split("\n", 1) for c in text.split("\n\n") if "all-reduce(" in c or "all-reduce-start(" in c]
    names = [re.match(r"%(\S+) ", head).group(1) for head, _ in computations if not head.startswith("ENTRY")]
    branches = re.findall(r"(?:true_computation|false_computation)=%([\w.]+)|branch_computations=\{([^}]*)\}", text)
    in_branches = {name for pair in branches for part in pair for name in re.findall(r"[\w.]+", part)}
    assert len(computations) == len(names) == 1
    assert set(names) <= in_branches


def test_custom_loop_accumulates_like_fit(strategy):
    ours, theirs = under(strategy, accumulating()), alone(accumulating())
    ours.optimizer.build(ours.trainable_variables)
    step = step_of(ours)
    for batch in strategy.experimental_distribute_dataset((X, Y), batch_size=BATCH):
        strategy.run(step, args=(batch,))
    theirs.fit(X, Y, **FIT)
    same_state(ours, theirs)


def test_saved_within_a_round(strategy, tmp_path):
    """What the replicas have summed is saved as one, and training goes on from it on another number of replicas.

    Accumulators that are set to zero begin a round anew.
    """
    ours, theirs = under(strategy, accumulating()), alone(accumulating())
    for model in (ours, theirs):
        model.fit(X, Y, **FIT)
    ours.save(tmp_path / "model.keras")
    with replicas(4).scope():
        loaded = keras.saving.load_model(tmp_path / "model.keras")
    for model in (loaded, theirs):
        model.fit(X, Y, **FIT)
    same_state(loaded, theirs)
    for model in (loaded, theirs):
        for variable in model.optimizer.variables:
            if "accumulator" in variable.path:
                variable.assign(np.zeros(variable.shape))
        model.fit(X, Y, **FIT)
    same_state(loaded, theirs)


def test_without_rows_on_a_replica():
    make = compiled(mlp, optimizer=lambda: keras.optimizers.SGD(0.5, gradient_accumulation_steps=2))
    ours, theirs = under(replicas(2), make), alone(make)
    for model in (ours, theirs):
        model.fit(X[:17], Y[:17], batch_size=8, epochs=2, shuffle=False, verbose=0)
    same_state(ours, theirs)
