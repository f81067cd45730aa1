# SPDX-License-Identifier: Apache-2.0
"""The axes of the mesh, and over which of them the dims of a variable are divided."""

import difflib
import math
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

from jax.sharding import PartitionSpec
from typing_extensions import override

from phalanx.errors import InvalidArgumentError, arguments, shown

REPLICA_AXIS = "replica"
"""The mesh axis over which `Strategy.run` maps its replica function."""

MODEL_AXIS = "model"
"""The usual name of the mesh axis over which one replica spreads."""

Sizes = Mapping[str, int]
"""How many devices each axis of a mesh has."""

_RULES = 'layout={".*dense.*kernel": (None, "model")}'


class AbstractLayout(ABC):
    """A rule that divides variables over axes of a mesh. What it does not divide, every device holds whole."""

    @property
    @abstractmethod
    def axes(self) -> frozenset[str]:
        """The axes that it names."""

    @abstractmethod
    def spec(self, path: str, shape: tuple[int, ...], sizes: Sizes) -> PartitionSpec:
        """Returns how a variable is divided.

        Raises:
          InvalidArgumentError: the rule does not fit the variable.
        """

    @abstractmethod
    def require_used(self) -> None:
        """Raises where a part of the rule has not met its variable. Called when the variables that are trained are made.

        Raises:
          InvalidArgumentError: it has not.
        """

    @final
    def require_axes(self, sizes: Sizes) -> None:
        """Raises for a mesh without the axes that it names.

        Raises:
          InvalidArgumentError: it names another one.
        """
        for axis in sorted(self.axes - set(sizes)):
            near = difflib.get_close_matches(axis, sizes, n=1)
            raise InvalidArgumentError(
                f"layout={self!r}",
                f"the mesh has no axis {axis!r}, but {', '.join(f'{name!r} of {n}' for name, n in sizes.items())}.",
                f'"{near[0]}"' if near else f'MirroredStrategy(model_axis=("{axis}", 2), layout=...)',
            )


@arguments.typed()
@final
@dataclass(frozen=True)
class FullySharded(AbstractLayout):
    """Divides every large variable over one axis, along its first dim that can be. `fully_sharded` makes it.

    Args:
      axis: the axis.
      min_size: how many elements a variable has at least that is divided.

    Raises:
      InvalidArgumentError: an axis that is not a name, or a size that is not a positive integer.
    """

    axis: str = REPLICA_AXIS
    min_size: int = 4096

    def __post_init__(self) -> None:
        arguments.integer("min_size", self.min_size, hint="fully_sharded(min_size=4096)")
        if not self.axis:
            raise InvalidArgumentError(
                f"axis={self.axis!r}", "must be the name of an axis.", 'fully_sharded("replica")'
            )

    @property
    @override
    def axes(self) -> frozenset[str]:
        return frozenset({self.axis})

    @override
    def spec(self, path: str, shape: tuple[int, ...], sizes: Sizes) -> PartitionSpec:
        count, elements = sizes[self.axis], math.prod(shape)
        dim = next((i for i, n in enumerate(shape) if n and n % count == 0), None)
        if count == 1 or elements < self.min_size or dim is None:
            return PartitionSpec()
        return PartitionSpec(*(None,) * dim, self.axis)

    @override
    def require_used(self) -> None:
        """A model may have small variables alone."""


def fully_sharded(axis: str = REPLICA_AXIS, min_size: int = 4096) -> FullySharded:
    """Returns a layout that divides every large variable, and its optimizer slots, over an axis. May be called in any context.

    Over the replicas each of them holds, and updates, a part of the variables and slots. A step gathers the variables, and
    gives each replica its part of the summed gradients.

    Args:
      axis: "replica", or the name of a strategy's model axis.
      min_size: how many elements a variable has at least that is divided. Those whose dims the axis does not divide are
        whole everywhere, too.

    Raises:
      InvalidArgumentError: an axis that is not a name, or a size that is not a positive integer.

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=phalanx.fully_sharded())
      >>> with strategy.scope():
      ...     v = keras.Variable(keras.ops.zeros((64, 64)))
      >>> v.value.addressable_shards[0].data.shape
      (32, 64)
    """
    return FullySharded(axis, min_size)


@final
class PathRules(AbstractLayout):
    """Divides each variable as the rule for its path says: those of a `keras.distribution.LayoutMap`, or of a dict.

    Args:
      rules: for each pattern, which matches whole paths, the axis of each dim, or None.

    Raises:
      InvalidArgumentError: a rule that names no axes.
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
        patterns = [path] if path in self._rules else [p for p in self._rules if re.fullmatch(p, path)]
        if len(patterns) > 1:
            raise InvalidArgumentError(
                f"layout={self!r}", f"variable {path!r} matches {patterns}.", "patterns of which one matches a variable"
            )
        self._unused.difference_update(patterns)
        rule = self._rules[patterns[0]] if patterns else ()
        self._require_fit(path, shape, rule, sizes)
        while rule and not rule[-1]:
            rule = rule[:-1]
        return PartitionSpec(*(None if not names else names[0] if len(names) == 1 else names for names in rule))

    @override
    def require_used(self) -> None:
        for pattern in sorted(self._unused):
            words = re.sub(r"[^\w/]+", "", pattern)
            near = difflib.get_close_matches(words, sorted(self._seen), n=1, cutoff=0.0)
            raise InvalidArgumentError(
                f"the rule {shown(pattern)} of a layout",
                f"it matches no variable; a pattern has to match the whole path, and the nearest is {near[0] if near else ''!r}.",
                # Models are numbered: the next one's path begins otherwise.
                f'layout={{"{re.sub("^[^/]*/", ".*/", near[0])}": {self._shown(pattern)}}}' if near else "leave it out",
            )

    def _require_fit(self, path: str, shape: tuple[int, ...], rule: Sequence[tuple[str, ...]], sizes: Sizes) -> None:
        if len(rule) > len(shape):
            raise InvalidArgumentError(
                f"the rule for variable {path!r} {shape} of a layout",
                f"it names axes for {len(rule)} dims.",
                f"one axis or None for each of its {len(shape)} dims",
            )
        for dim, names in enumerate(rule):
            if shape[dim] % (count := math.prod(sizes[name] for name in names)):
                raise InvalidArgumentError(
                    f"the rule for variable {path!r} {shape} of a layout",
                    f"{count} devices of {' x '.join(names)} do not divide dim {dim}.",
                    "None for this dim, or a size that divides",
                )

    def _shown(self, pattern: str) -> tuple[Any, ...]:
        return tuple(None if not names else names[0] if len(names) == 1 else names for names in self._rules[pattern])

    def __repr__(self) -> str:
        return f"{{{', '.join(f'{p!r}: {self._shown(p)}' for p in self._rules)}}}"


def layout_of(layout: Any) -> AbstractLayout | None:
    """Returns what a strategy's `layout` asks for.

    Raises:
      InvalidArgumentError: it is neither rules nor a layout.
    """
    if layout is None or isinstance(layout, AbstractLayout):
        return layout
    if not isinstance(layout, Mapping):
        raise InvalidArgumentError(
            f"layout={shown(layout)}",
            "must be a LayoutMap of Keras, a dict, or fully_sharded().",
            "layout=phalanx.fully_sharded()" if layout is fully_sharded else _RULES,
        )
    return PathRules(layout)


def _axes(pattern: str, rule: Any) -> tuple[tuple[str, ...], ...]:
    """Returns the axes of each dim; a rule is a tuple, or a `TensorLayout` of Keras, whose mesh has no part in it."""
    try:
        re.compile(pattern)
    except (re.error, TypeError) as e:
        raise InvalidArgumentError(
            f"the pattern {shown(pattern)} of a layout", f"is no regular expression: {e}.", _RULES
        ) from e
    given: Any = getattr(rule, "axes", rule)
    dims = (
        [() if d is None else (d,) if isinstance(d, str) else d for d in given] if isinstance(given, tuple) else [given]
    )
    names = [name for d in dims for name in (d if isinstance(d, tuple) else (None,))]
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise InvalidArgumentError(
            f"the rule {shown(pattern)}: {shown(rule)}",
            "must name an axis or None for each dim, and no axis twice.",
            _RULES,
        )
    return tuple(dims)
