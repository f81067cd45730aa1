# SPDX-License-Identifier: Apache-2.0
"""Notes the moments of the steps of a script, and ends the script when there are enough. `phalanx bench` starts it in each process."""

import dataclasses
import json
import os
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, final

import jax
from typing_extensions import override

from phalanx._src.launch.script import run_as_main
from phalanx._src.programs.program import Call
from phalanx._src.runtime.observers import Observer, observers
from phalanx._src.runtime.settings import settings
from phalanx._src.tools.bench.session import TOO_FEW
from phalanx._src.tools.bench.timeline import Moments
from phalanx._src.tools.estimate.step import FirstStep
from phalanx.errors import PhalanxError


class _Enough(BaseException):
    """Ends a script. Not an `Exception`, so that the script does not handle it."""


@final
class MomentRecorder(Observer):
    """Hears of all training steps of this process.

    Args:
      steps: number of calls of the program to wait for.
      path: file in which to write the moments.
    """

    def __init__(self, steps: int, path: Path) -> None:
        self._steps, self._path = steps, path
        self._calls: list[float] = []
        self._waits: list[tuple[float, float]] = []
        self._own: dict[str, list[float]] = {}
        self._ends: dict[str, list[float]] = {}

    @property
    def num_calls(self) -> int:
        """The number of calls so far."""
        return len(self._calls)

    @override
    def after_own_part(self, replica: int, rows: int) -> None:
        """See `Observer`."""
        self._own.setdefault(str(replica), []).append(time.monotonic())

    @override
    def after_replica_step(self, replica: int) -> None:
        """See `Observer`."""
        self._ends.setdefault(str(replica), []).append(time.monotonic())

    @override
    def after_wait(self, began_s: float, ended_s: float) -> None:
        """Notes that the process has waited for a batch."""
        self._waits.append((began_s, ended_s))

    @override
    def before_program(self, call: Call) -> None:
        """Notes that a program is called, and ends the script instead if it has made enough steps."""
        if not call.program.trains:
            return
        # One call later than the last one to measure, which may still run.
        if len(self._calls) == self._steps:
            self._finish(call)
        self._calls.append(time.monotonic())

    def _finish(self, call: Call) -> NoReturn:
        finish: Any = jax.effects_barrier
        finish()  # Callbacks of programs that still run note their moments first.
        strategy: Any = call.program.strategy
        topology = strategy.topology
        each = FirstStep(call, strategy).num_rows
        rows = None if each is None else each * topology.num_replicas
        moments = Moments(
            topology.worker_index,
            topology.num_replicas,
            topology.num_workers,
            rows,
            self._calls,
            self._waits,
            self._own,
            self._ends,
        )
        # The id of the process and not its rank, because processes that train alone are all rank 0.
        path = self._path.with_name(f"{self._path.name}.{os.getpid()}")
        path.write_text(json.dumps(dataclasses.asdict(moments)))
        topology.exchange(jax.numpy.zeros(1))  # All processes end together, so that no one misses another.
        raise _Enough


def main(steps: str, path: str, kind: str, target: str, *arguments: str) -> int:
    """Runs a script until it has made some steps.

    Args:
      steps: number of calls of the training program.
      path: file for the moments. A point and the number of the process are added to its name.
      kind: "module" or "script".
      target: the name of a module, or the path of a script.
      *arguments: the arguments of the script.

    Returns:
      The exit code.
    """
    recorder = MomentRecorder(int(steps), Path(path))
    observers.add(recorder)
    try:
        with settings.changed(wraps_one_replica=True):  # So that the rows of one replica can be told from other arrays.
            run_as_main(kind, target, arguments)
    except _Enough:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)  # Other processes may have ended, so JAX would wait for them in vain.
    except PhalanxError as e:
        print(f"phalanx: {e}", file=sys.stderr)
        return 2
    print(f"phalanx bench: the script ended after {recorder.num_calls} of {steps} steps.", file=sys.stderr)
    return TOO_FEW


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
