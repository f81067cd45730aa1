# SPDX-License-Identifier: Apache-2.0
"""Child processes that are the workers of one cluster on this machine, with the settings that `phalanx run` gives them."""

import math
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from statistics import fmean
from typing import Any, Self

from benchmarks.parent import ROOT, Child, ChildError
from phalanx._src.launch.plan import Machine, Request, free_ports, plan

_SETTINGS = {"JAX_PLATFORMS": "cpu", "KERAS_BACKEND": "jax", "TF_CPP_MIN_LOG_LEVEL": "2"}
_PREPARE_S, _TURN_LIMIT_S = 300, 120
_MULTIPLE = 16
"""The largest number of steps per execution."""


class Workers:
    """Processes that call the same function at the same time. Between two calls each waits at its pipe.

    Args:
      count: how many.
      python: the interpreter.
    """

    def __init__(self, count: int, python: str = sys.executable) -> None:
        request = Request("benchmarks.child", is_module=True, workers=count, devices_per_worker=1)
        specs = plan(request, Machine.this(_SETTINGS), _SETTINGS, free_ports(count))
        path = {"PYTHONPATH": str(ROOT / "src")}  # Phalanx need not be installed.
        self._children = [Child(python=python, environment={**spec.environment, **path}) for spec in specs]
        self._pool = ThreadPoolExecutor(count)

    def call(self, function: str, deadline_s: float, **kwargs: Any) -> list[Any]:
        """Calls `function`, written `module:name`, in all of them, and returns what each of them returned.

        Raises:
          ChildError: some failed, or took longer than `deadline_s`; it has the logs of all these.
        """
        calls = [self._pool.submit(child.call, function, deadline_s, **kwargs) for child in self._children]
        wait(calls)
        if failures := [str(e) for call in calls if (e := call.exception())]:
            raise ChildError("\n".join(failures))
        return [call.result() for call in calls]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        for child in self._children:
            child.__exit__(*error)
        self._pool.shutdown()


class Program:
    """A program that workers have prepared and run together.

    Args:
      workers: they may have several programs.
      module: theirs, with a function `seconds_a_step`.
      function: what prepares the program there.
      name: how it is called there.
      turn_s: how long a measurement takes, about.
      multiple: the number of steps of a measurement is a multiple of it.
      options: what `function` gets besides the name.
    """

    def __init__(
        self,
        workers: Workers,
        module: str,
        function: str,
        name: str,
        *,
        turn_s: float,
        multiple: int = _MULTIPLE,
        **options: Any,
    ) -> None:
        self._workers, self._module, self._name = workers, module, name
        first, *others = workers.call(f"{module}:{function}", _PREPARE_S, name=name, **options)
        require_same(name, first, *others)
        self.numbers, self._steps = first, multiple
        # All workers must do as many steps, so this cannot be left to each of them.
        self._steps = multiple * math.ceil(turn_s / self.seconds_a_step() / multiple)

    def seconds_a_step(self) -> float:
        """Measures once, by the slowest worker."""
        call = f"{self._module}:seconds_a_step"
        return max(self._workers.call(call, _TURN_LIMIT_S, name=self._name, count=self._steps))


def interleaved(programs: Mapping[Any, Program], rounds: int, turns: int) -> dict[Any, list[float]]:
    """Measures all in turn, again and again, and returns the mean seconds a step of each in every round."""
    found: dict[Any, list[float]] = {key: [] for key in programs}
    for _ in range(rounds):
        seconds = [[program.seconds_a_step() for program in programs.values()] for _ in range(turns)]
        for key, of_one in zip(programs, zip(*seconds, strict=True), strict=True):
            found[key].append(fmean(of_one))
    return found


def require_same(what: str, *found: Sequence[float], rel_tol: float = 1e-2) -> None:
    """Makes sure that programs have computed the same numbers.

    Raises:
      AssertionError: they have not.
    """
    for numbers in zip(*found, strict=True):
        if not all(math.isclose(number, numbers[0], rel_tol=rel_tol) for number in numbers):
            raise AssertionError(f"{what}: different numbers: {found}")
