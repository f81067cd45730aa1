# SPDX-License-Identifier: Apache-2.0
"""The training of `elastic_peers` with Ray Train's `TorchTrainer`, in an environment of its own.

`python -m benchmarks.elastic_ray WORKERS SAVE_EVERY FOLDER` trains until it is ended.
"""

import sys
import tempfile
from pathlib import Path
from typing import Any

import ray
import torch
from ray import train
from ray.train.torch import TorchConfig, TorchTrainer

from benchmarks import elastic_torch

_STATE = "state.pt"


def train_worker(options: dict[str, Any]) -> None:
    """Restores the newest checkpoint and trains. Runs in each worker of Ray Train."""
    restored = None
    if checkpoint := train.get_checkpoint():
        with checkpoint.as_directory() as folder:
            restored = torch.load(Path(folder, _STATE))

    def save(state: dict[str, Any]) -> None:
        if train.get_context().get_world_rank():
            train.report({})
            return
        with tempfile.TemporaryDirectory(dir=options["folder"]) as folder:
            torch.save(state, Path(folder, _STATE))
            train.report({}, checkpoint=train.Checkpoint.from_directory(folder))

    elastic_torch.train(Path(options["folder"]), restored, options["save_every"], save)


def main(workers: int, save_every: int, folder: Path) -> None:
    """Starts Ray on this machine, and the trainer."""
    # One more CPU per process of Ray Train, so that nothing waits for a resource.
    ray.init(num_cpus=2 * workers, include_dashboard=False, _node_ip_address="127.0.0.1", _temp_dir=str(folder / "ray"))
    trainer = TorchTrainer(
        train_worker,
        train_loop_config={"folder": str(folder), "save_every": save_every},
        torch_config=TorchConfig(backend="gloo"),
        scaling_config=train.ScalingConfig(num_workers=workers),
        run_config=train.RunConfig(
            name="job",
            storage_path=str(folder / "storage"),
            failure_config=train.FailureConfig(max_failures=-1),
            checkpoint_config=train.CheckpointConfig(num_to_keep=2),
        ),
    )
    trainer.fit()


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]))
