# SPDX-License-Identifier: Apache-2.0
"""Gradient tapes as markers in one jaxpr, and the evaluator that differentiates between the markers.

A tape adds equations of four primitives to the trace of a function: `enter` (identity over the variables that it watches),
`watch` (one tensor), `leave`, and `gradient`. The equations between `enter` and `leave` are the region of the tape.

`evaluate` runs such a jaxpr. It evaluates each region once under `jax.linearize`, as a function of perturbations of the sources.
Each `gradient` marker then transposes the part of the linear map that belongs to its targets and sources. Tapes with overlapping
regions share one linearization. A tape inside another is evaluated inside the other's linearization, which gives higher-order
gradients. The number of flops is the same as with a hand-written `jax.grad`.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax.extend import core as jex

from phalanx.typing import PyTree

Jaxpr = jex.Jaxpr
Env = dict[Any, Any]
Key = tuple[int, Any]


class _Marker(Protocol):
    """A primitive of JAX, whose methods have no annotations."""

    multiple_results: bool

    def def_abstract_eval(self, rule: Callable[..., Any]) -> object: ...
    def bind(self, *args: object, **params: object) -> list[Any]: ...


def _primitive(name: str, abstract: Callable[..., Any]) -> _Marker:
    """Returns a primitive that can only be traced. It has no lowering, because `evaluate` removes it before XLA sees it."""
    primitive: _Marker = jex.Primitive(f"phalanx_tape_{name}")
    primitive.multiple_results = True
    primitive.def_abstract_eval(abstract)
    return primitive


enter_p = _primitive("enter", lambda *values, tape: list(values))
leave_p = _primitive("leave", lambda *, tape: [])
watch_p = _primitive("watch", lambda value, *, tape: [])
gradient_p = _primitive("gradient", lambda *values, tape, counts: list(values[sum(counts) :]))


# JAX fixes the inputs of a jaxpr before it traces the function. An input that a function turns out to need is therefore an
# equation, and `with_first_values` makes it an input when the trace is complete.
_first_value_p = _primitive("first_value", lambda *, aval: [aval])
_MARKERS = (enter_p, leave_p, watch_p, gradient_p)


def gradient(tape: int, targets: Sequence[Any], cotangents: Sequence[Any], sources: Sequence[Any]) -> list[Any]:
    """Adds a gradient marker to the trace, and returns the gradients of `targets` with respect to `sources`.

    Args:
      tape: number of the tape.
      targets: traced arrays to differentiate.
      cotangents: one array per target, to multiply it with. Empty means ones.
      sources: traced arrays to differentiate with respect to.
    """
    return gradient_p.bind(*targets, *cotangents, *sources, tape=tape, counts=(len(targets), len(cotangents)))


def first_value(aval: Any) -> jax.Array:
    """Returns a traced array for an input of the program that the function turns out to need while it is traced."""
    value: jax.Array = _first_value_p.bind(aval=aval)[0]
    return value


def with_first_values(closed: jex.ClosedJaxpr) -> jex.ClosedJaxpr:
    """Returns `closed` with its `first_value` equations turned into leading inputs, in order."""
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
    """One gradient marker and the region of its tape.

    Args:
      at: index of the marker's equation.
      tape: number of the tape.
      targets: targets that were computed before the tape was left. Later ones have no gradient.
      cotangents: per target, the index of its cotangent among the inputs of the equation. Empty means ones.
      sources: sources of the marker.
      start: index of the first equation of the region.
      end: index after the last equation of the region.
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
        """Per source, the key under which it is perturbed. Two tapes perturb the same variable independently."""
        return [(self.tape, source) for source in self.sources]


def has_tapes(jaxpr: Jaxpr) -> bool:
    """Returns whether a tape was entered while `jaxpr` was traced."""
    return any(eqn.primitive is enter_p for eqn in jaxpr.eqns)


def gradients_of(jaxpr: Jaxpr) -> list[_Gradient]:
    """Returns the gradient markers of `jaxpr`, in order."""
    starts: dict[Any, int] = {}
    ends: dict[Any, int] = {}
    gradients = []
    for at, eqn in enumerate(jaxpr.eqns):
        tape: Any = eqn.params.get("tape")
        if eqn.primitive is enter_p:
            starts.setdefault(tape, at)  # The first of several: a variable that is first used inside the tape adds one.
        elif eqn.primitive is leave_p:
            ends[tape] = at
        elif eqn.primitive is gradient_p:
            num_targets, num_cotangents = eqn.params["counts"]
            # A tape may still be open when it is asked, so its region ends here at the latest.
            end = min(ends.get(tape, at), at)
            unrecorded = {o for e in jaxpr.eqns[end:at] for o in e.outvars}
            indices = [
                i for i, v in enumerate(eqn.invars[:num_targets]) if isinstance(v, jex.Var) and v not in unrecorded
            ]
            targets = tuple(eqn.invars[i] for i in indices)
            cotangents = tuple(num_targets + i for i in indices if num_cotangents)
            sources = tuple(eqn.invars[num_targets + num_cotangents :])
            gradients.append(_Gradient(at, tape, targets, cotangents, sources, starts[tape], end))
    return gradients


def connected(jaxpr: Jaxpr) -> list[tuple[bool, ...]]:
    """Returns, per gradient marker and source, whether a target depends on the source through the region of the tape."""
    flags = []
    for g in gradients_of(jaxpr):
        needed = _dependencies(jaxpr, {t for t in g.targets if isinstance(t, jex.Var)}, g.start, g.end)
        flags.append(tuple(source in needed for source in g.sources))
    return flags


CALLS = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat2", "remat")
"""Primitives with one inner jaxpr, whose inputs and outputs correspond one to one to those of the primitive."""


def _dependencies(jaxpr: Jaxpr, targets: set[Any], start: int, end: int) -> set[Any]:
    """Returns `targets` and all variables on which they depend differentiably through the equations [start, end)."""
    needed = set(targets)
    for eqn in reversed(jaxpr.eqns[start:end]):
        outs = [o in needed for o in eqn.outvars]
        if not any(outs) or eqn.primitive.name == "stop_gradient":
            continue
        needed.update(v for v, on in zip(eqn.invars, _inputs(eqn, outs), strict=True) if on and _is_floating(v))
    return needed


def _inputs(eqn: Any, outs: list[bool]) -> list[bool]:
    """Returns on which inputs of an equation its outputs depend, if `outs` says which outputs are of interest."""
    if eqn.primitive is enter_p:
        return outs
    # For primitives other than calls (`scan`, `cond`, `custom_vjp_call`), assume that each output depends on each input. A
    # source that is wrongly taken for connected gets a gradient of zeros instead of None.
    body = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    if eqn.primitive.name not in CALLS or body is None:
        return [True] * len(eqn.invars)
    inner = body.jaxpr if isinstance(body, jex.ClosedJaxpr) else body
    targets = {o for o, on in zip(inner.outvars, outs, strict=True) if on and isinstance(o, jex.Var)}
    needed = _dependencies(inner, targets, 0, len(inner.eqns))
    return [v in needed for v in inner.invars]


def _is_floating(atom: Any) -> bool:
    return isinstance(atom, jex.Var) and jnp.issubdtype(_aval(atom).dtype, jnp.inexact)


@jax.custom_jvp
def _perturb(value: jax.Array, delta: jax.Array) -> jax.Array:
    """Returns `value` unchanged, with the tangent of `value + delta`. Without differentiation it costs nothing."""
    return value


@_perturb.defjvp
def _perturb_jvp(primals: tuple[Any, Any], tangents: tuple[Any, Any]) -> tuple[Any, Any]:
    return primals[0], tangents[0] + tangents[1]


def evaluate(closed: jex.ClosedJaxpr, *args: jax.Array) -> list[Any]:
    """Evaluates a jaxpr with tape markers, and returns its outputs."""
    return _MarkerWalk(closed.jaxpr).outputs(closed.consts, args)


def gradient_values(closed: jex.ClosedJaxpr, *args: jax.Array) -> list[list[Any]]:
    """Evaluates a jaxpr with tape markers, and returns the gradients of each gradient marker."""
    walk = _MarkerWalk(closed.jaxpr)
    walk.outputs(closed.consts, args)
    return walk.gradients


class _MarkerWalk:
    """One evaluation of one jaxpr with tape markers.

    Attributes:
      gradients: the values of each gradient marker so far.
    """

    def __init__(self, jaxpr: Jaxpr) -> None:
        self._jaxpr = jaxpr
        self._gradients = gradients_of(jaxpr)
        self.gradients: list[list[Any]] = []
        self._pullbacks: dict[int, Callable[[list[Any]], list[Any]]] = {}
        self._injections: list[dict[Key, Any]] = []
        # Index of the last equation that uses a variable. A section or a region returns only what is used after it.
        self._last_use: dict[jex.Var, int] = {}
        for at, eqn in enumerate(jaxpr.eqns):
            self._last_use.update((v, at) for v in eqn.invars if isinstance(v, jex.Var))
        self._last_use.update((v, len(jaxpr.eqns)) for v in jaxpr.outvars if isinstance(v, jex.Var))

    def outputs(self, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluates the jaxpr and returns its outputs."""
        env: Env = dict(zip(self._jaxpr.constvars, consts, strict=True))
        env.update(zip(self._jaxpr.invars, args, strict=True))
        self._run(0, len(self._jaxpr.eqns), env, self._gradients)
        return [_read(env, v) for v in self._jaxpr.outvars]

    def _run(self, start: int, stop: int, env: Env, gradients: list[_Gradient]) -> None:
        """Evaluates the equations [start, stop). `gradients` are the markers whose regions lie in this range."""
        at = start
        for begin, end, members in _regions(gradients):
            self._run_plain(at, begin, env)
            self._run_region(begin, end, env, members)
            at = end
        self._run_plain(at, stop, env)

    def _run_plain(self, start: int, stop: int, env: Env) -> None:
        """Evaluates equations and markers in a range in which no region begins."""
        begin = start
        for at in range(start, stop):
            if self._jaxpr.eqns[at].primitive in _MARKERS:
                self._run_equations(begin, at, env)
                self._run_marker(at, env)
                begin = at + 1
        self._run_equations(begin, stop, env)

    def _run_equations(self, start: int, stop: int, env: Env) -> None:
        """Evaluates equations without markers, by `jax.core.eval_jaxpr` on a jaxpr of these equations alone."""
        eqns = self._jaxpr.eqns[start:stop]
        if not eqns:
            return
        # Dicts keep the order, unlike sets. All processes of a cluster must compile the same program.
        defined = dict.fromkeys(o for eqn in eqns for o in eqn.outvars)
        used = dict.fromkeys(v for eqn in eqns for v in eqn.invars if isinstance(v, jex.Var) and v not in defined)
        alive = [o for o in defined if self._last_use.get(o, -1) >= stop]
        replaced: Callable[..., Jaxpr] = self._jaxpr.replace
        section = replaced(
            constvars=(),
            invars=list(used),
            outvars=alive,
            eqns=eqns,
            # The debug info names the inputs and outputs of the whole jaxpr, not of this section.
            debug_info=self._jaxpr.debug_info.with_unknown_names(),
        )
        env.update(zip(alive, jax.core.eval_jaxpr(section, (), *(env[v] for v in used)), strict=True))

    def _run_marker(self, at: int, env: Env) -> None:
        """Evaluates one marker: adds perturbations at `enter` and `watch`, and computes gradients at `gradient`."""
        eqn = self._jaxpr.eqns[at]
        values = [_read(env, v) for v in eqn.invars]
        if eqn.primitive is enter_p:
            values = [self._perturbed((eqn.params["tape"], out), v) for out, v in zip(eqn.outvars, values, strict=True)]
        elif eqn.primitive is watch_p:
            # `watch` has no output, because the user continues with the same tensor. So its value in `env` is replaced from here on.
            env[eqn.invars[0]] = self._perturbed((eqn.params["tape"], eqn.invars[0]), values[0])
            return
        elif eqn.primitive is gradient_p:
            values = self._pullbacks[at](values)
            self.gradients.append(values)
        env.update(zip(eqn.outvars, values, strict=True))

    def _perturbed(self, key: Key, value: jax.Array) -> jax.Array:
        """Returns a source with the perturbations of all linearizations that are being evaluated."""
        for injection in self._injections:
            if key in injection:
                value = _perturb(value, injection[key])
        return value

    def _run_region(self, start: int, end: int, env: Env, members: list[_Gradient]) -> None:
        """Linearizes the equations [start, end) once for all gradient markers of the region.

        Inner tapes are evaluated while the range is linearized, which gives higher-order gradients.
        """
        # A marker after the range wants gradients of it. A marker inside the range belongs to an inner tape.
        inner = [g for g in members if g.at < end]
        outer = [g for g in members if g.at >= end]
        keys = list(dict.fromkeys(k for g in outer for k in g.keys))
        targets = list(dict.fromkeys(t for g in outer for t in g.targets))
        defined = [o for eqn in self._jaxpr.eqns[start:end] for o in eqn.outvars]
        alive = [o for o in defined if self._last_use.get(o, -1) >= end]

        def forward(deltas: list[Any]) -> tuple[list[Any], list[Any]]:
            local_env = dict(env)
            self._injections.append(dict(zip(keys, deltas, strict=True)))
            self._run(start, end, local_env, inner)
            self._injections.pop()
            return [_read(local_env, t) for t in targets], [local_env[o] for o in alive]

        deltas = [jnp.zeros(_aval(source).shape, _aval(source).dtype) for _, source in keys]
        # `linearize` and not `vjp`: each marker transposes another part of the same linear map, for its targets and sources.
        primals, linear, aux = jax.linearize(forward, deltas, has_aux=True)
        env.update(zip(alive, aux, strict=True))
        region = _Linearized(linear, primals, deltas, targets, keys)
        self._pullbacks.update((g.at, functools.partial(region.pull, g)) for g in outer)


@dataclass(frozen=True)
class _Linearized:
    """The linearization of one region: a linear map from perturbations of sources to perturbations of targets.

    Args:
      linear: the linear map.
      primals: values of the targets.
      deltas: zeros, one per source.
      targets: the targets, as variables of the jaxpr.
      keys: the keys of the sources.
    """

    linear: Callable[[list[Any]], list[Any]]
    primals: list[Any]
    deltas: list[Any]
    targets: list[Any]
    keys: list[Key]

    def pull(self, gradient: _Gradient, values: list[Any]) -> list[Any]:
        """Returns the gradients of one marker, by a transpose of its part of the linear map.

        Args:
          gradient: the marker.
          values: values of the inputs of the marker's equation.
        """
        outs = [self.targets.index(t) for t in gradient.targets]
        ins = [self.keys.index(k) for k in gradient.keys]
        # A source may be listed twice. Each occurrence gets the full gradient, so the transpose must see it once.
        unique = list(dict.fromkeys(ins))

        def linear_part(tangents: list[Any]) -> list[Any]:
            all_tangents = list(self.deltas)
            for i, tangent in zip(unique, tangents, strict=True):
                all_tangents[i] = tangent
            results = self.linear(all_tangents)
            return [results[i] for i in outs]

        if gradient.cotangents:
            cotangents = [values[i] for i in gradient.cotangents]
        else:
            cotangents = [jnp.ones_like(self.primals[i]) for i in outs]
        grads = jax.linear_transpose(linear_part, [self.deltas[i] for i in unique])(cotangents)[0]
        return [grads[unique.index(i)] for i in ins]


def _regions(gradients: list[_Gradient]) -> list[tuple[int, int, list[_Gradient]]]:
    """Groups gradient markers into disjoint ranges of equations to linearize, `(start, end, markers)`, in order.

    If two regions overlap in part, the later one is extended to the start of the earlier one, so that one contains the other.
    This does not change its gradients, because a perturbation enters at its own marker and not at the start of the range.
    """
    spans = sorted(gradients, key=lambda g: (g.start, -g.end))
    # Extending one region may create a new partial overlap, so repeat until there is none.
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
