"""Evaluation beside training."""

import threading

import keras
import pytest
from twins import FIT, X, Y, alone, compiled, mlp, replicas, same, under

import phalanx
from phalanx.cluster import training
from phalanx.errors import InputError, InvalidArgumentError

pytestmark = pytest.mark.slow

ACCURATE = compiled(metrics=["accuracy"], optimizer=lambda: keras.optimizers.Adam(0.05))
QUICK = {"poll_s": 0.05, "timeout_s": 60.0}
STEPS = 7  # A pass over the rows.


def saving(path):
    """Keras's callback that saves after each epoch."""
    return keras.callbacks.ModelCheckpoint(path, save_weights_only=str(path).endswith(".weights.h5"))


@pytest.fixture
def evaluator(tmp_path):
    """A function that makes an evaluator on three replicas."""

    def make(**given):
        model = under(replicas(3), ACCURATE)
        return phalanx.keras.SidecarEvaluator(model, (X, Y), tmp_path / "saved", **(QUICK | given))

    return make


@pytest.mark.parametrize("name", ["model-{epoch}.keras", "{epoch}.weights.h5"])
def test_results_are_those_of_the_saved_models(evaluator, tmp_path, name):
    """Every file that is there when it looks gives the loss that the trained model had."""
    trained = under(replicas(2), ACCURATE)
    for epoch in (1, 2):
        trained.fit(X, Y, **FIT, initial_epoch=epoch - 1, epochs=epoch, callbacks=[saving(tmp_path / "saved" / name)])
        (result,) = evaluator(max_evaluations=epoch).start()
        expected = trained.evaluate(X, Y, verbose=0, return_dict=True)
        same(result, {"accuracy": expected["accuracy"], "loss": expected["loss"], "step": epoch * STEPS})


@pytest.mark.parametrize("name", ["manager", "callback"])
def test_results_are_those_of_phalanx_checkpoints(evaluator, tmp_path, name):
    """Checkpoints of a manager, with an optimizer of their own, and those of `ModelCheckpoint`."""
    trained = under(replicas(2), ACCURATE)
    folder = tmp_path / "saved"
    checkpoint = phalanx.train.Checkpoint(model=trained, optimizer=trained.optimizer, epoch=0)
    manager = phalanx.train.CheckpointManager(checkpoint, folder, 1)
    callbacks = [phalanx.keras.ModelCheckpoint(folder, max_to_keep=1)] if name == "callback" else []
    for epoch in (1, 2):
        trained.fit(X, Y, **FIT, initial_epoch=epoch - 1, epochs=epoch, callbacks=callbacks)
        if not callbacks:
            manager.save()
            manager.sync()
        (result,) = evaluator(max_evaluations=epoch).start()
        expected = trained.evaluate(X, Y, verbose=0, return_dict=True)
        same(result, {"accuracy": expected["accuracy"], "loss": expected["loss"], "step": epoch * STEPS})


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("optimizer", ["sgd", "rmsprop", None])
def test_optimizer_of_the_evaluator_does_not_matter(evaluator, tmp_path, optimizer, wrapped):
    """`compile` without one takes another. The step is that of the training, also within a loss scale."""
    adam = keras.optimizers.Adam(0.05)
    chosen = keras.optimizers.LossScaleOptimizer(adam) if wrapped else adam
    trained = under(replicas(2), compiled(metrics=["accuracy"], optimizer=lambda: chosen))
    trained.fit(X, Y, **FIT, callbacks=[phalanx.keras.ModelCheckpoint(tmp_path / "saved")])
    model = under(replicas(3), compiled(metrics=["accuracy"], optimizer=lambda: optimizer))
    (result,) = phalanx.keras.SidecarEvaluator(model, (X, Y), tmp_path / "saved", max_evaluations=1, **QUICK).start()
    same(result, {**trained.evaluate(X, Y, verbose=0, return_dict=True), "step": STEPS})
    assert optimizer is None or int(model.optimizer.iterations) == STEPS


def test_model_that_is_not_built_yet(tmp_path):
    """Its variables, and the layers that it creates with them, receive their values when `evaluate` builds it."""

    class Late(keras.Model):
        def build(self, shape):
            self.scale = self.add_weight(shape=(1,), name="scale")
            self.dense = keras.layers.Dense(2)
            self.dense.build(shape)

        def call(self, x):
            return self.dense(x) * self.scale

    trained, fresh = Late(), Late()
    for model, optimizer in ((trained, keras.optimizers.Adam(0.1)), (fresh, "sgd")):
        model.compile(optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    trained.fit(X, Y % 2, verbose=0)
    phalanx.train.Checkpoint(model=trained).save(tmp_path / "ckpt")
    phalanx.train.Checkpoint().sync()
    (result,) = phalanx.keras.SidecarEvaluator(fresh, (X, Y % 2), tmp_path, max_evaluations=1, **QUICK).start()
    same(result["loss"], trained.evaluate(X, Y % 2, verbose=0))


def test_phalanx_checkpoint_of_another_model(evaluator, tmp_path):
    """The error names the variable."""
    other = keras.Sequential([keras.Input((9,)), keras.layers.Dense(2)])
    phalanx.train.Checkpoint(model=other).save(tmp_path / "saved" / "ckpt")
    phalanx.train.Checkpoint().sync()
    with pytest.raises(InputError, match=r"another model: [^§]*model/layers/0/kernel"):
        evaluator().start()


def test_phalanx_checkpoint_without_the_model(evaluator, tmp_path):
    """The model must have the name that the evaluator looks for."""
    trained = under(replicas(2), ACCURATE)
    phalanx.train.Checkpoint(net=trained).save(tmp_path / "saved" / "ckpt")
    phalanx.train.Checkpoint().sync()
    with pytest.raises(InputError, match=r"it contains no object of the name 'model', but net, save_counter"):
        evaluator().start()


def test_follows_a_training_program(evaluator, tmp_path):
    """It waits for the folder, and ends after the last file of a training that goes on meanwhile."""
    follower, results = evaluator(max_evaluations=3), []
    thread = threading.Thread(target=lambda: results.extend(follower.start()))
    thread.start()
    model = alone(ACCURATE)
    model.fit(X, Y, **FIT, epochs=3, callbacks=[saving(tmp_path / "saved" / "model-{epoch}.keras")])
    thread.join(timeout=100)
    assert not thread.is_alive()
    assert results[-1]["step"] == 3 * STEPS
    same(results[-1]["loss"], model.evaluate(X, Y, verbose=0)[0])


def test_ends_with_the_training(evaluator, tmp_path, monkeypatch):
    """It evaluates what is saved before the launcher tells the end, and does not wait for more."""
    path = tmp_path / "training.ended"
    monkeypatch.setenv(training.ENDED, str(path))
    model = alone(ACCURATE)
    save = saving(tmp_path / "saved" / "model-{epoch}.keras")

    class Trains(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            if not path.exists():
                model.fit(X, Y, **FIT, initial_epoch=1, epochs=2, callbacks=[save])
                training.note_end(path, "succeeded")

    model.fit(X, Y, **FIT, callbacks=[save])
    results = evaluator(timeout_s=None, callbacks=[Trains()]).start()
    assert [result["step"] for result in results] == [STEPS, 2 * STEPS]
    same(results[-1]["loss"], model.evaluate(X, Y, verbose=0)[0])


@pytest.mark.parametrize(("data", "warnings"), [(None, 0), (b"PK\x03\x04", 1)], ids=["no file", "half a file"])
def test_training_that_ends_without_a_checkpoint(evaluator, tmp_path, monkeypatch, caplog, data, warnings):
    """Nothing is waited for; a last checkpoint that cannot be read is a warning."""
    monkeypatch.setenv(training.ENDED, str(tmp_path / "training.ended"))
    training.note_end(tmp_path / "training.ended", "failed")
    if data:
        (tmp_path / "saved").mkdir()
        (tmp_path / "saved" / "model-1.keras").write_bytes(data)
    with caplog.at_level("WARNING"):
        assert evaluator(timeout_s=None).start() == []
    assert caplog.text.count("the training has ended, but") == caplog.text.count("model-1.keras") == warnings


def test_stops_at_a_step(evaluator, tmp_path):
    """The number of steps that the optimizer has done decides, whatever the name of the file."""
    alone(ACCURATE).fit(X, Y, **FIT, epochs=2, callbacks=[saving(tmp_path / "saved" / "newest.keras")])
    assert [r["step"] for r in evaluator(stop_at_step=2 * STEPS).start()] == [2 * STEPS]


def test_stops_on_request(evaluator, tmp_path):
    """A callback can stop it."""
    alone(ACCURATE).fit(X, Y, **FIT, callbacks=[saving(tmp_path / "saved" / "newest.keras")])
    made = []

    class Stopping(keras.callbacks.Callback):
        def on_test_end(self, logs=None):
            made[0].stop()

    made.append(evaluator(callbacks=[Stopping()], timeout_s=None))
    assert len(made[0].start()) == 1


def test_counts_evaluations_without_numbers(evaluator, tmp_path):
    """Where the names have no numbers, each evaluation counts."""
    alone(ACCURATE).fit(X, Y, **FIT, callbacks=[saving(tmp_path / "saved" / "newest.keras")])
    assert len(evaluator(max_evaluations=1).start()) == 1


def test_ends_where_nothing_comes(evaluator):
    """A folder that never appears is no hang."""
    assert evaluator(timeout_s=0.2).start() == []


def test_file_that_is_not_whole(evaluator, tmp_path):
    """It is tried again, and not taken for an error."""
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "model-1.keras").write_bytes(b"PK\x03\x04")
    (tmp_path / "saved" / "model-2.weights.h5").write_bytes(b"\x89HDF")
    assert evaluator(timeout_s=0.5).start() == []


def test_checkpoint_of_another_model(evaluator, tmp_path):
    """The error names the file."""
    (tmp_path / "saved").mkdir()
    keras.Sequential([keras.Input((9,)), keras.layers.Dense(2)]).save_weights(tmp_path / "saved" / "1.weights.h5")
    with pytest.raises(InputError, match=r"1\.weights\.h5\n?.*another model"):
        evaluator().start()


def test_model_that_is_not_compiled(tmp_path):
    """There is nothing to evaluate with."""
    with pytest.raises(InvalidArgumentError, match="the model is not compiled"):
        phalanx.keras.SidecarEvaluator(mlp(), (X, Y), tmp_path)


@pytest.mark.parametrize("name", ["max_evaluations", "stop_at_step", "poll_s"])
def test_numbers_that_are_not_positive(evaluator, name):
    """They are found out before anything is waited for."""
    with pytest.raises(InvalidArgumentError, match=f"{name}=0"):
        evaluator(**{name: 0})
