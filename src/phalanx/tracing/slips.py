# SPDX-License-Identifier: Apache-2.0
"""Mistakes that a trace shows, and that cannot be refused: each is warned of once per line. Missing one is better than a false alarm."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax.extend import core as jex

from phalanx.errors import warn_of_slip
from phalanx.tracing import markers

_CALLS = (*markers.CALLS, "custom_jvp_call", "custom_vjp_call", "shard_map")


def random_states() -> tuple[Any, ...]:
    """Returns the states from which numpy.random and random draw."""
    name, keys, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  (where calls of users draw from)
    return (name, np.asarray(keys).tobytes(), *rest, random.getstate())


def warn_of_random_numbers(before: tuple[Any, ...]) -> None:
    """Warns if a random number of NumPy or Python was drawn while a function was traced.

    Args:
      before: the states before it was traced.
    """
    if random_states() != before:
        warn_of_slip(
            "A random number of numpy.random or random was drawn while a step was traced: the program uses this one number at "
            "every step, on all replicas.",
            "keras.random.normal(shape, seed=keras.random.SeedGenerator()), or draw it outside and pass it in args",
        )


def warn_of_constant_keys(closed: jex.ClosedJaxpr) -> None:
    """Warns if a program draws random numbers from a key that is a constant: it draws the same ones at every step."""
    jaxpr = closed.jaxpr
    if _has(jaxpr, "random_bits") and _draws_from_constant(jaxpr, [True] * len(jaxpr.invars)):
        warn_of_slip(
            "A step draws random numbers from a key that is a constant of its program: it draws the same numbers at every "
            "step.",
            "keras.random.normal(shape, seed=keras.random.SeedGenerator()); or pass the key in args, or fold the step into it",
        )


def _has(jaxpr: jex.Jaxpr, name: str) -> bool:
    return any(
        eqn.primitive.name == name or any(_has(inner, name) for inner in jex.jaxprs_in_params(eqn.params))
        for eqn in jaxpr.eqns
    )


def _uses_replica_id(jaxpr: jex.Jaxpr) -> bool:
    """Returns whether something is computed from the number of the replica, which every trace has."""
    used = {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, jex.Var)} | set(jaxpr.outvars)
    return any(
        (eqn.primitive.name == "axis_index" and eqn.outvars[0] in used)
        or any(map(_uses_replica_id, jex.jaxprs_in_params(eqn.params)))
        for eqn in jaxpr.eqns
    )


def _draws_from_constant(jaxpr: jex.Jaxpr, varies: Sequence[bool]) -> bool:
    """Returns whether a jaxpr draws from a key that depends on none of the inputs that vary, nor on the replica."""
    varying = {v for v, on in zip(jaxpr.invars, varies, strict=True) if on}
    for eqn in jaxpr.eqns:
        ins = [isinstance(v, jex.Var) and v in varying for v in eqn.invars]
        if eqn.primitive.name == "random_bits" and not ins[0]:
            return True
        inner = list(jex.jaxprs_in_params(eqn.params))
        if eqn.primitive.name in _CALLS and len(inner) == 1 and len(inner[0].invars) == len(ins):
            if _draws_from_constant(inner[0], ins):
                return True
            varying.update(eqn.outvars)
        elif any(ins) or eqn.primitive.name == "axis_index" or inner or not eqn.invars:
            varying.update(eqn.outvars)
    return False


def warn_of_whole_batch(closed: jex.ClosedJaxpr, num_replicas: int, own: Sequence[Any], whole: Sequence[Any]) -> None:
    """Warns if all replicas train on the same rows.

    Args:
      closed: the trace of one replica.
      num_replicas: how many replicas there are.
      own: the arguments of which each replica has its own component.
      whole: the arguments that are the same on all replicas.
    """
    shapes = [x.shape for x in whole if np.ndim(x) > 1]
    if own or not shapes or _uses_replica_id(closed.jaxpr):
        return
    warn_of_slip(
        f"A step trains on an array {list(shapes[0])} that was passed to run as it is: each of the {num_replicas} replicas "
        "computes the same, for all of its rows.",
        "for batch in strategy.experimental_distribute_dataset((x, y), batch_size=64): strategy.run(step, args=(batch,))",
    )


def warn_of_mean(closed: jex.ClosedJaxpr, num_replicas: int, batches: slice) -> None:
    """Warns if a replica differentiates a mean over its own rows, though gradients are summed over the replicas.

    Args:
      closed: the trace of one replica, with the markers of its tapes.
      num_replicas: how many replicas there are.
      batches: which of its inputs are the replica's own rows.
    """
    jaxpr = closed.jaxpr
    if not markers.has_tapes(jaxpr):
        return
    rows = {v.aval.shape[0] for v in jaxpr.invars[batches] if v.aval.shape}
    # What follows from the rows, and how it is made.
    made = dict.fromkeys(jaxpr.invars[batches])
    for eqn in jaxpr.eqns:
        if any(isinstance(v, jex.Var) and v in made for v in eqn.invars):
            made.update(dict.fromkeys(eqn.outvars, eqn))
    for gradient in markers.gradients_of(jaxpr):
        if gradient.cotangents or _is_scaled(jaxpr, gradient.at):
            continue
        for target in gradient.targets:
            count = _rows_of_mean(target, made, num_replicas, rows)
            if count:
                warn_of_slip(
                    f"A loss is a mean over the {count} rows of one replica, and gradients are summed over {num_replicas} replicas: "
                    f"steps are {num_replicas} times as large as on one device.",
                    "loss = phalanx.nn.compute_average_loss(per_example_loss), without the mean over rows",
                )
                return


def _is_scaled(jaxpr: jex.Jaxpr, at: int) -> bool:
    """Returns whether something is done with gradients before an optimizer gets them that may make up for a mean."""
    gradients = set(jaxpr.eqns[at].outvars)
    uses = [e for e in jaxpr.eqns[at + 1 :] if any(isinstance(v, jex.Var) and v in gradients for v in e.invars)]
    scales = [e for e in uses if e.primitive.name in ("mul", "div") and any(map(_constant_of, e.invars))]
    return bool(scales)


def _constant_of(atom: Any) -> float | None:
    """Returns the value of a scalar constant; None for everything else."""
    return float(atom.val) if isinstance(atom, jex.Literal) and np.ndim(atom.val) == 0 else None


def _rows_of_mean(atom: Any, made: dict[Any, Any], num_replicas: int, rows: set[int]) -> int:
    """Returns over how many rows a scalar is a mean, also if it is a sum with something else; 0 if it is none."""
    eqn = made.get(atom) if isinstance(atom, jex.Var) else None
    if eqn is None:
        return 0
    follow: Callable[[Any], int] = lambda x: _rows_of_mean(x, made, num_replicas, rows)  # noqa: E731
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
    total, divisor = made.get(eqn.invars[0]), _constant_of(eqn.invars[1])
    if divisor == 1:
        return follow(eqn.invars[0])
    if total is None or total.primitive.name != "reduce_sum" or 0 not in total.params["axes"]:
        return 0
    shape = total.invars[0].aval.shape
    count = math.prod(shape[axis] for axis in total.params["axes"])
    # A divisor that may be the size of the global batch is right.
    is_mean = divisor == count and shape[0] in rows and divisor not in {n * num_replicas for n in rows}
    return int(shape[0]) if is_mean else 0
