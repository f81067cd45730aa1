"""TensorBoard reads what `phalanx.summary` writes, and finds there what `tf.summary` writes of the same values."""

import jax.numpy as jnp
import numpy as np
import pytest
import tensorboardX  # noqa: F401  (It sets a variable of the environment, which no test may.)

tf = pytest.importorskip("tensorflow")
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator  # noqa: E402

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
