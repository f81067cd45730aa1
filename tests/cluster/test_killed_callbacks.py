"""`fit` in processes that SIGKILL ends in the middle of an epoch: its callbacks continue from the backup, as if nothing had happened."""

import json

import pytest
from launching import RUN, run, script

SOURCE = """
import json, os, signal, sys
from pathlib import Path
import phalanx, keras, numpy as np
folder, freq, is_killed, is_alone = Path(sys.argv[1]), sys.argv[2], sys.argv[3] == "killed", sys.argv[4] == "1"
strategy = phalanx.OneDeviceStrategy("cpu:0") if is_alone else phalanx.MultiWorkerMirroredStrategy()
rank = 0 if is_alone else strategy.cluster_resolver.task_id
random = np.random.default_rng(0)
x, y = random.normal(size=(96, 6)).astype("float32"), random.normal(size=(96, 1)).astype("float32")
keras.utils.set_random_seed(3)
with strategy.scope():
    model = keras.Sequential([keras.Input((6,)), keras.layers.Dense(16, "relu"), keras.layers.Dropout(0.2), keras.layers.Dense(1)])
    model.compile(keras.optimizers.Adam(0.02), "mse")
class Counter(keras.callbacks.Callback):
    def __init__(self):
        super().__init__()
        self.counts, self.rates = [0, 0], []
    def get_state(self):
        return {"counts": self.counts, "rates": self.rates}
    def set_state(self, state):
        self.counts, self.rates = state["counts"], state["rates"]
    def on_epoch_begin(self, epoch, logs=None):
        self.counts[0] += 1
    def on_train_batch_end(self, batch, logs=None):
        self.counts[1] += 1
    def on_epoch_end(self, epoch, logs=None):
        self.rates.append(float(self.model.optimizer.learning_rate))
class Kill(keras.callbacks.Callback):
    file = open(os.devnull)
    def on_train_begin(self, logs=None):
        self.count, self.lock = 0, None
    def on_train_batch_end(self, batch, logs=None):
        self.count, self.lock = self.count + 1, Kill.file
        if is_killed and rank == 0 and self.count == 45 and not (folder / "killed").exists():
            backup._manager.sync()
            (folder / "killed").touch()
            os.kill(os.getpid(), signal.SIGKILL)
counter, stop = Counter(), keras.callbacks.EarlyStopping("val_loss", patience=5, restore_best_weights=True)
backup = phalanx.keras.BackupAndRestore(folder / "backup", save_freq=freq if freq == "epoch" else int(freq))
best = keras.callbacks.ModelCheckpoint(folder / "best.weights.h5", save_best_only=True, save_weights_only=True)
rate = keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate * 0.99)
plateau = keras.callbacks.ReduceLROnPlateau("val_loss", factor=0.5, patience=2)
history = model.fit(
    x, y, batch_size=16, epochs=60, verbose=0, validation_data=(x[:32], y[::-1][:32]),
    callbacks=[backup, stop, plateau, best, counter, rate, Kill()],
)
found = {"logs": history.history, "epochs": history.epoch, "counter": counter.get_state(), "stopped": stop.stopped_epoch}
found["weights"] = [w.tolist() for w in model.get_weights()]
(folder / f"{rank}.json").write_text(json.dumps(found, default=float))
"""


def trained(folder, freq, how, workers):
    """What the processes have found in the end, and all that they have printed."""
    folder.mkdir()
    path, words = script(folder, SOURCE), [folder, freq, how, workers]
    words = [path, *words] if workers == 1 else [*RUN, workers, "--max-restarts", "1", path, *words]
    text = ""
    for expected in [-9, 0] if workers == 1 and how == "killed" else [0]:
        code, out, err = run(*words)
        text += out + err
        assert code == expected, text
    assert (folder / "killed").exists() == (how == "killed")
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(workers)], text


@pytest.mark.cover(["workers", "freq"], {(2, 4)})
@pytest.mark.parametrize("freq", ["epoch", 4])
@pytest.mark.parametrize("workers", [1, 2])
def test_callbacks_continue_from_the_backup(tmp_path, workers, freq):
    """Logs, learning rates, the epoch of the end and weights are those of a training run that nobody has killed."""
    expected, _ = trained(tmp_path / "undisturbed", "epoch", "alone", workers)
    assert 0 < expected[0]["stopped"] < 59
    found, text = trained(tmp_path / "killed", freq, "killed", workers)
    assert found == expected
    assert text.count("lock of Kill cannot be saved, so the callback may act differently after a restart.") >= 1
