"""Which object receives which value."""

import os
import signal
import weakref

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from keras import layers

import phalanx
from phalanx._src.checkpoint import restoration
from phalanx.errors import CheckpointError, CheckpointMismatchError
from phalanx.train import Checkpoint, CheckpointOptions

X, Y = np.ones((4, 3), "float32"), np.zeros((4, 2), "float32")


class Net(keras.Model):
    """A model whose layers know their shapes only when it is called. One of them is made then."""

    def __init__(self):
        super().__init__()
        self.first = layers.Dense(4)
        self.rest = [layers.BatchNormalization(), layers.Dropout(0.5)]

    def build(self, shape):
        self.last = layers.Dense(2)
        self.built = True

    def call(self, x, training=False):
        x = self.first(x)
        for layer in self.rest:
            x = layer(x, training=training)
        return self.last(x)


def trained(strategy, steps=2):
    """A model and an optimizer that have trained in a loop."""
    with strategy.scope():
        model, optimizer = Net(), keras.optimizers.Adam(0.1)
    train(strategy, model, optimizer, steps)
    return model, optimizer


def train(strategy, model, optimizer, steps):
    """Trains, which makes all variables in the first step."""

    def step(x, y):
        with phalanx.GradientTape() as tape:
            loss = keras.ops.mean((model(x, training=True) - y) ** 2)
        variables = model.trainable_variables
        optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables, strict=True))
        return loss

    return [float(strategy.reduce("MEAN", strategy.run(step, args=(X, Y)), axis=None)) for _ in range(steps)]


def assert_same(ours, theirs):
    """Compares the variables of models and optimizers, bit by bit."""
    values, others = ([v.numpy() for owner in owners for v in owner.variables] for owners in (ours, theirs))
    for a, b in zip(values, others, strict=True):
        np.testing.assert_array_equal(a, b)


def dense():
    layer = layers.Dense(2)
    layer.build((None, 3))
    return layer


def two_replicas():
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.cover(["make"], [two_replicas])
@pytest.mark.parametrize("make", [phalanx.get_strategy, two_replicas])
def test_variables_of_the_first_step_begin_with_saved_values(tmp_path, make):
    """The first step after `restore` makes the variables, and computes with the values of the checkpoint."""
    strategy = make()
    model, optimizer = trained(strategy)
    path = Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    wanted = train(strategy, model, optimizer, 3)
    with strategy.scope():
        keras.utils.set_random_seed(99)
        layers.Dense(1)  # The names that Keras generates differ.
        fresh, slots = Net(), keras.optimizers.Adam(0.1)
    status = Checkpoint(model=fresh, optimizer=slots).restore(path)
    assert fresh.weights == []
    assert train(strategy, fresh, slots, 3) == wanted
    status.assert_consumed()
    assert_same((fresh, slots), (model, optimizer))


def test_variables_of_a_model_that_is_called_begin_with_saved_values(tmp_path):
    """Without a strategy and without a step, too."""
    model, _ = trained(phalanx.get_strategy())
    path = Checkpoint(model=model).write(tmp_path / "c")
    fresh = Net()
    status = Checkpoint(model=fresh).read(path)
    np.testing.assert_array_equal(fresh(X), model(X))
    status.assert_consumed()


def test_variables_begin_with_saved_values_although_nobody_holds_the_checkpoint(tmp_path, collect):
    """As after `restore_or_initialize`. The objects are not kept alive by what waits for their variables."""
    model, optimizer = trained(phalanx.get_strategy())
    path = Checkpoint(model=model, optimizer=optimizer).save(tmp_path / "c")
    fresh, slots = Net(), keras.optimizers.Adam(0.1)
    Checkpoint(model=fresh, optimizer=slots).restore(path)
    collect()
    train(phalanx.get_strategy(), fresh, slots, 1)
    train(phalanx.get_strategy(), model, optimizer, 1)
    assert_same((fresh, slots), (model, optimizer))
    assert restoration.OPEN == []
    abandoned = Net()
    Checkpoint(model=abandoned).restore(path)
    assert len(restoration.OPEN) == 1
    gone = weakref.ref(abandoned)
    del abandoned
    collect()
    assert gone() is None
    layers.Dense(1).build((1, 1))
    assert restoration.OPEN == []


def test_compiled_model_contains_its_optimizer_and_metrics(tmp_path):
    """As one object; also when the optimizer is passed beside it."""

    def compiled():
        model = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        model.compile(keras.optimizers.SGD(0.1, momentum=0.9), "mse", metrics=["mae"])
        return model

    model = compiled()
    model.fit(X, Y, verbose=0)
    path = Checkpoint(model=model, optimizer=model.optimizer).save(tmp_path / "c")
    fresh = compiled()
    status = Checkpoint(model=fresh).restore(path)
    fresh.optimizer.build(fresh.trainable_variables)
    assert_same((fresh, fresh.optimizer), (model, model.optimizer))
    status.assert_existing_objects_matched()


@pytest.mark.parametrize("kept_bytes", [0, 1 << 20], ids=["read twice", "kept"])
def test_arrays_may_be_read_twice(tmp_path, monkeypatch, kept_bytes):
    """The variables keep no memory that another object could change."""
    monkeypatch.setattr(restoration, "_KEPT_BYTES", kept_bytes)
    saved, strategy = np.random.default_rng(0).normal(size=(3, 300, 200)), phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    path = Checkpoint(parts=[keras.Variable(x) for x in saved]).write(tmp_path / "saved")
    with strategy.scope():
        variables = [keras.Variable(np.zeros_like(x)) for x in saved]
    for _ in range(2):
        Checkpoint(parts=variables).restore(path)
        np.testing.assert_array_equal(variables, saved.astype("float32"))
        strategy.run(lambda: [v.assign_add(v.value) for v in variables] and None)
        np.testing.assert_array_equal(variables, 2 * saved.astype("float32"))


def test_shared_variable_is_saved_once(tmp_path):
    """Two paths lead to one object in both programs, or in one of them."""
    table = layers.Embedding(3, 2)
    table.build()
    checkpoint = Checkpoint(a=table, b={"again": table})
    path = checkpoint.write(tmp_path / "c")
    checkpoint.sync()
    assert phalanx._src.checkpoint.store.CheckpointFile(path).names == {"a/embeddings"}
    for names in (("a", "b"), ("b", "a")):
        fresh = layers.Embedding(3, 2)
        fresh.build()
        Checkpoint(**{names[0]: fresh if names[0] == "a" else {"again": fresh}}).read(path).assert_consumed()
        np.testing.assert_array_equal(fresh.embeddings.numpy(), table.embeddings.numpy())


def test_part_of_a_checkpoint_is_restored(tmp_path):
    """The code of tf.train's guide: only the bias, and the kernel when it is set as an attribute. The root has no prefix."""
    saved = dense()
    saved.bias.assign([5.0, 6.0])
    path = Checkpoint(net=Checkpoint(l1=saved), step=keras.Variable(1)).save(tmp_path / "c")
    bias, kernel = keras.Variable(np.zeros(2)), keras.Variable(np.zeros((3, 2)))
    layer = Checkpoint(bias=bias)
    status = Checkpoint(net=Checkpoint(l1=layer)).restore(path)
    assert bias.numpy().tolist() == [5, 6]
    layer.kernel = kernel
    np.testing.assert_array_equal(kernel.numpy(), saved.kernel.numpy())
    status.assert_existing_objects_matched().assert_nontrivial_match().expect_partial()
    with pytest.raises(CheckpointMismatchError, match="contains objects that the program does not have: step"):
        status.assert_consumed()
    kernel = keras.Variable(np.zeros((3, 2)))
    Checkpoint(kernel=kernel).read(Checkpoint(saved).write(tmp_path / "d")).assert_existing_objects_matched()
    np.testing.assert_array_equal(kernel.numpy(), saved.kernel.numpy())


def test_missing_objects_are_named_with_the_nearest(tmp_path):
    """A misspelled name is found by it."""
    path = Checkpoint(weights=keras.Variable(1.0)).write(tmp_path / "c")
    status = Checkpoint(weight=keras.Variable(0.0)).read(path)
    for check in (status.assert_consumed, status.assert_existing_objects_matched):
        with pytest.raises(CheckpointMismatchError, match=r"does not contain .*: weight \(nearest: weights\)"):
            check()
    with pytest.raises(
        CheckpointMismatchError,
        match=r"contains nothing that the program has; it contains: weights \(nearest: weight\)",
    ):
        status.assert_nontrivial_match()


def test_nothing_was_asked_for(tmp_path):
    """`restore(None)`, as with `latest_checkpoint` of an empty folder, does nothing."""
    status = Checkpoint(step=keras.Variable(0)).restore(None).expect_partial()
    with pytest.raises(CheckpointMismatchError, match=r"assert_consumed\(\) after restore\(None\)"):
        status.assert_consumed()


@pytest.mark.parametrize(
    "start",
    [lambda p: Checkpoint(params=p, ema=p), lambda p: Checkpoint(params=(p, [p]), ema=[p])],
    ids=["attributes", "nested"],
)
def test_average_that_begins_as_the_weights(tmp_path, start):
    """One dict of JAX arrays that has become two is two after a restore as well."""
    make = lambda: start({"w": jnp.zeros(2)})  # noqa: E731
    checkpoint = make()
    checkpoint.ema = jax.tree.map(lambda w: w + 0.25, checkpoint.ema)
    checkpoint.params = jax.tree.map(lambda w: w + 1, checkpoint.params)
    path = checkpoint.write(tmp_path / "a")
    restored = make()
    restored.read(path).assert_consumed()
    for name in ("params", "ema"):
        jax.tree.map(np.testing.assert_array_equal, getattr(restored, name), getattr(checkpoint, name))


@pytest.mark.parametrize(
    "make",
    [lambda x: np.full(2, x), lambda x: keras.Variable(float(x)), lambda x: [x, x], lambda x: np.random.default_rng(x)],
    ids=["array", "variable", "list", "generator"],
)
def test_one_object_for_two_values_is_refused(tmp_path, make):
    """An object that is changed in place cannot have both values. If they are equal, it can."""
    one = make(3)
    path = Checkpoint(first=make(1), second=make(2)).write(tmp_path / "a")
    with pytest.raises(CheckpointMismatchError, match=r"first and second are one object.*Nothing was restored"):
        Checkpoint(first=one, second=one).read(path)
    path = Checkpoint(first=make(4), second=make(4)).write(tmp_path / "b")
    Checkpoint(first=one, second=one).read(path).assert_consumed()


def test_failed_restoration_of_later_variables_ends(tmp_path):
    """The layer that does not fit is named once. Others can be made, and other checkpoints be written."""
    built = dense()
    path = Checkpoint(layer=built).write(tmp_path / "a")
    other = layers.Dense(2)
    checkpoint = Checkpoint(layer=other)
    checkpoint.read(path)
    with pytest.raises(CheckpointMismatchError, match="has the shape"):
        other.build((None, 5))
    layers.Dense(1).build((None, 2))
    checkpoint.write(tmp_path / "b")
    Checkpoint(layer=built).read(path).assert_consumed()


class Fails:
    """An object whose state cannot be restored the first time."""

    def __init__(self, error):
        self.error, self.state = error, 1

    def get_state(self):
        return self.state

    def set_state(self, state):
        error, self.error = self.error, None
        if error is not None:
            raise error
        self.state = state


def test_restoration_goes_on_after_an_interrupt(tmp_path):
    """Ctrl-C while a later object is restored does not make the rest forgotten."""
    path = Checkpoint(a=Fails(None), w=keras.Variable(3.0)).write(tmp_path / "a")
    checkpoint, later = Checkpoint(), keras.Variable(0.0)
    checkpoint.read(path)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.a = Fails(KeyboardInterrupt())
    checkpoint.w = later
    assert float(later) == 3.0


def test_failure_within_another_restoration_keeps_its_message(tmp_path):
    """Restoring the number sets the attribute again, which restores the object beside it, which fails."""
    path = Checkpoint(d={"a": 1, "b": Fails(None)}).write(tmp_path / "a")
    checkpoint = Checkpoint()
    checkpoint.read(path)
    with pytest.raises(CheckpointMismatchError, match="b: fails"):
        checkpoint.d = {"a": 0, "b": Fails(CheckpointMismatchError("b", "fails"))}


def test_position_in_other_data_names_the_checkpoint(tmp_path):
    """The batch size has changed since the checkpoint."""
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    datasets = [np.split(np.arange(12.0), parts) for parts in (3, 4)]
    first, second = (iter(strategy.experimental_distribute_dataset(d)) for d in datasets)
    next(first)
    path = Checkpoint(data=first).write(tmp_path / "a")
    with pytest.raises(CheckpointMismatchError, match=r"data does not fit this program: the position belongs to other"):
        Checkpoint(data=second).read(path)


def test_failed_restore_leaves_everything_as_it_was(tmp_path):
    """Positions in the data included: all objects are asked before the first variable changes."""
    strategy = phalanx.OneDeviceStrategy("cpu:0")
    datasets = [np.split(np.arange(12.0), parts) for parts in (3, 4)]
    first, second, other = (iter(strategy.experimental_distribute_dataset(datasets[i])) for i in (0, 0, 1))
    next(first)

    def objects(data, later, start):
        # The names decide the order.
        return {"a": data, "b": Stateful(start), "c": keras.Variable(start), "d": np.full(1, start), "e": later}

    def values(all_of_it):
        return [float(np.sum(all_of_it[name].state if name == "b" else all_of_it[name])) for name in "bcd"]

    path = Checkpoint(**objects(first, first, 1.0)).write(tmp_path / "a")
    whole = objects(second, other, 0.0)
    position = second.get_state()
    with pytest.raises(CheckpointMismatchError, match="e does not fit this program: the position belongs to other"):
        Checkpoint(**whole).read(path)
    assert values(whole) == [0.0, 0.0, 0.0]
    assert second.get_state() == position
    whole["e"] = second
    Checkpoint(**whole).read(path).assert_consumed()
    assert values(whole) == [1.0, 1.0, 1.0]


class Stateful:
    """An object of a user."""

    def __init__(self, state):
        self.state = state

    def get_state(self):
        return self.state

    def set_state(self, state):
        self.state = state


def test_damaged_array_leaves_everything_as_it_was(tmp_path):
    """Also those before it in the file."""
    path = Checkpoint(a=np.ones(9), b=np.ones(9), n=1).write(tmp_path / "a", CheckpointOptions(enable_async=False))
    content = bytearray((tmp_path / "a.safetensors").read_bytes())
    content[-1] ^= 1
    (tmp_path / "a.safetensors").write_bytes(content)
    a, b = np.zeros(9), np.zeros(9)
    checkpoint = Checkpoint(a=a, b=b, n=0)
    with pytest.raises(CheckpointError, match="the file is damaged: b is not what was saved"):
        checkpoint.read(path)
    assert (a.sum(), b.sum(), checkpoint.n) == (0, 0, 0)


@pytest.fixture
def ctrl_c():
    """Python's handler of SIGINT, also where the tests run in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_interrupted_restore_is_whole(tmp_path):
    """Ctrl-C between two variables waits for the others; an object that is interrupted, for those before it."""

    class Interrupting(Checkpoint):
        def __setattr__(self, name, value):
            super().__setattr__(name, value)
            if name == "b" and value == 1:
                os.kill(os.getpid(), signal.SIGINT)

    path = Checkpoint(a=keras.Variable(1.0), b=1, c=keras.Variable(1.0)).write(tmp_path / "a")
    checkpoint = Interrupting(a=keras.Variable(0.0), b=0, c=keras.Variable(0.0))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.read(path)
    assert (float(checkpoint.a), checkpoint.b, float(checkpoint.c)) == (1, 1, 1)

    class Interrupted(Stateful):
        def set_state(self, state):
            raise KeyboardInterrupt

    path = Checkpoint(a=Stateful(1), b=Stateful(1)).write(tmp_path / "b")
    checkpoint = Checkpoint(a=Stateful(0), b=Interrupted(0))
    with pytest.raises(KeyboardInterrupt):
        checkpoint.read(path)
    assert (checkpoint.a.state, checkpoint.b.state) == (0, 0)


RESULT = jnp.float32(0.25)
DRIFTS = {
    "a result for a number": (float("inf"), RESULT, 0.25),
    "bfloat16": (0.0, jnp.bfloat16(0.5), 0.5),
    "a NumPy number": (0, np.int64(5), 5),
    "a number for a result": (RESULT, 0.5, jnp.float32(0.5)),
    "for nothing": (None, RESULT, 0.25),
    "a member of an enumeration": (signal.SIGINT, signal.SIGTERM, signal.SIGTERM),
    "a list of results": ([], [0.5, RESULT], [0.5, 0.25]),
    "a longer list": ([1.0], [RESULT, 3], [0.25, 3]),
}


@pytest.mark.parametrize("name", DRIFTS)
def test_numbers_and_results_of_steps(tmp_path, name):
    """A program begins with a number, and saves what `reduce` has returned, or the reverse."""
    begin, saved, expected = DRIFTS[name]
    path = Checkpoint(best=saved, step=7).write(tmp_path / "a")
    checkpoint = Checkpoint(best=begin, step=0)
    checkpoint.read(path).assert_consumed()
    assert checkpoint.best == expected
    assert type(checkpoint.best) is type(expected)
    assert checkpoint.step == 7


KEYS = jax.random.split(jax.random.key(0), 3)
OTHERS = {
    "several keys for one": (KEYS[0], KEYS, r"has the shape \(\), and \(3,\) in the checkpoint"),
    "keys for a number": (0, KEYS, "of type int, and random keys"),
    "a number for keys": (KEYS[0], 1, "it is an array, and a value of another type"),
    "a number that is too long": (jnp.int32(0), 10**30, "does not fit into the dtype int32"),
    "an array for a number": (0.0, np.ones(2), "of type float, and an array"),
    "an array for a list": ([0.0], np.ones(2), "of type list, and an array"),
    "a list for an array": (np.ones(2), [1, 2], "it is an array, and a value of another type"),
    "text for a result": (RESULT, "text", "it is an array, and a value of another type"),
    "a number that does not fit": (RESULT, 0.1, "would become"),
    "numbers for results": ([RESULT, 1], [1, 2], "best has arrays in this program, and none in the checkpoint"),
    "a number for a variable": (keras.Variable(0.0), 1.0, "is a variable, and a value of another type"),
    "a variable for a number": (0.0, keras.Variable(1.0), "of type float, and a variable"),
}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_are_refused(tmp_path, name):
    """Nothing is skipped silently."""
    begin, saved, problem = OTHERS[name]
    path = Checkpoint(best=saved, step=7).write(tmp_path / "a")
    checkpoint = Checkpoint(best=begin, step=0)
    with pytest.raises(CheckpointMismatchError, match=problem):
        checkpoint.read(path)
    assert checkpoint.step == 0


def test_quantized_weights_are_no_floats(tmp_path):
    """Their codes without the scale are other numbers."""
    models = [keras.Sequential([keras.Input((8,)), layers.Dense(8)]) for _ in range(2)]
    models[0].layers[0].quantize("int8")
    path = Checkpoint(model=models[0]).write(tmp_path / "a")
    with pytest.raises(CheckpointMismatchError, match="has the dtype float32, and is quantized in the checkpoint"):
        Checkpoint(model=models[1]).read(path)


def test_replaced_model_begins_as_it_is(tmp_path):
    """The values belong to the model before it, and models elsewhere hear nothing of it."""
    path = Checkpoint(model=dense(), more=keras.Variable(1.0)).write(tmp_path / "a")
    checkpoint, other = Checkpoint(model=dense()), dense()
    checkpoint.read(path).expect_partial()
    before = other.kernel.numpy()
    checkpoint.model = other
    dense()
    assert (other.kernel.numpy() == before).all()
    checkpoint.more = keras.Variable(0.0)
    assert float(checkpoint.more) == 1
    checkpoint = Checkpoint(model=None, more=None)
    checkpoint.read(path)
    checkpoint.model, checkpoint.more = dense(), keras.Variable(0.0)  # In place of nothing.
    assert float(checkpoint.more) == 1
    assert (checkpoint.model.kernel.numpy() != before).any()
    other.quantize("int8")
    dense()


def test_rows_of_replicas_are_no_arrays(tmp_path):
    """The array of unequal rows has padding. Equal rows are an array."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    (batch,) = strategy.experimental_distribute_dataset(X[:3], batch_size=3)
    with pytest.raises(CheckpointError, match="an object of type PerReplica cannot be saved.*\nHINT: .*gather"):
        Checkpoint(b=batch).write(tmp_path / "a")


def embedding(tie):
    layer = layers.ReversibleEmbedding(5, 3, tie_weights=tie, name="e")
    layer.build((None, 2))
    return layer


def lora(rank):
    layer = layers.Dense(3, name="d")
    layer.build((None, 3))
    if rank:
        layer.enable_lora(rank)
    return layer


@pytest.mark.parametrize("saved", [True, False])
def test_layer_with_other_weights_is_refused(tmp_path, saved):
    """Half of it would begin with random numbers, or be lost. LoRA may be added."""
    path = Checkpoint(model=embedding(saved)).write(tmp_path / "a")
    where = "this program" if saved else "the checkpoint"
    with pytest.raises(
        CheckpointMismatchError, match=f"only {where} has model/reverse_embeddings, and both have the layer e"
    ):
        Checkpoint(model=embedding(not saved)).read(path)
    path = Checkpoint(model=lora(0)).write(tmp_path / "b")
    Checkpoint(model=lora(2)).read(path).expect_partial()
    path = Checkpoint(model=lora(2)).write(tmp_path / "c")
    with pytest.raises(CheckpointMismatchError, match="only the checkpoint has model/lora_kernel_a"):
        Checkpoint(model=lora(0)).read(path)


class Growing(keras.Model):
    """A model whose own weights become more."""

    def __init__(self, count):
        super().__init__()
        self.own = [self.add_weight(shape=(2,), name=f"w{i}") for i in range(count)]
        self.built = True


def test_model_with_more_weights_keeps_the_others(tmp_path):
    path = Checkpoint(model=Growing(1)).write(tmp_path / "a")
    more = Growing(2)
    Checkpoint(model=more).read(path).expect_partial()
    assert (more.own[0].numpy() == phalanx.train.load_checkpoint(path).get_tensor("model/w0")).all()


def test_weights_for_another_optimizer(tmp_path):
    """As the hint says: before the model is compiled."""

    def model(optimizer=None):
        made = keras.Sequential([keras.Input((3,)), layers.Dense(2)])
        if optimizer:
            made.compile(optimizer, "mse")
            made.optimizer.build(made.trainable_variables)
        return made

    saved, other = model("adam"), model()
    path = Checkpoint(model=saved).write(tmp_path / "a")
    with pytest.raises(CheckpointMismatchError, match="HINT: .*expect_partial.. before model.compile"):
        Checkpoint(model=model("sgd")).read(path)
    Checkpoint(model=other).restore(path).expect_partial()
    other.compile("sgd", "mse")
    assert (other.layers[0].kernel.numpy() == saved.layers[0].kernel.numpy()).all()
    other.fit(X, Y, verbose=0)
    assert float(other.optimizer.iterations) == 1
    dense()  # Models elsewhere hear nothing of it.
