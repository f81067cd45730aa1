# SPDX-License-Identifier: Apache-2.0
"""In each of several workers: the same step with torch's `DistributedDataParallel` over gloo, and an all-reduce alone.

In an environment of its own.
"""

import functools
import itertools
import json
import math
import os
import time
from collections.abc import Callable

import numpy as np
import torch
from torch import nn
from torch.distributed import all_reduce, init_process_group
from torch.nn.parallel import DistributedDataParallel

from benchmarks import timing, torch_zoo
from benchmarks.models import CASES, COMPARED_STEPS, LEARNING_RATE, MLP, Case, initial, sizes

_BETA_1, _BETA_2, _EPSILON = 0.9, 0.999, 1e-7
_WIDTHS = (784, 512, 512, 10)
_measures: dict[str, Callable[[int], float]] = {}


@functools.cache
def _connected(threads: int) -> tuple[int, int]:
    """Connects this process with the others, and returns its rank and how many there are."""
    torch.set_num_threads(threads)
    config = json.loads(os.environ["TF_CONFIG"])
    addresses, rank = config["cluster"]["worker"], config["task"]["index"]
    init_process_group("gloo", init_method=f"tcp://{addresses[0]}", world_size=len(addresses), rank=rank)
    return rank, len(addresses)


def prepare_loop(name: str, threads: int) -> list[float]:
    """Makes the step for the MLP, and returns the mean loss of some steps and the sizes of the weights after them."""
    rank, workers = _connected(threads)
    model = _mlp()
    step = _step_of(model, workers)
    x, y = _local_batch(MLP, workers, rank, workers)
    loss = torch.stack([step(x, y) for _ in range(COMPARED_STEPS)]).mean()
    all_reduce(loss)
    _measures[name] = functools.partial(timing.seconds_a_step, lambda: step(x, y), float)
    return [float(loss) / workers, *sizes([p.detach().numpy() for p in model.parameters()])]


def prepare_fit(name: str, case: str, replicas: int, weights: str, threads: int) -> list[float]:
    """Makes the epoch loop for a model of the zoo, takes ten steps, and returns their losses.

    Args:
      name: how the program is called here.
      case: the name of the model.
      replicas: how many replicas the global batch is for.
      weights: the file of the weights that the model begins with.
      threads: how many threads this process has.
    """
    rank, workers = _connected(threads)
    step = _step_of(torch_zoo.model(case, weights), workers)
    x, y = _local_batch(CASES[case], replicas, rank, workers)
    losses = torch.stack([step(x, y) for _ in range(10)])
    all_reduce(losses)

    def epoch(steps: int) -> float:
        """Returns the seconds per step of an epoch, which keeps the mean loss, as `fit` does."""
        batches = [torch.cat([rows] * steps).split(len(rows)) for rows in (x, y)]
        start, total = time.perf_counter(), torch.zeros(())
        for batch in zip(*batches, strict=True):
            total += step(*batch)
        float(total)
        return (time.perf_counter() - start) / steps

    _measures[name] = epoch
    return (losses / workers).tolist()


def prepare_all_reduce(name: str, size_bytes: int, threads: int = 1) -> list[float]:
    """Sums an array of each worker, and returns the smallest and the largest element of the sum."""
    rank, _ = _connected(threads)
    total = torch.full((size_bytes // 4,), 1.0 + rank)
    all_reduce(total)
    # In place: anything but zero would grow without end.
    value = torch.zeros_like(total)
    _measures[name] = functools.partial(timing.seconds_a_step, lambda: all_reduce(value), lambda result: result)
    return [float(total.min()), float(total.max())]


def seconds_a_step(name: str, count: int) -> float:
    """Times `count` steps."""
    return _measures[name](count)


def _local_batch(case: Case, replicas: int, rank: int, workers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the shard of the global batch that a worker trains on."""
    x, y = (torch.from_numpy(a).chunk(workers)[rank] for a in case.batch(replicas))
    return x, y.long()


def _step_of(model: nn.Module, workers: int) -> Callable[[torch.Tensor, torch.Tensor], torch.Tensor]:
    """Returns a function that takes a step on a batch of this worker and returns its loss."""
    if workers > 1:
        model = DistributedDataParallel(model, gradient_as_bucket_view=True, static_graph=True)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, betas=(_BETA_1, _BETA_2), fused=True)
    loss_of, counter = nn.CrossEntropyLoss(), itertools.count(1)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        # Keras adds epsilon before it corrects the bias of the second moment, torch afterwards.
        optimizer.param_groups[0]["eps"] = _EPSILON / math.sqrt(1 - _BETA_2 ** next(counter))
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _mlp() -> nn.Sequential:
    layers = [nn.Linear(inputs, outputs) for inputs, outputs in zip(_WIDTHS, _WIDTHS[1:], strict=False)]
    shapes = [shape for layer in layers for shape in ((layer.in_features, layer.out_features), (layer.out_features,))]
    weights = initial([np.zeros(shape, "float32") for shape in shapes])
    with torch.no_grad():
        for layer, kernel, bias in zip(layers, weights[::2], weights[1::2], strict=True):
            layer.weight.copy_(torch.from_numpy(kernel.T))
            layer.bias.copy_(torch.from_numpy(bias))
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])
