"""Preemption of a worker: all workers save after the same step, the launcher starts them again, and no row is lost."""

import json
import re
import signal

import numpy as np
import pytest
from launching import RUN, end_of, script, started
from launching import run as run_to_its_end
from tests.waiting import wait_until

STEPS, BATCH = 40, 6
SCRIPT = f"""
import json, os, signal, sys, time
from pathlib import Path
import phalanx
import keras, numpy as np
rank = int(os.environ["TF_CONFIG"].rpartition(":")[2].strip(" }}"))
here, victims, at, mode = Path(sys.argv[1]), json.loads(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
restart = os.environ["PHALANX_RESTART"]
strategy = phalanx.MultiWorkerMirroredStrategy()
keras.utils.set_random_seed(3)
with strategy.scope():
    model = keras.Sequential([keras.Input((1,)), keras.layers.Dense(4), keras.layers.Dropout(0.3), keras.layers.Dense(1)])
    optimizer = keras.optimizers.Adam(1e-2)
    step = keras.Variable(0, dtype="int32")
x = np.arange({STEPS * BATCH}, dtype="float32")[:, None]
def give_time(step):
    # However busy the machine is, the processes agree on the step to save after before they have made all steps.
    if victims and restart == "0" and step >= at:
        time.sleep(0.3)
if mode == "fit":
    with strategy.scope():
        model.compile(optimizer, "mse")
    class Kill(keras.callbacks.Callback):
        count = 0
        def on_train_batch_end(self, batch, logs=None):
            self.count += 1
            if rank in victims and restart == "0" and self.count == at:
                os.kill(os.getpid(), signal.SIGTERM)
            give_time(self.count)
    backup = phalanx.keras.BackupAndRestore(here / "backup", save_freq=False, save_before_preemption=True)
    model.fit(x, x / 100, batch_size={BATCH}, epochs=1, verbose=0, callbacks=[Kill(), backup])
else:
    iterator = iter(strategy.experimental_distribute_dataset((x, x / 100), batch_size={BATCH}))
    checkpoint = phalanx.train.Checkpoint(model=model, optimizer=optimizer, step=step, iterator=iterator)
    config = phalanx.experimental.TerminationConfig(grace_period=3.0 if mode == "grace" else None)
    handler = phalanx.experimental.PreemptionCheckpointHandler(
        strategy.cluster_resolver, checkpoint, here / "checkpoints", config
    )
    print("begins at", int(step), flush=True)
    def replica_step(batch):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss((model(batch[0], training=True) - batch[1]) ** 2)
        optimizer.apply_gradients(zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables))
    rows = open(here / f"rows{{rank}}", "a")
    def train_step(batch):
        strategy.run(replica_step, args=(batch,))
        rows.write("".join(f"{{row:g}}\\n" for part in strategy.experimental_local_results(batch[0]) for row in np.ravel(part)))
        rows.flush()
    while int(step) < {STEPS}:
        if rank in victims and restart == "0" and int(step) == at:
            os.kill(os.getpid(), signal.SIGTERM)
        handler.run(train_step, next(iterator))
        step.assign_add(1)
        give_time(int(step))
    handler.close()
np.savez(here / f"end{{rank}}.npz", *[v.numpy() for v in [*model.variables, *optimizer.variables]])
"""


def run(folder, victims, at, mode="loop", workers=2):
    """Trains, sends SIGTERM to some workers at a step, and lets the launcher start all again."""
    options = ("--max-restarts", 1, "--grace-seconds", 60)
    arguments = (folder, json.dumps(victims), at, mode)
    return run_to_its_end(*RUN, workers, *options, script(folder, SCRIPT), *arguments)


def variables_of(folder):
    """The variables of all workers at the end."""
    ends = [list(np.load(file).values()) for file in sorted(folder.glob("end*.npz"))]
    for other in ends[1:]:
        for a, b in zip(ends[0], other, strict=True):
            np.testing.assert_array_equal(a, b)
    return ends[0]


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The variables after a training that nobody disturbs, by mode and workers."""
    found = {}

    def get(mode, workers=2):
        if (mode, workers) not in found:
            folder = tmp_path_factory.mktemp("undisturbed")
            code, out, err = run(folder, [], 0, mode, workers)
            assert code == 0, out + err
            assert not list(folder.glob("checkpoints/*.safetensors"))
            found[mode, workers] = variables_of(folder)
        return found[mode, workers]

    return get


@pytest.mark.cover(["mode", "victims"], [("loop", [0])])
@pytest.mark.parametrize(
    ("victims", "mode", "workers"),
    [([0], "loop", 2), ([1], "loop", 2), ([0, 1], "loop", 2), ([2], "loop", 3), ([1], "fit", 2), ([1], "grace", 2)],
    ids=["chief", "worker", "all", "one of three", "fit", "grace"],
)
def test_training_goes_on_after_sigterm(tmp_path, undisturbed, victims, mode, workers):
    """All workers save after the same step and exit with 42. After the restart, training ends with the same bits."""
    code, out, report = run(tmp_path, victims, 11, mode, workers)
    assert code == 0, out + report
    assert re.search(r"saved after the same step, because rank \d \(127.0.0.1:\d+\) received SIGTERM", out + report)
    assert re.search(
        r"exited with code 42 \(it was asked to exit, and saved first\), .* The next start continues from there\.",
        report,
    ), report
    assert "The group starts again: 1 of 1." in report
    for a, b in zip(variables_of(tmp_path), undisturbed(mode, workers), strict=True):
        np.testing.assert_array_equal(a, b)
    if mode != "fit":
        starts = sorted(int(n) for n in re.findall(r"^\[worker \d\] begins at (\d+)", out, re.M))
        assert starts[:workers] == [0] * workers
        assert len(set(starts[workers:])) == 1
        assert starts[-1] >= 11
        # In the grace period the same processes save a second time.
        assert [f.name for f in tmp_path.glob("checkpoints/ckpt-*")] == [f"ckpt-{1 + (mode == 'grace')}.safetensors"]
        rows = [float(row) for file in tmp_path.glob("rows*") for row in file.read_text().split()]
        assert sorted(rows) == list(range(STEPS * BATCH))


@pytest.mark.exhaustive("test_training_goes_on_after_sigterm, test_sigterm.py")
def test_launcher_that_is_ended_lets_the_workers_save(tmp_path, undisturbed):
    """As a scheduler does: SIGTERM to the launcher, which passes it on; and the whole job starts again later."""
    folder = tmp_path / "job"
    folder.mkdir()
    train = script(folder, SCRIPT.replace("np.ravel(part)))", "np.ravel(part)))\n        time.sleep(0.1)"))
    command = (*RUN, 2, "--grace-seconds", 60, train, folder, "[]", 0, "loop")
    rows = [folder / f"rows{rank}" for rank in (0, 1)]
    with started(*command) as first:
        wait_until(lambda: all(file.exists() and file.stat().st_size for file in rows), first)
        first.send_signal(signal.SIGTERM)
        code, out, report = end_of(first)
    assert code == 143, out + report
    assert re.search(r"saved after the same step, because rank \d .* received SIGTERM\. They exit\.", out), out + report
    code, out, report = run_to_its_end(*command)
    assert code == 0, out + report
    for a, b in zip(variables_of(folder), undisturbed("loop"), strict=True):
        np.testing.assert_array_equal(a, b)
    rows = [float(row) for file in folder.glob("rows*") for row in file.read_text().split()]
    assert sorted(rows) == list(range(STEPS * BATCH))
