"""TensorBoard reads what Phalanx writes, and finds there what TensorFlow, or Keras's callback, writes of the same values."""

import json
import time
import urllib.request
import warnings

import board_twin
import jax.numpy as jnp
import keras
import numpy as np
import pytest
import tensorboardX  # noqa: F401  (It sets a variable of the environment, which no test may.)

tf = pytest.importorskip("tensorflow")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

import phalanx  # noqa: E402
from phalanx import function, summary  # noqa: E402

RANDOM = np.random.default_rng(0)
VALUES = RANDOM.normal(size=(3, 50)).astype("float32")
PIXELS = RANDOM.integers(0, 256, (2, 5, 6, 3)).astype("uint8")
TONE = np.sin(np.arange(100, dtype="float32") / 5)[None, :, None]


def record(to, x, step):
    """Records all kinds of values with one of the two libraries."""
    to.scalar("loss", x.mean(), step=step, description="why")
    to.histogram("values", x, step=step, buckets=7)
    to.histogram("one value", x * 0 + 2.5, step=step)
    to.image("images", PIXELS, step=step)
    to.audio("tone", TONE, 8000, step=step)
    to.text("text", "*a*", step=step)
    to.text("table", [["a", "b"], ["c", "d"]], step=step)


def read(folder):
    """What TensorBoard finds: for each tag its plugin, description, and the array of each step."""
    events = EventAccumulator(str(folder), size_guidance={"tensors": 0})
    events.Reload()
    found = {}
    for tag in events.Tags()["tensors"]:
        metadata = events.SummaryMetadata(tag)
        arrays = {e.step: tf.make_ndarray(e.tensor_proto) for e in events.Tensors(tag)}
        found[tag] = (metadata.plugin_data.plugin_name, metadata.data_class, metadata.summary_description, arrays)
    return found


@pytest.mark.parametrize("compiled", [False, True])
def test_values_equal_those_of_tensorflow(tmp_path, compiled):
    """Tags, plugins, steps and values, of three steps."""
    ours, theirs = (
        summary.create_file_writer(tmp_path / "ours"),
        tf.summary.create_file_writer(str(tmp_path / "theirs")),
    )
    step = function(lambda x, i: record(summary, x, i)) if compiled else lambda x, i: record(summary, jnp.asarray(x), i)
    for i, x in enumerate(VALUES):
        with ours.as_default():
            step(x, i)
        with theirs.as_default():
            record(tf.summary, x, i)
    ours.close()
    theirs.close()
    found, wanted = read(tmp_path / "ours"), read(tmp_path / "theirs")
    assert found.keys() == wanted.keys()
    for tag, (*names, arrays) in wanted.items():
        *own_names, own_arrays = found[tag]
        assert own_names == names, tag
        assert own_arrays.keys() == arrays.keys() == {0, 1, 2}
        for i, array in arrays.items():
            compare(tag, own_arrays[i], array)


def compare(tag, own, array):
    """Images and sounds are compared as pixels and samples, because encoders differ."""
    if tag == "images":
        assert list(own[:2]) == list(array[:2])
        for ours, theirs in zip(own[2:], array[2:], strict=True):
            np.testing.assert_array_equal(tf.io.decode_png(ours), tf.io.decode_png(theirs))
    elif tag == "tone":
        assert own.shape == array.shape
        ours, theirs = (tf.audio.decode_wav(x[0, 0]) for x in (own, array))
        assert int(ours.sample_rate) == int(theirs.sample_rate)
        np.testing.assert_allclose(ours.audio, theirs.audio, atol=1e-4)
    elif tag == "one value":
        # TensorFlow writes all buckets with the same ends here.
        assert own[:, 2].sum() == array[:, 2].sum() == 50
        assert own[0, 0] <= 2.5 <= own[-1, 1]
    elif array.dtype == object:
        np.testing.assert_array_equal(own, array)
    else:
        np.testing.assert_allclose(own, array, rtol=1e-5)


@pytest.fixture(scope="module")
def board(tmp_path_factory):
    """The folder that our callback fills, on two replicas, and a function that asks TensorBoard about it."""
    folder = tmp_path_factory.mktemp("board")
    with phalanx.MirroredStrategy(["cpu:0", "cpu:1"]).scope():
        made = board_twin.model(keras)
    board_twin.fit(made, phalanx.keras.TensorBoard(folder, **board_twin.OPTIONS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # Of a library inside TensorBoard.
        from tensorboard import program

        server = program.TensorBoard()
    server.configure([None, "--logdir", str(folder), "--port", "0", "--host", "localhost", "--load_fast", "false"])
    address = server.launch()

    def ask(path):
        with urllib.request.urlopen(f"{address}data/{path}", timeout=60) as answer:
            return answer.read()

    deadline = time.monotonic() + 60
    while json.loads(ask("runs")) != ["train", "validation"]:
        assert time.monotonic() < deadline, "TensorBoard does not find the files"
        time.sleep(0.2)
    return folder, made, ask


def test_callback_writes_what_that_of_keras_writes(board, tmp_path):
    """Tags, plugins, steps and values. Speeds differ, and ours has the program besides."""
    board_twin.fit(board_twin.model(keras), keras.callbacks.TensorBoard(str(tmp_path), **board_twin.OPTIONS))
    for part in ("train", "validation"):
        found, wanted = read(board[0] / part), read(tmp_path / part)
        found.pop("graph", None)
        assert found.keys() == wanted.keys()
        for tag, (*names, arrays) in wanted.items():
            *own_names, own_arrays = found[tag]
            assert own_names == names, tag
            assert own_arrays.keys() == arrays.keys(), tag
            for i, array in arrays.items():
                compare_twins(tag, own_arrays[i], array)


def compare_twins(tag, own, array):
    """Two devices and one train with different rounding."""
    if tag.endswith("/image"):
        for ours, theirs in zip(own[2:], array[2:], strict=True):
            np.testing.assert_allclose(*(tf.io.decode_png(x).numpy().astype(int) for x in (ours, theirs)), atol=1)
    elif tag == "sequential/dense/bias/histogram":
        assert own[:, 2].sum() == array[:, 2].sum()
    elif tag == "keras":
        assert json.loads(own.item())["class_name"] == json.loads(array.item())["class_name"]
    elif "per_second" not in tag:
        np.testing.assert_allclose(own, array, rtol=1e-3, atol=1e-5)


def test_projector_shows_the_embedding(board):
    """TensorBoard finds the list, the labels and the rows of the last epoch."""
    _, made, ask = board
    (entry,) = json.loads(ask("plugin/projector/info?run=."))["embeddings"]
    assert (entry["tensorShape"], entry["metadataPath"]) == ([5, 4], "words.tsv")
    rows = np.frombuffer(ask("plugin/projector/tensor?run=.&name=embedding"), np.float32).reshape(5, 4)
    np.testing.assert_allclose(rows, np.asarray(made.layers[0].embeddings), rtol=1e-6)


def test_graph_shows_the_layers(board):
    """TensorBoard draws them, and shows the program among the texts."""
    graph = board[2]("plugin/graphs/graph?run=train&tag=keras&conceptual=true").decode()
    assert all(f'name: "sequential/{layer.name}"' in graph for layer in board[1].layers)
    (text,) = json.loads(board[2]("plugin/text/text?run=train&tag=graph"))
    assert "<h3>sequential.train</h3>" in text["text"]
    assert "stablehlo" in text["text"]


def test_traces_can_be_read(tmp_path):
    """The program that was called between `trace_on` and `trace_export`."""
    summary.trace_on()
    function(lambda x: x * 2)(1.0)
    writer = summary.create_file_writer(tmp_path)
    with writer.as_default():
        summary.trace_export("step", step=4)
    writer.close()
    ((plugin, _, _, arrays),) = read(tmp_path).values()
    assert plugin == "text"
    assert b"stablehlo.multiply" in arrays[4].item()
