# SPDX-License-Identifier: Apache-2.0
"""Interleaved rounds, and the ratio they give."""

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

Pair = tuple[float, float]


def interleaved(first: Callable[[], float], second: Callable[[], float], rounds: int, turns: int = 1) -> list[Pair]:
    """Runs `first`, `second`, `first`, `second`, ... and returns the mean of each for every round.

    Args:
      first: measures once.
      second: the same.
      rounds: how many pairs to return.
      turns: how often each measures in a round. Short turns in quick change share what else the machine does.
    """
    return [_round(first, second, turns) for _ in range(rounds)]


def _round(first: Callable[[], float], second: Callable[[], float], turns: int) -> Pair:
    pairs = [(first(), second()) for _ in range(turns)]
    return statistics.fmean(a for a, _ in pairs), statistics.fmean(b for _, b in pairs)


def ratios(rounds: Sequence[Pair]) -> list[float]:
    """Returns first / second of each round."""
    return [a / b for a, b in rounds]


def median_ratio(rounds: Sequence[Pair]) -> float:
    """Returns the median over the rounds of first / second."""
    return statistics.median(ratios(rounds))


def middle_half(rounds: Sequence[Pair]) -> str:
    """Returns between which ratios the middle half of the rounds lies."""
    low, _, high = statistics.quantiles(ratios(rounds), n=4)
    return f"{low:.2f} to {high:.2f}"


def medians(rounds: Sequence[Pair]) -> Pair:
    """Returns the median of the first and that of the second."""
    return statistics.median(a for a, _ in rounds), statistics.median(b for _, b in rounds)


def seconds_a_step(step: Callable[[], Any], wait: Callable[[Any], Any], count: int) -> float:
    """Runs `count` steps, waits for the last one, and returns the mean time of one."""
    start = time.perf_counter()
    for _ in range(count):
        result = step()
    wait(result)
    return (time.perf_counter() - start) / count


def steps_for(step: Callable[[], Any], wait: Callable[[Any], Any], turn_s: float) -> int:
    """Returns how many steps take about `turn_s`."""
    seconds_a_step(step, wait, 3)
    return max(3, round(turn_s / seconds_a_step(step, wait, 5)))
