# SPDX-License-Identifier: Apache-2.0
"""`get_strategy`, with `Strategy` as the type of its result."""

from phalanx._src.strategies.base import Strategy
from phalanx._src.tracing import context


def get_strategy() -> Strategy:
    """Returns the current strategy, or the default strategy outside all scopes. May be called in any context.

    Example:
      >>> import phalanx
      >>> phalanx.get_strategy().num_replicas_in_sync
      1
    """
    strategy = context.get_strategy()
    assert isinstance(strategy, Strategy)
    return strategy
