"""Records what tensorflow-estimator 2.15 really does, for the tests that compare Phalanx with it.

It runs only in an environment of its own, with Python 3.11, which the tests do not need:

    python3.11 -m venv tf215
    tf215/bin/pip install tensorflow-cpu==2.15.1 tensorflow-estimator==2.15.0
    tf215/bin/python tests/estimator/record_tensorflow.py              # every item
    tf215/bin/python tests/estimator/record_tensorflow.py dnn hooks    # these items; the others stay as they are

It answers `recorded_columns.json` and `recorded.json`, beside it: an entry has the description of a case, which stays, and
TensorFlow's answers, which are replaced. A new case is a new entry, with a description alone. "about" says what entries are.
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
    "defaults": "premade.defaults",
    "dnn": "premade.record",
    "linear": "premade.record",
    "others": "premade.record",
    "custom": "custom.record",
    "semantics": "semantics.record",
    "files": "files.record",
    "train_and_evaluate": "evaluation.record",
    "hooks": "hooks.record",
    "keras": "keras_model.record",
}
VERSIONS = {"tensorflow-estimator": "2.15.0", "keras": "2.15.0"}


def main(items):
    os.environ |= {"TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "", "TF_ENABLE_ONEDNN_OPTS": "0"}
    versions = {name: importlib.metadata.version(name) for name in VERSIONS}
    if versions != VERSIONS:
        raise SystemExit(f"This records {VERSIONS}, and here are {versions}.")
    two_devices()
    for item in items or ITEMS:
        module, function = ITEMS[item].split(".")
        path = FOLDER / ("recorded_columns.json" if item == "columns" else "recorded.json")
        records = json.loads(path.read_text(encoding="utf-8"))
        answer = getattr(importlib.import_module(f"recorders.{module}"), function)
        records |= answer(records) if item == "columns" else {item: records[item] | answer(records[item])}
        path.write_text(lines(records) + "\n", encoding="utf-8")
        print("recorded", item)


def two_devices():
    """Splits the CPU into two logical devices, for strategies."""
    import tensorflow as tf

    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)


def lines(record, depth=2):
    """Returns JSON whose first levels have a line per entry."""
    if depth == 0 or not isinstance(record, dict) or not record:
        return json.dumps(record, separators=(",", ":"), ensure_ascii=False)
    entries = (f"{json.dumps(name, ensure_ascii=False)}: {lines(item, depth - 1)}" for name, item in record.items())
    return "{\n" + ",\n".join(entries) + "\n}"


if __name__ == "__main__":
    main(sys.argv[1:])
