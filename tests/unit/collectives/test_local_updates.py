"""Replicas that train on their own, against NumPy: what they synchronize and when, what is read outside, and what is refused."""

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.tools.estimate.hlo import HloProgram
from phalanx.errors import AggregationError, InvalidArgumentError, VariableError
from phalanx.experimental import CommunicationOptions, DiLoCo, LocalSGD

ROWS, WIDTH, REPLICAS = 24, 3, 2
RANDOM = np.random.default_rng(0)
X = RANDOM.normal(size=(ROWS, WIDTH)).astype("float32")
Y = (X @ [[1.0], [-2.0], [0.5]] + 0.1).astype("float32")
RATE, MOMENTUM = 0.05, 0.5
OUTER_RATE, OUTER_MOMENTUM = 0.7, 0.9
CHOICES = {
    "LocalSGD": LocalSGD(3),
    "fragments": DiLoCo(every=4, fragments=2),
    "Adam": DiLoCo(keras.optimizers.Adam(0.1), every=3),
}


def strategy_with(local_updates, replicas=REPLICAS, **options):
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)], local_updates=local_updates, **options)


def linear(strategy, optimizer=None, **compiled):
    """A model with one layer, whose weights begin at zero."""
    with strategy.scope():
        layer = keras.layers.Dense(1, kernel_initializer="zeros")
        model = keras.Sequential([keras.Input((WIDTH,)), layer])
        model.compile(optimizer or keras.optimizers.SGD(RATE, momentum=MOMENTUM), "mse", **compiled)
    return model


def step_of(strategy, model):
    """A step of a custom loop."""

    def replica(batch):
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(keras.ops.sum((model(x, training=True) - y) ** 2, -1))
        variables = model.trainable_variables
        model.optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return phalanx.function(lambda batch: strategy.reduce("SUM", strategy.run(replica, args=(batch,)), axis=None))


class Training:
    """A model in a custom loop, whose batches are halves of the rows in turn."""

    def __init__(self, local_updates, replicas=REPLICAS, optimizer=None, model=None):
        self.strategy = strategy_with(local_updates, replicas)
        self.model = model or linear(self.strategy, optimizer)
        self.kernel = self.model.layers[0].kernel
        self.step = step_of(self.strategy, self.model)
        halves = [(X[: ROWS // 2], Y[: ROWS // 2]), (X[ROWS // 2 :], Y[ROWS // 2 :])]
        self.batches = list(self.strategy.experimental_distribute_dataset(halves))
        self.steps, self.losses = 0, []

    def go(self, steps):
        for _ in range(steps):
            self.losses.append(float(self.step(self.batches[self.steps % 2])))
            self.steps += 1
        return self

    def local_weights(self):
        """Kernel and bias of each replica."""
        parts = [self.strategy.experimental_local_results(v) for v in self.model.trainable_variables]
        return [np.concatenate([kernel, bias[None]]) for kernel, bias in zip(*parts, strict=True)]


def weights_of(model):
    """Kernel and bias in one array."""
    return np.concatenate([model.get_weights()[0], model.get_weights()[1][None]])


def gradients(weights, step, group=1):
    """Those of the mean over the rows that each replica has in a step. The replicas of a group share theirs."""
    x = np.c_[X, np.ones(ROWS)].reshape(2, len(weights), -1, WIDTH + 1)[step % 2]
    y = Y.reshape(2, len(weights), -1, 1)[step % 2]
    found = 2 / x.shape[1] * x.swapaxes(1, 2) @ (x @ weights - y)
    return found.reshape(-1, group, WIDTH + 1, 1).mean(1).repeat(group, 0)


def simulated(steps, every=3, count=REPLICAS, group=1, diloco=False):
    """The weights and momentum of replicas that synchronize every few steps, and the weights that are read outside."""
    weights = momentum = np.zeros((count, WIDTH + 1, 1))
    outer = velocity = np.zeros((WIDTH + 1, 1))
    for step in range(steps):
        momentum = MOMENTUM * momentum - RATE * gradients(weights, step, group)
        weights = weights + momentum
        if (step + 1) % every == 0 and diloco:  # SGD with Nesterov momentum, as Keras defines it.
            change = outer - weights.mean(0)
            velocity = OUTER_MOMENTUM * velocity - OUTER_RATE * change
            outer = outer + OUTER_MOMENTUM * velocity - OUTER_RATE * change
            weights = np.stack([outer] * count)
        elif (step + 1) % every == 0:
            weights, momentum = (np.stack([x.mean(0)] * count) for x in (weights, momentum))
    return weights, momentum, outer if diloco else weights.mean(0)


def test_local_sgd_takes_the_mean():
    """Of weights and momentum, every third step. In between, the mean is what is read."""
    training = Training(LocalSGD(3))
    for steps in (2, 3, 7):
        training.go(steps - training.steps)
        weights, momentum, mean = simulated(steps)
        np.testing.assert_allclose(training.local_weights(), weights, atol=1e-6)
        np.testing.assert_allclose(weights_of(training.model), mean, atol=1e-6)
        slot = training.model.optimizer.variables[2]
        np.testing.assert_allclose(slot.numpy(), momentum.mean(0)[:WIDTH], atol=1e-6)


@pytest.mark.parametrize(("count", "stops"), [(2, (3, 8)), (1, (4,))])
def test_diloco_has_outer_steps(count, stops):
    """The mean change of the weights is the gradient of the outer optimizer; the outer weights are what is read."""
    training = Training(DiLoCo(every=2), count)
    for steps in stops:
        training.go(steps - training.steps)
        weights, _, outer = simulated(steps, every=2, count=count, diloco=True)
        np.testing.assert_allclose(training.local_weights(), weights, atol=1e-5)
        np.testing.assert_allclose(weights_of(training.model), outer, atol=1e-5)


def test_fragments_are_synchronized_in_turn():
    """The kernel, which is larger, is the first fragment; the bias is the second."""
    training = Training(DiLoCo(every=4, fragments=2))
    seen = [[w.tolist() for w in training.go(steps > 0).model.get_weights()] for steps in range(9)]
    kernels, biases = zip(*seen, strict=True)
    assert [i for i in range(1, 9) if kernels[i] != kernels[i - 1]] == [2, 6]
    assert [i for i in range(1, 9) if biases[i] != biases[i - 1]] == [4, 8]


def test_replicas_of_a_group_stay_equal():
    """They aggregate their gradients at every step, and the groups are the replicas of the algorithm."""
    training = Training(LocalSGD(3, replicas_per_group=2), 4).go(5)
    found = training.local_weights()
    assert [np.array_equal(found[0], x) for x in found] == [True, True, False, False]
    np.testing.assert_allclose(found, simulated(5, count=4, group=2)[0], atol=1e-6)


@pytest.mark.exhaustive("tests/contract/test_law1_equals_one_device.py, test_steps_in_one_program")
def test_every_step_is_synchronous_training():
    """With a linear optimizer: also in `fit`, on batches with padding."""
    losses = []
    outer = DiLoCo(lambda: keras.optimizers.SGD(1.0), every=1)
    for choice in (None, LocalSGD(1), outer, LocalSGD(1, replicas_per_group=2)):
        model = linear(strategy_with(choice))
        run = model.fit(X, Y, batch_size=9, epochs=3, shuffle=False, verbose=0, validation_data=(X, Y))
        losses.append([*run.history["loss"], *run.history["val_loss"]])
    for found in losses[1:]:
        np.testing.assert_allclose(losses[0], found, rtol=1e-5)


@pytest.mark.cover(["local_updates"], [CHOICES["fragments"]])
@pytest.mark.parametrize("local_updates", CHOICES.values(), ids=CHOICES)
def test_steps_in_one_program(local_updates):
    """Are those of several programs: the synchronization is a part of a step."""
    results = []
    for steps in (1, 5):
        model = linear(strategy_with(local_updates), steps_per_execution=steps)
        model.fit(X, Y, batch_size=4, epochs=2, shuffle=False, verbose=0)
        results.append(weights_of(model))
    np.testing.assert_allclose(*results, rtol=1e-5)


def test_several_updates_in_one_call():
    """`phalanx.scan` around the optimizer synchronizes inside its body."""
    training = Training(LocalSGD(2))
    model, variables = training.model, training.model.trainable_variables

    def body(carry, batch):
        x, y = batch
        loss_of = lambda: phalanx.nn.compute_average_loss(keras.ops.sum((model(x) - y) ** 2, -1))  # noqa: E731
        loss, gradients = phalanx.value_and_grad(loss_of, variables)()
        model.optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return carry, loss

    x, y = X.reshape(2, REPLICAS, -1, WIDTH), Y.reshape(2, REPLICAS, -1, 1)

    def replica():
        i = phalanx.get_replica_context().replica_id_in_sync_group
        phalanx.scan(body, 0.0, (jax.numpy.asarray(x)[:, i], jax.numpy.asarray(y)[:, i]))

    training.strategy.run(replica)
    np.testing.assert_array_equal(*training.local_weights())
    np.testing.assert_allclose(training.local_weights(), simulated(2, every=2)[0], atol=1e-6)


def test_statistics_are_local_and_averaged():
    """BatchNormalization computes those of its replica. A replica without rows keeps what it had."""
    strategy = strategy_with(LocalSGD(2))
    with strategy.scope():
        layer = keras.layers.BatchNormalization(momentum=0.5)
        model = keras.Sequential([keras.Input((WIDTH,)), layer, keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(RATE))
    step = step_of(strategy, model)
    full, short = strategy.experimental_distribute_dataset([(X[:n], Y[:n]) for n in (ROWS // 2, 1)])
    step(full)
    own = [0.5 * X[rows].mean(0) for rows in (slice(0, 6), slice(6, 12))]
    found = strategy.experimental_local_results(layer.moving_mean)
    np.testing.assert_allclose(found, own, atol=1e-6)
    np.testing.assert_allclose(layer.moving_mean.numpy(), np.mean(own, axis=0), atol=1e-6)
    step(short)
    mean = np.mean([0.5 * own[0] + 0.5 * X[0], own[1]], axis=0)
    np.testing.assert_allclose(strategy.experimental_local_results(layer.moving_mean), [mean, mean], atol=1e-6)


def test_integers_are_averaged_exactly():
    """A synchronization gives all replicas the mean of their counters, without a fraction, where a float32 has no odd numbers."""
    training = Training(LocalSGD(1))
    with training.strategy.scope():
        counter = keras.Variable(2_000_000_001, dtype="int32", trainable=False, aggregation="mean")

    def step():
        counter.assign_add(2 + 3 * phalanx.get_replica_context().replica_id_in_sync_group)
        variables = training.model.trainable_variables
        training.model.optimizer.apply([w * 0 for w in variables], variables)

    training.strategy.run(step)
    assert [int(x) for x in training.strategy.experimental_local_results(counter)] == [2_000_000_004] * 2


@pytest.mark.cover(["local_updates"], [CHOICES["fragments"]])
@pytest.mark.parametrize("local_updates", CHOICES.values(), ids=CHOICES)
def test_reads_and_writes_between_steps(local_updates):
    """What is read outside is what a plain model evaluates; reads disturb nothing; an assignment is that of all replicas."""
    training, undisturbed = Training(local_updates).go(5), Training(local_updates).go(8)
    model, kernel, step = training.model, training.kernel, training.step
    evaluated = model.evaluate(X, Y, verbose=0)
    plain = linear(phalanx.OneDeviceStrategy("cpu:0"))
    plain.set_weights(model.get_weights())
    np.testing.assert_allclose(evaluated, plain.evaluate(X, Y, verbose=0), rtol=1e-5)
    np.testing.assert_allclose(model.predict(X, verbose=0), plain.predict(X, verbose=0), rtol=1e-5)

    @phalanx.function
    def read_step_read(batch):
        first = kernel.value * 1
        step(batch)
        return first, kernel.value * 1

    for i in range(5, 8):
        before = kernel.numpy()
        first, last = read_step_read(training.batches[i % 2])
        np.testing.assert_allclose(first, before, rtol=1e-6)
        np.testing.assert_allclose(last, kernel.numpy(), rtol=1e-6)
        model.evaluate(X, Y, verbose=0)
    np.testing.assert_allclose(weights_of(model), weights_of(undisturbed.model), rtol=1e-6)

    @phalanx.function
    def assign_and_step(batch):
        kernel.assign(keras.ops.ones((WIDTH, 1)) * 5)
        kernel.assign_add(keras.ops.ones((WIDTH, 1)))
        step(batch)

    assign_and_step(training.batches[0])
    undisturbed.kernel.assign(np.full((WIDTH, 1), 6.0))
    undisturbed.go(1)
    np.testing.assert_allclose(weights_of(model), weights_of(undisturbed.model), rtol=1e-5)
    np.testing.assert_allclose(training.local_weights(), undisturbed.local_weights(), rtol=1e-5)

    model.set_weights([np.full((WIDTH, 1), 0.25, "float32"), np.zeros(1, "float32")])
    for found in training.local_weights():
        np.testing.assert_array_equal(found, [[0.25]] * WIDTH + [[0.0]])
    training.go(12)
    assert model.evaluate(X, Y, verbose=0) < np.square(X @ np.full((WIDTH, 1), 0.25) - Y).mean()


def fit_unchanged(strategy, model, before):
    """Trains with a learning rate of zero: what is read stays what it was."""
    with strategy.scope():
        model.compile(keras.optimizers.SGD(0.0), "mse")
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    np.testing.assert_allclose(weights_of(model), before, rtol=1e-6)


def test_another_strategy_takes_what_is_read():
    """A model that replicas have trained alone goes on under strategies with as many replicas, more, and one; or outside."""
    first = Training(LocalSGD(3)).go(5)
    before = weights_of(first.model)
    for others in (
        (strategy_with(LocalSGD(3)), strategy_with(None, 3), phalanx.OneDeviceStrategy("cpu:0")),
        (strategy_with(DiLoCo(every=2)),),
    ):
        training = Training(LocalSGD(3)).go(5)
        for strategy in others:
            fit_unchanged(strategy, training.model, before)
    phalanx.function(lambda: first.kernel.assign(keras.ops.ones((WIDTH, 1))))()
    np.testing.assert_array_equal(first.kernel.numpy(), np.ones((WIDTH, 1)))


def test_local_sgd_after_outer_weights():
    """Begins with them, and then reads as the mean of the replicas."""
    model = Training(DiLoCo(every=2)).go(5).model
    before = weights_of(Training(DiLoCo(every=2)).go(5).model)
    training = Training(LocalSGD(8), model=model)
    fit_unchanged(training.strategy, model, before)
    model.optimizer.learning_rate = 0.1
    model.fit(X, Y, batch_size=8, epochs=1, verbose=0)
    assert not np.allclose(weights_of(model), before)
    np.testing.assert_allclose(weights_of(model), np.mean(training.local_weights(), axis=0), rtol=1e-5)


def test_outer_weights_of_two_optimizers():
    """Are those of the first, so that each goes on from what the other has done."""
    training = Training(DiLoCo(every=2)).go(4)
    before = weights_of(training.model)
    for optimizer in (keras.optimizers.SGD(0.0), training.model.optimizer):
        training.model.optimizer = optimizer
        training.step = step_of(training.strategy, training.model)
        training.go(1)
        np.testing.assert_array_equal(weights_of(training.model), before)


@pytest.mark.parametrize("local_updates", [LocalSGD(3), DiLoCo(every=3)], ids=["LocalSGD", "DiLoCo"])
def test_constraints_hold_after_a_synchronization(local_updates):
    """Kernels of norm 1, whose mean has another norm; and so has an outer step."""
    with strategy_with(local_updates).scope():
        layer = keras.layers.Dense(4, kernel_initializer="ones", kernel_constraint=keras.constraints.UnitNorm())
        model = keras.Sequential([keras.Input((WIDTH,)), layer])
        model.compile(keras.optimizers.SGD(0.3), "mse")
    model.fit(X, np.tile(Y, 4) * [1, -1, 2, 0], batch_size=8, epochs=2, shuffle=False, verbose=0)
    np.testing.assert_allclose(np.linalg.norm(layer.kernel.numpy(), axis=0), 1.0, atol=1e-5)


def test_replicas_hold_weights_of_their_own():
    """Each device holds a whole one, also before it is read. They are written by optimizers, and changed by equal increments."""
    training = Training(LocalSGD(3)).go(1)
    held = training.strategy.held(training.kernel)
    assert [(part.place, part.num_bytes) for part in held] == [("cpu:0", 4 * WIDTH), ("cpu:1", 4 * WIDTH)]
    before = training.kernel.numpy()
    with pytest.raises(AggregationError, match="the variable is trainable"):
        training.strategy.run(lambda: training.kernel.assign_sub(keras.random.normal((WIDTH, 1))))
    training.strategy.run(lambda: training.kernel.assign_sub(keras.ops.ones((WIDTH, 1))))
    np.testing.assert_allclose(training.kernel.numpy(), before - 1, atol=1e-6)


def test_accumulated_gradients_are_local():
    """An update is counted once per accumulation, and nothing is sent before."""
    optimizer = keras.optimizers.SGD(RATE, momentum=MOMENTUM, gradient_accumulation_steps=2)
    training = Training(LocalSGD(3), optimizer=optimizer).go(6)
    weights = momentum = np.zeros((REPLICAS, WIDTH + 1, 1))
    for _ in range(3):
        momentum = MOMENTUM * momentum - RATE * (gradients(weights, 0) + gradients(weights, 1)) / 2
        weights = weights + momentum
    np.testing.assert_allclose(weights_of(training.model), weights.mean(0), atol=1e-6)
    np.testing.assert_array_equal(*training.local_weights())


CHECKPOINTED = CHOICES | {"int8": DiLoCo(every=4, compression="int8")}


@pytest.mark.cover(["local_updates"], [CHECKPOINTED["int8"]])
@pytest.mark.parametrize("local_updates", CHECKPOINTED.values(), ids=CHECKPOINTED)
def test_checkpoint_in_the_middle(local_updates, tmp_path):
    """A training goes on with the same bits, and on another number of replicas from the weights that are read.

    A saved model has these weights too, and loads without Phalanx's strategies.
    """
    training = Training(local_updates).go(6)
    model = training.model
    path = phalanx.train.Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "saved")
    model.save(tmp_path / "model.keras")
    weights = weights_of(model)
    np.testing.assert_array_equal(weights_of(keras.models.load_model(tmp_path / "model.keras")), weights)
    expected = training.go(6).losses[6:]
    for replicas in (REPLICAS, 3):
        other = Training(local_updates, replicas)
        status = phalanx.train.Checkpoint(model=other.model, optimizer=other.model.optimizer).restore(path)
        np.testing.assert_array_equal(weights_of(other.model), weights)
        found = other.go(6).losses
        status.assert_consumed()
        if replicas == REPLICAS:
            assert found == expected
        assert max(found) < 2 * max(expected)


def test_training_without_a_synchronization():
    """The outer weights were not trained, and `fit` says so."""
    model = linear(strategy_with(DiLoCo(every=100)))
    with pytest.warns(
        phalanx.errors.SlipWarning, match=r"6 updates of DiLoCo\(every=100\), so not all weights were synchronized"
    ):
        model.fit(X, Y, batch_size=8, epochs=2, verbose=0)


def sent_bytes(local_updates):
    """Bytes of the arrays that a step of two layers sums over the replicas, if all is due."""
    strategy = strategy_with(local_updates)
    with strategy.scope():
        model = keras.Sequential([keras.Input((256,)), keras.layers.Dense(128), keras.layers.Dense(10)])
        model.compile(keras.optimizers.SGD(momentum=MOMENTUM))
    rows = np.zeros((8, 256), "float32"), np.zeros((8, 10), "float32")
    (batch,) = strategy.experimental_distribute_dataset([rows])
    program = HloProgram(step_of(strategy, model).lower(batch).compile().as_text())
    # A ring sends an array of an all-reduce twice, and the arrays of the others once.
    return sum(c.num_bytes * (2 if c.kind == "all-reduce" else 1) for c in program.collectives)


def test_few_bytes_per_step():
    """DiLoCo sends the weights once in 100 steps, in parts if there are fragments; in between, only the loss is sent."""
    whole = sent_bytes(None)
    assert whole >= 2 * 4 * (256 * 128 + 128 * 10)
    assert sent_bytes(DiLoCo(every=100)) / 100 <= 0.011 * whole
    assert sent_bytes(DiLoCo(every=100, fragments=4)) / 100 <= 0.011 * whole
    assert sent_bytes(DiLoCo(every=100, compression="int8")) / 100 <= 0.003 * whole
    # The momentum is one more array per weight.
    assert sent_bytes(LocalSGD(100)) / 100 <= 0.021 * whole


def train_swapping():
    """Trains with a callback that assigns the averages of the weights for an evaluation, and then the weights that it has read."""
    strategy = strategy_with(DiLoCo(every=2))
    model = linear(strategy, keras.optimizers.SGD(RATE, use_ema=True))
    model.fit(X, Y, validation_data=(X, Y), verbose=0, callbacks=[keras.callbacks.SwapEMAWeights()])


def train_stateless():
    """Applies the optimizer by its stateless method in a custom loop."""
    strategy = strategy_with(LocalSGD(2))
    model = linear(strategy)
    variables = model.trainable_variables
    model.optimizer.build(variables)

    def replica():
        values = [v.value for v in variables]
        state = [v.value for v in model.optimizer.variables]
        for variable, value in zip(variables, model.optimizer.stateless_apply(state, values, values)[0], strict=True):
            variable.assign(value)

    strategy.run(replica)


def train_scaled():
    Training(LocalSGD(2), optimizer=keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())).go(1)


BAD = {
    "every": (lambda: LocalSGD(0), r"every=0"),
    "group": (lambda: LocalSGD(8, replicas_per_group="two"), r"replicas_per_group='two'"),
    "fragments": (
        lambda: DiLoCo(every=10, fragments=4),
        r"DiLoCo\(every=10, fragments=4\): the fragments are .* must divide `every`.*\n.*every=12",
    ),
    "no fragments": (lambda: DiLoCo(fragments=0), r"fragments=0"),
    "compression": (lambda: DiLoCo(compression="int4"), r"compression='int4'"),
    "first argument": (
        lambda: DiLoCo(100),
        r"DiLoCo\(100\): the first argument is the outer optimizer.\nHINT: DiLoCo\(every=100",
    ),
    "stateless step": (train_stateless, r"optimizer.stateless_apply under a strategy with local_updates: it names no"),
    "swapped weights": (
        train_swapping,
        r"keras.callbacks.SwapEMAWeights under a strategy with DiLoCo: restoring the weights",
    ),
    "outer optimizer": (lambda: DiLoCo("sgd"), r"outer_optimizer='sgd': must be an? Optimizer"),
    "outer scale": (
        lambda: DiLoCo(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD())),
        r"outer_optimizer=LossScaleOptimizer: outer gradients do not come from a loss",
    ),
    "function": (lambda: Training(DiLoCo(lambda: "sgd", every=1)).go(1), r"outer_optimizer='sgd': must be"),
    "no kind": (lambda: strategy_with(8), r"local_updates=8: must be a LocalSGD or a DiLoCo"),
    "uneven groups": (
        lambda: strategy_with(LocalSGD(8, replicas_per_group=2), 3),
        r"replicas_per_group=2 with 3 replicas: every group must have",
    ),
    "layout": (
        lambda: strategy_with(LocalSGD(8), layout=phalanx.fully_sharded()),
        r"local_updates=LocalSGD with a layout or a model axis: every replica must hold whole",
    ),
    "two ways": (
        lambda: strategy_with(DiLoCo(), cross_device_ops=phalanx.NcclAllReduce()),
        r"local_updates=DiLoCo with cross_device_ops=NcclAllReduce\(\)",
    ),
    "gradients": (
        lambda: strategy_with(LocalSGD(8), communication_options=CommunicationOptions(compression="int8")),
        r"local_updates=LocalSGD with communication_options that round or compress gradients: the replicas send no",
    ),
    "central storage": (
        lambda: phalanx.experimental.CentralStorageStrategy(local_updates=LocalSGD(8)),
        r"CentralStorageStrategy\(local_updates=LocalSGD\(every=8.*: one device holds the variables of all replicas",
    ),
    "parameter servers": (
        lambda: phalanx.ParameterServerStrategy(local_updates=LocalSGD(8)),
        r"ParameterServerStrategy\(local_updates=LocalSGD\(every=8.*: workers send each update to the servers",
    ),
    "scaled loss": (train_scaled, r"LossScaleOptimizer under a strategy with local_updates=LocalSGD: replicas whose"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_local_updates_are_refused(case):
    make, message = BAD[case]
    with pytest.raises(InvalidArgumentError, match=message):
        make()


def test_variables_of_other_scopes_are_refused():
    """Replicas have no values of their own of them."""
    training = Training(LocalSGD(2), model=linear(phalanx.get_strategy()))
    with pytest.raises(VariableError, match=r"under a strategy with local_updates=LocalSGD.*outside the scope"):
        training.go(1)
