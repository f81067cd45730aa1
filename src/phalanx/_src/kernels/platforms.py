# SPDX-License-Identifier: Apache-2.0
"""The platforms for which a program is traced, if those are other ones than the platform of the strategy's devices."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

import jax

_platforms: ContextVar[tuple[str, ...] | None] = ContextVar("platforms", default=None)


@contextmanager
def compiled_for(platforms: Sequence[str]) -> Iterator[None]:
    """Traces inside the `with` block for the devices of other processes, for example `("cpu",)`."""
    token = _platforms.set(tuple(platforms))
    try:
        yield
    finally:
        _platforms.reset(token)


def are_cpus(devices: Sequence[jax.Device]) -> bool:
    """Returns whether the program that is being traced is for CPUs only.

    Args:
      devices: the strategy's devices. They count unless the program is for other processes.
    """
    # Empty for a strategy without devices outside `compiled_for`: its program may be for any platform.
    platforms = _platforms.get() or {device.platform for device in devices}
    return bool(platforms) and all(platform == "cpu" for platform in platforms)
