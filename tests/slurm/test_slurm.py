"""The scripts of `phalanx run --print slurm` on a real Slurm: `make test-slurm`."""

import re

TRAIN = """
import os, time
import phalanx  # isort: skip
import keras, numpy as np
strategy = phalanx.MultiWorkerMirroredStrategy()
rank = strategy.cluster_resolver.task_id
print("START", rank, "replicas", strategy.num_replicas_in_sync, "restart", os.environ["PHALANX_RESTART"], flush=True)
keras.utils.set_random_seed(0)
with strategy.scope():
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
x = np.random.RandomState(0).rand(64, 4)
first = []  # No attribute of the callback, because a backup restores those.
class Slow(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        time.sleep(0.1)
        step = int(self.model.optimizer.iterations.numpy())
        if not first:
            first.append(step)
            print("FIRST", rank, step, flush=True)
        if step == first[0] + 20:
            print("TRAINS", rank, flush=True)
backup = phalanx.keras.BackupAndRestore("backup", save_freq=10, save_before_preemption=True)
try:
    model.fit(x, x[:, :1], batch_size=16, epochs=int(os.environ["EPOCHS"]), verbose=0, callbacks=[backup, Slow()])
except SystemExit:
    print("SAVED", rank, int(model.optimizer.iterations.numpy()), flush=True)
    raise
print("DONE", rank, int(model.optimizer.iterations.numpy()), flush=True)
"""
FIXED, ELASTIC = ("--workers", "2", "--max-restarts", "1"), ("--workers", "1:2", "--max-restarts", "1")
FOR_EVER, SHORT = "100000", "40"


def first_steps(job):
    return [int(step) for step in re.findall(r"FIRST 0 (\d+)", job.text)]


def saved_steps(job):
    return {int(step) for step in re.findall(r"SAVED \d (\d+)", job.text)}


def test_cancelled_job_saves_and_stays_away(submit):
    """All ranks save after the same step, and the script does not put the job back into the queue."""
    job = submit(TRAIN, FIXED, EPOCHS=FOR_EVER)
    job.wait_for_text("TRAINS", 2)
    job.slurm("scancel", job.number)
    assert job.wait_for_state("CANCELLED", "PENDING", "RUNNING", "FAILED") == "CANCELLED"
    job.wait_for_text("SAVED", 2)
    assert len(saved_steps(job)) == 1
    assert job.show("Restarts") == "0"


def test_job_survives_its_time_limit(submit):
    """Before the limit it saves and goes back into the queue, and its next run begins with the next step."""
    job = submit(TRAIN, FIXED, ["--time=60", "--signal=B:USR1@120"], EPOCHS=FOR_EVER)
    job.wait_for_text("TRAINS", 2)
    hours, minutes, _ = map(int, job.show("RunTime").split(":"))
    job.slurm("scontrol", "update", f"JobId={job.number}", f"TimeLimit={60 * hours + minutes + 2}")
    job.wait_for_text("SAVED", 2)
    job.slurm("scontrol", "update", f"JobId={job.number}", "TimeLimit=60")
    job.wait_for_text("FIRST 0", 2)
    assert job.show("Restarts") == "1"
    (saved,) = saved_steps(job)
    assert first_steps(job)[1] == saved + 1
    assert re.search(r"START 0 replicas 2 restart 1", job.text)


def test_tasks_that_were_told_to_end_resume(submit):
    """SIGTERM to the tasks alone, as by `--signal=TERM@120`: the job goes on with the next step, in this run or in the next."""
    job = submit(TRAIN, FIXED, EPOCHS=FOR_EVER)
    job.wait_for_text("TRAINS", 2)
    job.slurm("scancel", "--signal=TERM", job.number)
    job.wait_for_text("FIRST 0", 2)
    (saved,) = saved_steps(job)
    assert first_steps(job)[1] == saved + 1
    assert re.search(r"START 0 replicas 2 restart 1", job.text)


def test_failure_restarts_the_step(submit):
    """Then the job fails with the code of the tasks, and is not requeued."""
    job = submit("raise SystemExit(3)", FIXED)
    assert job.wait_for_state("FAILED", "COMPLETED") == "FAILED"
    assert (job.show("ExitCode"), job.show("Restarts")) == ("3:0", "0")
    assert "restart" not in job.text


def test_lost_node_requeues_a_fixed_job(submit, slurm):
    """The job resumes from its checkpoint on nodes that are there."""
    job = submit(TRAIN, FIXED, EPOCHS=FOR_EVER)
    job.wait_for_text("TRAINS", 2)
    with slurm.without("node2"):
        job.wait_for_text("FIRST 0", 2)
        assert job.show("NodeList") == "node[1,3]"
    assert first_steps(job)[1] > 10


def test_elastic_job_goes_on_without_its_second_node(submit, slurm):
    """It makes all steps on the first one."""
    job = submit(TRAIN, ELASTIC, EPOCHS=SHORT)
    job.wait_for_text("TRAINS", 2)
    with slurm.without("node2"):
        job.wait_for_text(f"DONE 0 {4 * int(SHORT)}")
    assert "Generation 2: worker 0 continues." in job.text
    assert job.show("Restarts") == "0"


def test_elastic_job_is_requeued_without_its_first_node(submit, slurm):
    """The launcher of the second node requeues it, because the script has died with the first one."""
    job = submit(TRAIN, ELASTIC, EPOCHS=FOR_EVER)
    job.wait_for_text("TRAINS", 2)
    with slurm.without("node1"):
        job.wait_for_text("FIRST 0", 2)
        assert job.show("NodeList") == "node[2-3]"
    assert job.show("Restarts") == "1"
    assert first_steps(job)[1] > 10


def test_array_tasks_share_a_node(submit):
    """Each trains with the ranks of its own step, although all have one secret."""
    options = ["--nodes=1", "--ntasks-per-node=2", "--nodelist=node3", "--array=0-1"]
    job = submit(TRAIN, FIXED, options, EPOCHS="2", PHALANX_TOKEN="s" * 32)
    job.wait_for_text("DONE", 4)
    assert len(re.findall(r"START \d replicas 2 restart 0", job.text)) == 4
