# SPDX-License-Identifier: Apache-2.0
"""Records the text of compiled programs, and profiles of their runs."""

import os
import shutil
import tempfile
from dataclasses import dataclass

import jax
from typing_extensions import override

from phalanx._src import compat
from phalanx._src.programs.program import Call
from phalanx._src.runtime.bootstrap import is_this_chief
from phalanx._src.runtime.observers import Observer, observers
from phalanx._src.typed_jax import stop_profile
from phalanx.errors import ContextError, InvalidArgumentError, arguments, shown
from phalanx.summary.ops import Recorded, text
from phalanx.summary.steps import Step


class CalledPrograms(Observer):
    """Collects the text of each program that is called, once."""

    def __init__(self) -> None:
        self._of_program: dict[object, tuple[str, str]] = {}
        observers.add(self)

    def stop(self) -> None:
        """Stops collecting."""
        observers.remove(self)

    def as_markdown(self) -> str:
        """Returns the name and the text of each program."""
        return "\n\n".join(f"### {name}\n\n{_fenced(program)}" for name, program in self._of_program.values())

    @override
    def before_program(self, call: Call) -> None:
        # Once per program: later calls run the same text.
        if call.program not in self._of_program:
            self._of_program[call.program] = call.name, call.trace().lower().as_text()


@dataclass
class _Trace:
    """What is being traced.

    Attributes:
      programs: the called programs. None if they are not collected.
      profile: folder of the profiler until the trace is exported. None if profiling is off.
      out_dir: folder of the exported profile. None if `trace_export` names it.
    """

    programs: CalledPrograms | None
    profile: tempfile.TemporaryDirectory[str] | None
    out_dir: str | None


_traces: list[_Trace] = []
"""The trace that is on, if any."""


def graph(graph_data: object, name: str = "graph") -> Recorded:
    """Records the text of a program, as StableHLO. Call it outside compiled functions.

    TensorBoard shows it among the texts, with step 0.

    Args:
      graph_data: what `lower` of a `phalanx.function` or of `jax.jit` returns, another object with a method `as_text`, or a str.
      name: the tag in TensorBoard.

    Returns:
      Whether the text is recorded.

    Raises:
      ContextError: called in a function that is being traced.
      InvalidArgumentError: `graph_data` has no text, or `name` is not a str.

    Source: tf.summary.graph.

    Example:
      >>> import phalanx
      >>> step = phalanx.function(lambda x: x * 2)
      >>> with phalanx.summary.create_file_writer("out/logs").as_default():
      ...     phalanx.summary.graph(step.lower(1.0))
      True
    """
    _require_eager("graph")
    program = graph_data if isinstance(graph_data, str) else _text_of(graph_data)
    # A program has no step, and TensorBoard wants one.
    return text(name, _fenced(program), step=0)


def trace_on(graph: bool = True, profiler: bool = False, profiler_outdir: str | os.PathLike[str] | None = None) -> None:
    """Starts to collect called programs, and to profile. Call it outside compiled functions.

    `trace_export` stops and writes, and `trace_off` stops. A program is collected at its first call after `trace_on`, on any
    thread: compiled functions, `Strategy.run` and the steps of `fit`. In a cluster, all processes call it.

    Args:
      graph: whether to collect programs.
      profiler: whether to profile with `jax.profiler`.
      profiler_outdir: folder for the profile. None if `trace_export` names it.

    Raises:
      ContextError: called in a function that is being traced, or a trace or another profile is on.
      InvalidArgumentError: an argument has the wrong type.

    Source: tf.summary.trace_on.

    Example:
      >>> import phalanx
      >>> step = phalanx.function(lambda x: x * 2)
      >>> phalanx.summary.trace_on()
      >>> _ = step(1.0)
      >>> with phalanx.summary.create_file_writer("out/logs").as_default():
      ...     phalanx.summary.trace_export("step", step=0)
    """
    _require_eager("trace_on")
    arguments.flag("graph", graph)
    arguments.flag("profiler", profiler)
    out_dir = None if profiler_outdir is None else arguments.local_path("profiler_outdir", profiler_outdir)
    if _traces:
        raise ContextError("summary.trace_on", "a trace is on.", "trace_export(name, step) or trace_off() before")
    folder = _profiling() if profiler else None
    _traces.append(_Trace(CalledPrograms() if graph else None, folder, out_dir))


def trace_export(name: str, step: Step = None, profiler_outdir: str | os.PathLike[str] | None = None) -> None:
    """Stops the trace and writes the programs and the profile. Call it outside compiled functions.

    The default writer gets the programs as a text. The profile is written to the folder, where TensorBoard's profile plugin
    finds it. Only the chief of a cluster writes.

    Args:
      name: the tag of the programs in TensorBoard.
      step: integer. None for the default step.
      profiler_outdir: folder for the profile. None for the one of `trace_on`.

    Raises:
      ContextError: called in a function that is being traced, or no trace is on.
      InvalidArgumentError: there is no step, no folder for a profile, or an argument has the wrong type. The trace stays on.

    Source: tf.summary.trace_export.

    Example:
      >>> import phalanx
      >>> phalanx.summary.trace_on(graph=False, profiler=True)
      >>> _ = phalanx.function(lambda x: x * 2)(1.0)
      >>> phalanx.summary.trace_export("profile", profiler_outdir="out/logs")
    """
    _require_eager("trace_export")
    if not _traces:
        raise ContextError("summary.trace_export", "no trace is on.", "trace_on() before the step")
    (trace,) = _traces
    out_dir = trace.out_dir if profiler_outdir is None else arguments.local_path("profiler_outdir", profiler_outdir)
    if trace.profile is not None and out_dir is None:
        raise InvalidArgumentError(
            "profiler_outdir=None", "the trace has a profile, which needs a folder.", 'profiler_outdir="logs"'
        )
    if trace.programs is not None:
        text(name, trace.programs.as_markdown(), step=step)
    _stop(trace, out_dir)


def trace_off() -> None:
    """Stops the trace without writing anything. May be called in any context.

    Source: tf.summary.trace_off.

    Example:
      >>> import phalanx
      >>> phalanx.summary.trace_on()
      >>> phalanx.summary.trace_off()
    """
    # A copy, because `_stop` removes from the list.
    for trace in _traces[:]:
        _stop(trace, None)


def _stop(trace: _Trace, out_dir: str | None) -> None:
    _traces.remove(trace)
    if trace.programs is not None:
        trace.programs.stop()
    if trace.profile is not None:
        with trace.profile as folder:
            stop_profile()
            if out_dir is not None and is_this_chief():
                # The profiler is started before the folder may be known (`trace_export`
                # can name it), so it writes elsewhere first.
                shutil.copytree(folder, out_dir, dirs_exist_ok=True)


def _profiling() -> tempfile.TemporaryDirectory[str]:
    """Starts the profiler. Returns the folder into which it writes."""
    folder = tempfile.TemporaryDirectory(prefix="phalanx-profile-")
    try:
        jax.profiler.start_trace(folder.name)
    except RuntimeError as e:
        folder.cleanup()
        raise ContextError(
            "summary.trace_on(profiler=True)", f"JAX cannot profile: {e}", "jax.profiler.stop_trace() before"
        ) from e
    return folder


def _require_eager(name: str) -> None:
    if compat.is_lifting():
        raise ContextError(
            f"summary.{name} in a function that is being traced",
            "it would act when the function is traced, not when it runs.",
            f"summary.{name}(...) outside the function",
        )


def _text_of(program: object) -> str:
    as_text = getattr(program, "as_text", None)
    hlo = as_text() if callable(as_text) and not isinstance(program, type) else None
    if not isinstance(hlo, str):
        raise InvalidArgumentError(
            f"summary.graph({shown(program)})",
            "must be a program that is lowered or compiled, or its text.",
            "phalanx.function(step).lower(batch)",
        )
    return hlo


def _fenced(program: str) -> str:
    return f"```\n{program}\n```"
