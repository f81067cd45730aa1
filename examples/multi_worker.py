# SPDX-License-Identifier: Apache-2.0
"""Trains the language model of text_lm.py with several processes, the workers of a cluster.

  phalanx run --workers 2 examples/multi_worker.py                                       two workers on this machine
  phalanx run --workers 2:4 examples/multi_worker.py --crash-at 250                      one dies, and the others continue
  phalanx run --workers 2 --max-restarts 1 examples/multi_worker.py --crash-at 250       one dies, and both start again
  phalanx run --workers 2 --print slurm examples/multi_worker.py                         a script for sbatch

Every worker runs this program. It reads its own files (all files with `--shard data`, so that every number of workers trains on the
same batches) and trains on its part of each batch. Only the chief prints and writes, also the loss of each step to `losses.json`.
It saves a checkpoint every few steps. A group that starts again continues from the checkpoint as if nothing had happened, so
`--out` must be a folder that all workers can read.
"""

import argparse
import functools
import json
import math
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

import phalanx  # isort: skip  (before Keras, because it selects the JAX backend)

import keras
import numpy as np
from text_lm import (
    WINDOW,
    Trainer,
    add_training_arguments,
    console,
    evaluate,
    num_bytes,
    shuffled_windows,
    source_files,
    training_progress,
)


def main() -> None:
    args = parse_arguments()
    keras.utils.set_random_seed(args.seed)
    # Finds the other workers from TF_CONFIG, Slurm or a similar environment. Without one, this process trains alone.
    strategy = phalanx.MultiWorkerMirroredStrategy()
    console.quiet = not strategy.extended.should_checkpoint
    args.out.mkdir(parents=True, exist_ok=True)

    trainer = Trainer(strategy, args.width, args.layers, args.learning_rate, args.steps)
    train_files, held_out_files = source_files()
    console.print(
        f"{strategy.topology.num_workers} workers, {strategy.num_replicas_in_sync} replicas, "
        f"{trainer.model.count_params():,} weights, {num_bytes(train_files):,} bytes to train on, "
        f"{num_bytes(held_out_files):,} held out"
    )
    manager = train(trainer, train_files, args)
    evaluate(trainer, held_out_files)

    if strategy.extended.should_checkpoint:
        weights = args.out / "model.weights.h5"
        trainer.model.save_weights(weights)
        console.print(f"Saved: {weights}")
    manager.delete_all()  # The next run begins with the first step.


def train(trainer: Trainer, files: Sequence[Path], args: argparse.Namespace) -> phalanx.train.CheckpointManager:
    """Trains up to step `args.steps`, starting from the last checkpoint if there is one. Returns what saves."""
    windows = phalanx.data.from_files(files, functools.partial(shuffled_windows, seed=args.seed), interleave=len(files))
    options = phalanx.InputOptions(auto_shard_policy=phalanx.data.AutoShardPolicy[args.shard.upper()])
    dataset = trainer.strategy.experimental_distribute_dataset(windows, options, batch_size=args.batch)
    loop = phalanx.elastic.steps(trainer.train_step, dataset, epochs=None, max_steps=args.steps)
    checkpoint = phalanx.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer, loop=loop)
    manager = phalanx.train.CheckpointManager(checkpoint, args.out, max_to_keep=1)
    manager.restore_or_initialize()
    losses: list[float] = []
    workers: list[int] = []
    every = max(1, args.steps // 10)
    with training_progress(tokens_per_step=args.batch * WINDOW) as progress:
        task = progress.add_task("training", total=args.steps, completed=trainer.step, loss=math.nan)
        for loss in loop:
            losses.append(float(loss))
            workers.append(trainer.strategy.topology.num_workers)
            # In an elastic group, the chief may be another process than at the beginning.
            console.quiet = not trainer.strategy.extended.should_checkpoint
            progress.update(task, completed=trainer.step, loss=losses[-1])
            if trainer.step == 1 or trainer.step % every == 0:
                progress.console.print(f"step {trainer.step:5d}   loss {np.mean(losses[-every:]):.4f}")
            if trainer.step % args.save_every == 0 or trainer.step == args.steps:
                manager.save()
            if trainer.step == args.crash_at:
                crash(trainer.strategy, manager)
    manager.sync()
    if trainer.strategy.extended.should_checkpoint:
        (args.out / "losses.json").write_text(json.dumps({"losses": losses, "workers": workers}))
    return manager


def crash(strategy: phalanx.Strategy, manager: phalanx.train.CheckpointManager) -> None:
    """Kills rank 1 once there is a checkpoint, unless the group was restarted."""
    if strategy.topology.worker_index == 1 and os.environ.get("PHALANX_RESTART", "0") == "0":
        while manager.latest_checkpoint is None:
            time.sleep(0.1)
        os.kill(os.getpid(), signal.SIGKILL)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="(default: %(default)s)")
    add_training_arguments(parser)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--crash-at", type=int, help="kill rank 1 after this step, to see what the others do")
    parser.add_argument(
        "--shard", choices=["auto", "data"], default="auto", help="what a worker reads (default: its own files)"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out/multi_worker"), help="where to save (default: %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
