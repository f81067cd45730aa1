# SPDX-License-Identifier: Apache-2.0
"""Runs the processes of a plan, ends all of them when one fails, and starts them again."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from phalanx._src.launch.elastic.group import ElasticGroup
from phalanx._src.launch.evaluator import EvaluatorProcess, Patience
from phalanx._src.launch.group import Group, Start
from phalanx._src.launch.kept import KeptProcesses
from phalanx._src.launch.outcome import Outcome, in_words, report
from phalanx._src.launch.output import Sink
from phalanx._src.launch.plan import ALONE, Machines, ProcessSpec
from phalanx._src.launch.processes import WorkerProcess
from phalanx._src.launch.relay import Relay
from phalanx._src.launch.signals import Signals
from phalanx.errors import StartupError

_WORD_S = 2.0
_IN_PLACE_OF_THE_LOST = Patience(first_pause_s=2.0)
"""When others start in an elastic group. Not sooner, because they use the cores on which the group compiles its next step."""


def run_group(
    plan: Callable[[int], Sequence[ProcessSpec]],
    *,
    max_restarts: int = 0,
    least_workers: int | None = None,
    machines: Machines = ALONE,
    start: Start = WorkerProcess,
    grace_s: float = 5.0,
    word_s: float = _WORD_S,
    patience: Patience | None = None,
    sink: Sink | None = None,
    say: Callable[[str], None] = print,
) -> Outcome:
    """Runs a group of processes to its end, and restarts it if one of them fails.

    An evaluator in the plan is not part of the group: it restarts alone, and continues while the group restarts. If the group is
    one process, its parameter servers outlive it until the last start has ended.

    Args:
      plan: function from the number of earlier starts to the processes to start.
      max_restarts: how often to restart the group.
      least_workers: number of processes without which the group cannot continue. None if it ends with the first that fails.
      machines: the machines on which the group has processes, if it may lose some.
      start: starts a process that trains.
      grace_s: time that processes have to end after SIGTERM, in seconds.
      word_s: time that the others have before SIGTERM to report which process they miss, in seconds. At most `grace_s`.
      patience: the limits of the evaluator. None means `Patience()`.
      sink: receives the output of the processes. None means the standard output.
      say: receives the reports.

    Returns:
      The outcome of the last run.

    Raises:
      StartupError: a process that trains cannot be started.
      OutputError: the output of the processes cannot be written.
    """
    with Signals() as signals:
        relay = Relay(signals, sink or Sink(1))
        with EvaluatorProcess(relay, grace_s, patience or Patience(), say) as evaluator:
            with KeptProcesses(is_wanted=max_restarts > 0 and least_workers is None) as kept:
                for restart in range(max_restarts + 1):
                    is_last = restart == max_restarts
                    specs = kept.announce_to(evaluator.split_off(plan(restart)))
                    try:
                        if least_workers is None:
                            group = Group(specs, relay, evaluator.tend, start)
                        else:
                            group = ElasticGroup(
                                specs,
                                least_workers,
                                relay,
                                patience=_IN_PLACE_OF_THE_LOST,
                                say=say,
                                machines=machines,
                                beside=evaluator.tend,
                                start=start,
                            )
                        outcome = _run_once(group, relay, grace_s, word_s)
                        if isinstance(group, ElasticGroup):
                            # The machine that has taken the place of a lost one keeps it when the group starts again.
                            machines = replace(machines, leader=group.leader)
                            # A new start would begin a second training while the others continue theirs.
                            is_last = is_last or group.is_cut_off
                    except StartupError as error:
                        number = relay.ending_signal()
                        if number is None and (not restart or least_workers is None):
                            raise
                        # The first machine answered before. A scheduler may have another one.
                        outcome = Outcome(
                            (), number, unfinished="" if number else f"{error.asked}: {error.found}".rstrip(".")
                        )
                        is_last = True
                    if text := report(outcome):
                        say(text)
                    if not outcome.exit_code or outcome.signal is not None or is_last:
                        break
                    say(f"The group starts again: {restart + 1} of {max_restarts}.")
            evaluator.finish(is_success=outcome.exit_code == 0)
            # Once more: a signal may have arrived while the evaluator had time to finish.
            outcome = replace(outcome, signal=relay.ending_signal(), evaluator=evaluator.ending)
    if outcome.is_success and (failed := outcome.failed_evaluator):
        say(f"The workers have succeeded, but {failed.name} {in_words(failed.code)}.")
    return outcome


def _run_once(group: Group, relay: Relay, grace_s: float, word_s: float) -> Outcome:
    """Runs a group of processes once, until all of them have ended.

    Args:
      group: the processes.
      relay: forwards their output.
      grace_s: time that processes have to end after SIGTERM, in seconds.
      word_s: see `run_group`.

    Returns:
      The outcome of the group.

    Raises:
      StartupError: a process cannot be started. The others have been ended.
      OutputError: the output of the processes cannot be written.
    """
    try:
        group.start()
        group.run()
    finally:
        # If a process has failed, the others first get time to report which one they miss.
        group.end(grace_s, min(word_s, grace_s))
    return Outcome(group.endings(), relay.ending_signal(), unfinished=group.unfinished)
