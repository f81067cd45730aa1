# SPDX-License-Identifier: Apache-2.0
"""Trains the language model of text_lm.py with several processes, the workers of a cluster.

  phalanx run --workers 2 examples/multi_worker.py                                       two workers on this machine
  phalanx run --workers 2 --max-restarts 1 examples/multi_worker.py --crash-at 250       one worker dies, and the group restarts
  phalanx run --workers 2 --print slurm examples/multi_worker.py                         a script for sbatch

Every worker runs this program. It reads its own files and trains on its part of each batch. Only the chief prints and writes.
It saves a checkpoint every few steps. A group that restarts continues from the checkpoint as if nothing had happened, so
`--out` must be a folder that all workers can read.
"""

import argparse
import functools
import json
import math
import os
import signal
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
    is_chief = strategy.extended.should_checkpoint
    console.quiet = not is_chief
    args.out.mkdir(parents=True, exist_ok=True)

    trainer = Trainer(strategy, args.width, args.layers, args.learning_rate, args.steps)
    train_files, held_out_files = source_files()
    console.print(
        f"{strategy.topology.num_workers} workers, {strategy.num_replicas_in_sync} replicas, "
        f"{trainer.model.count_params():,} weights, {num_bytes(train_files):,} bytes to train on, "
        f"{num_bytes(held_out_files):,} held out"
    )
    checkpoint = Checkpoint(args.out / "checkpoint.npz", trainer)
    train(trainer, train_files, checkpoint, args)
    evaluate(trainer, held_out_files)

    if is_chief:
        weights = args.out / "model.weights.h5"
        trainer.model.save_weights(weights)
        checkpoint.path.unlink(missing_ok=True)
        console.print(f"Saved: {weights}")


def train(trainer: Trainer, files: Sequence[Path], checkpoint: "Checkpoint", args: argparse.Namespace) -> None:
    """Trains up to step `args.steps`, starting from the checkpoint if there is one."""
    windows = phalanx.data.from_files(files, functools.partial(shuffled_windows, seed=args.seed), interleave=len(files))
    dataset = trainer.strategy.experimental_distribute_dataset(windows, batch_size=args.batch)
    iterator = iter(dataset)
    first = checkpoint.restore(iterator)
    losses: list[float] = []
    every = max(1, args.steps // 10)
    with training_progress(tokens_per_step=args.batch * WINDOW) as progress:
        task = progress.add_task("training", total=args.steps, completed=first, loss=math.nan)
        for step in range(first + 1, args.steps + 1):
            if (batch := next(iterator, None)) is None:
                iterator = iter(dataset)  # The next epoch.
                batch = next(iterator)
            losses.append(float(trainer.train_step(batch)))
            progress.update(task, advance=1, loss=losses[-1])
            if step == 1 or step % every == 0:
                progress.console.print(f"step {step:5d}   loss {np.mean(losses[-every:]):.4f}")
            if step % args.save_every == 0 or step == args.steps:
                checkpoint.save(iterator)
            if step == args.crash_at:
                crash(trainer.strategy)


class Checkpoint:
    """The weights, the optimizer and the position in the data, in one file that the chief writes and all workers read."""

    def __init__(self, path: Path, trainer: Trainer) -> None:
        self.path, self.strategy, self.optimizer = path, trainer.strategy, trainer.optimizer
        with trainer.strategy.scope():
            self.optimizer.build(trainer.model.trainable_variables)
        self.variables = [*trainer.model.variables, *self.optimizer.variables]

    def save(self, iterator: phalanx.DistributedIterator) -> None:
        """Writes the file, completely or not at all. All workers must call it."""
        position = iterator.get_state()  # On all workers, because each knows only its own position.
        if not self.strategy.extended.should_checkpoint:
            return
        beside = self.path.with_suffix(".part")
        with beside.open("wb") as file:
            np.savez(file, *[v.numpy() for v in self.variables], position=json.dumps(position))
        beside.replace(self.path)

    def restore(self, iterator: phalanx.DistributedIterator) -> int:
        """Restores the file, and returns the number of steps that it contains. Returns 0 if there is no file."""
        if self.path.exists():
            with np.load(self.path) as saved:
                for number, variable in enumerate(self.variables):
                    variable.assign(saved[f"arr_{number}"])
                iterator.set_state(json.loads(saved["position"].item()))
            console.print(f"restored step {int(self.optimizer.iterations.numpy())} from {self.path}")
        return int(self.optimizer.iterations.numpy())


def crash(strategy: phalanx.Strategy) -> None:
    """Kills worker 1, unless the group was restarted."""
    if strategy.topology.worker_index == 1 and os.environ.get("PHALANX_RESTART", "0") == "0":
        os.kill(os.getpid(), signal.SIGKILL)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=800, help="(default: %(default)s)")
    add_training_arguments(parser)
    parser.add_argument("--save-every", type=int, default=100, help="steps between checkpoints (default: %(default)s)")
    parser.add_argument("--crash-at", type=int, help="kill worker 1 after this step, to see the group restart")
    parser.add_argument(
        "--out", type=Path, default=Path("out/multi_worker"), help="where to save (default: %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
