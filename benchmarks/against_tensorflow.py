# SPDX-License-Identifier: Apache-2.0
"""The speed of a step beside tf.distribute's MirroredStrategy on virtual CPU devices.

Both train with a custom loop, or both with Keras `fit`, which also reads its batches and keeps the mean loss; the custom
loops have one batch at hand.
The step that an expert writes in JAX is measured too: no library on JAX can be faster than XLA lets it be.
"""

import math
from pathlib import Path

from benchmarks import peers, timing
from benchmarks.parent import Child
from benchmarks.report import Report, all_rounds, verdict

_TURN_S = 0.15
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
        losses = [
            peer.call(f"{theirs}:prepare", 300, case=case, replicas=replicas),
            ours.call(f"{own}:{prepare}", 300, case=case),
        ]
        if not all(math.isclose(a, b, rel_tol=1e-3) for a, b in zip(*losses, strict=True)):
            raise AssertionError(f"the two programs compute different losses: {losses}")
        counts = [
            peer.call(f"{theirs}:steps_for", 120, turn_s=_TURN_S),
            ours.call(f"{own}:steps_for", 120, turn_s=_TURN_S),
        ]
        return timing.interleaved(
            lambda: peer.call(f"{theirs}:seconds_a_step", 120, count=counts[0]),
            lambda: ours.call(f"{own}:seconds_a_step", 120, count=counts[1]),
            rounds,
            turns,
        )
