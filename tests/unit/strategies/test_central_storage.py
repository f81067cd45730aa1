"""`CentralStorageStrategy`: where variables live, when they change, and what a step must not do."""

import jax
import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.tracing.strategy import Updates
from phalanx.errors import DeviceError, InvalidArgumentError, NestedWriteError, VariableError

pytestmark = pytest.mark.slow

X = np.random.RandomState(0).normal(size=(22, 4)).astype("float32")
Y = X.sum(1, keepdims=True)


X3, X2_SHARED, X1 = ["cpu:1", "cpu:2", "cpu:3"], ["cpu:0", "cpu:1"], ["cpu:1"]


@pytest.fixture(params=[X3, X2_SHARED, X1], ids=["x3", "x2_shared", "x1"])
def strategy(request):
    """Over other devices than the variables', over theirs too, and over one."""
    return phalanx.experimental.CentralStorageStrategy(request.param, "cpu:0")


def parts(strategy, optimizer=None):
    keras.utils.set_random_seed(3)
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
        optimizer = optimizer or keras.optimizers.Adam(0.1)
    return model, optimizer


def stepper(model, optimizer):
    """A replica function as users of tf.distribute write it."""

    def step(batch):
        x, y = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss((model(x) - y)[:, 0] ** 2)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    return step


def by_keras(epochs, optimizer):
    """What plain Keras makes of the same batches: the weights."""
    keras.utils.set_random_seed(3)
    model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1)])
    model.compile(optimizer, "mse")
    model.fit(X, Y, batch_size=8, epochs=epochs, shuffle=False, verbose=0)
    return model.get_weights()


def devices_of(variables):
    """Where arrays are."""
    return {f"cpu:{d.id}" for v in variables for d in v.value.devices()}


def same(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.cover(["strategy"], [X2_SHARED])
def test_custom_loop_equals_plain_keras(strategy):
    """Weights and slots stay on their device, and are those of plain Keras; the last batch is short."""
    model, optimizer = parts(strategy)
    step = stepper(model, optimizer)
    run = lambda batch: strategy.run(step, args=(batch,))  # noqa: E731
    dataset = strategy.experimental_distribute_dataset((X, Y), batch_size=8)
    for way in (run, phalanx.function(run)):
        for batch in dataset:
            way(batch)
            assert devices_of([*model.variables, *optimizer.variables]) == {"cpu:0"}
    iterator = iter(dataset)
    for count in (2, 1):  # The last batch is short.
        losses = strategy.run_steps(step, iterator, 3)
        assert strategy.reduce("SUM", losses, axis=None).shape == (count,)
    same(model.get_weights(), by_keras(3, keras.optimizers.Adam(0.1)))
    assert int(optimizer.iterations.value) == 9


OPTIMIZERS = {
    "schedule": (X3, lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.5), 0.9)),
    "clipnorm": (X2_SHARED, lambda: keras.optimizers.AdamW(0.1, clipnorm=0.1)),
    "ema": (X3, lambda: keras.optimizers.Adam(0.1, use_ema=True, ema_overwrite_frequency=2)),
    "accumulation": (X3, lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)),
    "accumulation_x1": (X1, lambda: keras.optimizers.Adam(0.1, gradient_accumulation_steps=2)),
    "loss_scale": (X3, lambda: keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(0.1))),
    "muon": (X2_SHARED, lambda: keras.optimizers.Muon(0.1)),
}


@pytest.mark.cover(["name"], {"clipnorm", "accumulation"})
@pytest.mark.parametrize(
    ("strategy", "name"), [(on, name) for name, (on, _) in OPTIMIZERS.items()], indirect=["strategy"], ids=OPTIMIZERS
)
def test_fit_with_optimizers(strategy, name):
    _, optimizer = OPTIMIZERS[name]
    model, _ = parts(strategy)
    with strategy.scope():
        model.compile(optimizer(), "mse", steps_per_execution=2)
    model.fit(X, Y, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert devices_of([*model.variables, *model.optimizer.variables]) == {"cpu:0"}
    same(model.get_weights(), by_keras(2, optimizer()))


def test_writes_of_replicas(strategy):
    """Sums and means arrive once; on-read values of replicas add up."""
    n = strategy.num_replicas_in_sync
    with strategy.scope():
        total = keras.Variable(1.0, aggregation="sum")
        mean = keras.Variable(1.0, aggregation="mean")
        count = keras.Variable(0.0, aggregation="sum", synchronization="on_read", trainable=False)

    def step():
        number = phalanx.get_replica_context().replica_id_in_sync_group
        total.assign_add(1.0 + number)
        mean.assign(2.0 * number)
        count.assign_add(1.0)

    for _ in range(2):
        strategy.run(step)
    assert float(total.value) == 1 + 2 * sum(range(1, n + 1))
    assert float(mean.value) == n - 1
    assert float(count.value) == 2 * n
    assert devices_of([total, mean, count]) == {"cpu:0"}
    assert len(strategy.experimental_local_results(total)) == 1


def test_slots_are_nowhere_else():
    """After a step the compute devices hold nothing of the size of the model."""
    strategy = phalanx.experimental.CentralStorageStrategy(["cpu:2", "cpu:3"], "cpu:1")
    with strategy.scope():
        model = keras.Sequential([keras.layers.Input((4,)), keras.layers.Dense(1000), keras.layers.Dense(1)])
        optimizer = keras.optimizers.Adam()
    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    others = jax.live_arrays()  # Caches hold what other tests have left.
    strategy.run(stepper(model, optimizer), args=(batch,))
    made = [array for array in jax.live_arrays() if not any(array is other for other in others)]
    shards = [shard for array in made for shard in array.addressable_shards]
    assert max((shard.data.nbytes for shard in shards if shard.device.id in (2, 3)), default=0) < 4000


@pytest.mark.parametrize("strategy", [X3], indirect=True)
def test_a_variable_after_its_update(strategy):
    """It has no new value in the step, neither to read nor to write. The failure changes nothing. A new learning rate counts."""
    model, optimizer = parts(strategy)
    step = stepper(model, optimizer)
    (batch,) = strategy.experimental_distribute_dataset([(X, Y)])
    strategy.run(step, args=(batch,))
    before = model.get_weights()

    def reads(batch):
        step(batch)
        return model(batch[0])

    def writes(batch):
        step(batch)
        optimizer.iterations.assign_add(1)

    for fn in (reads, writes):
        with pytest.raises(VariableError, match="after optimizer.apply in the same step") as e:
            strategy.run(fn, args=(batch,))
        assert "HINT: use it before optimizer.apply, or in the next strategy.run" in str(e.value)
    same(model.get_weights(), before)
    optimizer.learning_rate = 0.0
    strategy.run(step, args=(batch,))
    same(model.get_weights(), before)


@pytest.mark.parametrize("strategy", [X3], indirect=True)
def test_updates_in_bodies(strategy):
    """A body of a loop has no end of the step. A wrong number of gradients is found in the step."""
    model, optimizer = parts(strategy)
    optimizer.build(model.trainable_variables)
    ones = [np.ones(v.shape, "float32") for v in model.trainable_variables]
    for scan in (jax.lax.scan, phalanx.scan):
        with pytest.raises(NestedWriteError) as e:
            strategy.run(lambda scan=scan: scan(lambda c, _: (optimizer.apply(ones), (c, None))[1], 0.0, None, 2))
        assert e.value.hint == "call strategy.run once per step"
    with pytest.raises(
        InvalidArgumentError, match=r"Adam.apply was called with len\(grads\)=1: the number of variables is 2"
    ):
        strategy.run(lambda: optimizer.apply([1.0]))


def test_all_devices_compute_by_default():
    """By default all compute, and the host stores; unknown devices are refused."""
    strategy = phalanx.experimental.CentralStorageStrategy()
    assert strategy.num_replicas_in_sync == len(jax.local_devices())
    assert strategy.updates is Updates.AFTER_PROGRAM
    for arguments in ([["cpu:999"]], [None, "cpu:999"], [["cpu:1", "cpu:1"]]):
        with pytest.raises(DeviceError):
            phalanx.experimental.CentralStorageStrategy(*arguments)


def test_parameter_device_holds_the_variables():
    """The one device that has the variables, and the strategy knows its own."""
    strategy = phalanx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"], "cpu:2")
    assert strategy.extended.parameter_devices == ("cpu:2",)
    assert strategy.extended.worker_devices == ("cpu:0", "cpu:1")
    with strategy.scope():
        v = keras.Variable(1.0)
    assert strategy.extended.variable_created_in_scope(v)
    assert strategy.extended.update(v, lambda v: v.assign(2.0), group=False)[0] == 2.0


@pytest.mark.cover(["strategy"], [X2_SHARED])
def test_results_and_variables_are_combined(strategy):
    """Although they are on different devices: what `reduce`, `gather` and functions return, and `Mirrored` values."""
    with strategy.scope():
        v, mean = keras.Variable(3.0), keras.metrics.Mean()
    count = strategy.num_replicas_in_sync
    ones = strategy.run(lambda: keras.ops.ones(1) * v / v)
    total = strategy.reduce("SUM", ones, axis=None)[0]
    mirrored = strategy.run(lambda: phalanx.Mirrored(v * 2))
    of_function = phalanx.function(lambda x: strategy.reduce("SUM", x, axis=None))(ones)
    for result, expected in ((total, count), (strategy.gather(ones, axis=0)[-1], 1), (of_function[0], count)):
        assert float(v * result) == float(result * v) == 3 * expected
        assert float(keras.ops.maximum(v, result)) == max(3, expected)
    assert float(v + mirrored) == float(mirrored + v) == 9
    v.assign_add(total)
    mean.update_state(total)
    strategy.extended.update(v, lambda v, x: v.assign_sub(x), args=(total,))
    assert float(v) == 3
    assert float(mean.result()) == count
    assert v.value.devices() == {jax.devices()[0]}
