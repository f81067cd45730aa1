"""Evaluation beside training."""

import os
import threading

import keras
import pytest
from twins import FIT, X, Y, alone, compiled, mlp, replicas, same, under

import phalanx
from phalanx._src.cluster.processes import training
from phalanx.errors import InputError, InvalidArgumentError

pytestmark = pytest.mark.slow

ACCURATE = compiled(metrics=["accuracy"], optimizer=lambda: keras.optimizers.Adam(0.05))
QUICK = {"poll_s": 0.05, "timeout_s": 600.0}
STEPS = 7  # A pass over the rows.


def saving(path):
    """Keras's callback that saves after each epoch."""
    return keras.callbacks.ModelCheckpoint(path, save_weights_only=str(path).endswith(".weights.h5"))


@pytest.fixture
def evaluator(tmp_path):
    def make(model=None, **given):
        model = model or under(replicas(4), ACCURATE)
        return phalanx.keras.SidecarEvaluator(model, (X, Y), tmp_path / "saved", **(QUICK | given))

    return make


@pytest.mark.cover(["name"], {"{epoch}.weights.h5", "callback"})
@pytest.mark.parametrize("name", ["model-{epoch}.keras", "{epoch}.weights.h5", "manager", "callback"])
def test_results_are_those_of_the_saved_models(evaluator, tmp_path, name):
    """Every file that is there when it looks gives the loss that the trained model had.

    So do checkpoints of a manager, with an optimizer of their own, and those of `ModelCheckpoint`.
    """
    trained, folder = under(replicas(2), ACCURATE), tmp_path / "saved"
    model = under(replicas(4), ACCURATE)
    checkpoint = phalanx.train.Checkpoint(model=trained, optimizer=trained.optimizer, epoch=0)
    manager = phalanx.train.CheckpointManager(checkpoint, folder, 1)
    callbacks = [saving(folder / name)] if "{epoch}" in name else []
    if name == "callback":
        callbacks = [phalanx.keras.ModelCheckpoint(folder, max_to_keep=1)]
    for epoch in (1, 2):
        trained.fit(X, Y, **FIT, initial_epoch=epoch - 1, epochs=epoch, callbacks=callbacks)
        if name == "manager":
            manager.save()
            manager.sync()
        (result,) = evaluator(model, max_evaluations=epoch).start()
        expected = trained.evaluate(X, Y, verbose=0, return_dict=True)
        same(result, {"accuracy": expected["accuracy"], "loss": expected["loss"], "step": epoch * STEPS})


@pytest.mark.cover(["optimizer"], {"rmsprop"})
@pytest.mark.parametrize(("optimizer", "wrapped"), [("sgd", True), ("rmsprop", False), (None, True)])
def test_optimizer_of_the_evaluator_does_not_matter(evaluator, tmp_path, optimizer, wrapped):
    """`compile` without one takes another. The step is that of the training, also within a loss scale."""
    adam = keras.optimizers.Adam(0.05)
    chosen = keras.optimizers.LossScaleOptimizer(adam) if wrapped else adam
    trained = under(replicas(2), compiled(metrics=["accuracy"], optimizer=lambda: chosen))
    trained.fit(X, Y, **FIT, callbacks=[phalanx.keras.ModelCheckpoint(tmp_path / "saved")])
    model = under(replicas(4), compiled(metrics=["accuracy"], optimizer=lambda: optimizer))
    (result,) = evaluator(model, max_evaluations=1).start()
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


@pytest.mark.parametrize(
    ("save", "message"),
    [
        pytest.param(
            lambda model, folder: phalanx.train.Checkpoint(model=model).save(folder / "ckpt"),
            r"another model: [^§]*model/layers/dense~0/kernel",
            id="the error names the variable",
        ),
        pytest.param(
            lambda model, folder: phalanx.train.Checkpoint(net=model).save(folder / "ckpt"),
            "it contains no object of the name 'model', but net, save_counter",
            id="without the model",
        ),
        pytest.param(
            lambda model, folder: model.save_weights(folder / "1.weights.h5"),
            r"1\.weights\.h5\n?.*another model",
            id="the error names the file",
        ),
    ],
)
def test_checkpoint_of_another_model(evaluator, tmp_path, save, message):
    """The model must have the name and the variables that the evaluator looks for."""
    (tmp_path / "saved").mkdir()
    save(keras.Sequential([keras.Input((9,)), keras.layers.Dense(2)]), tmp_path / "saved")
    phalanx.train.Checkpoint().sync()
    with pytest.raises(InputError, match=message):
        evaluator().start()


def test_follows_a_training_program(evaluator, tmp_path):
    """It waits for the folder, and ends after the last file of a training that goes on meanwhile."""
    follower, results = evaluator(max_evaluations=3), []
    thread = threading.Thread(target=lambda: results.extend(follower.start()))
    thread.start()
    model = alone(ACCURATE)
    model.fit(X, Y, **FIT, epochs=3, callbacks=[saving(tmp_path / "saved" / "model-{epoch}.keras")])
    thread.join(timeout=QUICK["timeout_s"])
    assert not thread.is_alive()
    assert results[-1]["step"] == 3 * STEPS
    same(results[-1]["loss"], model.evaluate(X, Y, verbose=0)[0])


def test_ends_with_the_training(evaluator, tmp_path, monkeypatch):
    """It evaluates what is saved before the launcher tells the end, and does not wait for more."""
    path = tmp_path / "training.ended"
    monkeypatch.setenv(training.ENDED, str(path))
    model = alone(ACCURATE)
    save = saving(tmp_path / "saved" / "model-{epoch}.keras")

    def train(logs):
        if not path.exists():
            model.fit(X, Y, **FIT, initial_epoch=1, epochs=2, callbacks=[save])
            training.note_end(path, "succeeded")

    model.fit(X, Y, **FIT, callbacks=[save])
    results = evaluator(timeout_s=None, callbacks=[keras.callbacks.LambdaCallback(on_test_end=train)]).start()
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
    """The number of steps of the optimizer decides, whatever the name of the file. Each evaluation counts, and a callback can stop."""
    alone(ACCURATE).fit(X, Y, **FIT, epochs=2, callbacks=[saving(tmp_path / "saved" / "newest.keras")])
    model = under(replicas(4), ACCURATE)
    assert [r["step"] for r in evaluator(model, stop_at_step=2 * STEPS).start()] == [2 * STEPS]
    assert len(evaluator(model, max_evaluations=1).start()) == 1
    stop = keras.callbacks.LambdaCallback(on_test_end=lambda logs: stopped.stop())
    stopped = evaluator(model, callbacks=[stop], timeout_s=None)
    assert len(stopped.start()) == 1


def test_pipes_and_links_of_others_are_skipped(evaluator, tmp_path):
    """Keras would wait for the other end of a pipe."""
    saved = tmp_path / "saved"
    saved.mkdir()
    for name in ("a.keras", "b.weights.h5"):
        os.mkfifo(saved / name)
    (saved / "c.safetensors").symlink_to("c.safetensors")
    (saved / "d.keras").symlink_to("/dev/zero")
    assert evaluator(timeout_s=0.1).start() == []


def test_folder_that_is_none(evaluator, tmp_path):
    (tmp_path / "saved").write_text("")
    with pytest.raises(
        InputError, match=r"the folder cannot be read: .*Not a directory.*\nHINT: the folder into which"
    ):
        evaluator().start()


def test_ends_where_nothing_comes(evaluator, tmp_path):
    """A folder that never appears is no hang. A file that is not whole is tried again, and not taken for an error."""
    assert evaluator(timeout_s=0.2).start() == []
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "model-1.keras").write_bytes(b"PK\x03\x04")
    (tmp_path / "saved" / "model-2.weights.h5").write_bytes(b"\x89HDF")
    assert evaluator(timeout_s=0.5).start() == []


@pytest.mark.parametrize("name", ["max_evaluations", "stop_at_step", "poll_s"])
def test_numbers_that_are_not_positive(evaluator, name):
    """They are found out before anything is waited for, and so is a model with which there is nothing to evaluate."""
    with pytest.raises(InvalidArgumentError, match=f"{name}=0"):
        evaluator(**{name: 0})
    with pytest.raises(InvalidArgumentError, match="the model is not compiled"):
        evaluator(mlp())


def test_file_that_is_removed_while_the_folder_is_listed(evaluator, tmp_path, monkeypatch):
    """The others are seen in the same turn."""
    trained, folder = under(replicas(1), ACCURATE), tmp_path / "saved"
    folder.mkdir()
    for name in ("1.weights.h5", "2.weights.h5"):
        trained.save_weights(folder / name)
    is_file = os.path.isfile

    def removing(path):
        there = is_file(path)
        if path.endswith("2.weights.h5"):
            os.unlink(path)
        return there

    monkeypatch.setattr(os.path, "isfile", removing)
    assert evaluator()._newest()[1] == "1.weights.h5"
