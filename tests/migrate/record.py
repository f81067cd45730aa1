"""Writes what TensorFlow computes, for tests that run without it: `python -m tests.migrate.record`, with TensorFlow installed.

`python -m tests.migrate.record programs gan.py` records one program.
"""

import json
import multiprocessing
import os
import runpy
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np

FOLDER = Path(__file__).parent


def expressions():
    """Returns the lines of the file."""
    lines = (FOLDER / "expressions.txt").read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def plain(value):
    """Returns a value as JSON has it: its shape, what kind of numbers it has, and the numbers."""
    array = np.asarray(value)
    if array.dtype.kind == "c":
        array = np.stack([array.real, array.imag], axis=-1)
    kind = {"u": "i"}.get(array.dtype.kind, array.dtype.kind)
    numbers = [float(f"{x:.7g}") if kind == "f" else x for x in array.ravel().tolist()]
    return {"shape": list(array.shape), "kind": kind, "numbers": numbers}


def losses_of(path):
    """Runs a program, and returns what it leaves in `losses`."""
    return [float(f"{float(loss):.7g}") for loss in runpy.run_path(str(path))["losses"]]


def record_expressions():
    """Writes the values of the expressions."""
    import tensorflow as tf
    from tests.migrate.arguments import arguments

    values = {text: plain(eval(text, {"tf": tf, **arguments()})) for text in expressions()}
    _write("expressions.json", values)


def in_tensorflow(path):
    """Returns the losses of a program, which finds two CPU devices. None if TensorFlow cannot run it any more."""
    import tensorflow as tf

    device = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(device, [tf.config.LogicalDeviceConfiguration()] * 2)
    try:
        return losses_of(path)
    except Exception as e:
        print(f"{path.name}: {type(e).__name__}: {e}")
        return None


def record_programs(names):
    """Writes the losses of the programs. Each runs in a process of its own, as devices cannot change later."""
    file = FOLDER / "programs.json"
    losses = json.loads(file.read_text()) if names and file.exists() else {}
    paths = [path for path in sorted((FOLDER / "programs").glob("*.py")) if path.name in names or not names]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=spawn, max_tasks_per_child=1) as pool:
        for path, recorded in zip(paths, pool.map(in_tensorflow, paths), strict=True):
            losses[path.name] = recorded
            _write("programs.json", dict(sorted(losses.items())))


def _write(name, values):
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in values.items()]
    (FOLDER / name).write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main(what="all", *names):
    """Records what is asked for: `expressions`, `programs` with names of files or with none, or all."""
    if what in {"all", "programs"}:
        record_programs(names)
    if what in {"all", "expressions"}:
        record_expressions()


if __name__ == "__main__":
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    main(*sys.argv[1:])
