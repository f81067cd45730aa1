# SPDX-License-Identifier: Apache-2.0
"""Weight-update sharding: the time of a step and the bytes of slots on a device, compared with whole updates."""

import functools
import math
from collections.abc import Callable
from typing import Any

from benchmarks import timing
from benchmarks.parent import call_in_child
from benchmarks.report import Report, all_rounds, verdict

_CASES = (
    ("mlp", 512, 2),
    ("mlp", 2048, 2),
    ("mlp", 7000, 2),
    ("wide and deep", 50_000, 2),
    ("wide and deep", 50_000, 4),
)
_QUICK = (("mlp", 2048, 2),)
_TARGETS = {("mlp", 7000): 1.3}
_TURN_S = 0.3


def run(*, quick: bool) -> Report:
    """Measures each model in a process of its own."""
    report = Report(
        "update_sharding",
        "A step with Adam: whole update / sharded update",
        ("model", "weights", "replicas", "whole ms", "sharded ms", "ratio", "target", "slots / whole", "all rounds"),
    )
    for model, size, replicas in _QUICK if quick else _CASES:
        report.measure([functools.partial(_add, report, model, size, replicas, rounds=3 if quick else 11)])
    return report


def _add(report: Report, model: str, size: int, replicas: int, rounds: int) -> None:
    options: dict[str, Any] = {"model": model, "size": size, "replicas": replicas, "rounds": rounds}
    raw = call_in_child("benchmarks.update_sharding:measure", 600, devices=replicas, **options)
    whole_s, sharded_s = timing.medians(raw["rounds"])
    ratio, target = timing.median_ratio(raw["rounds"]), _TARGETS.get((model, size))
    row = [f"{model} {size:,}", raw["weights"], replicas, f"{whole_s * 1e3:.2f}", f"{sharded_s * 1e3:.2f}", ratio]
    row += [verdict(ratio, at_least=target), raw["slots"] / raw["whole_slots"], all_rounds(raw["rounds"])]
    report.add(row, ratio=ratio, **options | raw)


def measure(model: str, size: int, replicas: int, rounds: int) -> dict[str, Any]:
    """In a child: checks that both train alike, then times them in turn."""
    whole, sharded = (_Trained(model, size, is_sharded=x) for x in (False, True))
    losses = [(whole.loss(), sharded.loss()) for _ in range(3)]
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in losses):
        raise AssertionError(f"the two compute different losses: {losses}")
    wait: Callable[[Any], Any] = lambda result: result.block_until_ready()  # noqa: E731
    count = timing.steps_for(whole.step, wait, _TURN_S)
    seconds = [functools.partial(timing.seconds_a_step, each.step, wait, count) for each in (whole, sharded)]
    results = timing.interleaved(seconds[0], seconds[1], rounds)
    return {
        "rounds": results,
        "losses": losses,
        "weights": whole.model.count_params(),
        "slots": sharded.bytes_of_slots(),
        "whole_slots": whole.bytes_of_slots(),
    }


class _Trained:
    """A model that trains on one batch of 64 rows, again and again.

    Args:
      model: "mlp" or "wide and deep".
      size: the width of its layers, or the rows of its two tables.
      is_sharded: whether the replicas share the updates.
    """

    def __init__(self, model: str, size: int, *, is_sharded: bool) -> None:
        import keras
        import numpy as np

        import phalanx

        # None, the default, leaves small variables whole.
        self._strategy = phalanx.MirroredStrategy(weight_update_sharding=None if is_sharded else False)
        keras.utils.set_random_seed(0)
        rng = np.random.default_rng(0)
        with self._strategy.scope():
            if model == "mlp":
                x = rng.normal(size=(64, 64)).astype("float32")
                layers = [keras.layers.Dense(size, activation="relu") for _ in range(2)]
                self.model = keras.Sequential([keras.Input((64,)), *layers, keras.layers.Dense(10)])
            else:
                x = rng.integers(0, size, (64, 2)).astype("int32")
                ids = keras.Input((2,), dtype="int32")
                tables = [keras.layers.Embedding(size, 8)(ids[:, i]) for i in range(2)]
                hidden = keras.layers.Dense(64, activation="relu")(keras.layers.Concatenate()(tables))
                self.model = keras.Model(ids, keras.layers.Dense(10)(hidden))
            self.optimizer = keras.optimizers.Adam()
        y = rng.integers(0, 10, 64)
        (self._batch,) = self._strategy.experimental_distribute_dataset([(x, y)])
        self._function: Callable[[Any], Any] = self._step

    def _step(self, batch: Any) -> Any:
        import keras

        import phalanx

        x, y = batch
        with phalanx.GradientTape() as tape:
            logits = self.model(x, training=True)
            losses = keras.losses.sparse_categorical_crossentropy(y, logits, from_logits=True)
            loss = phalanx.nn.compute_average_loss(losses)
        variables = self.model.trainable_variables
        self.optimizer.apply(tape.gradient(loss, variables), variables)
        return phalanx.get_replica_context().all_reduce("SUM", loss)

    def step(self) -> Any:
        """Trains once. Returns the loss, which may still be computed."""
        return self._strategy.experimental_local_results(self._strategy.run(self._function, args=(self._batch,)))[0]

    def loss(self) -> float:
        """Trains once, and returns the loss."""
        return float(self.step())

    def bytes_of_slots(self) -> int:
        """Returns the bytes that the first device holds of the optimizer's variables."""
        return sum(v.value.addressable_shards[0].data.nbytes for v in self.optimizer.variables)
