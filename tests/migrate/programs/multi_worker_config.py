"""A cluster of one worker that TF_CONFIG describes, with the files of the chief, as in the tutorial on several workers."""

import json
import os
import tempfile

import numpy as np

os.environ["TF_CONFIG"] = json.dumps(
    {"cluster": {"worker": ["localhost:12377"]}, "task": {"type": "worker", "index": 0}}
)

import tensorflow as tf  # noqa: E402

per_worker_batch_size = 32
tf_config = json.loads(os.environ["TF_CONFIG"])
num_workers = len(tf_config["cluster"]["worker"])

strategy = tf.distribute.MultiWorkerMirroredStrategy()
global_batch_size = per_worker_batch_size * num_workers
rng = np.random.default_rng(0)
x = rng.normal(size=(32, 4)).astype("float32")
y = (np.sin(x).sum(1, keepdims=True)).astype("float32")


def _is_chief(task_type, task_id):
    return task_type is None or task_type == "chief" or (task_type == "worker" and task_id == 0)


def write_filepath(filepath, task_type, task_id):
    dirpath = os.path.dirname(filepath)
    base = os.path.basename(filepath)
    if not _is_chief(task_type, task_id):
        dirpath = os.path.join(dirpath, f"workertemp_{task_id}")
    os.makedirs(dirpath, exist_ok=True)
    return os.path.join(dirpath, base)


with strategy.scope():
    # Model building and compiling belong into the scope.
    model = tf.keras.Sequential(
        [tf.keras.layers.Input((4,)), tf.keras.layers.Dense(8, activation="relu"), tf.keras.layers.Dense(1)]
    )
    model.compile(loss=tf.keras.losses.Huber(), optimizer=tf.keras.optimizers.SGD(learning_rate=0.1))
model.set_weights([rng.normal(0, 0.5, w.shape) for w in model.get_weights()])

task_type, task_id = strategy.cluster_resolver.task_type, strategy.cluster_resolver.task_id
path = write_filepath(os.path.join(tempfile.mkdtemp(), "model.keras"), task_type, task_id)
losses = []
for _ in range(2):
    history = model.fit(x, y, epochs=10, batch_size=global_batch_size, shuffle=False, verbose=0)
    losses += history.history["loss"]
    model.save(path)
    model = tf.keras.models.load_model(path)
os.environ.pop("TF_CONFIG")
