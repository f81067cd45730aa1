"""Records what tensorflow-estimator 2.15 really does, for the tests that compare Phalanx with it.

It runs only in an environment of its own, with Python 3.11, which the tests do not need:

    python3.11 -m venv tf215
    tf215/bin/pip install tensorflow-cpu==2.15.1 tensorflow-estimator==2.15.0
    tf215/bin/python tests/estimator/record_tensorflow.py              # every item
    tf215/bin/python tests/estimator/record_tensorflow.py dnn hooks    # these items; the others stay as they are

It writes `recorded_columns.json` and `recorded.json`, beside it. Each says in "about" what its entries are.
"""

import importlib
import importlib.metadata
import json
import os
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
ITEMS = {
    "columns": "columns.record",
    "data": "data.record",
    "defaults": "premade.defaults",
    "dnn": "premade.dnn",
    "linear": "premade.linear_classifier",
    "others": "premade.others",
    "custom": "custom.record",
    "semantics": "semantics.record",
    "files": "files.record",
    "train_and_evaluate": "evaluation.record",
    "hooks": "hooks.record",
    "keras": "keras_model.record",
}
VERSIONS = {"tensorflow-estimator": "2.15.0", "keras": "2.15.0"}


def main(items):
    """Records the items, each in the file in which it belongs."""
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_ENABLE_ONEDNN_OPTS": "0"}
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    if versions != VERSIONS:
        raise SystemExit(f"This records {VERSIONS}, and here are {versions}.")
    two_devices()
    for item in items or ITEMS:
        module, function = ITEMS[item].split(".")
        save(item, getattr(importlib.import_module(f"recorders.{module}"), function)())
        print("recorded", item)


def two_devices():
    """Splits the CPU into two logical devices, for strategies."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def save(item, record):
    """Replaces the record of an item; columns have a file of their own."""
    if item == "columns":
        (FOLDER / "recorded_columns.json").write_text(lines(record) + "\n", encoding="utf-8")
        return
    path = FOLDER / "recorded.json"
    records = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    records[item] = record
    path.write_text(lines({name: records[name] for name in ITEMS if name in records}) + "\n", encoding="utf-8")


def lines(record, depth=2):
    """Returns JSON whose first levels have a line per entry."""
    if depth == 0 or not isinstance(record, dict) or not record:
        return json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    entries = (f"{json.dumps(name, ensure_ascii=False)}: {lines(item, depth - 1)}" for name, item in record.items())
    return "{\n" + ",\n".join(entries) + "\n}"


if __name__ == "__main__":
    main(sys.argv[1:])
