# SPDX-License-Identifier: Apache-2.0
"""The host's time for one step, by the number of variables, compared with `jax.jit` on a list of as many arrays.

In a loop that does not wait for its steps, the time of `jax.jit` depends on what Python does between two calls: XLA's threads fall asleep
if it takes longer than a step. So the loop of `jax.jit` is also measured with about as much Python as `run` is.
"""

import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

from benchmarks import timing
from benchmarks.devices import at_most
from benchmarks.parent import call_in_child
from benchmarks.report import Report, all_rounds

_REPLICAS = at_most(2)
_PYTHON_S = 30e-6


def run(*, quick: bool) -> Report:
    """Measures 10, 100 and 1000 variables."""
    report = Report(
        "host",
        f"Host time of a step that adds 1 to every variable, {_REPLICAS} replica{'s' * (_REPLICAS > 1)} (jax.jit / Phalanx)",
        (
            "variables",
            "jax.jit ms",
            "Phalanx ms",
            "ratio",
            "Phalanx more, us a variable",
            "loop: jax.jit ms",
            f"loop: jax.jit and {_PYTHON_S * 1e6:.0f} us of Python ms",
            "loop: Phalanx ms",
            "all rounds",
        ),
    )
    report.measure(functools.partial(_add, report, quick, count) for count in (10, 100, 1000))
    return report


def _add(report: Report, quick: bool, count: int) -> None:
    options = {"rounds": 3, "steps": 20} if quick else {"rounds": 21, "steps": 50}
    measured = functools.partial(call_in_child, deadline_s=300, devices=_REPLICAS, count=count)
    rounds = measured("benchmarks.host_time:measure", **options)
    loops = measured("benchmarks.host_time:measure_loops", rounds=3 if quick else 9, steps=20 if quick else 500)
    loop_ms = [statistics.median(each) * 1e3 for each in zip(*loops, strict=True)]
    jit_s, phalanx_s = timing.medians(rounds)
    ratio = timing.median_ratio(rounds)
    more_us = f"{(phalanx_s - jit_s) / count * 1e6:.2f}"
    row = [count, jit_s * 1e3, phalanx_s * 1e3, ratio, more_us, *loop_ms, all_rounds(rounds)]
    report.add(row, variables=count, ratio=ratio, rounds=rounds, loops=loops)


def measure(count: int, rounds: int, steps: int) -> list[timing.Pair]:
    """In a child: times both in turn, by the processor time of the calling thread. Waiting for XLA does not count."""
    plain, ours = _plain(count), _with_phalanx(count)
    for step in (plain, ours):
        _host_s(step, 3)
    return timing.interleaved(lambda: _host_s(plain, steps), lambda: _host_s(ours, steps), rounds)


def measure_loops(count: int, rounds: int, steps: int) -> list[tuple[float, float, float]]:
    """In a child: times loops of both in turn, and the loop of `jax.jit` with Python between two calls, by the clock on the wall."""
    plain, ours = _plain(count), _with_phalanx(count)

    def with_python() -> Callable[[], Any]:
        wait, end = plain(), time.perf_counter() + _PYTHON_S
        while time.perf_counter() < end:
            pass
        return wait

    def seconds(step: Callable[[], Callable[[], Any]]) -> float:
        return timing.seconds_a_step(step, lambda wait: wait(), steps)

    seconds(ours)
    return [(seconds(plain), seconds(with_python), seconds(ours)) for _ in range(rounds)]


def _host_s(step: Callable[[], Callable[[], Any]], steps: int) -> float:
    total = 0.0
    for _ in range(steps):
        start = time.thread_time()
        results = step()
        total += time.thread_time() - start
        results()
    return total / steps


def _with_phalanx(count: int) -> Callable[[], Callable[[], Any]]:
    import jax
    import keras

    import phalanx
    from phalanx._src.compat import raw_value

    strategy = phalanx.MirroredStrategy()
    with strategy.scope():
        variables = [keras.Variable(0.0) for _ in range(count)]

    def update(_: phalanx.Strategy) -> None:
        for v in variables:
            v.assign_add(1.0)

    def step() -> None:
        phalanx.get_replica_context().merge_call(update)

    def call() -> Callable[[], Any]:
        strategy.run(step)
        # `v.value` would make the next step copy an array on one device, because the caller might hold it.
        return lambda: jax.block_until_ready([raw_value(v) for v in variables])

    return call


def _plain(count: int) -> Callable[[], Callable[[], Any]]:
    import jax
    import jax.numpy as jnp

    import phalanx

    replicated = phalanx.MirroredStrategy().topology.replicated
    arrays = [jax.device_put(jnp.float32(0), replicated) for _ in range(count)]
    step = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)

    def call() -> Callable[[], Any]:
        nonlocal arrays
        arrays = step(arrays)
        return lambda: jax.block_until_ready(arrays)

    return call
