# SPDX-License-Identifier: Apache-2.0
"""`strategy.run_steps` beside what an expert writes: single steps, and a `lax.scan` over stacked batches.

All three read the same rows and put them on the devices: the single steps each batch, the scan each group of K, which
the expert has stacked beforehand. Phalanx's iterator stacks them as it reads.
"""

import functools
import itertools
import math
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import timing
from benchmarks.devices import fitting
from benchmarks.models import CASES
from benchmarks.parent import call_in_child
from benchmarks.report import Report, all_rounds, verdict

_STEPS = (1, 4, 16, 64)
_PASS = {"small_mlp": 1024, "mlp": 128}
_TITLES = {"single steps": "single", "scan": "scan"}
Pass = Callable[[], list[float]]


def run(*, quick: bool) -> Report:
    """Measures each model, number of replicas and K, in a process of its own."""
    report = Report(
        "run_steps",
        "Speed of strategy.run_steps(step, iterator, K) (hand-written time / Phalanx time), each with its input",
        (
            "model",
            "replicas",
            "K",
            "against hand-written",
            "its steps/s",
            "Phalanx steps/s",
            "ratio",
            "target",
            "middle half",
            "all rounds",
        ),
    )
    rows = itertools.product(_PASS, fitting((1, 2)), (1, 16) if quick else _STEPS)
    report.measure(functools.partial(_add, report, quick, *row) for row in rows)
    return report


def _add(report: Report, quick: bool, case: str, replicas: int, steps: int) -> None:
    options = {"rounds": 3, "turns": 1} if quick else {"rounds": 5, "turns": 1}
    raw = call_in_child("benchmarks.run_steps:measure", 400, devices=replicas, case=case, steps=steps, **options)
    for title, key in _TITLES.items():
        _add_row(report, [case, replicas, steps, title], raw[key])


def _add_row(report: Report, what: list[Any], rounds: list[timing.Pair]) -> None:
    case, replicas, steps, against = what
    hand_s, phalanx_s = timing.medians(rounds)
    ratio = timing.median_ratio(rounds)
    speeds = [f"{1 / hand_s:.1f}", f"{1 / phalanx_s:.1f}"]
    row = [*what, *speeds, ratio, verdict(ratio), timing.middle_half(rounds), all_rounds(rounds)]
    report.add(row, case=case, replicas=replicas, steps=steps, against=against, ratio=ratio, rounds=rounds)


def measure(case: str, steps: int, rounds: int, turns: int) -> dict[str, Any]:
    """In a child: checks that all programs compute the same losses, then times each of the other two beside Phalanx."""
    ours = _with_phalanx(case, steps)
    others = {"single": _single(case), "scan": _scan(case, steps)}
    wanted = ours()
    for key, other in others.items():
        _check(key, other(), wanted)
    seconds = lambda one: lambda: _seconds_a_step(one, _PASS[case])  # noqa: E731
    return {key: timing.interleaved(seconds(other), seconds(ours), rounds, turns) for key, other in others.items()}


def _check(key: str, losses: list[float], wanted: list[float]) -> None:
    if not all(math.isclose(a, b, rel_tol=1e-3, abs_tol=1e-5) for a, b in zip(losses[:64], wanted[:64], strict=True)):
        raise AssertionError(f"{key} computes different losses: {losses[:64]} and {wanted[:64]}")


def _seconds_a_step(one: Pass, count: int) -> float:
    start = time.perf_counter()
    one()
    return (time.perf_counter() - start) / count


def _data(case: str, replicas: int) -> tuple[Any, Any]:
    """Returns the rows of one pass."""
    return CASES[case].batch(replicas * _PASS[case])


def _with_phalanx(case: str, steps: int) -> Pass:
    import keras
    import numpy as np

    import phalanx
    from benchmarks.with_phalanx import train_step

    strategy = phalanx.MirroredStrategy()
    n = strategy.num_replicas_in_sync
    step = train_step(strategy, lambda: CASES[case].model(keras))
    dataset = strategy.experimental_distribute_dataset(_data(case, n), batch_size=CASES[case].per_replica_batch * n)

    def one() -> list[float]:
        iterator = iter(dataset)
        found = [strategy.run_steps(step, iterator, steps) for _ in range(_PASS[case] // steps)]
        return np.concatenate([np.asarray(each.data).sum(0) for each in found]).tolist()

    return one


class _HandWritten:
    """What both hand-written programs have in common: the devices, the replica's step and its state."""

    def __init__(self, case: str) -> None:
        import jax
        import keras
        import numpy as np
        from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

        from benchmarks.handwritten import pure_step

        self.n, self.rows = len(jax.devices()), CASES[case].per_replica_batch
        mesh = Mesh(np.array(jax.devices()), ("replica",), axis_types=(AxisType.Auto,))
        self.split, self.whole = PartitionSpec("replica"), PartitionSpec()
        self.sharding = NamedSharding(mesh, self.split)
        sum_grads = functools.partial(jax.lax.psum, axis_name="replica") if self.n > 1 else lambda grads: grads
        self.step, state = pure_step(CASES[case].model(keras), sum_grads, self.rows * self.n)
        self.state = jax.device_put(jax.tree.map(np.asarray, state), NamedSharding(mesh, self.whole))
        specs = {"in_specs": (self.whole, self.split, self.split), "out_specs": (self.split, self.whole)}
        self.mapped = lambda f: jax.shard_map(f, mesh=mesh, check_vma=False, **specs) if self.n > 1 else f

    def over(self, program: Any, batches: Callable[[], Iterator[Any]]) -> Pass:
        """Returns a pass over all batches, which returns the losses of all steps."""
        import jax
        import numpy as np

        def one() -> list[float]:
            found = []
            for batch in batches():
                loss, self.state = program(self.state, *jax.device_put(batch, self.sharding))
                found.append(loss)
            return np.concatenate([np.asarray(loss).reshape(self.n, -1).sum(0) for loss in found]).tolist()

        return one


def _single(case: str) -> Pass:
    import jax

    hand = _HandWritten(case)
    x, y = _data(case, hand.n)
    rows = hand.rows * hand.n
    program = jax.jit(hand.mapped(hand.step), donate_argnums=0)
    return hand.over(program, lambda: ((x[i : i + rows], y[i : i + rows]) for i in range(0, len(x), rows)))


def _scan(case: str, steps: int) -> Pass:
    import jax
    import numpy as np

    hand = _HandWritten(case)

    def many(state: Any, x: jax.Array, y: jax.Array) -> Any:
        def body(state: Any, batch: Any) -> Any:
            loss, state = hand.step(state, *batch)
            return state, loss[0]

        state, losses = jax.lax.scan(body, state, (x[0], y[0]))
        return losses[None], state

    def stacked(a: Any) -> Any:
        """Groups of `(replicas, steps, rows, ...)`."""
        shape = (-1, steps, hand.n, hand.rows, *a.shape[1:])
        return np.ascontiguousarray(np.swapaxes(a.reshape(shape), 1, 2))

    groups = list(zip(*map(stacked, _data(case, hand.n)), strict=True))
    return hand.over(jax.jit(hand.mapped(many), donate_argnums=0), lambda: iter(groups))
