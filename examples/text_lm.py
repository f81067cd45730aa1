# SPDX-License-Identifier: Apache-2.0
"""A language model of Python code, trained with a custom loop on the replicas of a strategy.

  python examples/text_lm.py                          two replicas: two virtual CPU devices, or all GPUs
  python examples/text_lm.py --strategy one-device    the same training on one device

The text is one that every machine has, the sources of Python's own standard library, and a token is a byte. At the end
come the loss on files that were held back from training and a sample of what the model writes. The sample is saved in
`--out`, with the loss curve.
"""

import argparse
import functools
import itertools
import math
import sysconfig
from collections.abc import Callable, Sequence
from pathlib import Path

import phalanx  # isort: skip  (before Keras, whose backend it chooses)

import jax
import keras
import numpy as np
from matplotlib.figure import Figure
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    Task,
    TextColumn,
    TimeRemainingColumn,
)
from rich.text import Text

VOCABULARY = 256
WINDOW = 64
HOLD_BACK_ONE_FILE_IN = 20
EVALUATION_BATCH = 256
PROMPT = "def "
SAMPLE_LENGTH = 600
TEMPERATURE = 0.6
UNPRINTABLE = "\N{REPLACEMENT CHARACTER}"

STRATEGIES: dict[str, Callable[[], phalanx.Strategy]] = {
    "mirrored": phalanx.MirroredStrategy,
    "one-device": lambda: phalanx.OneDeviceStrategy(jax.local_devices()[0]),
    "default": phalanx.get_strategy,
}

console = Console(highlight=False, soft_wrap=True)


def main() -> None:
    args = parse_arguments()
    phalanx.set_virtual_cpu_devices(args.devices)
    keras.utils.set_random_seed(args.seed)
    args.out.mkdir(parents=True, exist_ok=True)

    strategy = STRATEGIES[args.strategy]()
    trainer = Trainer(strategy, args.width, args.layers, args.learning_rate, args.steps)
    train_files, held_back_files = source_files()
    console.print(
        f"{args.strategy}: {strategy.num_replicas_in_sync} replicas, {trainer.model.count_params():,} weights, "
        f"{num_bytes(train_files):,} bytes to train on, {num_bytes(held_back_files):,} held back"
    )

    losses = train(trainer, train_files, args)
    held_back_loss = evaluate(trainer, held_back_files)
    plot(losses, held_back_loss, args.out / "loss.png")
    sample = write(trainer, PROMPT, SAMPLE_LENGTH, args.seed)
    (args.out / "sample.txt").write_text(sample, encoding="utf-8")
    console.print(f"\nA sample:\n\n{sample}\n\nSaved: {args.out / 'loss.png'}, {args.out / 'sample.txt'}", markup=False)


# The steps: what one replica does with its share of a batch, and what all replicas do together.


class Trainer:
    """A model and its optimizer on the replicas of a strategy."""

    def __init__(
        self, strategy: phalanx.Strategy, width: int, layers: int, learning_rate: float, num_steps: int
    ) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = LanguageModel(width, layers)
            self.model(np.zeros((1, WINDOW), np.int32))  # The first call makes the variables.
            schedule = keras.optimizers.schedules.CosineDecay(
                0.0, num_steps, alpha=0.02, warmup_target=learning_rate, warmup_steps=max(1, num_steps // 20)
            )
            self.optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01, global_clipnorm=1.0)
        self.byte_losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    @phalanx.function
    def train_step(self, batch):
        """Moves the weights against the gradient of the mean loss of a global batch, and returns that loss."""
        losses = self.strategy.run(self.replica_train_step, args=(batch,))
        return self.strategy.reduce("SUM", losses, axis=None)

    def replica_train_step(self, batch):
        with phalanx.GradientTape() as tape:
            loss = phalanx.nn.compute_average_loss(self.window_losses(batch, training=True))
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        return loss

    @phalanx.function
    def evaluation_step(self, batch):
        """Returns the sum of the losses of a global batch of windows, and their number. Padding counts for nothing."""
        per_window = self.strategy.run(self.replica_evaluation_step, args=(batch,))
        return self.strategy.reduce("SUM", per_window, axis=0)

    def replica_evaluation_step(self, batch):
        losses = self.window_losses(batch, training=False)
        return losses, keras.ops.ones_like(losses, dtype="int32")

    def window_losses(self, windows, training):
        inputs, targets = windows[:, :-1], windows[:, 1:]
        return keras.ops.mean(self.byte_losses(targets, self.model(inputs, training=training)), axis=-1)

    @phalanx.function
    def next_byte_logits(self, window, last):
        """Returns the logits of the byte that follows `window[last]`."""
        return self.model(window[None], training=False)[0, last]


# The model: layers of Keras.


class LanguageModel(keras.Model):
    """A transformer from bytes `(batch, WINDOW)` to the logits of each next byte `(batch, WINDOW, VOCABULARY)`."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = keras.layers.Embedding(VOCABULARY, width)
        self.positions = keras.layers.Embedding(WINDOW, width)
        self.blocks = [Block(width, heads=max(1, width // 32)) for _ in range(layers)]
        self.norm = keras.layers.LayerNormalization()
        self.logits = keras.layers.Dense(VOCABULARY)

    def call(self, tokens):
        x = self.tokens(tokens) + self.positions(keras.ops.arange(WINDOW))
        for block in self.blocks:
            x = block(x)
        return self.logits(self.norm(x))


class Block(keras.layers.Layer):
    """Causal self-attention and a perceptron, each added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = keras.layers.LayerNormalization()
        self.attention = keras.layers.MultiHeadAttention(heads, width // heads)
        self.mlp_norm = keras.layers.LayerNormalization()
        self.expand = keras.layers.Dense(4 * width, activation="gelu", name="expand")
        self.contract = keras.layers.Dense(width, name="contract")

    def call(self, x):
        normed = self.attention_norm(x)
        x = x + self.attention(normed, normed, use_causal_mask=True)
        return x + self.contract(self.expand(self.mlp_norm(x)))


# The loops: ordinary Python over distributed batches.


def train(trainer: Trainer, files: Sequence[Path], args: argparse.Namespace) -> list[float]:
    """Trains for `args.steps` steps, shows how it goes, and returns the loss of each step."""
    # One window of each file in turn. With several workers each would read files of its own.
    windows = phalanx.data.from_files(files, functools.partial(shuffled_windows, seed=args.seed), interleave=len(files))
    dataset = trainer.strategy.experimental_distribute_dataset(windows, batch_size=args.batch)
    console.print(*map(str, dataset.shards))
    epochs = itertools.chain.from_iterable(itertools.repeat(dataset))
    losses: list[float] = []
    every = max(1, args.steps // 10)
    with training_progress(tokens_per_step=args.batch * WINDOW) as progress:
        task = progress.add_task("training", total=args.steps, loss=math.nan)
        for batch in itertools.islice(epochs, args.steps):
            losses.append(float(trainer.train_step(batch)))
            progress.update(task, advance=1, loss=losses[-1])
            if len(losses) == 1 or len(losses) % every == 0:
                progress.console.print(f"step {len(losses):5d}   loss {np.mean(losses[-every:]):.4f}")
    return losses


def evaluate(trainer: Trainer, files: Sequence[Path]) -> float:
    """Returns the mean loss over all windows of the files, each counted once, however many there are."""
    total, count = 0.0, 0
    windows = phalanx.data.from_files(files, windows_of)
    for batch in trainer.strategy.experimental_distribute_dataset(windows, batch_size=EVALUATION_BATCH):
        batch_total, batch_count = trainer.evaluation_step(batch)
        total, count = total + float(batch_total), count + int(batch_count)
    mean = total / count
    console.print(f"held-back loss: {mean:.4f} nats, {mean / math.log(2):.4f} bits a byte, over all {count} windows")
    return mean


def write(trainer: Trainer, prompt: str, length: int, seed: int) -> str:
    """Continues the prompt by `length` bytes, each drawn from what the model expects after those before it."""
    rng = np.random.default_rng(seed)
    text = list(prompt.encode())
    for _ in range(length):
        recent = text[-WINDOW:]
        window = np.zeros(WINDOW, np.int32)
        window[: len(recent)] = recent
        logits = np.asarray(trainer.next_byte_logits(window, len(recent) - 1))
        # The largest of logits with Gumbel noise is a draw from their softmax.
        text.append(int(np.argmax(logits / TEMPERATURE + rng.gumbel(size=VOCABULARY))))
    # A model that has learnt little writes control codes too, which are not for the terminal.
    return "".join(c if c.isprintable() or c == "\n" else UNPRINTABLE for c in bytes(text).decode(errors="replace"))


# The data: a file's records are its windows.


def source_files() -> tuple[list[Path], list[Path]]:
    """Returns the files to train on and those held back."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_back = files[::HOLD_BACK_ONE_FILE_IN]
    return [f for f in files if f not in held_back], held_back


def num_bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


def windows_of(path: str) -> np.ndarray:
    """Returns a file cut into windows, each with the byte that follows it."""
    text = np.frombuffer(Path(path).read_bytes(), np.uint8)
    if len(text) <= WINDOW:
        return np.zeros((0, WINDOW + 1), np.uint8)
    return np.lib.stride_tricks.sliding_window_view(text, WINDOW + 1)[::WINDOW]


def shuffled_windows(path: str, seed: int) -> np.ndarray:
    """Returns the same windows in an order that depends on the seed alone."""
    return np.random.default_rng(seed).permutation(windows_of(path))


# What you see, and what you can ask for.


class TokensPerSecond(ProgressColumn):
    """The speed of the last half minute."""

    def __init__(self, tokens_per_step: int) -> None:
        super().__init__()
        self.tokens_per_step = tokens_per_step

    def render(self, task: Task) -> Text:
        steps_per_s = task.finished_speed or task.speed or 0.0
        return Text(f"{steps_per_s * self.tokens_per_step:,.0f} tokens/s")


def training_progress(tokens_per_step: int) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TokensPerSecond(tokens_per_step),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
    )


def plot(losses: list[float], held_back_loss: float, path: Path) -> None:
    """Draws the loss of each step, its running mean, and the loss on the held-back files."""
    span = max(1, len(losses) // 25)
    running_mean = np.convolve(losses, np.ones(span) / span, mode="valid")
    figure = Figure(figsize=(8, 4.5), dpi=150, layout="constrained")
    axes = figure.subplots()
    axes.plot(np.arange(1, len(losses) + 1), losses, color="C0", alpha=0.3, linewidth=1, label="each step")
    axes.plot(np.arange(len(running_mean)) + (span + 1) / 2, running_mean, color="C0", label=f"mean of {span} steps")
    axes.axhline(held_back_loss, color="C1", linestyle="--", label=f"held-back files: {held_back_loss:.2f}")
    axes.set(xlabel="step", ylabel="loss (nats a byte)", title="A small transformer on Python's standard library")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds what says how the model is made and trained."""
    parser.add_argument("--batch", type=int, default=32, help="windows in a global batch (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=4e-3, help="at its peak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=STRATEGIES, default="mirrored")
    parser.add_argument(
        "--devices", type=int, default=2, help="CPU devices, where there is no GPU (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=1200, help="(default: %(default)s)")
    add_training_arguments(parser)
    parser.add_argument("--out", type=Path, default=Path("out"), help="where to save (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
