"""A training that the TensorBoard callbacks of tf_keras and of Phalanx write about.

`python board_twin.py` in an environment with TensorFlow 2.15 and its Keras writes `board_twin.json`, with which a test compares.
"""

import json
import pathlib
import tempfile

import numpy as np

RECORDED = pathlib.Path(__file__).with_suffix(".json")
OPTIONS = {
    "histogram_freq": 1,
    "write_images": True,
    "write_steps_per_second": True,
    "update_freq": 2,
    "embeddings_freq": 1,
    "embeddings_metadata": "words.tsv",
}
FIT = {"batch_size": 4, "epochs": 2, "shuffle": False, "verbose": 0}
WORDS = (np.arange(48).reshape(16, 3) * 7 % 5).astype("int32")
TARGETS = np.sin(np.arange(16, dtype="float32"))[:, None]


def model(keras):
    """A compiled model with an embedding, a convolution and a dense layer, whose weights follow from a formula."""
    layers = keras.layers
    made = keras.Sequential(
        [
            keras.Input((3,), dtype="int32"),
            layers.Embedding(5, 4, name="embedding"),
            layers.Conv1D(3, 2, name="convolution"),
            layers.Flatten(),
            layers.Dense(1, name="dense"),
        ],
        name="sequential",
    )
    made.set_weights([np.sin(np.arange(w.size, dtype="float32")).reshape(w.shape) for w in made.get_weights()])
    rate = keras.optimizers.schedules.ExponentialDecay(0.1, 4, 0.5)
    made.compile(keras.optimizers.SGD(rate), "mse", metrics=["mae"])
    return made


def fit(made, callback):
    made.fit(WORDS, TARGETS, **FIT, validation_data=(WORDS, TARGETS), callbacks=[callback])


def main():
    """Records what tf_keras writes: `[part, tag, plugin, step, content]` of each summary."""
    import tensorflow as tf

    found = []
    with tempfile.TemporaryDirectory() as folder:
        fit(model(tf.keras), tf.keras.callbacks.TensorBoard(folder, **OPTIONS))
        for part in ("train", "validation"):
            for path in sorted(pathlib.Path(folder, part).glob("events*")):
                for event in tf.compat.v1.train.summary_iterator(str(path)):
                    for value in event.summary.value:
                        plugin = value.metadata.plugin_data.plugin_name
                        content = _content(tf, plugin, tf.make_ndarray(value.tensor))
                        found.append([part, value.tag, plugin, event.step, content])
    RECORDED.write_text("[\n" + ",\n".join(map(json.dumps, found)) + "\n]\n")


def _content(tf, plugin, array):
    """Returns numbers, or the pixels of images. Nothing for other kinds."""
    if plugin == "images":
        return [tf.io.decode_png(png).numpy().tolist() for png in array[2:]]
    return array.tolist() if plugin in ("scalars", "histograms") else None


if __name__ == "__main__":
    main()
