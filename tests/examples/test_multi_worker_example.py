"""`examples/multi_worker.py` with a tiny model as two workers, of which one dies: all are started again, or the other goes on."""

import json
import re
import sys
from pathlib import Path

import keras
import numpy as np
import pytest

import phalanx

EXAMPLES = Path(__file__).parents[2] / "examples"
STEPS, BATCH, WIDTH, LAYERS, RATE, SEED = 10, 32, 32, 1, 4e-3, 0
SAVED, CRASHED = 4, 6
ARGUMENTS = ("--steps", STEPS, "--batch", BATCH, "--width", WIDTH, "--layers", LAYERS, "--learning-rate", RATE)
LAUNCHER = ("run", "--workers", "2", "--max-restarts", "1", "--grace-seconds", "0.5")

pytestmark = pytest.mark.exhaustive("tests/cluster/test_kills.py and test_elastic.py")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the example saves."""
    return tmp_path_factory.mktemp("multi_worker")


@pytest.fixture(scope="module")
def printed(run_example, folder):
    """What the workers print."""
    crashing = ("--save-every", SAVED, "--crash-at", CRASHED)
    return run_example("multi_worker.py", *ARGUMENTS, "--seed", SEED, *crashing, folder=folder, launcher=LAUNCHER)


@pytest.fixture(scope="module")
def text_lm():
    """The module of the model and of the data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLES)
        import text_lm

        yield text_lm
        del sys.modules["text_lm"]


def trainer(text_lm):
    """Model and optimizer, without a strategy."""
    keras.utils.set_random_seed(SEED)
    return text_lm.Trainer(phalanx.get_strategy(), WIDTH, LAYERS, RATE, STEPS)


def batches(text_lm):
    """The rows of each step: of two workers, each takes one window in turn from each of every other file."""
    files, _ = text_lm.source_files()
    each = BATCH // 2
    parts = []
    for own in (files[::2], files[1::2]):
        windows = [text_lm.shuffled_windows(file, SEED) for file in own]
        rows = [w[turn] for turn in range(20) for w in windows if turn < len(w)]
        parts.append(np.stack(rows[: STEPS * each]).reshape(STEPS, each, -1))
    return np.concatenate(parts, axis=1)


def test_goes_on_from_the_checkpoint(printed):
    """After the crash the steps since the last checkpoint are done again, and no others."""
    steps = [int(n) for n in re.findall(r"^\[worker 0\] step +(\d+) ", printed, re.MULTILINE)]
    assert steps == [*range(1, CRASHED + 1), *range(SAVED + 1, STEPS + 1)]


def test_the_chief_alone_prints(printed):
    """The other worker says nothing of the training."""
    assert re.search(r"^\[worker 0\] .*(replicas|loss|Saved)", printed, re.MULTILINE)
    assert not re.search(r"^\[worker 1\] .*(replicas|loss|Saved)", printed, re.MULTILINE)


def test_learns_what_one_device_learns(printed, text_lm):
    """Keras's own steps on the same rows, never interrupted, have the losses that are printed before and after the crash."""
    one = trainer(text_lm)
    one.model.compile(one.optimizer, keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    losses = [one.model.train_on_batch(rows[:, :-1], rows[:, 1:]) for rows in batches(text_lm)]
    found = re.findall(r"step +(\d+) +loss ([\d.]+)$", printed, re.MULTILINE)
    assert [float(loss) for _, loss in found] == pytest.approx([losses[int(n) - 1] for n, _ in found], abs=2e-3)


def test_held_out_loss(printed, text_lm, folder):
    """NumPy finds the same loss of the saved weights over all windows of the held-out files."""
    loss, count = re.search(r"held-out loss: ([\d.]+) nats.* all (\d+) windows", printed).groups()
    model = trainer(text_lm).model
    model.load_weights(folder / "out/multi_worker/model.weights.h5")
    windows = np.concatenate([text_lm.windows_of(str(file)) for file in text_lm.source_files()[1]])
    logits = model.predict(windows[:, :-1].astype("int32"), batch_size=512, verbose=0)
    of_targets = np.take_along_axis(logits, windows[:, 1:, None].astype(int), axis=-1)[..., 0]
    losses = np.log(np.exp(logits).sum(axis=-1)) - of_targets
    assert int(count) == len(windows)
    assert float(loss) == pytest.approx(losses.mean(), abs=1e-3)


def test_goes_on_without_the_other(run_example, tmp_path):
    """Under `--workers 1:2`: each step is done once, in order, and the chief that is left saves the weights."""
    launcher = ("run", "--workers", "1:2", "--grace-seconds", "0.5")
    crashing = ("--save-every", SAVED, "--crash-at", CRASHED, "--seed", SEED)
    printed = run_example("multi_worker.py", *ARGUMENTS, *crashing, folder=tmp_path, launcher=launcher)
    assert [int(n) for n in re.findall(r" step +(\d+) ", printed)] == [*range(1, STEPS + 1)]
    saved = tmp_path / "out/multi_worker"
    assert sorted(p.name for p in saved.iterdir()) == ["losses.json", "model.weights.h5"]
    workers = json.loads((saved / "losses.json").read_text())["workers"]
    assert workers[:CRASHED] == [2] * CRASHED
    assert 1 in workers[CRASHED:]


def test_leaves_the_weights_alone(printed, folder):
    """The checkpoint of a training that is done would stop the next one."""
    assert "Saved: " in printed
    assert sorted(p.name for p in (folder / "out/multi_worker").iterdir()) == ["losses.json", "model.weights.h5"]
