# SPDX-License-Identifier: Apache-2.0
"""Warnings about probable mistakes that a trace reveals. Each is issued once per line of the user's code.

A false alarm is worse than a missed mistake, so each check stays silent in cases of doubt.
"""

import math
import random
from collections.abc import Callable
from typing import Any

import numpy as np
from jax.extend import core as jex

from phalanx._src.tracing import markers
from phalanx.errors import warn_of_slip


def random_states() -> tuple[Any, ...]:
    """Returns the states of the global generators of `numpy.random` and `random`."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  (the generator that users' calls draw from)
    return (name, np.asarray(keys).tobytes(), *rest, random.getstate())


def warn_of_random_numbers(before: tuple[Any, ...]) -> None:
    """Warns if a function drew a random number from NumPy or Python while it was traced.

    Args:
      before: the states of the generators before the function was traced.
    """
    if random_states() != before:
        warn_of_slip(
            "A random number of numpy.random or random was drawn while a step was traced. It is a constant of the program, so "
            "every step uses this number on all replicas.",
            "keras.random.normal(shape, seed=keras.random.SeedGenerator()), or draw it outside the step and pass it in args",
        )


def warn_of_mean(closed: jex.ClosedJaxpr, num_replicas: int, batches: slice) -> None:
    """Warns if a replica differentiates a mean over its own rows, because gradients are summed over the replicas.

    Args:
      closed: the trace of one replica, with the markers of its tapes.
      num_replicas: number of replicas.
      batches: the inputs of the trace that hold the replica's rows.
    """
    jaxpr = closed.jaxpr
    if not markers.has_tapes(jaxpr):
        return
    rows = {v.aval.shape[0] for v in jaxpr.invars[batches] if v.aval.shape}
    # Every variable that depends on the rows, and the equation that defines it. The inputs themselves have None.
    definitions = dict.fromkeys(jaxpr.invars[batches])
    for eqn in jaxpr.eqns:
        if any(isinstance(v, jex.Var) and v in definitions for v in eqn.invars):
            definitions.update(dict.fromkeys(eqn.outvars, eqn))
    for gradient in markers.gradients_of(jaxpr):
        if gradient.cotangents or _is_scaled(jaxpr, gradient.at):
            continue
        for target in gradient.targets:
            count = _rows_of_mean(target, definitions, num_replicas, rows)
            if count:
                warn_of_slip(
                    f"A loss is a mean over the {count} rows of one replica, but gradients are summed over {num_replicas} replicas, so "
                    f"steps are {num_replicas} times as large as on one device.",
                    "loss = phalanx.nn.compute_average_loss(per_example_loss), without the mean over rows",
                )
                return


def _is_scaled(jaxpr: jex.Jaxpr, at: int) -> bool:
    """Returns whether the gradients of the marker at `at` are multiplied or divided by a constant, which may correct a mean."""
    gradients = set(jaxpr.eqns[at].outvars)
    uses = [e for e in jaxpr.eqns[at + 1 :] if any(isinstance(v, jex.Var) and v in gradients for v in e.invars)]
    scales = [e for e in uses if e.primitive.name in ("mul", "div") and any(map(_constant_of, e.invars))]
    return bool(scales)


def _constant_of(atom: Any) -> float | None:
    """Returns the value of a scalar constant, or None if `atom` is not one."""
    return float(atom.val) if isinstance(atom, jex.Literal) and np.ndim(atom.val) == 0 else None


def _rows_of_mean(atom: Any, definitions: dict[Any, Any], num_replicas: int, rows: set[int]) -> int:
    """Returns the number of rows over which a scalar, or a term of it, is a mean. 0 if it is not a mean over rows.

    Args:
      atom: the scalar.
      definitions: per variable that depends on the rows, the equation that defines it.
      num_replicas: number of replicas.
      rows: numbers of rows of the batches.
    """
    eqn = definitions.get(atom) if isinstance(atom, jex.Var) else None
    if eqn is None:
        return 0
    follow: Callable[[Any], int] = lambda x: _rows_of_mean(x, definitions, num_replicas, rows)  # noqa: E731
    name = eqn.primitive.name
    if name in ("add", "add_any", "sub"):
        return follow(eqn.invars[0]) or follow(eqn.invars[1])
    if name in ("neg", "convert_element_type", "copy", "reshape", "squeeze") or eqn.primitive is markers.enter_p:
        return follow(eqn.invars[list(eqn.outvars).index(atom)])
    if name == "mul":
        factors = [_constant_of(x) for x in eqn.invars]
        return follow(eqn.invars[1 - factors.index(1.0)]) if 1.0 in factors else 0
    if name != "div" or _constant_of(eqn.invars[1]) is None or not isinstance(eqn.invars[0], jex.Var):
        return 0
    # `mean` is traced as `reduce_sum` and a division by a constant.
    total, divisor = definitions.get(eqn.invars[0]), _constant_of(eqn.invars[1])
    if divisor == 1:
        return follow(eqn.invars[0])
    if total is None or total.primitive.name != "reduce_sum" or 0 not in total.params["axes"]:
        return 0
    shape = total.invars[0].aval.shape
    count = math.prod(shape[axis] for axis in total.params["axes"])
    # A divisor that equals the global batch size of one of the batches is correct.
    is_mean = divisor == count and shape[0] in rows and divisor not in {n * num_replicas for n in rows}
    return int(shape[0]) if is_mean else 0
