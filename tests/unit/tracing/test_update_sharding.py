# SPDX-License-Identifier: Apache-2.0
"""Weight-update sharding: equal to one device, with slots that no replica holds whole."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
from phalanx.errors import InvalidArgumentError

ROWS = np.random.default_rng(0).normal(size=(7, 6)).astype("float32")
BATCHES = [ROWS, ROWS[:1], ROWS]  # With two replicas, four rows and three, one and none.
TWO = ["cpu:0", "cpu:1"]


def _sharded(**options: Any) -> phalanx.MirroredStrategy:
    return phalanx.MirroredStrategy(TWO, weight_update_sharding=True, **options)


def _model() -> keras.Model:
    keras.utils.set_random_seed(1)
    layers = [keras.layers.Dense(8, activation="tanh"), keras.layers.Dense(3)]
    return keras.Sequential([keras.Input((6,)), *layers])


def _step(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> Callable[[Any], Any]:
    def step(x: Any) -> Any:
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss((model(x, training=True) ** 2).sum(-1))
            scaled = optimizer.scale_loss(loss)
        optimizer.apply(tape.gradient(scaled, model.trainable_variables), model.trainable_variables)
        return loss

    return step


def _trained(
    strategy: phalanx.Strategy,
    make: Callable[[], keras.optimizers.Optimizer],
    batches: Sequence[np.ndarray] = BATCHES,
) -> tuple[list[np.ndarray], keras.Model, keras.optimizers.Optimizer]:
    """Trains, and returns all that the model and the optimizer have learned."""
    with strategy.scope():
        model, optimizer = _model(), make()
    step = _step(model, optimizer)
    for batch in strategy.experimental_distribute_dataset(batches):
        strategy.run(step, args=(batch,))
    return [np.asarray(v) for v in (*model.variables, *optimizer.variables)], model, optimizer


def _is_sharded(variable: keras.Variable) -> bool:
    return not variable.value.is_fully_replicated


ELEMENTWISE = {
    "SGD with momentum": lambda: keras.optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "Adam": lambda: keras.optimizers.Adam(0.1, amsgrad=True, weight_decay=0.01, clipvalue=0.1),
    "AdamW": lambda: keras.optimizers.AdamW(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "Adamax": lambda: keras.optimizers.Adamax(0.1),
    "Nadam": lambda: keras.optimizers.Nadam(0.1),
    "Adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "Adadelta": lambda: keras.optimizers.Adadelta(0.1),
    "RMSprop": lambda: keras.optimizers.RMSprop(0.1, momentum=0.5, centered=True),
    "Ftrl": lambda: keras.optimizers.Ftrl(0.1),
    "Lion": lambda: keras.optimizers.Lion(0.01),
}
WHOLE = {
    "SGD": lambda: keras.optimizers.SGD(0.1),
    "Lamb": lambda: keras.optimizers.Lamb(0.1),
    "Adafactor": lambda: keras.optimizers.Adafactor(0.1),
    "clipnorm": lambda: keras.optimizers.Adam(0.1, clipnorm=0.1),
    "global_clipnorm": lambda: keras.optimizers.Adam(0.1, global_clipnorm=0.1),
    "use_ema": lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2),
    "accumulated": lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2),
    "loss scale": lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1), initial_scale=4.0),
    "subclass": lambda: _OfUser(0.1),
}


class _OfUser(keras.optimizers.Adam):
    """An optimizer of a user, which divides each gradient by its norm."""

    def update_step(self, gradient: Any, variable: Any, learning_rate: Any) -> None:
        super().update_step(gradient / (1.0 + jnp.linalg.norm(gradient)), variable, learning_rate)


def _after_three_updates(strategy: phalanx.Strategy, optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Applies gradients that do not depend on the number of replicas, and returns the variables and those of the optimizer."""
    rng = np.random.default_rng(2)
    with strategy.scope():
        bounded = keras.Variable(rng.normal(size=(4,)), dtype="float32")
        bounded.constraint = keras.constraints.MaxNorm(0.5)
        trained = [*(keras.Variable(rng.normal(size=n), dtype="float32") for n in ((6, 8), (5, 4), (5,))), bounded]

    def step() -> None:
        count = phalanx.get_replica_context().num_replicas_in_sync
        grads = [keras.ops.convert_to_tensor(v) * 0.1 * optimizer.scale_loss(1.0) / count for v in trained]
        optimizer.apply(grads, trained)

    for _ in range(3):
        strategy.run(step)
    return [*trained, *optimizer.variables]


@pytest.mark.cover(["name"], {"SGD with momentum", "Adam", *WHOLE} - {"SGD", "Lamb", "clipnorm"})
@pytest.mark.parametrize("name", [*ELEMENTWISE, *WHOLE])
def test_every_optimizer_updates_alike(name: str) -> None:
    make = {**ELEMENTWISE, **WHOLE}[name]
    expected = _after_three_updates(phalanx.OneDeviceStrategy("cpu:0"), make())
    actual = _after_three_updates(_sharded(), make())
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), rtol=2e-5, atol=2e-6)
    sharded = [v for v in actual if _is_sharded(v)]
    assert bool(sharded) == (name in ELEMENTWISE)
    # Neither a variable, nor the slots of five elements, nor those of what is bounded by a norm.
    assert {v.shape for v in sharded} <= {(6, 8), (5, 4)}
    assert not any(map(_is_sharded, actual[:4]))
    for v in sharded:
        assert {s.data.size * 2 for s in v.value.addressable_shards} == {v.value.size}


def test_short_batches_equal_one_device() -> None:
    make = ELEMENTWISE["SGD with momentum"]
    expected, _, _ = _trained(phalanx.OneDeviceStrategy("cpu:0"), make)
    actual, _, _ = _trained(_sharded(), make)
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_scaled_losses_of_a_short_first_batch() -> None:
    # The first trace makes the variables of the optimizer, in another order than it uses them afterwards.
    make = WHOLE["loss scale"]
    expected, _, _ = _trained(phalanx.OneDeviceStrategy("cpu:0"), make, BATCHES[:2])
    actual, _, _ = _trained(_sharded(), make, BATCHES[:2])
    for a, b in zip(actual, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_slots_written_with_short_batches() -> None:
    def values(strategy: phalanx.Strategy) -> list[np.ndarray]:
        with strategy.scope():
            v, optimizer = keras.Variable(np.arange(8.0, dtype="float32")), keras.optimizers.SGD(0.5, momentum=0.5)

        def step(x: Any) -> None:
            optimizer.apply([v * keras.ops.sum(x)], [v])
            optimizer.variables[2].assign(optimizer.variables[2] * 0.5)

        for batch in strategy.experimental_distribute_dataset([ROWS[:3], ROWS[:1]]):
            strategy.run(step, args=(batch,))
        return [np.asarray(v), np.asarray(optimizer.variables[2])]

    for a, b in zip(values(_sharded()), values(phalanx.OneDeviceStrategy("cpu:0")), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_large_variables_by_default() -> None:
    with phalanx.MirroredStrategy(TWO).scope():
        v, w = keras.Variable(np.ones((640, 640), "float32")), keras.Variable(np.ones((640, 64), "float32"))
        optimizer = keras.optimizers.Adam()
    strategy = phalanx.MirroredStrategy(TWO)
    strategy.run(lambda: optimizer.apply([jnp.ones((640, 640)), jnp.ones((640, 64))], [v, w]))
    assert [_is_sharded(s) for s in optimizer.variables[2:]] == [True, True, False, False]
    whole = phalanx.MirroredStrategy(TWO, weight_update_sharding=False)
    whole.run(lambda: optimizer.apply([jnp.ones((640, 640)), jnp.ones((640, 64))], [v, w]))
    assert not any(map(_is_sharded, optimizer.variables))
    np.testing.assert_allclose(v, np.full((640, 640), 1 - 2 * 0.001), rtol=1e-5)


def _one_update(
    strategy: phalanx.Strategy, body: Callable[[keras.Variable, keras.optimizers.Optimizer], Any]
) -> list[Any]:
    """Runs a replica function once, and returns its results and the variable and slots afterwards."""
    with strategy.scope():
        v, optimizer = keras.Variable(np.arange(8.0, dtype="float32")), keras.optimizers.SGD(0.5, momentum=0.5)
        optimizer.build([v])
    results = [strategy.run(lambda: body(v, optimizer)) for _ in range(2)]
    first = [jax.tree.map(lambda x: np.asarray(strategy.experimental_local_results(x)[0]), r) for r in results]
    return [*first, np.asarray(v), np.asarray(optimizer.variables[2])]


def _reads_between_updates(v: keras.Variable, optimizer: keras.optimizers.Optimizer) -> Any:
    optimizer.apply([v * 0.5], [v])
    between = v + 0, optimizer.variables[2] + 0
    optimizer.apply([v * 0.5], [v])
    return between


def _writes_slots(v: keras.Variable, optimizer: keras.optimizers.Optimizer) -> Any:
    momentum = optimizer.variables[2]
    optimizer.apply([v * 0.5], [v])
    momentum.assign(momentum * 0.5)
    momentum.assign_add(jnp.ones(8))
    return momentum + 0


def _writes_slots_that_differ(v: keras.Variable, optimizer: keras.optimizers.Optimizer) -> Any:
    momentum = optimizer.variables[2]
    optimizer.apply([v * 0.5], [v])
    momentum.assign(momentum * (1 + phalanx.get_replica_context().replica_id_in_sync_group))
    return momentum + 0


def _updates_in_branch(v: keras.Variable, optimizer: keras.optimizers.Optimizer) -> Any:
    return phalanx.cond(v[1] > 0.9, lambda: optimizer.apply([v * 0.5], [v]), lambda: None)


def _updates_in_loop(v: keras.Variable, optimizer: keras.optimizers.Optimizer) -> Any:
    return phalanx.scan(lambda carry, x: (optimizer.apply([v * x], [v]), keras.ops.sum(v))[::-1], 0.0, jnp.ones(3))[1]


def _takes_gradients_again(v: keras.Variable, optimizer: keras.optimizers.Optimizer) -> Any:
    for _ in range(2):
        with phalanx.GradientTape() as tape:
            loss = keras.ops.sum(v**2) + keras.ops.sum(optimizer.variables[2])
        optimizer.apply([tape.gradient(loss, v)], [v])
    return loss


def _reads_in_branch_of_one_replica(v: keras.Variable, optimizer: keras.optimizers.Optimizer) -> Any:
    optimizer.apply([v * 0.5], [v])
    index = phalanx.get_replica_context().replica_id_in_sync_group
    return phalanx.cond(index == 0, lambda: keras.ops.sum(optimizer.variables[2]), lambda: jnp.float32(0))


def _reads_in_loop_of_one_replica(v: keras.Variable, optimizer: keras.optimizers.Optimizer) -> Any:
    optimizer.apply([v * 0.5], [v])
    num_steps = 2 - 2 * phalanx.get_replica_context().replica_id_in_sync_group
    step = lambda state: (state[0] + 1, state[1] + optimizer.variables[2])  # noqa: E731
    return phalanx.while_loop(lambda state: state[0] < num_steps, step, (0, jnp.zeros(8)))


def _changes_its_mind(v: keras.Variable, optimizer: keras.optimizers.Optimizer) -> Any:
    optimizer.apply([v * 0.5], [v])
    optimizer.clipnorm = 0.1
    optimizer.apply([v * 0.5], [v])
    optimizer.clipnorm = None


@pytest.mark.parametrize(
    "body",
    [
        _reads_between_updates,
        _writes_slots,
        _writes_slots_that_differ,
        _updates_in_branch,
        _updates_in_loop,
        _takes_gradients_again,
        _changes_its_mind,
        _reads_in_branch_of_one_replica,
        _reads_in_loop_of_one_replica,
    ],
)
def test_replica_functions_see_whole_values(body: Callable[..., Any]) -> None:
    # One replica with the same gradient twice: the sum over two replicas.
    expected = _one_update(phalanx.MirroredStrategy(TWO, weight_update_sharding=False), body)
    actual = _one_update(_sharded(), body)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5), actual, expected)


def test_learning_rates_may_use_variables() -> None:
    def values(strategy: phalanx.Strategy) -> list[np.ndarray]:
        with strategy.scope():
            v, total = keras.Variable(np.arange(8.0, dtype="float32")), keras.Variable(0.0, trainable=False)

        def rate() -> Any:
            total.assign(keras.ops.sum(v))
            return 1 / (1 + total)

        optimizer = keras.optimizers.SGD(rate, momentum=0.5)
        strategy.run(lambda: optimizer.apply([jnp.ones(8)], [v]))
        return [np.asarray(x) for x in (v, total)]

    expected = values(phalanx.MirroredStrategy(TWO, weight_update_sharding=False))
    np.testing.assert_allclose(expected[1], 28.0)
    for a, b in zip(values(_sharded()), expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5)


def test_eager_steps_hold_shards() -> None:
    strategy = _sharded()
    with strategy.scope():
        v, optimizer = keras.Variable(np.arange(4.0, dtype="float32")), keras.optimizers.SGD(0.5, momentum=0.5)
    strategy.run(lambda: optimizer.apply([jnp.ones(4)], [v]), options=phalanx.RunOptions(eager=True))
    np.testing.assert_array_equal(np.asarray(v), np.arange(4.0) - 1.0)
    assert _is_sharded(optimizer.variables[2])


@pytest.mark.filterwarnings("ignore:Gradients do not exist")
@pytest.mark.parametrize("how", ["run_steps", "fit", "no gradient"])
def test_other_ways_to_step(how: str) -> None:
    def values(strategy: phalanx.Strategy) -> list[np.ndarray]:
        with strategy.scope():
            model, optimizer = _model(), keras.optimizers.Adam(0.1)
        step = _step(model, optimizer)
        dataset = strategy.experimental_distribute_dataset([ROWS[:4]] * 3)
        if how == "run_steps":
            strategy.run_steps(step, iter(dataset), 3)
        elif how == "fit":
            model.compile(optimizer, "mse", jit_compile=True)
            model.fit(ROWS, ROWS[:, :3], batch_size=4, epochs=2, verbose=0, shuffle=False)
        else:
            trained = model.trainable_variables
            strategy.run(lambda: optimizer.apply([None, *(jnp.ones(v.shape) for v in trained[1:])], trained))
        return [np.asarray(v) for v in (*model.variables, *optimizer.variables)]

    for a, b in zip(
        values(_sharded()), values(phalanx.MirroredStrategy(TWO, weight_update_sharding=False)), strict=True
    ):
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6)


def test_checkpoints_between_whole_and_sharded(tmp_path: Any) -> None:
    make = ELEMENTWISE["SGD with momentum"]
    strategies = [_sharded(), phalanx.OneDeviceStrategy("cpu:0"), _sharded()]
    even = [ROWS[:2]]
    _, model, optimizer = _trained(strategies[0], make, even)
    expected = [np.asarray(v) for v in (*model.variables, *optimizer.variables)]
    phalanx.train.Checkpoint(model=model, optimizer=optimizer).write(tmp_path / "a")
    for strategy in strategies[1:]:
        _, model, optimizer = _trained(strategy, make, even)
        phalanx.train.Checkpoint(model=model, optimizer=optimizer).restore(tmp_path / "a")
        for a, b in zip((*model.variables, *optimizer.variables), expected, strict=True):
            np.testing.assert_array_equal(a, b)
        strategy.run(_step(model, optimizer), args=(ROWS[:2],))
        phalanx.testing.assert_in_sync(model, optimizer)


@pytest.mark.parametrize(
    "options",
    [
        {"cross_device_ops": phalanx.ReductionToOneDevice()},
        {"communication_options": phalanx.experimental.CommunicationOptions(compression="int8")},
        {"communication_options": phalanx.experimental.CommunicationOptions(wire_dtype="bfloat16")},
        {"local_updates": phalanx.experimental.LocalSGD(every=2)},
        {"layout": phalanx.fully_sharded()},
        {"model_axis": ("model", 2)},
    ],
)
def test_options_that_need_full_gradients(options: dict[str, Any]) -> None:
    with pytest.raises(
        InvalidArgumentError, match=r"weight_update_sharding=True with .*[.]\nHINT: leave one of them out"
    ):
        _sharded(**options)
    assert not phalanx.MirroredStrategy(TWO, **options).topology.shards_updates


def test_choice_that_is_no_bool() -> None:
    with pytest.raises(InvalidArgumentError, match="weight_update_sharding='yes': must be True, False or None"):
        phalanx.MirroredStrategy(TWO, weight_update_sharding="yes")  # type: ignore[arg-type]
