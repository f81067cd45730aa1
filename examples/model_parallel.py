# SPDX-License-Identifier: Apache-2.0
"""Trains the language model of text_lm.py with variables that are sharded, so that no device holds all of them.

  python examples/model_parallel.py                    both variants, one after the other
  python examples/model_parallel.py --only model       two replicas of two devices each, which share the heads and neurons
  python examples/model_parallel.py --only sharded     four replicas, each with a quarter of the variables and optimizer slots

Both see the same batches and learn the same. The program prints where each variable is placed, and the bytes per device.
"""

import argparse

import phalanx  # isort: skip  (before Keras, because it selects the JAX backend)

import keras
from text_lm import Trainer, add_training_arguments, console, source_files, train

DEVICES = 4

# Each device computes half of the heads and half of the neurons. XLA sums their outputs over the two devices.
HEADS_AND_NEURONS = {
    ".*/(query|key|value)/kernel": (None, "model", None),
    ".*/(query|key|value)/bias": ("model", None),
    ".*/attention_output/kernel": ("model", None, None),
    ".*/expand/kernel": (None, "model"),
    ".*/expand/bias": ("model",),
    ".*/contract/kernel": ("model", None),
}

STRATEGIES = {
    "model": lambda: phalanx.MirroredStrategy(model_axis=("model", 2), layout=HEADS_AND_NEURONS),
    "sharded": lambda: phalanx.MirroredStrategy(layout=phalanx.fully_sharded()),
}


def main() -> None:
    args = parse_arguments()
    phalanx.set_virtual_cpu_devices(DEVICES)
    train_files, _ = source_files()
    for name in [args.only] if args.only else STRATEGIES:
        keras.utils.set_random_seed(args.seed)
        strategy = STRATEGIES[name]()
        console.rule(name)
        trainer = Trainer(strategy, args.width, args.layers, args.learning_rate, args.steps)
        trainer.optimizer.build(trainer.model.trainable_variables)
        phalanx.describe(strategy, trainer.model, trainer.optimizer, console=console)
        train(trainer, train_files, args)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=STRATEGIES)
    parser.add_argument("--steps", type=int, default=100, help="(default: %(default)s)")
    add_training_arguments(parser)
    return parser.parse_args()


if __name__ == "__main__":
    main()
