# SPDX-License-Identifier: Apache-2.0
"""`fit` of ten models on two replicas, beside tf.distribute, Keras's own `DataParallel` on JAX, and torch.

All train with Adam in global batches of 64 rows, from the same weights on the same batches. Losses are compared before anything is
timed. Beside Keras, both also compute an accuracy.

torch runs in one process with 2 threads, and with DDP over gloo in two processes with 1 thread each. It does not compile its models. Its loop
over the batches keeps the mean loss, as `fit` does. `torch_zoo` has eight of the models.

The operations of a step are counted in the program of Phalanx. How many of them a library does in a second is given as a share of what
large matrix products reach on both replicas at once, which is the most that any program can do here.
"""

import statistics
import tempfile
from typing import Any

from benchmarks import against_tensorflow, fit, peers, timing
from benchmarks.parent import Child, call_in_child
from benchmarks.report import Report, all_rounds, verdict
from benchmarks.workers import Program, Workers, require_same
from benchmarks.zoo import ZOO

_LEAST = {"tf.distribute 2.21": 1.5, "Keras DataParallel": 1.0, "torch 2.13": 1.0, "torch DDP": 1.0}
_PROCESSES = {"torch 2.13": 1, "torch DDP": 2}
"""The number of processes of torch. They share one thread per replica."""
_WITHOUT_TORCH = ("bidirectional LSTM", "U-Net")
_MEDIAN = 3.0
_REPLICAS = 2
_TOLERANCE = 0.05
"""Phalanx normalizes the batch of a replica, as tf.distribute and DDP do. Keras's DataParallel and torch in one process
normalize the global batch."""


def run(*, quick: bool, case: str | None = None) -> Report:
    """Measures each model, or one, the processes of both libraries alive and only those of one at work."""
    report = Report(
        "models",
        "Speed of fit, two replicas, global batch 64, Adam (time of the other / time of Phalanx)",
        (
            "model",
            "beside",
            "its steps/s",
            "Phalanx steps/s",
            "ratio",
            "target",
            "its share of the peak",
            "share of Phalanx",
            "middle half",
            "all rounds",
        ),
    )
    peak = call_in_child("benchmarks.every_model:peak", 300, devices=_REPLICAS)
    python = peers.interpreter("tensorflow", peers.TENSORFLOW)
    theirs, ours = against_tensorflow.PEERS["fit"], against_tensorflow.OURS["fit", "Phalanx"]
    found = []
    times = (3, 1) if quick else (9, 3)
    for name in [case] if case else list(ZOO)[:1] if quick else ZOO:
        share = call_in_child("benchmarks.every_model:flops", 300, devices=_REPLICAS, case=name) / peak
        rounds = against_tensorflow.rounds_of(python, name, theirs, ours, _REPLICAS, *times)
        found.append(_add(report, name, "tf.distribute 2.21", rounds, share))
        _, rounds = fit.rounds_of(name, 1, 1, 3 if quick else 9, _TOLERANCE)
        _add(report, name, "Keras DataParallel", rounds, share)
        for beside, processes in _PROCESSES.items():
            if name not in _WITHOUT_TORCH:
                _add(report, name, beside, _rounds_beside_torch(name, processes, *times), share)
    if case:
        return report
    median = statistics.median(found)
    target = verdict(median, at_least=_MEDIAN)
    report.add(["median", "tf.distribute 2.21", "", "", median, target, *[""] * 4], case="median", ratio=median)
    return report


def _rounds_beside_torch(case: str, processes: int, rounds: int, turns: int) -> list[timing.Pair]:
    """Measures torch and Phalanx in turns, after it has compared their losses.

    Args:
      case: the name of the model.
      processes: number of processes of torch.
      rounds: number of rounds.
      turns: how often each measures in a round.
    """
    python = str(peers.interpreter("torch", peers.TORCH))
    module, prepare = against_tensorflow.OURS["fit", "Phalanx"]
    with (
        tempfile.NamedTemporaryFile(suffix=".npz") as weights,
        Workers(processes, python) as workers,
        Child(_REPLICAS) as child,
    ):
        child.call(f"{module}:save_weights", 300, case=case, path=weights.name)
        ours = against_tensorflow.Prepared(child, module, prepare, case=case)
        theirs = Program(
            workers,
            "benchmarks.workers_torch",
            "prepare_fit",
            "fit",
            turn_s=against_tensorflow.TURN_S,
            multiple=3,
            case=case,
            replicas=_REPLICAS,
            weights=weights.name,
            threads=_REPLICAS // processes,
        )
        tolerance = against_tensorflow.TOLERANCE if processes == _REPLICAS else _TOLERANCE
        require_same(f"losses of {case}", theirs.numbers, ours.losses, rel_tol=tolerance)
        return timing.interleaved(theirs.seconds_a_step, ours.seconds_a_step, rounds, turns)


def _add(report: Report, case: str, beside: str, rounds: list[timing.Pair], share: float) -> float:
    """Adds a row. `share` is that of a program that makes one step per second."""
    theirs_s, ours_s = timing.medians(rounds)
    ratio = timing.median_ratio(rounds)
    row = [case, beside, f"{1 / theirs_s:.1f}", f"{1 / ours_s:.1f}", ratio, verdict(ratio, at_least=_LEAST[beside])]
    row += [f"{share / theirs_s:.0%}", f"{share / ours_s:.0%}", timing.middle_half(rounds), all_rounds(rounds)]
    report.add(row, case=case, beside=beside, ratio=ratio, rounds=rounds, share=[share / theirs_s, share / ours_s])
    return ratio


def peak() -> float:
    """In a child: multiplications and additions per second of matrix products on all devices at once."""
    import jax
    import numpy as np

    import phalanx

    devices, size, count = phalanx.MirroredStrategy().topology.per_replica, 1024, 5
    x = jax.device_put(np.ones((_REPLICAS, size, size), "float32"), devices)
    product = jax.jit(lambda x: x @ x)
    rounds = [timing.seconds_a_step(lambda: product(x), jax.block_until_ready, count) for _ in range(11)]
    return _REPLICAS * 2 * size**3 / min(rounds)


def flops(case: str) -> float:
    """In a child: multiplications and additions of a step of all replicas."""
    import keras

    import phalanx
    from benchmarks.models import CASES

    def train() -> Any:
        with phalanx.MirroredStrategy(1).scope():
            model = CASES[case].model(keras)
            model.compile("adam", keras.losses.SparseCategoricalCrossentropy(from_logits=True))
        x, y = CASES[case].batch(1)
        model.fit(x, y, batch_size=len(x), verbose=0)

    (found,) = phalanx.estimate(train, [f"cpu:{_REPLICAS}"])
    return found.flops * found.num_replicas
