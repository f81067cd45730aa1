# SPDX-License-Identifier: Apache-2.0
"""The cross-entropy of a sigmoid or a softmax is computed from its logits, as in tf.keras.

Keras's TensorFlow backend remembers the logits of a probability; its JAX backend clips the probability, so the gradient
vanishes once a unit saturates. Here each traced probability is remembered with its logits for as long as it lives. Casts
and changes of rank are followed. Outside of traced steps nothing is remembered.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx import compat
from phalanx.errors import InvalidArgumentError, shown


@dataclass(frozen=True)
class _Source:
    """Where a probability comes from.

    Args:
      probability: the array; the entry ends with it.
      logits: what the probability was computed from, in the same shape and dtype.
      axis: of a softmax, counted from the first dim; None for a sigmoid.
    """

    probability: weakref.ref[Any]
    logits: Any
    axis: int | None


_sources: dict[int, _Source] = {}
_is_on = True


def set_logits_recovery(enabled: bool) -> None:
    """Decides whether traced steps compute cross-entropy from the logits of a sigmoid or softmax; by default they do.

    May be called in any context, before the first step: steps that are compiled already stay as they are.

    Args:
      enabled: False for what Keras does on JAX: it clips the probability to `keras.config.epsilon()`.

    Raises:
      InvalidArgumentError: `enabled` is not a bool.

    Example:
      >>> import phalanx
      >>> phalanx.keras.set_logits_recovery(False)
      >>> phalanx.keras.set_logits_recovery(True)
    """
    global _is_on  # noqa: PLW0603
    if not isinstance(enabled, bool):
        raise InvalidArgumentError(
            f"set_logits_recovery({shown(enabled)})",
            "enabled must be a bool.",
            "phalanx.keras.set_logits_recovery(False)",
        )
    _is_on = enabled


def _remember(probability: Any, logits: Any, axis: int | None) -> None:
    key = id(probability)
    _sources[key] = _Source(weakref.ref(probability, lambda _: _sources.pop(key, None)), logits, axis)


def _source_of(x: Any) -> _Source | None:
    source = _sources.get(id(x))
    return source if source is not None and source.probability() is x else None


def _sigmoid(original: Callable[..., Any], x: Any) -> Any:
    probability = original(x)
    if _is_on and compat.is_lifting():
        _remember(probability, compat.to_tensor(x), None)
    return probability


def _softmax(original: Callable[..., Any], x: Any, axis: Any = -1) -> Any:
    probability = original(x, axis=axis)
    if _is_on and isinstance(axis, int) and compat.is_lifting():
        _remember(probability, compat.to_tensor(x), axis % probability.ndim)
    return probability


def _follow(original: Callable[..., Any], x: Any, *args: Any, **kwargs: Any) -> Any:
    """Remembers what a function makes of a probability that is known, if it keeps the elements."""
    result = original(x, *args, **kwargs)
    source = _source_of(x) if _sources and result is not x else None
    if source is not None and (source.axis is None or result.shape == x.shape):
        _remember(result, original(source.logits, *args, **kwargs), source.axis)
    return result


def _binary(original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False) -> Any:
    source = None if from_logits else _source_of(output)
    if source is None or source.axis is not None:
        return original(target, output, from_logits=from_logits)
    return original(target, source.logits, from_logits=True)


def _categorical(
    original: Callable[..., Any], target: Any, output: Any, from_logits: bool = False, axis: int = -1
) -> Any:
    source = None if from_logits else _source_of(output)
    if source is None or source.axis != axis % source.logits.ndim:
        return original(target, output, from_logits=from_logits, axis=axis)
    return original(target, source.logits, from_logits=True, axis=axis)


compat.extend_backend("nn.sigmoid", _sigmoid)
compat.extend_backend("nn.softmax", _softmax)
for _name in ("cast", "core.cast", "core.convert_to_tensor", "numpy.expand_dims", "numpy.squeeze", "numpy.reshape"):
    compat.extend_backend(_name, _follow)
compat.extend_backend("nn.binary_crossentropy", _binary)
compat.extend_backend("nn.categorical_crossentropy", _categorical)
compat.extend_backend("nn.sparse_categorical_crossentropy", _categorical)
