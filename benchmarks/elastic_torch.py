# SPDX-License-Identifier: Apache-2.0
"""The training of `elastic_peers` with torch's `DistributedDataParallel` over gloo, in an environment of its own.

`torchrun` starts it: `-m benchmarks.elastic_torch SAVE_EVERY FOLDER`. It trains until it is ended.
"""

import itertools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.elastic_job import BATCH, LEARNING_RATE, MOMENTUM, STEPS, WIDTHS, StepFile, rows


def train(
    folder: Path, restored: dict[str, Any] | None, save_every: int, save: Callable[[dict[str, Any]], None]
) -> None:
    """Trains without end in a process group that exists already.

    Args:
      folder: where this process writes down its steps.
      restored: the newest checkpoint. None at the first start.
      save_every: number of steps between two checkpoints.
      save: called with each checkpoint on every process.
    """
    torch.set_num_threads(1)
    rank, workers = distributed.get_rank(), distributed.get_world_size()
    # Later groups have larger numbers: all processes take the time of the first one.
    generation = torch.tensor([time.monotonic_ns()])
    distributed.broadcast(generation, 0)
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(WIDTHS)]
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
    loss_of, step = nn.CrossEntropyLoss(), 0
    if restored is not None:
        net.load_state_dict(restored["model"])
        optimizer.load_state_dict(restored["optimizer"])
        step = restored["step"]
    inputs, labels = map(torch.from_numpy, rows())
    batches = [
        tuple(part.chunk(workers)[rank] for part in pair)
        for pair in zip(inputs.split(BATCH), labels.split(BATCH), strict=True)
    ]
    file = StepFile(folder)
    while True:
        x, y = batches[step % STEPS]
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        float(loss.detach())
        step += 1
        file.write(rank, int(generation), step)
        if step % save_every == 0:
            save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step})


def main(save_every: int, folder: Path) -> None:
    """Restores the newest checkpoint and trains."""
    distributed.init_process_group("gloo")
    path = folder / "checkpoint.pt"
    restored = torch.load(path) if path.exists() else None

    def save(state: dict[str, Any]) -> None:
        if distributed.get_rank() == 0:
            torch.save(state, path.with_suffix(".new"))
            os.replace(path.with_suffix(".new"), path)

    train(folder, restored, save_every, save)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
