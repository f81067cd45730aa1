"""Files that someone else made are data: 3,000 malicious ones in `make draws`, of which `make test` reads some."""

import json
import os
import subprocess
import sys
from pathlib import Path

import keras
import malicious_files
import numpy as np
import pytest
from tests import forks
from tests.draws import MANY

import phalanx
import phalanx.estimator as estimator

pytestmark = [
    pytest.mark.slow,
    pytest.mark.hypothesis,
    pytest.mark.skipif(sys.platform != "linux", reason="reads the memory of a process from /proc"),
]

COUNT = 3000 if MANY else 60


@pytest.fixture
def folder(tmp_path):
    """Holds good files of each kind."""
    good = tmp_path / "good"
    good.mkdir()
    model = malicious_files.network()
    checkpoint = phalanx.train.Checkpoint(w=keras.Variable(np.ones(2, "float32")), n=3, m=model)
    checkpoint.write(good / "checkpoint")
    checkpoint.sync()
    model.save_weights(good / "weights.weights.h5")
    model.save(good / "model.keras")
    writer = phalanx.summary.create_file_writer(str(good / "log"))
    with writer.as_default():
        for step in range(3):
            phalanx.summary.scalar("loss", 0.5 * step, step=step)
    writer.close()
    (events,) = (good / "log").iterdir()
    events.rename(good / "summaries.events")
    (good / "log").rmdir()
    trained = estimator.LinearRegressor(
        [phalanx.feature_column.numeric_column("x")], model_dir=tmp_path / "trained"
    ).train(lambda: [({"x": np.ones((4, 1), "float32")}, np.ones((4, 1), "float32"))], steps=1)
    receiver = estimator.export.build_raw_serving_input_receiver_fn({"x": np.ones((2,), "float32")})
    Path(trained.export_saved_model(str(tmp_path / "exported"), receiver)).rename(good / "export")
    return tmp_path


def results_of(folder, count):
    """Reads the files in a process, and in another one after each that ends it. Yields what was said, or that it ended."""
    first = 0
    while first < count:
        reader = forks.Popen(
            [sys.executable, malicious_files.__file__, str(folder), str(first), str(count)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",  # JAX says what it cannot read, byte by byte.
            env={k: v for k, v in os.environ.items() if not k.startswith("JAX_COMPILATION_CACHE")},
        )
        try:
            out, err = reader.communicate(timeout=120 + malicious_files.FILE_S * (count - first))
        finally:
            reader.kill()
        lines = [json.loads(line) for line in out.splitlines() if line.startswith('{"number"')]
        assert lines, err[-2000:]
        yield from (line for line in lines if "said" in line)
        first = lines[-1]["number"] + 1
        if "said" not in lines[-1]:
            yield {
                **lines[-1],
                "said": f"ended with {reader.returncode}: {err[-300:]}",
                "size": 0,
                "grown": 0,
                "noted": [],
            }


def test_malicious_files_are_data(folder):
    """No reader ends its process, executes, writes elsewhere, or takes more memory than thrice the file and 200 MB, but for libhdf5."""
    wrong, seen = [], []
    for result in results_of(folder, COUNT):
        seen.append(result["number"])
        is_of_keras = result["kind"] in ("weights", "model")
        # libhdf5 allocates the size that a chunk is said to have, as docs/security.md says of files that Keras reads.
        is_refused = is_of_keras and "memory allocation failed" in result["said"]
        too_much = result["grown"] > 3 * result["size"] + 200e6 and not is_refused
        is_typed = is_of_keras or result["said"].startswith(("read", "phalanx.errors"))
        if result["said"].startswith("ended") or result["noted"] or too_much or not is_typed:
            wrong.append(result)
    assert seen == list(range(COUNT))
    assert not wrong, "\n".join(map(json.dumps, wrong[:40])) + f"\n{len(wrong)} of {COUNT}"
    assert not list(folder.rglob("outside/*outside*"))
