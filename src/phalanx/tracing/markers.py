# SPDX-License-Identifier: Apache-2.0
"""Gradient tapes as markers in one jaxpr, and the walk that differentiates between them.

A tape leaves equations of four primitives in the trace of a function: `enter` (identity over variables it watches),
`watch` (a tensor), `leave`, and `gradient`. `evaluate` runs such a jaxpr: what a tape recorded is evaluated once under
`jax.linearize`, as a function of perturbations of its sources, and each `gradient` transposes its part of that linear map.
Tapes that record the same equations share one linearization; a tape inside another is walked inside it, which gives
higher orders. The flops are those of a hand-written `jax.grad`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from phalanx.typing import PyTree

Jaxpr = jex.Jaxpr
Env = dict[Any, Any]
Key = tuple[int, Any]


def _primitive(name: str, abstract: Callable[..., Any]) -> jex.Primitive:
    primitive = jex.Primitive(f"phalanx_tape_{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    return primitive


enter_p = _primitive("enter", lambda *values, tape: list(values))
leave_p = _primitive("leave", lambda *, tape: [])
watch_p = _primitive("watch", lambda value, *, tape: [])
gradient_p = _primitive("gradient", lambda *values, tape, counts: list(values[sum(counts) :]))


_first_value_p = _primitive("first_value", lambda *, aval: [aval])
_MARKERS = (enter_p, leave_p, watch_p, gradient_p)


def gradient(tape: int, targets: Sequence[Any], cotangents: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """Marks where the gradient of `targets` with respect to `sources` is wanted; `cotangents` is empty or one a target."""
    return gradient_p.bind(*targets, *cotangents, *sources, tape=tape, counts=(len(targets), len(cotangents)))


def first_value(aval: Any) -> jax.Array:
    """Stands for the first value of a variable, or for an array that a call fetches, while the function is traced."""
    return _first_value_p.bind(aval=aval)[0]


def with_first_values(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Returns a jaxpr whose first inputs are the first values that stand in `closed`, in order."""
    jaxpr = closed.jaxpr
    values = [eqn.outvars[0] for eqn in jaxpr.eqns if eqn.primitive is _first_value_p]
    inner = jaxpr.replace(
        invars=[*values, *jaxpr.invars],
        eqns=[eqn for eqn in jaxpr.eqns if eqn.primitive is not _first_value_p],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return jex.ClosedJaxpr(inner, closed.consts)


@dataclass(frozen=True)
class _Gradient:
    """One gradient marker.

    Args:
      at: the equation it is.
      tape: the number of its tape.
      targets: those of its targets that were computed before its tape was left.
      cotangents: for each, the place of its cotangent among the equation's inputs; empty for ones.
      sources: its sources.
      start: the first equation that its tape recorded.
      end: the equation behind the last one.
    """

    at: int
    tape: int
    targets: tuple[Any, ...]
    cotangents: tuple[int, ...]
    sources: tuple[Any, ...]
    start: int
    end: int

    @property
    def keys(self) -> list[Key]:
        return [(self.tape, source) for source in self.sources]


def has_tapes(jaxpr: Jaxpr) -> bool:
    """Returns whether a tape was entered while `jaxpr` was traced."""
    return any(eqn.primitive is enter_p for eqn in jaxpr.eqns)


def gradients_of(jaxpr: Jaxpr) -> list[_Gradient]:
    """Returns the gradient markers of `jaxpr`, in order."""
    starts: dict[Any, int] = {}
    ends: dict[Any, int] = {}
    found = []
    for at, eqn in enumerate(jaxpr.eqns):
        tape: Any = eqn.params.get("tape")
        if eqn.primitive is enter_p:
            starts.setdefault(tape, at)
        elif eqn.primitive is leave_p:
            ends[tape] = at
        elif eqn.primitive is gradient_p:
            t, c = eqn.params["counts"]
            end = min(ends.get(tape, at), at)
            late = {o for e in jaxpr.eqns[end:at] for o in e.outvars}
            kept = [i for i, v in enumerate(eqn.invars[:t]) if isinstance(v, jex.Var) and v not in late]
            targets, places = tuple(eqn.invars[i] for i in kept), tuple(t + i for i in kept if c)
            found.append(_Gradient(at, tape, targets, places, tuple(eqn.invars[t + c :]), starts[tape], end))
    return found


def connected(jaxpr: Jaxpr) -> list[tuple[bool, ...]]:
    """Returns, for each gradient marker, which of its sources reach one of its targets through what its tape recorded."""
    result = []
    for g in gradients_of(jaxpr):
        needed = _needed(jaxpr, {t for t in g.targets if isinstance(t, jex.Var)}, g.start, g.end)
        result.append(tuple(source in needed for source in g.sources))
    return result


CALLS = (
    "jit",
    "pjit",
    "closed_call",
    "core_call",
    "checkpoint",
    "remat2",
    "remat",
)
"""Primitives whose one inner jaxpr takes their inputs, one by one."""


def _needed(jaxpr: Jaxpr, wanted: set[Any], start: int, end: int) -> set[Any]:
    """Returns all variables on which `wanted` depend differentiably through the equations [start, end)."""
    needed = set(wanted)
    for eqn in reversed(jaxpr.eqns[start:end]):
        outs = [o in needed for o in eqn.outvars]
        if not any(outs) or eqn.primitive.name == "stop_gradient":
            continue
        needed.update(v for v, on in zip(eqn.invars, _inputs(eqn, outs), strict=True) if on and _is_floating(v))
    return needed


def _inputs(eqn: Any, outs: list[bool]) -> list[bool]:
    """Returns which inputs of one equation its outputs `outs` depend on."""
    if eqn.primitive is enter_p:
        return outs
    body = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    if eqn.primitive.name not in CALLS or body is None:
        return [True] * len(eqn.invars)
    inner = body.jaxpr if isinstance(body, jex.ClosedJaxpr) else body
    wanted = {o for o, on in zip(inner.outvars, outs, strict=True) if on and isinstance(o, jex.Var)}
    needed = _needed(inner, wanted, 0, len(inner.eqns))
    return [v in needed for v in inner.invars]


def _is_floating(atom: Any) -> bool:
    return isinstance(atom, jex.Var) and jnp.issubdtype(_aval(atom).dtype, jnp.inexact)


@jax.custom_jvp
def _perturb(value: jax.Array, delta: jax.Array) -> jax.Array:
    """Is `value`, and has the tangent of `value + delta`, at no cost where nothing is differentiated."""
    return value


@_perturb.defjvp
def _perturb_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[0], tangents[0] + tangents[1]


def evaluate(closed: jex.ClosedJaxpr, *args: jax.Array) -> list[Any]:
    """Runs a jaxpr with tape markers; every primitive but the markers runs as it is."""
    return _MarkerWalk(closed.jaxpr).outputs(closed.consts, args)


def gradient_values(closed: jex.ClosedJaxpr, *args: jax.Array) -> list[list[Any]]:
    """Runs a jaxpr with tape markers and returns what each gradient marker gives."""
    walk = _MarkerWalk(closed.jaxpr)
    walk.outputs(closed.consts, args)
    return walk.gradients


class _MarkerWalk:
    """One evaluation of one jaxpr."""

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._jaxpr = jaxpr
        self._gradients = gradients_of(jaxpr)
        self.gradients: list[list[Any]] = []
        self._pullbacks: dict[int, Callable[[list[Any]], list[Any]]] = {}
        self._injections: list[dict[Key, Any]] = []
        self._last_use: dict[jex.Var, int] = {}
        for at, eqn in enumerate(jaxpr.eqns):
            self._last_use.update((v, at) for v in eqn.invars if isinstance(v, jex.Var))
        self._last_use.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if isinstance(v, jex.Var))

    def outputs(self, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        env: Env = dict(zip(self._jaxpr.constvars, consts, strict=True))
        env.update(zip(self._jaxpr.invars, args, strict=True))
        self._run(0, len(self._jaxpr.eqns), env, self._gradients)
        return [_read(env, v) for v in self._jaxpr.outvars]

    def _run(self, start: int, stop: int, env: Env, gradients: list[_Gradient]) -> None:
        """Evaluates the equations [start, stop), in which exactly `gradients` are wanted."""
        at = start
        for begin, end, members in _regions(gradients):
            self._run_plain(at, begin, env)
            self._run_region(begin, end, env, members)
            at = end
        self._run_plain(at, stop, env)

    def _run_plain(self, start: int, stop: int, env: Env) -> None:
        """Evaluates equations and markers in which no region begins."""
        begin = start
        for at in range(start, stop):
            if self._jaxpr.eqns[at].primitive in _MARKERS:
                self._run_equations(begin, at, env)
                self._run_marker(at, env)
                begin = at + 1
        self._run_equations(begin, stop, env)

    def _run_equations(self, start: int, stop: int, env: Env) -> None:
        eqns = self._jaxpr.eqns[start:stop]
        if not eqns:
            return
        defined = dict.fromkeys(o for eqn in eqns for o in eqn.outvars)
        used = dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, jex.Var) and v not in defined)
        alive = [o for o in defined if self._last_use.get(o, -1) >= stop]
        stretch = self._jaxpr.replace(
            constvars=(),
            invars=list(used),
            outvars=alive,
            eqns=eqns,
            debug_info=self._jaxpr.debug_info.with_unknown_names(),
        )
        env.update(zip(alive, jax.core.eval_jaxpr(stretch, (), *(env[v] for v in used)), strict=True))

    def _run_marker(self, at: int, env: Env) -> None:
        eqn = self._jaxpr.eqns[at]
        values = [_read(env, v) for v in eqn.invars]
        if eqn.primitive is enter_p:
            values = [self._injected((eqn.params["tape"], out), v) for out, v in zip(eqn.outvars, values, strict=True)]
        elif eqn.primitive is watch_p:
            env[eqn.invars[0]] = self._injected((eqn.params["tape"], eqn.invars[0]), values[0])
            return
        elif eqn.primitive is gradient_p:
            values = self._pullbacks[at](values)
            self.gradients.append(values)
        env.update(zip(eqn.outvars, values, strict=True))

    def _injected(self, key: Key, value: jax.Array) -> jax.Array:
        for injection in self._injections:
            if key in injection:
                value = _perturb(value, injection[key])
        return value

    def _run_region(self, start: int, end: int, env: Env, members: list[_Gradient]) -> None:
        """Linearizes the equations [start, end) once for all gradients wanted after them."""
        inner = [g for g in members if g.at < end]
        outer = [g for g in members if g.at >= end]
        keys = list(dict.fromkeys(k for g in outer for k in g.keys))
        targets = list(dict.fromkeys(t for g in outer for t in g.targets))
        defined = [o for eqn in self._jaxpr.eqns[start:end] for o in eqn.outvars]
        alive = [o for o in defined if self._last_use.get(o, -1) >= end]

        def forward(deltas: list[Any]) -> tuple[list[Any], list[Any]]:
            local = dict(env)
            self._injections.append(dict(zip(keys, deltas, strict=True)))
            self._run(start, end, local, inner)
            self._injections.pop()
            return [_read(local, t) for t in targets], [local[o] for o in alive]

        deltas = [jnp.zeros(_aval(source).shape, _aval(source).dtype) for _, source in keys]
        primals, linear, aux = jax.linearize(forward, deltas, has_aux=True)
        env.update(zip(alive, aux, strict=True))
        region = _Linearized(linear, primals, deltas, targets, keys)
        self._pullbacks.update((g.at, functools.partial(region.pull, g)) for g in outer)


@dataclass(frozen=True)
class _Linearized:
    """What some tapes recorded, as a linear map from perturbations of their sources to their targets."""

    linear: Callable[[list[Any]], list[Any]]
    primals: list[Any]
    deltas: list[Any]
    targets: list[Any]
    keys: list[Key]

    def pull(self, gradient: _Gradient, values: list[Any]) -> list[Any]:
        """Transposes the part that one gradient marker asks for; `values` are the marker's inputs."""
        outs = [self.targets.index(t) for t in gradient.targets]
        ins = [self.keys.index(k) for k in gradient.keys]
        unique = list(dict.fromkeys(ins))

        def part(tangents: list[Any]) -> list[Any]:
            every = list(self.deltas)
            for i, tangent in zip(unique, tangents, strict=True):
                every[i] = tangent
            results = self.linear(every)
            return [results[i] for i in outs]

        places = gradient.cotangents
        cotangents = [values[p] for p in places] if places else [jnp.ones_like(self.primals[i]) for i in outs]
        found = jax.linear_transpose(part, [self.deltas[i] for i in unique])(cotangents)[0]
        return [found[unique.index(i)] for i in ins]


def _regions(gradients: list[_Gradient]) -> list[tuple[int, int, list[_Gradient]]]:
    """Groups gradients into the outermost stretches of equations to linearize, in order.

    Where two stretches overlap in part, the later one is begun as early as the other: a perturbation enters at its marker,
    wherever the stretch began, and then one lies inside the other.
    """
    spans = sorted(gradients, key=lambda g: (g.start, -g.end))
    changed = True
    while changed:
        changed = False
        for a in list(spans):
            for j, b in enumerate(spans):
                if a.start < b.start < a.end < b.end:
                    spans[j], changed = replace(b, start=a.start), True
    spans.sort(key=lambda g: (g.start, -g.end))
    regions: list[tuple[int, int, list[_Gradient]]] = []
    for g in spans:
        if regions and g.start < regions[-1][1]:
            regions[-1][2].append(g)
        else:
            regions.append((g.start, g.end, [g]))
    return regions


def _aval(atom: Any) -> Any:
    return atom.aval


def _read(env: Env, atom: Any) -> PyTree:
    return atom.val if isinstance(atom, jex.Literal) else env[atom]
