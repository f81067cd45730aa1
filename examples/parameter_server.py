# SPDX-License-Identifier: Apache-2.0
"""Learns asynchronously which items users click on, with two large tables on parameter servers and steps on workers.

  python examples/parameter_server.py                      two workers and two servers, started on this machine
  python examples/parameter_server.py --fit                the same with Keras's fit
  python examples/parameter_server.py --workers 4 --ps 3   four workers and three servers

The data set is synthetic, but distributed like a log of clicks: few users and items have most of the rows (a power law), and
clicks are drawn from a hidden model of tastes, genres, hour and price. The best possible AUC is therefore known. Every
worker generates its own rows, as it would read its own files.

If TF_CONFIG is set, the program is the chief of a cluster whose workers and servers run `phalanx.Server`.
"""

import argparse
import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import phalanx  # isort: skip  (before Keras, because it selects the JAX backend)

import keras
import numpy as np
from sklearn.metrics import roc_auc_score

from phalanx.coordinator import ClusterCoordinator, experimental_get_current_worker_index

HELD_OUT = 20_000
TASTES, CONTEXT = 8, 3


def main() -> None:
    args = parse_arguments()
    keras.utils.set_random_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)
    clicks = Clicks(args.users, args.items, args.seed)
    inputs, clicked, chances = clicks.rows(HELD_OUT, np.random.default_rng([args.seed, 0]))
    best = roc_auc_score(clicked, chances)

    strategy = phalanx.ParameterServerStrategy(workers=args.workers, ps=args.ps)
    with strategy.scope():
        model = make_model(args.users, args.items, args.width)
        optimizer = keras.optimizers.Adagrad(args.learning_rate)
    print(
        f"{strategy}: {model.count_params():,} weights in tables of {args.users:,} users and {args.items:,} items; "
        f"{clicked.mean():.1%} of {HELD_OUT:,} held-out rows are clicks, AUC of the hidden model {best:.4f}"
    )
    train = train_by_fit if args.fit else train_by_schedule
    curve = train(strategy, model, optimizer, clicks, (inputs, clicked), args)

    weights = args.out / "model.weights.h5"
    model.save_weights(weights)
    print(f"Saved: {weights}")
    with contextlib.suppress(ModuleNotFoundError):
        plot(curve, best, args.out / "auc.png")
    strategy.close()


def train_by_schedule(
    strategy: phalanx.ParameterServerStrategy,
    model: keras.Model,
    optimizer: keras.Optimizer,
    clicks: "Clicks",
    held_out: tuple[Any, np.ndarray],
    args: argparse.Namespace,
) -> list[float]:
    """Trains with scheduled steps, and computes the AUC after each epoch. Starts from the checkpoint if there is one."""
    loss_of = keras.losses.BinaryCrossentropy(from_logits=True, reduction="none")

    def replica_step(batch):
        inputs, clicked = batch
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(loss_of(clicked[:, None], model(inputs, training=True)))
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        return loss

    def train_step(iterator):
        return strategy.run(replica_step, args=(next(iterator),))

    def logits(inputs):
        return model(inputs)[:, 0]

    coordinator = ClusterCoordinator(strategy)
    checkpoint = Checkpoint(args.out / "checkpoint.npz", strategy, model, optimizer)
    curve = checkpoint.restore()

    def batches():
        worker = experimental_get_current_worker_index()
        return clicks.batches(args.batch, np.random.default_rng([args.seed, 1, len(curve), worker]))

    iterator = iter(coordinator.create_per_worker_dataset(batches))
    inputs, clicked = held_out
    for epoch in range(len(curve), args.epochs):
        began = time.perf_counter()
        losses = [coordinator.schedule(train_step, args=(iterator,)) for _ in range(args.steps)]
        coordinator.join()  # Waits for all steps. On a terminal, it shows the progress.
        status = coordinator.status().line(args.steps / (time.perf_counter() - began))

        parts = [slice(i, i + args.batch) for i in range(0, HELD_OUT, args.batch)]
        found = [coordinator.schedule(logits, args=({k: x[rows] for k, x in inputs.items()},)) for rows in parts]
        curve.append(float(roc_auc_score(clicked, np.concatenate(coordinator.fetch(found)))))
        loss = np.mean(coordinator.fetch(losses))
        print(f"epoch {epoch + 1:2d}   loss {loss:.4f}   held-out AUC {curve[-1]:.4f}   {status}", flush=True)
        checkpoint.save(curve)
    checkpoint.path.unlink(missing_ok=True)
    return curve


def train_by_fit(
    strategy: phalanx.ParameterServerStrategy,
    model: keras.Model,
    optimizer: keras.Optimizer,
    clicks: "Clicks",
    held_out: tuple[Any, np.ndarray],
    args: argparse.Namespace,
) -> list[float]:
    """Trains with `fit`."""

    def dataset_fn(context):
        return clicks.batches(args.batch, np.random.default_rng([args.seed, 1, context.input_pipeline_id]))

    with strategy.scope():
        loss = keras.losses.BinaryCrossentropy(from_logits=True)
        model.compile(optimizer, loss, metrics=[keras.metrics.AUC(from_logits=True, name="auc")])
    return model.fit(
        phalanx.keras.DatasetCreator(dataset_fn),
        epochs=args.epochs,
        steps_per_epoch=args.steps,
        validation_data=held_out,
        validation_batch_size=args.batch,
        callbacks=[keras.callbacks.ModelCheckpoint(args.out / "epoch.weights.h5", save_weights_only=True)],
        verbose=2,
    ).history["val_auc"]


def make_model(users: int, items: int, width: int) -> keras.Model:
    """Returns a model with named inputs: the dot product of user and item embeddings, and a small network on all inputs."""
    inputs = {
        "user": keras.Input((), dtype="int32", name="user"),
        "item": keras.Input((), dtype="int32", name="item"),
        "context": keras.Input((CONTEXT,), name="context"),
    }
    user = phalanx.keras.ShardedEmbedding(users, width, name="users")(inputs["user"])
    item = phalanx.keras.ShardedEmbedding(items, width, name="items")(inputs["item"])
    both = keras.layers.Concatenate()([user, item, inputs["context"]])
    hidden = keras.layers.Dense(32, activation="relu")(both)
    common = keras.layers.Dot(axes=1)([user, item])
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Concatenate()([hidden, common])))


class Clicks:
    """A random log of clicks without an end.

    Args:
      users: number of users.
      items: number of items.
      seed: seed of the tastes and genres. All workers must pass the same.
    """

    def __init__(self, users: int, items: int, seed: int) -> None:
        hidden = np.random.default_rng([seed, 2])
        self._tastes = hidden.normal(size=(users, TASTES)) + hidden.normal(size=TASTES)
        self._genres = hidden.normal(size=(items, TASTES)) / np.sqrt(TASTES)

    def rows(self, count: int, rng: np.random.Generator) -> tuple[dict[str, np.ndarray], np.ndarray, np.ndarray]:
        """Returns `count` rows: the inputs, whether there was a click, and the probability of a click."""
        user, item = power_law(len(self._tastes), count, rng), power_law(len(self._genres), count, rng)
        hour, price = rng.uniform(0, 2 * np.pi, count), rng.exponential(1.0, count)
        logit = 1.5 * (self._tastes[user] * self._genres[item]).sum(axis=1) + np.sin(hour) - 0.5 * price - 1.5
        chance = 1 / (1 + np.exp(-logit))
        context = np.stack([np.sin(hour), np.cos(hour), price], axis=1).astype("float32")
        return {"user": user, "item": item, "context": context}, (rng.random(count) < chance).astype("float32"), chance

    def batches(self, size: int, rng: np.random.Generator) -> Iterator[tuple[dict[str, np.ndarray], np.ndarray]]:
        """Yields batches of `size` rows: the inputs, and whether there was a click."""
        while True:
            yield self.rows(size, rng)[:2]


def power_law(count: int, size: int, rng: np.random.Generator) -> np.ndarray:
    """Returns `size` random ids below `count`. The probability of id n is about proportional to 1 / (n + 1)."""
    return ((count + 1) ** rng.random(size)).astype("int32") - 1


class Checkpoint:
    """The weights, the optimizer and the AUC of each epoch so far, in one file."""

    def __init__(self, path: Path, strategy: phalanx.Strategy, model: keras.Model, optimizer: keras.Optimizer) -> None:
        self.path = path
        with strategy.scope():
            optimizer.build(model.trainable_variables)
        self.variables = [*model.variables, *optimizer.variables]

    def save(self, curve: list[float]) -> None:
        """Writes the file, completely or not at all."""
        beside = self.path.with_suffix(".part")
        with beside.open("wb") as file:
            np.savez(file, *[v.numpy() for v in self.variables], curve=curve)
        beside.replace(self.path)

    def restore(self) -> list[float]:
        """Restores the file, and returns the AUC of each epoch so far. Returns an empty list if there is no file."""
        if not self.path.exists():
            return []
        with np.load(self.path) as saved:
            for number, variable in enumerate(self.variables):
                variable.assign(saved[f"arr_{number}"])
            curve = saved["curve"].tolist()
        print(f"restored epoch {len(curve)} from {self.path}")
        return curve


def plot(curve: list[float], best: float, path: Path) -> None:
    import matplotlib as mpl

    mpl.use("agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6, 4))
    axes.plot(range(1, len(curve) + 1), curve, marker="o", label="held-out rows")
    axes.axhline(best, color="gray", linestyle="--", label="the hidden model")
    axes.set(xlabel="epoch", ylabel="AUC", title="Clicks, by parameter servers")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")
    print(f"Saved: {path}")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=2, help="workers on this machine (default: %(default)s)")
    parser.add_argument("--ps", type=int, default=2, help="parameter servers (default: %(default)s)")
    parser.add_argument("--fit", action="store_true", help="train with Keras's fit")
    parser.add_argument("--epochs", type=int, default=5, help="(default: %(default)s)")
    parser.add_argument("--steps", type=int, default=400, help="steps per epoch (default: %(default)s)")
    parser.add_argument("--batch", type=int, default=1024, help="rows per step (default: %(default)s)")
    parser.add_argument("--users", type=int, default=100_000, help="(default: %(default)s)")
    parser.add_argument("--items", type=int, default=20_000, help="(default: %(default)s)")
    parser.add_argument("--width", type=int, default=16, help="length of the rows of the tables (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=1.0, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--out", type=Path, default=Path("out/parameter_server"), help="where to save (default: %(default)s)"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
