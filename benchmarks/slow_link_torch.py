# SPDX-License-Identifier: Apache-2.0
"""A training of `slow_link` with torch's `DistributedDataParallel` and its hooks: `-m benchmarks.slow_link_torch HOOK STEPS RANK ADDRESS`."""

import itertools
import sys
import time

import torch
from torch import distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.elastic_job import BATCH, LEARNING_RATE, WARM_UP, WIDTHS, rows

WORKERS = 2


def main(hook: str, steps: int, rank: int, address: str) -> None:
    """Trains, and measures the steps after the first ones."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"tcp://{address}", rank=rank, world_size=WORKERS)
    layers = [nn.Linear(*pair) for pair in itertools.pairwise(WIDTHS)]
    net = nn.Sequential(layers[0], nn.Tanh(), layers[1], nn.Tanh(), layers[2])
    # One bucket: with several, the collectives of the hook of PowerSGD cross each other in gloo, and it fails or hangs.
    model = DistributedDataParallel(net, gradient_as_bucket_view=True, bucket_cap_mb=100)
    if hook == "fp16":
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    elif hook == "PowerSGD(2)":
        # It must send whole gradients for two steps at least, which are in the warm-up.
        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, fused=True)
    loss_of = nn.CrossEntropyLoss()
    inputs, labels = map(torch.from_numpy, rows())
    pairs = zip(inputs.split(BATCH), labels.split(BATCH), strict=True)
    batches = itertools.cycle([tuple(part.chunk(WORKERS)[rank] for part in pair) for pair in pairs])
    began_s = 0.0
    for number, (x, y) in enumerate(itertools.islice(batches, WARM_UP + steps)):
        if number == WARM_UP:
            began_s = time.monotonic()
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        float(loss.detach())
    if rank == 0:
        print("seconds", time.monotonic() - began_s, flush=True)
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
