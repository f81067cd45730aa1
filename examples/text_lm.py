# SPDX-License-Identifier: Apache-2.0
"""Trains a language model of Python code with a custom loop, on one device and then on two.

  python examples/text_lm.py                  on one device, then on two: virtual CPU devices, or GPUs
  python examples/text_lm.py --devices 2      on two devices only
  python examples/text_lm.py --resume         resumes where such a run was stopped or killed
  python examples/text_lm.py --summaries      writes loss, learning rate and weights for TensorBoard
  python examples/text_lm.py --steps 600 --sample      also shows a function that the model has written

The text is the source code of Python's standard library, so nothing is downloaded. The program prints how little the two
trainings differ and their speed. It draws both loss curves in one picture in `--out`.
"""

import argparse
import collections
import dataclasses
import functools
import itertools
import math
import re
import shutil
import sysconfig
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import phalanx  # isort: skip  (before Keras, because it selects the JAX backend)

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

WINDOW = 64
NUM_TOKENS = 1024
HOLD_OUT_ONE_FILE_IN = 20
EVALUATION_BATCH = 128
PROMPT = "\n\n    def read(self"
SAMPLE_LENGTH = 160
TEMPERATURE = 0.55
CANDIDATES = 8
NUM_FREQUENT = 60  # The first tokens: brackets, operators and words such as `self`, which every line needs.
MEMORY = 40
REPETITION_PENALTY = 2.0

console = Console(highlight=False, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Training:
    """The results of one training."""

    num_devices: int
    losses: list[float]
    tokens_per_s: float
    held_out_loss: float
    weights: list[np.ndarray]


def main() -> None:
    args = parse_arguments()
    phalanx.set_virtual_cpu_devices(max(args.devices))
    devices = jax.local_devices()
    if len(devices) < max(args.devices):
        raise SystemExit(
            f"There are {len(devices)} devices, not {max(args.devices)}. HINT: JAX_PLATFORMS=cpu uses CPUs."
        )
    args.out.mkdir(parents=True, exist_ok=True)
    train_files, held_out_files = source_files()
    console.print(
        f"The same training on {' and on '.join(map(named, args.devices))}: {args.steps} steps of "
        f"{args.batch * WINDOW:,} tokens. The text is {num_bytes(train_files) / 1e6:.1f} MB of Python's standard library. "
        "On two idle CPU cores, 120 steps take a minute."
    )

    trainings = []
    for count in args.devices:
        console.rule(named(count))
        keras.utils.clear_session(free_memory=False)  # Layers have the same names in both trainings.
        keras.utils.set_random_seed(args.seed)
        strategy = phalanx.MirroredStrategy(devices[:count])
        trainer = Trainer(strategy, args.width, args.layers, args.learning_rate, args.steps)
        phalanx.describe(strategy, console=console)
        folder = args.out / f"checkpoints_{count}" if args.resume else None
        with summary_writer(args, count).as_default():
            losses, tokens_per_s = train(trainer, train_files, args, folder)
        held_out_loss = evaluate(trainer, held_out_files)
        trainings.append(Training(count, losses, tokens_per_s, held_out_loss, trainer.model.get_weights()))

    for count in args.devices:
        shutil.rmtree(args.out / f"checkpoints_{count}", ignore_errors=True)  # The next run begins with the first step.
    console.rule("the same training?")
    compare(trainings)
    if args.sample:
        console.rule(f"what the model writes after {PROMPT.strip()!r}")
        sample = write(trainer, PROMPT, SAMPLE_LENGTH, args.seed)
        (args.out / "sample.txt").write_text(sample, encoding="utf-8")
        console.print(f"{sample}\n\nSaved: {args.out / 'sample.txt'}", markup=False)
    if args.summaries:
        console.print(f"Summaries: pip install tensorboard; tensorboard --logdir {args.out / 'logs'}")
    curves = {named(training.num_devices): training.losses for training in trainings}
    draw(curves, f"The same training on {' and on '.join(curves)}", args.out / "loss.png")
    console.print(f"The picture of both: {args.out / 'loss.png'}")


# The steps: functions for one replica and its share of a batch, and functions for all replicas.


class Trainer:
    """A model and its optimizer on the replicas of a strategy."""

    def __init__(
        self, strategy: phalanx.Strategy, width: int, layers: int, learning_rate: float, num_steps: int
    ) -> None:
        self.strategy = strategy
        with strategy.scope():
            self.model = LanguageModel(width, layers)
            self.model(keras.Input((WINDOW,), dtype="int32"))  # The first call creates the variables.
            schedule = keras.optimizers.schedules.CosineDecay(
                0.0, num_steps, alpha=0.02, warmup_target=learning_rate, warmup_steps=max(1, num_steps // 20)
            )
            # Larger than Adam's default, so that gradients that are zero except for rounding do not move weights.
            self.optimizer = keras.optimizers.AdamW(schedule, weight_decay=0.01, epsilon=1e-6, global_clipnorm=1.0)
        self.token_losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

    @property
    def step(self) -> int:
        """The number of steps so far."""
        return int(self.optimizer.iterations.value)

    @phalanx.function
    def train_step(self, batch):
        """Trains on one global batch, and returns its mean loss."""
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
        """Returns the sum of the losses of a global batch of windows, and their number."""
        per_window = self.strategy.run(self.replica_evaluation_step, args=(batch,))
        return self.strategy.reduce("SUM", per_window, axis=0)

    def replica_evaluation_step(self, batch):
        losses = self.window_losses(batch, training=False)
        return losses, keras.ops.ones_like(losses, dtype="int32")

    def window_losses(self, windows, training):
        inputs, targets = windows[:, :-1], windows[:, 1:]
        return keras.ops.mean(self.token_losses(targets, self.model(inputs, training=training)), axis=-1)

    @phalanx.function
    def next_token_logits(self, window, last):
        """Returns the logits of the token that follows `window[last]`."""
        return self.model(window[None], training=False)[0, last]


# The model: a Keras model.


class LanguageModel(keras.Model):
    """A transformer from tokens `(batch, WINDOW)` to the logits of each next token `(batch, WINDOW, NUM_TOKENS)`."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.tokens = keras.layers.Embedding(NUM_TOKENS, width)
        self.positions = keras.layers.Embedding(WINDOW, width)
        self.blocks = [Block(width, heads=max(1, width // 32)) for _ in range(layers)]
        self.norm = keras.layers.LayerNormalization()
        self.logits = keras.layers.Dense(NUM_TOKENS)

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


def train(
    trainer: Trainer, files: Sequence[Path], args: argparse.Namespace, folder: Path | None = None
) -> tuple[list[float], float]:
    """Trains up to step `args.steps`, and saves in a folder, if there is one. Returns the loss of each step, and the tokens per second."""
    windows = np.concatenate([windows_of(str(file)) for file in files])
    windows = np.random.default_rng(args.seed).permutation(windows)
    dataset = trainer.strategy.experimental_distribute_dataset(windows, batch_size=args.batch)
    iterator = iter(dataset)
    losses: list[float] = []
    state = phalanx.train.Checkpoint(model=trainer.model, optimizer=trainer.optimizer, iterator=iterator, losses=losses)
    state.timed_steps, state.seconds = 0, 0.0
    manager = None if folder is None else phalanx.train.CheckpointManager(state, folder, max_to_keep=1)
    if manager and (restored := manager.restore_or_initialize()):
        console.print(f"restored step {len(losses)} from {restored}")
    every = max(1, args.steps // 10)
    with training_progress(tokens_per_step=args.batch * WINDOW) as progress:
        task = progress.add_task("training", total=args.steps, completed=len(losses), loss=math.nan)
        start = None  # The first step compiles the program, and is not timed.
        while len(losses) < args.steps:
            if (batch := next(iterator, None)) is None:
                iterator = state.iterator = iter(dataset)  # The next epoch.
                batch = next(iterator)
            losses.append(float(trainer.train_step(batch)))
            now = time.perf_counter()
            if start is not None:
                state.timed_steps, state.seconds = state.timed_steps + 1, state.seconds + now - start
            progress.update(task, advance=1, loss=losses[-1])
            phalanx.summary.scalar("loss", losses[-1], step=len(losses))
            if len(losses) == 1 or len(losses) % every == 0:
                progress.console.print(f"step {len(losses):5d}   loss {np.mean(losses[-every:]):.4f}")
                phalanx.summary.scalar("learning_rate", trainer.optimizer.learning_rate, step=len(losses))
                for variable in trainer.model.trainable_variables:
                    phalanx.summary.histogram(variable.path, variable, step=len(losses))
            if manager and (len(losses) % args.save_every == 0 or len(losses) == args.steps):
                manager.save()
            start = now
    if manager:
        manager.sync()
    return losses, state.timed_steps * args.batch * WINDOW / max(state.seconds, 1e-9)


def evaluate(trainer: Trainer, files: Sequence[Path]) -> float:
    """Returns the mean loss over all windows of the files. Each window counts once, also in a short batch."""
    total, count = 0.0, 0
    windows = phalanx.data.from_files(files, windows_of)
    for batch in trainer.strategy.experimental_distribute_dataset(windows, batch_size=EVALUATION_BATCH):
        batch_total, batch_count = trainer.evaluation_step(batch)
        total, count = total + float(batch_total), count + int(batch_count)
    mean = total / count
    console.print(f"held-out loss: {mean:.4f} nats per token, over all {count} windows")
    return mean


def write(trainer: Trainer, prompt: str, length: int, seed: int) -> str:
    """Continues the prompt by up to `length` tokens, and returns the complete lines."""
    rng = np.random.default_rng(seed)
    tokens = tokens_of(prompt)
    for _ in range(length):
        recent = tokens[-WINDOW:]
        window = np.zeros(WINDOW, np.int32)
        window[: len(recent)] = recent
        logits = np.array(trainer.next_token_logits(window, len(recent) - 1))
        logits[0] = -np.inf  # No rare words.
        logits[[token for token in recent[-MEMORY:] if token >= NUM_FREQUENT]] -= REPETITION_PENALTY
        # The argmax of logits plus Gumbel noise is a sample from their softmax.
        best = np.argsort(logits)[-CANDIDATES:]
        tokens.append(int(best[np.argmax(logits[best] / TEMPERATURE + rng.gumbel(size=CANDIDATES))]))
    return text_of(tokens).strip("\n").rpartition("\n")[0]


# The data: a file's records are its windows of tokens. A token is a word, an operator, or a line end with its indentation.


def source_files() -> tuple[list[Path], list[Path]]:
    """Returns the files for training, and the files for evaluation."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    held_out = files[::HOLD_OUT_ONE_FILE_IN]
    return [f for f in files if f not in held_out], held_out


def num_bytes(files: Sequence[Path]) -> int:
    return sum(file.stat().st_size for file in files)


@functools.cache
def code_of(path: str) -> str:
    """Returns the text of a file without its comments and docstrings."""
    text = Path(path).read_text("utf-8")
    return re.sub(r"^\s*#[^\n]*|^\s*r?(\"\"\"|''').*?\1", "", text, flags=re.MULTILINE | re.DOTALL)


def words_of(text: str) -> list[str]:
    return re.findall(r"""\n+ *| ?[bfr]?"[^"\n]*"| ?[bfr]?'[^'\n]*'| ?\w+| ?[^\w\s]|\s""", text)


@functools.cache
def vocabulary() -> list[str]:
    """Returns the word of each token. Token 0 stands for all words that are too rare to be tokens."""
    files, _ = source_files()
    counts = collections.Counter(word for file in files for word in words_of(code_of(str(file))))
    return ["", *(word for word, _ in counts.most_common(NUM_TOKENS - 1))]


@functools.cache
def token_numbers() -> dict[str, int]:
    return {word: number for number, word in enumerate(vocabulary())}


def tokens_of(text: str) -> list[int]:
    return [token_numbers().get(word, 0) for word in words_of(text)]


def text_of(tokens: Sequence[int]) -> str:
    return "".join(vocabulary()[token] for token in tokens)


@functools.cache
def windows_of(path: str) -> np.ndarray:
    """Returns a file cut into windows, each with the token that follows it."""
    tokens = np.array(tokens_of(code_of(path)), np.uint16)
    if len(tokens) <= WINDOW:
        return np.zeros((0, WINDOW + 1), np.uint16)
    return np.lib.stride_tricks.sliding_window_view(tokens, WINDOW + 1)[::WINDOW]


def shuffled_windows(path: str, seed: int) -> np.ndarray:
    """Returns the windows of a file in a random order, which is the same for the same seed."""
    return np.random.default_rng(seed).permutation(windows_of(path))


# The output, and the command line.


def named(num_devices: int) -> str:
    return f"{num_devices} device{'s' if num_devices > 1 else ''}"


def compare(trainings: Sequence[Training]) -> None:
    """Prints the speed and loss of each training, and the largest difference of its weights to the first training."""
    first = trainings[0]
    for training in trainings:
        line = f"{named(training.num_devices)}: {training.tokens_per_s:,.0f} tokens/s, held-out loss {training.held_out_loss:.4f}"
        if training is not first:
            difference = max(np.abs(a - b).max() for a, b in zip(training.weights, first.weights, strict=True))
            line += f", largest difference of the weights to {named(first.num_devices)}: {difference:.1e}"
        console.print(line)
    if jax.default_backend() == "cpu":
        console.print("Virtual devices share this machine's cores, so these speeds say nothing about scaling.")


class TokensPerSecond(ProgressColumn):
    """A progress column with the speed over the last half minute."""

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


def draw(curves: Mapping[str, Sequence[float]], title: str, path: Path, events: Sequence[tuple[int, str]] = ()) -> None:
    """Draws loss curves on top of each other, and writes how far the others are from the first one.

    Args:
      curves: the loss of each step, by the name of the training.
      title: what the picture shows.
      path: the picture: .png or .svg.
      events: what happened after which step. The steps between the first and the last one are shaded.
    """
    first, *others = curves.values()
    figure = Figure(figsize=(8, 4.2), dpi=150, layout="constrained", facecolor="white")
    axes = figure.subplots()
    for name, (color, width) in zip(curves, itertools.cycle([("#9ecae1", 7), ("#08306b", 1.3)]), strict=False):
        axes.plot(range(1, len(curves[name]) + 1), curves[name], color=color, linewidth=width, label=name)
    if events:
        axes.axvspan(events[0][0], events[-1][0], color="#cb181d", alpha=0.07, linewidth=0)
    for height, (step, text) in enumerate(events):
        axes.axvline(step, color="#cb181d", linewidth=1, linestyle=(0, (4, 3)))
        offset, side = ((-6, 0), "right") if step > len(first) / 2 else ((6, 0), "left")
        place = (step, 0.72 - 0.08 * height)
        axes.annotate(
            f"step {step}: {text}",
            place,
            offset,
            xycoords=("data", "axes fraction"),
            textcoords="offset points",
            color="#cb181d",
            ha=side,
        )
    for losses in others:
        difference = np.abs(np.subtract(losses, first)).max()
        text = f"largest difference between the losses of a step: {difference:.0e}"
        axes.text(0.02, 0.04, text, transform=axes.transAxes, color="#08306b")
    axes.set_title(title, loc="left", fontweight="bold")
    axes.set(xlabel="step", ylabel="loss (nats per token)")
    axes.grid(color="#e5e5e5")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    axes.margins(x=0.02)
    axes.set_ylim(bottom=min(map(min, curves.values())) - 0.7)
    figure.savefig(path)


def summary_writer(args: argparse.Namespace, num_devices: int) -> phalanx.summary.SummaryWriter:
    """Returns what writes the summaries of a training, or drops them."""
    if not args.summaries:
        return phalanx.summary.create_noop_writer()
    return phalanx.summary.create_file_writer(args.out / "logs" / named(num_devices).replace(" ", "_"))


def add_training_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the options of the model and its training, which other examples share."""
    parser.add_argument("--batch", type=int, default=16, help="windows per global batch (default: %(default)s)")
    parser.add_argument("--width", type=int, default=128, help="of the model (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=2, help="of the model (default: %(default)s)")
    parser.add_argument("--learning-rate", type=float, default=2e-3, help="at its peak (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="(default: %(default)s)")


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--devices", type=int, nargs="+", default=[1, 2], help="devices of each training (default: %(default)s)"
    )
    parser.add_argument("--steps", type=int, default=120, help="(default: %(default)s)")
    add_training_arguments(parser)
    parser.add_argument(
        "--resume", action="store_true", help="save regularly, and continue where the last run was stopped"
    )
    parser.add_argument(
        "--sample", action="store_true", help="print what the model writes, and save it to OUT/sample.txt"
    )
    parser.add_argument("--summaries", action="store_true", help="write summaries for TensorBoard to OUT/logs")
    parser.add_argument("--save-every", type=int, default=20, help="steps between two saves (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=Path("out"), help="where to save (default: %(default)s)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
