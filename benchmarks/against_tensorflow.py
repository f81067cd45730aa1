# SPDX-License-Identifier: Apache-2.0
"""The speed of a step beside tf.distribute's MirroredStrategy on virtual CPU devices.

Both train with a custom loop, or both with Keras `fit`, which also reads its batches and keeps the mean loss; the custom
loops have one batch at hand.
The step that an expert writes in JAX is measured too: no library on JAX can be faster than XLA lets it be.
"""

import functools
from pathlib import Path
from typing import Any

from benchmarks import peers, timing
from benchmarks.parent import Child
from benchmarks.report import Report, all_rounds, verdict
from benchmarks.workers import require_same

TURN_S = 0.15
TOLERANCE = 1e-3
PEERS = {"custom loop": "benchmarks.tensorflow_peer", "fit": "benchmarks.tensorflow_fit"}
OURS = {
    ("custom loop", "Phalanx"): ("benchmarks.with_phalanx", "prepare"),
    ("custom loop", "hand-written JAX"): ("benchmarks.with_phalanx", "prepare_hand_written"),
    ("fit", "Phalanx"): ("benchmarks.phalanx_fit", "prepare"),
}
_MLP, _MLP_FIT, _NONE = {2: 3.0, 4: 5.0}, {2: 2.5, 4: None}, {2: None, 4: None}
_TARGETS = {
    ("mlp", "custom loop", "Phalanx"): _MLP,
    ("mlp", "custom loop", "hand-written JAX"): _NONE,
    ("mlp", "fit", "Phalanx"): _MLP_FIT,
    ("cnn", "custom loop", "Phalanx"): _NONE,
    ("cnn", "custom loop", "hand-written JAX"): _NONE,
}


class Prepared:
    """A program that a child process has prepared.

    Args:
      child: the process.
      module: the module of the program.
      function: the function there that prepares the program and returns its losses.
      options: the arguments of that function.
    """

    def __init__(self, child: Child, module: str, function: str = "prepare", **options: Any) -> None:
        self._child, self._module = child, module
        self.losses: list[float] = child.call(f"{module}:{function}", 300, **options)

    @functools.cached_property
    def _count(self) -> int:
        return self._child.call(f"{self._module}:steps_for", 120, turn_s=TURN_S)

    def seconds_a_step(self) -> float:
        """Measures once."""
        return self._child.call(f"{self._module}:seconds_a_step", 120, count=self._count)


def run(*, quick: bool) -> Report:
    """Measures each model and number of replicas, both processes alive and only one at work."""
    report = Report(
        "tensorflow",
        "Speed on JAX against tf.distribute 2.21 (tf.distribute time / its time);"
        " Phalanx, MLP: target 3x at 2 replicas, 5x at 4, of fit 2.5x at 2",
        (
            "model",
            "trains by",
            "on JAX",
            "replicas",
            "tf.distribute steps/s",
            "JAX steps/s",
            "ratio",
            "target",
            "middle half",
            "all rounds",
        ),
    )
    python = peers.interpreter("tensorflow", peers.TENSORFLOW)
    rows = [(*program, *target) for program, targets in _TARGETS.items() for target in targets.items()]
    for case, kind, ours, replicas, target in rows:
        rounds = rounds_of(python, case, PEERS[kind], OURS[kind, ours], replicas, *((3, 2) if quick else (11, 5)))
        tensorflow_s, jax_s = timing.medians(rounds)
        ratio = timing.median_ratio(rounds)
        speeds = [f"{1 / tensorflow_s:.1f}", f"{1 / jax_s:.1f}"]
        row = [case, kind, ours, replicas, *speeds, ratio, verdict(ratio, at_least=target), timing.middle_half(rounds)]
        report.add(
            [*row, all_rounds(rounds)], case=case, kind=kind, ours=ours, replicas=replicas, ratio=ratio, rounds=rounds
        )
    return report


def rounds_of(
    python: Path, case: str, theirs: str, program: tuple[str, str], replicas: int, rounds: int, turns: int
) -> list[timing.Pair]:
    """Measures a program of tf.distribute and one of ours in turns, after it has compared their losses.

    Args:
      python: the interpreter of TensorFlow.
      case: the name of the model.
      theirs: the module of the program of tf.distribute.
      program: module and function of ours.
      replicas: number of replicas.
      rounds: number of rounds.
      turns: how often each measures in a round.
    """
    with Child(python=str(python), environment={"TF_CPP_MIN_LOG_LEVEL": "2"}) as peer, Child(replicas) as ours:
        own, prepare = program
        first, second = Prepared(peer, theirs, case=case, replicas=replicas), Prepared(ours, own, prepare, case=case)
        require_same(f"losses of {case}", first.losses, second.losses, rel_tol=TOLERANCE)
        return timing.interleaved(first.seconds_a_step, second.seconds_a_step, rounds, turns)
