"""What TensorBoard gets to see of `fit`, compared with what the callback of tf_keras writes about the same training."""

import io
import json
import re
import sys
import warnings

import board_twin
import keras
import numpy as np
import pytest
from event_files import content, events, written
from PIL import Image
from twins import FIT, Raising, X, Y, compiled, mlp, replicas, same, under

import phalanx
from phalanx import summary
from phalanx._src.tracing.records import defaults
from phalanx.errors import ContextError, InvalidArgumentError, MissingDependencyError
from phalanx.keras.tensorboard import _as_images, _batches

pytestmark = pytest.mark.slow

ACCURATE = compiled(metrics=["accuracy"], optimizer=lambda: keras.optimizers.Adam(0.05))
STEPS = 7  # A pass over the rows.


@keras.saving.register_keras_serializable("board")
class Spy(keras.layers.Layer):
    def call(self, x):
        summary.scalar("spied", keras.ops.mean(x))
        return x


def spied():
    return keras.Sequential([keras.Input((5,)), Spy(), keras.layers.Dense(3)])


def ours(folder):
    """Returns what is in a folder as `board_twin` records it: `{(part, tag, step): (plugin, content)}`."""
    return {
        (part, value.tag, step): (value.metadata.plugin_data.plugin_name, content(value.tensor))
        for part in ("train", "validation")
        for step, value in events(folder / part)
    }


@pytest.fixture(scope="module")
def twin(tmp_path_factory):
    """The folder that the callback fills in the training of `board_twin`, on two replicas."""
    folder = tmp_path_factory.mktemp("board")
    with replicas(2).scope():
        made = board_twin.model(keras)
    board_twin.fit(made, phalanx.keras.TensorBoard(folder, **board_twin.OPTIONS))
    return folder


def recorded():
    """Yields what tf_keras writes, under the names that Keras 3 gives to weights."""
    for part, tag, plugin, step, values in json.loads(board_twin.RECORDED.read_text()):
        name, _, kind = tag.rpartition("_0/")
        yield (part, f"sequential/{name}/{kind}" if name else tag, step), plugin, values


def test_values_equal_those_of_tf_keras(twin):
    """The same tags, plugins and steps; losses, metrics, rates, counts of histograms and pixels.

    Ours has the program of the step besides, where TensorFlow has its graph.
    """
    found = ours(twin)
    plugins = {key: plugin for key, (plugin, _) in found.items()}
    assert plugins.pop(("train", "graph", 0)) == "text"
    assert plugins == {key: plugin for key, plugin, _ in recorded()}
    for key, plugin, values in recorded():
        array = found[key][1]
        if plugin == "images":
            for png, pixels in zip(array[2:], values, strict=True):
                image = np.asarray(Image.open(io.BytesIO(png))).reshape(np.shape(pixels))
                np.testing.assert_allclose(image.astype(int), pixels, atol=1)
        elif plugin == "histograms" and "bias" in key[1]:
            # The bias of the dense layer is one number, for which TensorFlow writes buckets without width.
            assert array[:, 2].sum() == np.asarray(values)[:, 2].sum()
        elif plugin in ("histograms", "scalars") and "per_second" not in key[1]:
            np.testing.assert_allclose(array, values, rtol=1e-3, atol=1e-5)


def test_program_of_the_first_step_is_written(twin):
    """Once, as a text. TensorBoard draws the layers from the model's own JSON."""
    train = written(twin / "train")
    ((_, (text,)),) = train["keras"]
    assert keras.models.model_from_json(text.decode()).count_params() > 0
    ((_, (text,)),) = train["graph"]
    assert text.count(b"module @") == 1
    assert text.startswith(b"### sequential.train\n")


def test_embeddings_can_be_read_again(twin):
    """The projector's list names a file with the rows of the last epoch."""
    assert (twin / "projector_config.pbtxt").read_text() == (
        'embeddings {\n  tensor_name: "embedding"\n  tensor_path: "embeddings/embedding.tsv"\n'
        '  metadata_path: "words.tsv"\n}\n'
    )
    rows = np.loadtxt(twin / "embeddings" / "embedding.tsv", delimiter="\t")
    counts = [values for key, _, values in recorded() if key[1:] == ("sequential/embedding/embeddings/histogram", 1)]
    np.testing.assert_allclose([rows.min(), rows.max()], [counts[0][0][0], counts[0][-1][1]], rtol=1e-4)


def test_values_equal_those_of_history(strategy, tmp_path):
    """The values of the history, of validation and of the learning rate, under Keras's names. `evaluate` alone writes too."""
    model = under(strategy, ACCURATE)
    board = phalanx.keras.TensorBoard(tmp_path / "fit")
    history = model.fit(X, Y, **FIT, epochs=2, validation_data=(X[:9], Y[:9]), callbacks=[board]).history
    train, validation = written(tmp_path / "fit" / "train"), written(tmp_path / "fit" / "validation")
    same([v for _, v in train["epoch_loss"]], history["loss"])
    same([v for _, v in train["epoch_accuracy"]], history["accuracy"])
    same([v for _, v in train["epoch_learning_rate"]], [0.05, 0.05])
    same([v for _, v in validation["epoch_loss"]], history["val_loss"])
    assert [s for s, _ in train["epoch_loss"]] == [0, 1]
    assert [s for s, _ in validation["evaluation_loss_vs_iterations"]] == [STEPS, 2 * STEPS]
    loss, _ = model.evaluate(X, Y, verbose=0, callbacks=[phalanx.keras.TensorBoard(tmp_path)])
    ((step, value),) = written(tmp_path / "validation")["evaluation_loss_vs_iterations"]
    assert step == 2 * STEPS
    same(value, np.float32(loss))


@pytest.mark.cover(["steps"], {2})
@pytest.mark.parametrize(("steps", "expected"), [(1, [3, 6, 9, 12]), (2, [4, 6, 9, 13])])
def test_batches_that_are_written(strategy, tmp_path, steps, expected):
    """Every third batch of all, or the end of the call that trains on it. Layers record these, of training and of validation."""
    model = under(strategy, compiled(spied, steps_per_execution=steps))
    board = phalanx.keras.TensorBoard(tmp_path, update_freq=3)
    model.fit(X, Y, **FIT, epochs=2, validation_data=(X, Y), callbacks=[board])
    train, validation = written(tmp_path / "train"), written(tmp_path / "validation")
    assert [s for s, _ in train["batch_loss"]] == expected
    if steps == 1:
        assert [s for s, _ in train["spied"]] == [s for s, _ in validation["spied"]] == expected
        same(train["spied"][0][1], X[32:48].mean(dtype=np.float32))
    assert (defaults.writer, defaults.step, defaults.condition) == (None, None, True)


def test_training_without_a_strategy(tmp_path):
    """Keras's own `fit` gives the same values, but no program."""
    board = phalanx.keras.TensorBoard(tmp_path, histogram_freq=1, update_freq=3)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        history = ACCURATE().fit(X, Y, **FIT, callbacks=[board]).history
    found = written(tmp_path / "train")
    same([v for _, v in found["epoch_loss"]], history["loss"])
    assert "graph" not in found
    assert [s for s, _ in found["batch_loss"]] == [3, 6]


def test_layers_that_record_nothing_need_one_program(strategy, tmp_path):
    """A step is compiled twice only if it records something."""
    traced = []

    class Counted(keras.layers.Layer):
        def call(self, x):
            traced.append(1)
            return x

    def count(*callbacks):
        model = under(
            strategy, compiled(lambda: keras.Sequential([keras.Input((5,)), Counted(), keras.layers.Dense(3)]))
        )
        traced.clear()
        model.fit(X, Y, **FIT, callbacks=callbacks)
        return len(traced)

    assert 0 < count() == count(phalanx.keras.TensorBoard(tmp_path, write_graph=False, update_freq=2))


def test_training_that_fails_leaves_nothing_on(strategy, tmp_path):
    """The defaults are what they were, the profiler is off, and what was recorded is in the file."""
    model = under(strategy, compiled(spied))
    board = phalanx.keras.TensorBoard(tmp_path, update_freq=1, profile_batch=(2, 100))
    with pytest.raises(ZeroDivisionError):
        model.fit(X, Y, **FIT, callbacks=[board, Raising("train", 3)])
    assert [s for s, _ in written(tmp_path / "train")["spied"]] == [1, 2, 3, 4]
    assert (defaults.writer, defaults.step, defaults.condition) == (None, None, True)
    summary.trace_on(profiler=True)
    summary.trace_off()


@pytest.mark.cover(["batches"], [[2, 100]])
@pytest.mark.parametrize("batches", [(2, 3), [2, 100]])
def test_profile_is_where_tensorboard_looks(strategy, tmp_path, batches):
    """One profile of a range, and of a range that training does not complete. JAX has one profiler, which may be in use."""
    model = under(strategy, ACCURATE)
    model.fit(X, Y, **FIT, callbacks=[phalanx.keras.TensorBoard(tmp_path, profile_batch=batches)])
    assert len(list((tmp_path / "train" / "plugins" / "profile").glob("*/*.xplane.pb"))) == 1
    summary.trace_on(graph=False, profiler=True)
    with pytest.raises(ContextError, match="a trace is on"):
        model.fit(X, Y, **FIT, callbacks=[phalanx.keras.TensorBoard(tmp_path, profile_batch=2)])
    summary.trace_off()


def test_batches_of_a_profile():
    """A number or a text means one batch or a range."""
    assert [_batches(given) for given in (0, 2, "2", (2, 3), "2,3")] == [None, (2, 2), (2, 2), (2, 3), (2, 3)]


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((7,), (1, 7, 1, 1)),
        ((7, 2), (1, 2, 7, 1)),
        ((2, 7), (1, 2, 7, 1)),
        ((3, 4, 6), (6, 3, 4, 1)),
        ((5, 6, 7, 3), (5, 6, 7, 3)),
        *[(shape, None) for shape in ((5, 6, 7, 8), (1,), (2, 3, 4, 5, 6))],
    ],
)
def test_weights_as_images(shape, expected):
    """A bias, kernels of dense layers and convolutions, and weights that are no images."""
    images = _as_images(np.zeros(shape))
    assert (images if images is None else images.shape) == expected


def test_model_that_cannot_be_written_as_json(strategy, tmp_path):
    """A warning names it, and training goes on."""

    class Own(keras.layers.Activation):
        def get_config(self):
            raise NotImplementedError("mine")

    model = under(strategy, compiled(lambda: keras.Sequential([keras.Input((5,)), Own("relu"), keras.layers.Dense(3)])))
    with pytest.warns(UserWarning, match=r"no graph of .*to_json\(\) failed: mine"):
        model.fit(X, Y, **FIT, callbacks=[phalanx.keras.TensorBoard(tmp_path)])
    assert "keras" not in written(tmp_path / "train")


WRONG = {
    "update_freq": ["step", 0, 1.5],
    "histogram_freq": [-1],
    "embeddings_freq": ["epoch"],
    "write_graph": [1],
    "write_images": ["yes"],
    "write_steps_per_second": [None],
    "profile_batch": [-1, (3, 2), (1, 2, 3), "2,x", ()],
    "embeddings_metadata": [3, {"a": 3}],
    "log_dir": [3],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in WRONG.items() for value in values])
def test_arguments_that_are_wrong(name, value):
    with pytest.raises(InvalidArgumentError, match=f"{re.escape(f'{name}={value!r}')}: must be .*\nHINT"):
        phalanx.keras.TensorBoard(**{name: value})


def test_metadata_of_unknown_layers(strategy, tmp_path):
    board = phalanx.keras.TensorBoard(tmp_path, embeddings_freq=1, embeddings_metadata={"words": "words.tsv"})
    with pytest.raises(InvalidArgumentError, match=r"'words': the embedding layers of .* are: none"):
        under(strategy, compiled(mlp)).fit(X, Y, **FIT, callbacks=[board])
    with strategy.scope():
        made = board_twin.model(keras)
    with pytest.raises(InvalidArgumentError, match="are: embedding.\nHINT: embeddings_metadata={'embedding': ...}"):
        board_twin.fit(made, board)


def test_missing_tensorboardx_names_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingDependencyError, match=r'HINT: pip install "\.\[tensorboard\]"'):
        phalanx.keras.TensorBoard()
