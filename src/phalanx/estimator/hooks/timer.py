# SPDX-License-Identifier: Apache-2.0
"""Timers of hooks: every N steps, or every N seconds."""

import numbers
import time
from collections.abc import Callable
from typing import final

import jax

from phalanx._src.input.wire import exchange_bytes
from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.estimator.loop.graph import require_graph

_AGREE_EVERY = 10
"""Number of steps between two times at which several processes look at the clock of the chief."""


@final
class SecondOrStepTimer:
    """Decides when a hook acts: every `every_steps` steps or every `every_secs` seconds, and at the first step.

    With several processes, all decide the same: every ten steps they agree on the clock of the chief.

    Args:
      every_secs: time in seconds, or None.
      every_steps: number of steps, or None.

    Raises:
      InvalidArgumentError: none or both are given, or one is not positive.

    Source: tf.compat.v1.train.SecondOrStepTimer.
    """

    def __init__(self, every_secs: float | None = None, every_steps: int | None = None) -> None:
        # As in basic_session_run_hooks.py: with both, two clocks would decide,
        # and processes could not agree on one of them.
        if (every_secs is None) == (every_steps is None):
            raise InvalidArgumentError(
                f"every_secs={shown(every_secs)} and every_steps={shown(every_steps)}",
                "exactly one of them must be given.",
                "every_steps=100",
            )
        if every_steps is not None:
            arguments.integer("every_steps", every_steps)
        elif not (isinstance(every_secs, numbers.Real) and every_secs == 0):  # 0 is every step.
            arguments.seconds("every_secs", every_secs)
        self._every_secs, self._every_steps = every_secs, every_steps
        self.reset()

    def reset(self) -> None:
        """Forgets the last step."""
        self._last_step: int | None = None
        self._last_s = 0.0

    def should_trigger_for_step(self, step: int) -> bool:
        """Returns whether to act at this step."""
        if self._last_step is None:
            return True
        if step == self._last_step:
            return False
        if self._every_steps is not None:
            # `>=` and not `==`: a step of asynchronous workers may advance the count by more than one.
            return step >= self._last_step + self._every_steps
        assert self._every_secs is not None
        # Clocks of two machines differ. If each asked its own, one process would
        # save a checkpoint while another trains on.
        return agreed(time.monotonic() >= self._last_s + self._every_secs, step)

    def update_last_triggered_step(self, step: int) -> tuple[float | None, int | None]:
        """Marks this step as the last one. Returns the seconds and the steps since the last time, or two Nones."""
        now, before_s, before = time.monotonic(), self._last_s, self._last_step
        self._last_s, self._last_step = now, step
        return (None, None) if before is None else (now - before_s, step - before)

    def last_triggered_step(self) -> int | None:
        """Returns the last step that was marked, or None."""
        return self._last_step


def agreed(decision: bool, step: int) -> bool:
    """Returns the decision of the chief, at every tenth step; else False. With one process, returns the decision."""
    if _num_workers() == 1:
        return decision
    return step % _AGREE_EVERY == 0 and agreed_by_chief(lambda: decision)


def agreed_by_chief(decide: Callable[[], bool]) -> bool:
    """Returns the result of a function on the chief. With several processes, all must call it at the same step."""
    topology = require_graph("a hook").strategy.topology
    if _num_workers() == 1:
        return bool(decide())
    decision = b"1" if topology.worker_index == 0 and decide() else b"0"
    # Entry 0 is the chief. The others send a byte only because all processes must take part in an exchange.
    return exchange_bytes(decision, topology.exchange)[0] == b"1"


def _num_workers() -> int:
    # Parameter servers train in one JAX process, although their strategy has
    # several workers: the chief alone runs hooks.
    return 1 if jax.process_count() == 1 else require_graph("a hook").strategy.topology.num_workers
