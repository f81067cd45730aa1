"""The step times of a slow process among three: at the end with `--report`, and in TensorBoard."""

import re

import pytest
from event_files import events
from launching import RUN, run, script

pytestmark = pytest.mark.slow

TRAIN = """
import sys, time
import phalanx
import keras, numpy as np
strategy = phalanx.MultiWorkerMirroredStrategy()
class Slow(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.05 if strategy.topology.worker_index == 1 and batch % 2 else 0.005)
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.ones((300, 1), "float32")
board = phalanx.keras.TensorBoard(sys.argv[1], write_graph=False, write_steps_per_second=True)
model.fit(x, x, batch_size=6, epochs=3, verbose=0, callbacks=[Slow(), board])
print("rank", strategy.topology.worker_index, len(phalanx.experimental.step_times()), flush=True)
"""


@pytest.mark.cover(["workers"], {"3"})
@pytest.mark.parametrize("workers", ["3", "2:3"])
def test_slow_process_is_named(tmp_path, workers):
    """The others wait for it at about half of the steps, in a fixed group and in an elastic one. Only the chief knows."""
    code, out, err = run(*RUN, workers, "--report", script(tmp_path, TRAIN), tmp_path / "logs")
    said = out + err
    assert code == 0, said
    assert set(re.findall(r"rank (\d) (\d)$", said, re.M)) == {("0", "3"), ("1", "0"), ("2", "0")}, said
    rows = re.findall(r"^\[worker 0\] rank (\d) \(127\.0\.0\.1:\d+\) +[\d.]+ +[\d.]+  (?:never|at +(\d+)%)", said, re.M)
    waited = {int(rank): int(share or 0) for rank, share in rows}
    assert sorted(waited) == [0, 1, 2], said
    assert waited[1] == max(waited.values()) >= 20, said
    tags = {value.tag for _, value in events(tmp_path / "logs" / "train")}
    names = ("median_s", "p99_s", "waited_for", "waited_s")
    assert {f"step_times_rank_{rank}_{name}" for rank in range(3) for name in names} <= tags
