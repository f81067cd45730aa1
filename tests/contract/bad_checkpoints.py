"""Checkpoints with good arguments; bad values replace them one by one."""

import contextlib
import functools
import os
import tempfile

import keras
from bad_values import ALL, COUNT, INTEGER, NONE, SECONDS, TEXTS, Case, named

import phalanx
from phalanx import train


def in_new_folder(call):
    """Returns the call, made in a folder of its own, and waits until its files are there."""

    @functools.wraps(call)
    def run(**kwargs):
        with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
            checkpoint = train.Checkpoint(step=keras.Variable(1))
            checkpoint.write("here")
            try:
                call(checkpoint, **kwargs)
            finally:
                checkpoint.sync()

    return run


def manager(checkpoint, **kwargs):
    return train.CheckpointManager(checkpoint, os.getcwd(), None, **kwargs)


def preemption_handler(**kwargs):
    """A handler that no longer listens."""
    phalanx.experimental.PreemptionCheckpointHandler(**kwargs).close()


def run_handler(**kwargs):
    handler = phalanx.experimental.PreemptionCheckpointHandler(None, train.Checkpoint(), "none")
    try:
        handler.run(**kwargs)
    finally:
        handler.close()


def of_checkpoints():
    """What `phalanx.train` has, and the callback that uses it."""
    options = {"options": None}
    save, restore = {"file_prefix": "path", **options}, {"save_path": "here", **options}
    # Names that are too long for a file system are refused; texts are names of files that are there or not.
    taken = {"file_prefix": TEXTS - {"long text"}, "options": NONE}
    numbers = {"max_to_keep": COUNT | NONE, "keep_checkpoint_every_n_hours": SECONDS}
    return named(
        Case(train.Checkpoint, takes={"root": ALL}),
        Case(in_new_folder(train.Checkpoint.save), save, takes=taken),
        Case(in_new_folder(train.Checkpoint.write), save, takes=taken),
        Case(in_new_folder(train.Checkpoint.restore), restore, takes={"save_path": NONE}),
        Case(in_new_folder(train.Checkpoint.read), restore),
        Case(train.CheckpointOptions, {"enable_async": False}),
        Case(
            train.CheckpointManager,
            {"checkpoint": train.Checkpoint(), "directory": "folder", "max_to_keep": 1},
            takes={"directory": TEXTS - {"long text"}, **numbers, "checkpoint_name": {"text", "long text"}},
            functions=("init_fn",),
        ),
        Case(
            train.checkpoints_iterator,
            {"checkpoint_dir": "none", "timeout": 0.1},
            takes={"checkpoint_dir": TEXTS, "min_interval_secs": SECONDS | {"0"}, "timeout": SECONDS},
            functions=("timeout_fn",),
        ),
        Case(
            train.latest_checkpoint, {"checkpoint_dir": "none"}, takes={"checkpoint_dir": TEXTS, "latest_filename": ALL}
        ),
        Case(
            phalanx.keras.BackupAndRestore,
            {"backup_dir": "backup"},
            takes={"backup_dir": TEXTS - {"long text"}, "save_freq": COUNT, "save_every_s": SECONDS},
        ),
        Case(
            phalanx.keras.ModelCheckpoint,
            {"directory": "best", "save_best_only": True},
            takes={
                "directory": TEXTS,
                "monitor": TEXTS,
                "save_freq": COUNT,
                "max_to_keep": COUNT | NONE,
                "initial_value_threshold": NONE | INTEGER | {"1.5", "scalar of NumPy"},
            },
        ),
        Case(
            phalanx.experimental.TerminationConfig,
            takes={"grace_period": SECONDS | NONE | {"0"}},
            functions=("termination_watcher_fn", "exit_fn", "save_fn"),
        ),
    ) | {
        "CheckpointManager.save": Case(
            in_new_folder(lambda c, **k: manager(c).save(**k)),
            {"checkpoint_number": None, "check_interval": True, "options": None},
            takes={"checkpoint_number": {"0"} | COUNT | NONE, "check_interval": {"True"}, "options": NONE},
        ),
        "load_checkpoint": Case(in_new_folder(lambda c, **k: train.load_checkpoint(**k)), {"ckpt_dir_or_file": "here"}),
        "list_variables": Case(in_new_folder(lambda c, **k: train.list_variables(**k)), {"ckpt_dir_or_file": "here"}),
        "load_variable": Case(
            in_new_folder(lambda c, **k: train.load_variable(**k)), {"ckpt_dir_or_file": "here", "name": "step"}
        ),
        "CheckpointReader.get_tensor": Case(
            in_new_folder(lambda c, **k: train.load_checkpoint("here").get_tensor(**k)), {"tensor_str": "step"}
        ),
        "CheckpointReader.has_tensor": Case(
            in_new_folder(lambda c, **k: train.load_checkpoint("here").has_tensor(**k)),
            {"tensor_str": "step"},
            takes={"tensor_str": ALL},
        ),
        "PreemptionCheckpointHandler": Case(
            preemption_handler,
            {
                "cluster_resolver": None,
                "checkpoint_or_checkpoint_manager": train.Checkpoint(),
                "checkpoint_dir": "none",
                "termination_config": None,
            },
            takes={"cluster_resolver": NONE, "checkpoint_dir": TEXTS, "termination_config": NONE},
        ),
        "PreemptionCheckpointHandler.run": Case(
            run_handler, {"distributed_train_function": lambda: None}, functions=("distributed_train_function",)
        ),
    }


GROUPS = {"checkpoints": of_checkpoints}
