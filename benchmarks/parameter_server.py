# SPDX-License-Identifier: Apache-2.0
"""Training with parameter servers on this machine, beside tf.distribute; what arrays cost on their way, beside raw Ray.

All processes of both libraries are alive at the same time; those of one work, and the others wait. A measurement is the time
from the first `schedule` until `join` returns, for so many steps as take about two seconds. Each worker has a dataset of its own.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks import peers, timing
from benchmarks.models import MLP
from benchmarks.parent import Child
from benchmarks.report import Report, all_rounds, verdict
from benchmarks.workers import require_same
from phalanx._src.launch.plan import free_ports

_WORKERS = 2
_OURS, _THEIRS = "benchmarks.servers_phalanx", "benchmarks.servers_tensorflow"
_SIZES = {"64 KB": 1 << 16, "1 MB": 1 << 20, "4 MB": 1 << 22, "16 MB": 1 << 24, "64 MB": 1 << 26}
_SETTINGS = {"JAX_PLATFORMS": "cpu", "TF_CPP_MIN_LOG_LEVEL": "2"}
_EMPTY, _TARGET = "empty", 1.5
_TURN_S, _TURN_OF_CALLS_S = 2.0, 0.3
_PREPARE_S, _TURN_LIMIT_S = 300, 120


def run(*, quick: bool) -> Report:
    """Measures training with one and with two servers, steps that do nothing, and pulls and pushes by size."""
    report = Report(
        "parameter_server",
        f"ParameterServerStrategy with {_WORKERS} workers (other's time / Phalanx time)",
        ("what", "servers", "against", "its", "Phalanx", "unit", "ratio", "target", "middle half", "all rounds"),
    )
    for ps in (1, 2):
        with ExitStack() as stack:
            theirs, ours = stack.enter_context(_tensorflow(ps)), stack.enter_context(_phalanx(ps))
            for optimizer in ("SGD", "Adam"):
                _add_training(report, theirs, ours, optimizer, ps, *((3, 1) if quick else (11, 2)))
            if ps == 1:
                _add_empty(report, theirs, ours, *((3, 1) if quick else (11, 2)))
    with _phalanx(1) as ours:
        for size in ("64 KB", "4 MB") if quick else _SIZES:
            _add_transport(report, ours, size, *((3, 1) if quick else (11, 3)))
    return report


@contextmanager
def _phalanx(ps: int) -> Iterator[Child]:
    """The coordinator; it has started its workers and servers."""
    with Child(1, environment=_SETTINGS) as coordinator:
        coordinator.call(f"{_OURS}:start", _PREPARE_S, workers=_WORKERS, ps=ps)
        yield coordinator
        coordinator.call(f"{_OURS}:close", _TURN_LIMIT_S)


@contextmanager
def _tensorflow(ps: int) -> Iterator[Child]:
    """The same with tf.distribute, whose workers and servers are processes of the cluster that TF_CONFIG would tell."""
    python = str(peers.interpreter("tensorflow", peers.TENSORFLOW))
    addresses = [f"127.0.0.1:{port}" for port in free_ports(_WORKERS + ps)]
    cluster = {"worker": addresses[:_WORKERS], "ps": addresses[_WORKERS:]}
    with ExitStack() as stack:
        start = lambda: stack.enter_context(Child(python=python, environment=_SETTINGS))  # noqa: E731
        for job, index in [(job, i) for job, of_job in cluster.items() for i in range(len(of_job))]:
            start().call(f"{_THEIRS}:serve", _PREPARE_S, cluster=cluster, job=job, index=index)
        coordinator = start()
        coordinator.call(f"{_THEIRS}:start", _PREPARE_S, cluster=cluster)
        yield coordinator


def _add_training(report: Report, theirs: Child, ours: Child, optimizer: str, ps: int, rounds: int, turns: int) -> None:
    call = {"name": optimizer, "optimizer": optimizer}
    numbers = [c.call(f"{m}:prepare_training", _PREPARE_S, **call) for c, m in ((theirs, _THEIRS), (ours, _OURS))]
    require_same(f"loss and weights with {optimizer}", *numbers)
    pairs = timing.interleaved(
        _measure(theirs, _THEIRS, optimizer, _TURN_S), _measure(ours, _OURS, optimizer, _TURN_S), rounds, turns
    )
    what = f"MLP, {optimizer}, batch {MLP.per_replica_batch}"
    _add(report, what, ps, "tf.distribute", lambda s: f"{1 / s:.1f}", "steps/s", _TARGET, pairs)


def _add_empty(report: Report, theirs: Child, ours: Child, rounds: int, turns: int) -> None:
    for child, module in ((theirs, _THEIRS), (ours, _OURS)):
        child.call(f"{module}:prepare_empty", _PREPARE_S, name=_EMPTY)
    pairs = timing.interleaved(
        _measure(theirs, _THEIRS, _EMPTY, _TURN_S), _measure(ours, _OURS, _EMPTY, _TURN_S), rounds, turns
    )
    cost = lambda s: f"{1e6 * s:.0f}"  # noqa: E731
    _add(report, "schedule and join, a step that does nothing", 1, "tf.distribute", cost, "us a step", None, pairs)


def _add_transport(report: Report, ours: Child, size: str, rounds: int, turns: int) -> None:
    size_bytes = _SIZES[size]
    ours.call(f"{_OURS}:prepare_transport", _PREPARE_S, name=size, size_bytes=size_bytes)
    for verb in ("pull", "push"):
        measures = [_measure(ours, _OURS, f"{size}: {verb}{of}", _TURN_OF_CALLS_S) for of in (" of Ray", "")]
        pairs = timing.interleaved(*measures, rounds, turns)
        speed = lambda s: f"{size_bytes / s / 1e6:.0f}"  # noqa: E731
        _add(report, f"{verb} of {size}", 1, "raw Ray", speed, "MB/s", None, pairs)


def _measure(child: Child, module: str, name: str, turn_s: float) -> Callable[[], float]:
    """Returns what measures once, for about `turn_s`."""

    def measured(count: int) -> float:
        return float(child.call(f"{module}:seconds_a_step", _TURN_LIMIT_S, name=name, count=count))

    measured(5)
    count = max(3, round(turn_s / measured(10)))
    return lambda: measured(count)


def _add(
    report: Report,
    what: str,
    ps: int,
    against: str,
    shown: Callable[[float], str],
    unit: str,
    target: float | None,
    pairs: Sequence[timing.Pair],
) -> None:
    ratio = timing.median_ratio(pairs)
    row: list[Any] = [
        what,
        ps,
        against,
        *map(shown, timing.medians(pairs)),
        unit,
        ratio,
        verdict(ratio, at_least=target),
    ]
    row += [timing.middle_half(pairs), all_rounds(pairs)]
    report.add(row, what=what, servers=ps, against=against, ratio=ratio, rounds=pairs)
