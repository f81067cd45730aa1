# SPDX-License-Identifier: Apache-2.0
"""Child processes, each with its own number of devices; a call has a deadline, and a late child is killed."""

import json
import os
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any, Self

from benchmarks import devices as devices_of

ROOT = Path(__file__).resolve().parent.parent
_OF_THE_PARENT = ("NPROC", "PHALANX_CPU_DEVICES", "KERAS_BACKEND", "XLA_FLAGS", "PYTHONPATH")
_LOG_CHARACTERS = 20_000


class ChildError(RuntimeError):
    """A child died or was late; the message ends with the end of its log."""


class Child:
    """A process that calls functions of this package.

    Args:
      devices: number of devices that JAX has there; None if the process does not use JAX.
      python: the interpreter.
      environment: further environment variables.
    """

    def __init__(
        self, devices: int | None = None, python: str = sys.executable, environment: dict[str, str] | None = None
    ) -> None:
        own = {k: v for k, v in os.environ.items() if k not in _OF_THE_PARENT} | (environment or {})
        if devices is not None:
            # Phalanx need not be installed.
            own |= devices_of.environment(devices) | {"PYTHONPATH": str(ROOT / "src")}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115
        command = [python, "-m", "benchmarks.child"]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, cwd=ROOT, env=own, stdin=pipe, stdout=pipe, stderr=self._log, text=True, bufsize=1
        )

    def call(self, function: str, deadline_s: float, **kwargs: Any) -> Any:
        """Calls `function`, written `module:name`, there.

        Raises:
          ChildError: it failed, or took longer than `deadline_s`.
        """
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        killer = threading.Timer(deadline_s, self._process.kill)
        killer.start()
        try:
            self._process.stdin.write(json.dumps({"function": function, "kwargs": kwargs}) + "\n")
            reply = self._process.stdout.readline()
        except BrokenPipeError:
            reply = ""
        finally:
            killer.cancel()
        if not reply:
            raise ChildError(f"{function}({kwargs}) gave no result in {deadline_s} s:\n{self._end_of_log()}")
        return json.loads(reply)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._log.close()

    def _end_of_log(self) -> str:
        self._process.kill()
        self._process.wait()
        self._log.seek(0)
        return self._log.read()[-_LOG_CHARACTERS:]


def call_in_child(function: str, deadline_s: float, *, devices: int, **kwargs: Any) -> Any:
    """Calls `function` in a process of its own."""
    with Child(devices) as child:
        return child.call(function, deadline_s, **kwargs)
