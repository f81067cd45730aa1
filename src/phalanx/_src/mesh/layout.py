# SPDX-License-Identifier: Apache-2.0
"""Layouts: rules that shard the dims of variables over mesh axes."""

import difflib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, final

from jax.sharding import PartitionSpec
from typing_extensions import override

from phalanx._src.typed_jax import partition_spec
from phalanx.errors import InvalidArgumentError, arguments, shown

REPLICA_AXIS = "replica"
"""The mesh axis over which `Strategy.run` maps its replica function."""

MODEL_AXIS = "model"
"""The usual name of the mesh axis over which XLA partitions a replica."""

Sizes = Mapping[str, int]
"""The number of devices along each mesh axis."""

_MANY_BYTES = 1 << 30
"""The size of gathered variables from which a device should not hold all of them. Gathering twice in a step costs time."""

# Sharding biases of 1,024 elements costs 5% of a step on eight CPU devices.
_MIN_SIZE = 4096
"""The number of elements from which on a variable is sharded."""

_NUMBER = r"_\d+(?=/|$)"
"""The number that Keras appends to the name of a further layer."""

_OF_ATTENTION = r"attention|(^|/)(query|key|value)/"
"""Paths of variables with a dim for heads: Keras names the layers inside an attention layer like this, whatever its own name is."""

_RULES = 'layout={".*dense.*kernel": (None, "model")}'


class AbstractLayout(ABC):
    """Shards variables over mesh axes. Every device holds a variable whole unless the layout shards it."""

    @property
    @abstractmethod
    def axes(self) -> frozenset[str]:
        """The mesh axes that the layout names."""

    @abstractmethod
    def spec(self, path: str, shape: tuple[int, ...], sizes: Sizes) -> PartitionSpec:
        """Returns the mesh axes of each dim of a variable.

        Args:
          path: path of the variable.
          shape: shape of the variable.
          sizes: the number of devices along each mesh axis.

        Raises:
          InvalidArgumentError: the layout does not fit the shape of the variable.
        """

    def gathers_by_layer(self, num_bytes: int) -> bool:
        """Returns whether a step gathers each variable where it is used, and not all before it begins.

        Args:
          num_bytes: the size of all variables that a step gathers.
        """
        return num_bytes >= _MANY_BYTES

    def require_used(self) -> None:  # noqa: B027  (A layout without rules for paths has nothing to check.)
        """Checks that each rule of the layout has matched a variable. Called when all variables exist.

        Raises:
          InvalidArgumentError: a rule has not matched any variable.
        """

    def why_whole(self, shapes: Sequence[tuple[int, ...]], sizes: Sizes) -> tuple[str, str] | None:
        """Returns why the layout shards none of some variables, and what to write instead. None if it is not meant to shard them.

        Args:
          shapes: shapes of variables that the layout does not shard.
          sizes: the number of devices along each mesh axis.
        """
        return None

    def news(self) -> str:
        """Returns a line for the user about the layout, once all variables exist. Empty if there is nothing new."""
        return ""

    @final
    def require_axes(self, sizes: Sizes) -> None:
        """Checks that a mesh has all axes of the layout.

        Args:
          sizes: the number of devices along each mesh axis.

        Raises:
          InvalidArgumentError: the layout names an axis that the mesh does not have.
        """
        for axis in sorted(self.axes - set(sizes)):
            near = difflib.get_close_matches(axis, sizes, n=1)
            names = ", ".join(f"{name!r} of {n}" for name, n in sizes.items())
            raise InvalidArgumentError(
                f"layout={self!r}",
                f"the mesh has no axis {axis!r}; its axes are {names}.",
                f'"{near[0]}"' if near else f'model_axis=("{axis}", 2)',
            )


LayoutLike: TypeAlias = AbstractLayout | Mapping[str, Any] | Literal["auto"] | None
"""The argument `layout` of a strategy: a layout, a mapping from patterns of paths to rules, "auto", or None."""


@arguments.typed()
@final
@dataclass(frozen=True)
class FullySharded(AbstractLayout):
    """Shards every large variable over one mesh axis, along the first dim that the axis divides. See `fully_sharded`.

    Args:
      axis: name of the mesh axis.
      min_size: the smallest number of elements for which a variable is sharded.
      gather: when a step gathers a variable. See `fully_sharded`.

    Raises:
      InvalidArgumentError: `axis` is not a name, `min_size` is not a positive integer, or `gather` has another value.
    """

    axis: str = REPLICA_AXIS
    min_size: int = _MIN_SIZE
    gather: Literal["layer", "step"] | None = None

    def __post_init__(self) -> None:
        arguments.integer("min_size", self.min_size, hint="fully_sharded(min_size=4096)")
        if not self.axis:
            raise InvalidArgumentError(
                f"axis={self.axis!r}", "must be the name of a mesh axis.", 'fully_sharded("replica")'
            )
        if not isinstance(self.gather, str | None) or self.gather not in ("layer", "step", None):
            raise InvalidArgumentError(
                f"gather={shown(self.gather)}", 'must be "layer", "step" or None.', 'fully_sharded(gather="layer")'
            )

    @override
    def gathers_by_layer(self, num_bytes: int) -> bool:
        return self.gather == "layer" or (self.gather is None and super().gathers_by_layer(num_bytes))

    @property
    @override
    def axes(self) -> frozenset[str]:
        return frozenset({self.axis})

    @override
    def spec(self, path: str, shape: tuple[int, ...], sizes: Sizes) -> PartitionSpec:
        count, elements = sizes[self.axis], math.prod(shape)
        dim = next((i for i, n in enumerate(shape) if n % count == 0), None)
        if count == 1 or elements < self.min_size or dim is None:
            return partition_spec()
        return partition_spec(*(None,) * dim, self.axis)

    @override
    def why_whole(self, shapes: Sequence[tuple[int, ...]], sizes: Sizes) -> tuple[str, str] | None:
        count = sizes[self.axis]
        if count == 1:
            return None
        num_large = sum(math.prod(shape) >= self.min_size for shape in shapes)
        divisible = [math.prod(shape) for shape in shapes if any(n and n % count == 0 for n in shape)]
        reasons = {
            f"{len(shapes) - num_large} with fewer than {self.min_size} elements": num_large < len(shapes),
            f"{num_large} without a dim whose size is a multiple of {count}": num_large > 0,
        }
        axis = "" if self.axis == REPLICA_AXIS else f'"{self.axis}", '
        return (
            " and ".join(reason for reason, holds in reasons.items() if holds),
            f"layout=phalanx.fully_sharded({axis}min_size={max(divisible)})"
            if divisible
            else f"dims whose sizes are multiples of {count}",
        )


def fully_sharded(
    axis: str = REPLICA_AXIS, min_size: int = _MIN_SIZE, *, gather: Literal["layer", "step"] | None = None
) -> FullySharded:
    """Returns a layout that shards every large variable and its optimizer slots over one axis.

    May be called in any context. With the axis "replica", each replica holds and updates one shard of the variables and
    slots. A step all-gathers the variables and reduce-scatters the gradients.

    Args:
      axis: "replica", or the name of the model axis of a strategy.
      min_size: the smallest number of elements for which a variable is sharded. A variable without a dim that the axis
        divides is not sharded either.
      gather: with "layer", each operation that uses a variable gathers it, including in the backward pass, so that a device holds few
        complete variables at a time; with "step", a step gathers all variables once. None selects "layer" from 1 GiB of variables on.

    Returns:
      A layout for the argument `layout` of a strategy.

    Raises:
      InvalidArgumentError: `axis` is not a name, `min_size` is not a positive integer, or `gather` has another value.

    Source: Rajbhandari et al. 2020, "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models".

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=phalanx.fully_sharded())
      >>> with strategy.scope():
      ...     v = keras.Variable(keras.ops.zeros((64, 64)))
      >>> v.value.addressable_shards[0].data.shape
      (32, 64)
    """
    return FullySharded(axis, min_size, gather)


@final
class ShapeRules(AbstractLayout):
    """Shards every large variable over all axes of a mesh, along dims that its shape decides."""

    def __init__(self) -> None:
        self._specs: dict[str, PartitionSpec] = {}
        self._is_told = False

    @property
    @override
    def axes(self) -> frozenset[str]:
        # Every mesh has this axis. Axes of the model are used too, if there are any.
        return frozenset({REPLICA_AXIS})

    @override
    def spec(self, path: str, shape: tuple[int, ...], sizes: Sizes) -> PartitionSpec:
        names: list[str | None] = [None] * len(shape)
        # The axes of the model come first: it matters more which dim they get. Replicas gather along any.
        for axis in sorted(sizes, key=REPLICA_AXIS.__eq__):
            dims = [i for i, n in enumerate(shape) if names[i] is None and n % sizes[axis] == 0]
            if sizes[axis] > 1 and dims and math.prod(shape) >= _MIN_SIZE:
                of_heads = axis != REPLICA_AXIS and len(shape) > 2 and re.search(_OF_ATTENTION, path)  # noqa: PLR2004
                names[min(dims, key=shape.__getitem__) if of_heads else max(dims, key=lambda i: (shape[i], i))] = axis
        # JAX tells `P(None)` from `P()`, with which `Topology.sharding_of` compares.
        while names and names[-1] is None:
            names.pop()
        self._specs[path] = partition_spec(*names)
        return self._specs[path]

    @override
    def news(self) -> str:
        """Returns the rules, once."""
        if self._is_told:
            return ""
        count = sum(spec != partition_spec() for spec in self._specs.values())
        self._is_told = count > 0
        return f"layout='auto' shards {count} variables, as layout={self.rules()} does" if count else ""

    @override
    def why_whole(self, shapes: Sequence[tuple[int, ...]], sizes: Sizes) -> tuple[str, str] | None:
        # If no axis divides any of them, the longest one does not either.
        return FullySharded(max(sizes, key=sizes.__getitem__)).why_whole(shapes, sizes)

    def rules(self) -> dict[str, tuple[Any, ...]]:
        """Returns rules for paths that shard the variables alike. Layers that differ in their numbers have one, if they are sharded alike."""
        layers: dict[str, list[str]] = {}
        for path in self._specs:
            layers.setdefault(re.sub(_NUMBER, "", path), []).append(path)
        rules: dict[str, tuple[Any, ...]] = {}
        for paths in layers.values():
            pattern = _pattern_of(paths)
            # Over all paths: `x_1(_\d+)?`, made for `x_1_2` and `x_1_3`, matches `x_1` too, which may be sharded in another way.
            specs = {self._specs[path] for path in self._specs if re.fullmatch(pattern, path)}
            alike = [pattern] if len(paths) > 1 and len(specs) == 1 else map(re.escape, paths)
            rules |= {name: tuple(self._specs[path]) for name, path in zip(alike, paths, strict=False)}
        return {name: rule for name, rule in rules.items() if rule}

    def __repr__(self) -> str:
        return "'auto'"


def _pattern_of(paths: Sequence[str]) -> str:
    """Returns a pattern for the paths of layers that differ in their numbers."""
    parts = zip(*(path.split("/") for path in paths), strict=True)
    return "/".join(
        re.escape(part[0]) if len(set(part)) == 1 else re.escape(re.sub(_NUMBER, "", part[0])) + r"(_\d+)?"
        for part in parts
    )


@final
class PathRules(AbstractLayout):
    """Shards each variable by the rule whose pattern matches its path, like `keras.distribution.LayoutMap`.

    Args:
      rules: a dict from a pattern, which must match the whole path, to a tuple with one axis or None per dim.

    Raises:
      InvalidArgumentError: a rule does not name axes.
    """

    def __init__(self, rules: Mapping[str, Any]) -> None:
        self._rules = {pattern: _axes(pattern, rule) for pattern, rule in rules.items()}
        self._unused, self._seen = set(self._rules), set[str]()

    @property
    @override
    def axes(self) -> frozenset[str]:
        return frozenset(name for rule in self._rules.values() for dim in rule for name in dim)

    @override
    def spec(self, path: str, shape: tuple[int, ...], sizes: Sizes) -> PartitionSpec:
        self._seen.add(path)
        # A rule for exactly this path wins over patterns, as in `keras.distribution.LayoutMap`.
        patterns = [path] if path in self._rules else [p for p in self._rules if re.fullmatch(p, path)]
        if len(patterns) > 1:
            raise InvalidArgumentError(
                f"layout={self!r}",
                f"variable {path!r} matches several patterns: {patterns}.",
                "change the patterns so that only one matches each variable",
            )
        self._unused.difference_update(patterns)
        rule = self._rules[patterns[0]] if patterns else ()
        self._require_fit(path, shape, rule, sizes)
        # As in `ShapeRules.spec`: trailing None would make another spec.
        while rule and not rule[-1]:
            rule = rule[:-1]
        return partition_spec(*(None if not names else names[0] if len(names) == 1 else names for names in rule))

    @override
    def require_used(self) -> None:
        for pattern in sorted(self._unused):
            words = re.sub(r"[^\w/]+", "", pattern)
            near = difflib.get_close_matches(words, sorted(self._seen), n=1, cutoff=0.0)
            raise InvalidArgumentError(
                f"the rule {shown(pattern)} of a layout",
                "the pattern matches no variable; it must match the whole path, and the nearest path is "
                f"{near[0] if near else ''!r}.",
                # The hint replaces the first part of the path by ".*", because Keras numbers models: the name of the
                # next model of this class is different.
                f'layout={{"{re.sub("^[^/]*/", ".*/", near[0])}": {self._shown(pattern)}}}'
                if near
                else "remove the rule",
            )

    def _require_fit(self, path: str, shape: tuple[int, ...], rule: Sequence[tuple[str, ...]], sizes: Sizes) -> None:
        if len(rule) > len(shape):
            raise InvalidArgumentError(
                f"the rule for variable {path!r} {shape} of a layout",
                f"the rule has {len(rule)} dims, but the variable has {len(shape)}.",
                f"one axis or None for each of the {len(shape)} dims",
            )
        for dim, names in enumerate(rule):
            if shape[dim] % (count := math.prod(sizes[name] for name in names)):
                raise InvalidArgumentError(
                    f"the rule for variable {path!r} {shape} of a layout",
                    f"the {count} devices of {' x '.join(names)} do not divide dim {dim}, which has size {shape[dim]}.",
                    f"None for dim {dim}, or a size of the dim that {count} divides",
                )

    def _shown(self, pattern: str) -> tuple[Any, ...]:
        return tuple(None if not names else names[0] if len(names) == 1 else names for names in self._rules[pattern])

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{p!r}: {self._shown(p)}' for p in self._rules)}}}"


def layout_of(layout: LayoutLike) -> AbstractLayout | None:
    """Converts the argument `layout` of a strategy to a layout.

    Raises:
      InvalidArgumentError: `layout` is not None, a layout or a mapping.
    """
    if layout is None or isinstance(layout, AbstractLayout):
        return layout
    if isinstance(layout, str) and layout == "auto":
        return ShapeRules()
    if not isinstance(layout, Mapping):
        raise InvalidArgumentError(
            f"layout={shown(layout)}",
            'must be a keras.distribution.LayoutMap, a dict, fully_sharded(), or "auto".',
            "layout=phalanx.fully_sharded()" if layout is fully_sharded or isinstance(layout, str) else _RULES,
        )
    return PathRules(layout)


def _axes(pattern: str, rule: object) -> tuple[tuple[str, ...], ...]:
    """Returns the axes of each dim. A rule is a tuple, or a Keras `TensorLayout`, whose mesh is ignored.

    Raises:
      InvalidArgumentError: `pattern` is not a regular expression, or `rule` does not name axes.
    """
    try:
        re.compile(pattern)
    except (re.error, TypeError) as e:
        raise InvalidArgumentError(
            f"the pattern {shown(pattern)} of a layout", f"is not a regular expression: {e}.", _RULES
        ) from e
    axes: Any = getattr(rule, "axes", rule)
    dims = [() if d is None else (d,) if isinstance(d, str) else d for d in axes] if isinstance(axes, tuple) else [axes]
    names = [name for d in dims for name in (d if isinstance(d, tuple) else (None,))]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise InvalidArgumentError(
            f"the rule {shown(pattern)}: {shown(rule)}",
            "must have one axis or None per dim, and must not repeat an axis.",
            _RULES,
        )
    return tuple(dims)
