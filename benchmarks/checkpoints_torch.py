# SPDX-License-Identifier: Apache-2.0
"""torch saves tensors of given shapes: `torch.save`, and `async_save` of its distributed checkpoints. In an environment of its own."""

import json
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed
import torch.distributed.checkpoint


def measure(shapes: list[list[int]], rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of each round, by what was measured."""
    tensors = {str(i): torch.rand(shape) for i, shape in enumerate(shapes)}
    found: dict[str, list[float]] = {"torch": []}
    with tempfile.TemporaryDirectory() as name:
        for _ in range(rounds):
            start = time.perf_counter()
            torch.save(tensors, Path(name, "state.pt"))
            found["torch"].append(time.perf_counter() - start)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        script = [
            sys.executable,
            "-m",
            "benchmarks.checkpoints_torch",
            json.dumps(shapes),
            str(rounds),
            name,
            str(port),
        ]
        workers = [subprocess.Popen([*script, str(rank)], stdout=subprocess.PIPE, text=True) for rank in (0, 1)]
        try:
            outputs = [worker.communicate(timeout=300)[0] for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
    return found | {"dcp blocks": json.loads(outputs[0].splitlines()[-1])}


def _worker(shapes: list[list[int]], rounds: int, folder: str, port: str, rank: int) -> None:
    """One of two processes, both of which hold all tensors, as in data-parallel training."""
    torch.distributed.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    state: dict[str, Any] = {str(i): torch.rand(shape) for i, shape in enumerate(shapes)}
    blocks = []
    for number in range(rounds + 1):
        start = time.perf_counter()
        future = torch.distributed.checkpoint.async_save(state, checkpoint_id=f"{folder}/dcp{number}")
        blocks.append(time.perf_counter() - start)
        future.result()  # type: ignore[union-attr]
        if rank == 0:
            shutil.rmtree(f"{folder}/dcp{number - 1}", ignore_errors=True)
    print(json.dumps(blocks[1:]), flush=True)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    _worker(json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4], int(sys.argv[5]))
