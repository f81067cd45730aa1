"""What a process does that is one of several, before it has met the others."""

import json
import os
import subprocess
import sys
import warnings

import pytest

import phalanx
from phalanx._src.cluster.watch import watch
from phalanx._src.runtime import bootstrap
from phalanx.errors import ClusterError, SlipWarning

pytestmark = pytest.mark.slow

CLUSTER = {"worker": ["127.0.0.1:4001", "127.0.0.1:4002"]}


def config(kind="worker", index=1, **jobs):
    return json.dumps({"cluster": {**CLUSTER, **jobs}, "task": {"type": kind, "index": index}})


@pytest.mark.parametrize(
    ("tf_config", "printed"),
    [
        (None, "a-1\n"),
        (config(index=0), "a-1\n"),
        (config(index=1), ""),
        (config(index=0, chief=["127.0.0.1:4003"]), ""),
        (config("chief", 0, chief=["127.0.0.1:4003"]), "a-1\n"),
        (config("evaluator", 0), "a-1\n"),
        (config("evaluator", 0, evaluator=["127.0.0.1:4003"]), "a-1\n"),
    ],
)
def test_print_on_chief_before_the_start(monkeypatch, capsys, tf_config, printed):
    """The environment says who the chief is; a process that is alone prints."""
    if tf_config:
        monkeypatch.setenv("TF_CONFIG", tf_config)
    phalanx.print_on_chief("a", 1, sep="-")
    assert capsys.readouterr().out == printed


@pytest.mark.parametrize("name", ["Mirrored", "OneDevice"])
def test_single_process_strategy_in_a_cluster(monkeypatch, name):
    """A worker of a cluster that trains alone is warned of it, with what to write."""
    monkeypatch.setenv("TF_CONFIG", config())
    said = f"worker 1 of a cluster with 2 workers, but {name}Strategy uses only the devices of this process"
    with pytest.warns(SlipWarning, match=said + r"(.|\n)*HINT: phalanx.MultiWorkerMirroredStrategy\(\)"):
        phalanx.MirroredStrategy(["cpu:0", "cpu:1"]) if name == "Mirrored" else phalanx.OneDeviceStrategy("cpu:0")


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        (
            {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
            r"Open MPI has started 2 processes \(OMPI_COMM_WORLD_SIZE\), and this is rank 1 (.|\n)*"
            r"HINT: ./in_cluster.sh python train.py, with (.|\n)*OMPI_COMM_WORLD_RANK'}}'; exec",
        ),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "MPICH or Intel MPI has started 2 processes"),
        ({"RANK": "3", "WORLD_SIZE": "8"}, "torchrun has started 8 processes"),
        ({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "3"}, "The Slurm job has 3 tasks (.|\n)*HINT: srun python train.py$"),
    ],
)
def test_launcher_that_describes_no_cluster(monkeypatch, variables, said):
    """Its processes are warned that each trains alone, with what to write."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.warns(SlipWarning, match=said):
        phalanx.MultiWorkerMirroredStrategy()


@pytest.mark.parametrize(
    "tf_config",
    [
        json.dumps({"cluster": {"worker": CLUSTER["worker"][:1]}, "task": {"type": "worker", "index": 0}}),
        config("evaluator", 0),
        config(ps=["127.0.0.1:4003"]),
    ],
    ids=["one worker", "evaluator", "parameter servers"],
)
def test_strategy_of_one_process_that_is_meant(monkeypatch, tf_config):
    """A process that is alone on purpose gets no warning, whatever has started it."""
    monkeypatch.setenv("TF_CONFIG", tf_config)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.mark.parametrize("jobs", [{}, {"evaluator": ["127.0.0.1:4003"]}], ids=["unlisted", "listed"])
def test_evaluator_joins_nobody(monkeypatch, jobs):
    """The strategy of several workers is local there: it waits for no worker, and writes its own files."""
    monkeypatch.setenv("TF_CONFIG", config("evaluator", 0, **jobs))
    strategy = phalanx.MultiWorkerMirroredStrategy()
    assert strategy.topology.num_workers == 1
    assert strategy.extended.should_checkpoint
    assert strategy.cluster_resolver.task_type == "evaluator"
    assert watch.own() is None
    assert bootstrap.is_this_chief()


def test_second_evaluator_is_refused(monkeypatch):
    monkeypatch.setenv("TF_CONFIG", config("evaluator", 1))
    with pytest.raises(ClusterError, match="task evaluator:1: a cluster has at most one evaluator(.|\n)*HINT: "):
        phalanx.MultiWorkerMirroredStrategy()


def test_lines_of_gloo_are_left_out(capfd):
    """Other output passes complete and in order."""
    with bootstrap.without_lines_of_gloo():
        os.write(1, b"one\n[Gloo] Rank 0 is connected to 1 peer ranks.\n")
        os.write(1, b"two\n[Gloo] again\nthree")
    os.write(1, b"four\n")
    assert capfd.readouterr().out == "one\ntwo\nthreefour\n"


FIT = """
import sys
import phalanx
import keras, numpy as np
strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
model.fit(np.ones((64, 2)), np.ones((64, 1)), batch_size=4, epochs=2)
"""


@pytest.mark.exhaustive("tests/contract/test_keras_trainer.py: test_verbose_controls_what_is_printed")
def test_fit_writes_a_line_per_epoch_to_a_log(tmp_path):
    """Without a terminal there is no bar, whose states would be as many lines of the log."""
    (tmp_path / "train.py").write_text(FIT)
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "PHALANX_CPU_DEVICES", "XLA_FLAGS")}
    done = subprocess.run(
        [sys.executable, "-c", "from phalanx._src.tools.cli import main; main()", "run", "--workers", "2", "train.py"],
        cwd=tmp_path,
        env={**environment, "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    lines = [line for line in done.stdout.splitlines() if "loss" in line or "Epoch" in line]
    assert [line[:20] for line in lines if "Epoch" in line] == ["[worker 0] Epoch 1/2", "[worker 0] Epoch 2/2"]
    assert len(lines) == 4, done.stdout
    assert "[Gloo]" not in done.stdout
