# SPDX-License-Identifier: Apache-2.0
"""Resident memory while a table is made and trained that is larger than what a worker may have.

python -m benchmarks parameter_server_memory --gigabytes 1
"""

import os
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.parent import call_in_child
from benchmarks.processes import descendants
from benchmarks.report import Report, verdict

_GIGABYTES, _WORKERS, _SERVERS, _STEPS = 4.0, 2, 2, 400
_WIDTH, _BATCH, _IDS = 64, 512, 8
_EVERY_S = 0.2
_TARGET = 1.0
_DEADLINE_S = 1500


def run(*, quick: bool, gigabytes: float = _GIGABYTES) -> Report:
    """Trains a table over 2 servers by 2 workers, and looks how much memory each process has."""
    size = min(gigabytes, 0.25) if quick else gigabytes
    report = Report(
        "parameter_server_memory",
        f"{_STEPS} steps of SGD on a ShardedEmbedding of {size:g} GB over {_SERVERS} servers: resident GB of each process",
        ("process", "first", "median", "peak", "last", "target"),
    )
    found = call_in_child("benchmarks.parameter_server_memory:measure", _DEADLINE_S, devices=1, gigabytes=size)
    for name, sizes in sorted(found["resident"].items()):
        peak = max(sizes)
        target = verdict(peak, at_most=_TARGET) if name.startswith("worker") else ""
        median = sorted(sizes)[len(sizes) // 2]
        report.add(
            [name, *(f"{x:.2f}" for x in (sizes[0], median, peak, sizes[-1])), target], process=name, sizes=sizes
        )
    row = ["loss", f"{found['losses'][0]:.4f}", "", "", f"{found['losses'][-1]:.4f}", f"{found['rate']:.0f} steps/s"]
    report.add(row, losses=found["losses"], rate=found["rate"])
    return report


def measure(gigabytes: float) -> dict[str, Any]:
    """In a child: trains; returns the samples by process, and the mean losses of each tenth of the steps."""
    import phalanx  # isort: skip

    import keras
    import numpy as np

    rows = int(gigabytes * 1e9 / (4 * _WIDTH))
    strategy = phalanx.ParameterServerStrategy(workers=_WORKERS, ps=_SERVERS)
    with strategy.scope():
        layers = [
            keras.Input((_IDS,), dtype="int32"),
            phalanx.keras.ShardedEmbedding(rows, _WIDTH),
            keras.layers.Flatten(),
            keras.layers.Dense(1),
        ]
        model = keras.Sequential(layers)
        optimizer = keras.optimizers.SGD(0.1)

    def step(iterator: Any) -> Any:
        ids, labels = next(iterator)
        with phalanx.GradientTape() as tape:
            loss = ((model(ids) - labels) ** 2).mean()
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def batches() -> Any:
        rng = np.random.default_rng(phalanx.coordinator.experimental_get_current_worker_index())
        while True:
            ids = (rows * rng.random((_BATCH, _IDS)) ** 3).astype("int32")
            yield ids, (ids[:, :1] % 2).astype("float32")

    coordinator = phalanx.coordinator.ClusterCoordinator(strategy)
    iterator = iter(coordinator.create_per_worker_dataset(batches))
    with _Sampler() as sampler:
        coordinator.schedule(step, args=(iterator,)).get()  # Now the servers have made the table.
        began = time.perf_counter()
        values = [coordinator.schedule(step, args=(iterator,)) for _ in range(_STEPS)]
        coordinator.join()
        rate = _STEPS / (time.perf_counter() - began)
    strategy.close()
    losses = np.array(coordinator.fetch(values)).reshape(10, -1).mean(axis=1)
    return {"resident": sampler.resident, "losses": losses.tolist(), "rate": rate}


class _Sampler:
    """Reads the resident sizes of this process and its actors in a thread, as gigabytes by process."""

    def __init__(self) -> None:
        self.resident: dict[str, list[float]] = {}
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._sample)

    def __enter__(self) -> "_Sampler":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _sample(self) -> None:
        actors = {os.getpid(): "coordinator"}
        for kind, name in (("ray::ParameterServer", "server"), ("ray::Worker", "worker")):
            pids = [p for p in descendants() if _title(p).startswith(kind)]
            actors |= {pid: f"{name} {i}" for i, pid in enumerate(sorted(pids))}
        while True:
            for pid, name in actors.items():
                self.resident.setdefault(name, []).append(_resident_gigabytes(pid))
            if self._over.wait(_EVERY_S):
                return


def _title(pid: int) -> str:
    return Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " ").strip()


def _resident_gigabytes(pid: int) -> float:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e9
