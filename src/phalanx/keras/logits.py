# SPDX-License-Identifier: Apache-2.0
"""Computes the cross-entropy of a sigmoid or softmax from its logits, as tf.keras does.

Keras 3 on TensorFlow stores the logits with a probability (`_keras_logits`). Keras 3 on JAX clips the probability to
`[epsilon, 1 - epsilon]` instead, so the gradient vanishes once a unit saturates. This module records the logits of each
traced probability for as long as the probability lives, and follows it through casts and reshapes. It records nothing
outside traced steps.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from phalanx._src import compat
from phalanx._src.programs.identity import IdentityMap
from phalanx._src.runtime.settings import settings
from phalanx.errors import arguments
from phalanx.typing import PyTree


@dataclass(frozen=True)
class _Source:
    """The logits of a probability.

    Args:
      logits: array that the probability was computed from, with the same shape and dtype.
      axis: dim of a softmax, at least 0. None for a sigmoid.
    """

    logits: Any
    axis: int | None


_sources: IdentityMap[_Source] = IdentityMap()
"""By probability."""


def set_logits_recovery(enabled: bool) -> None:
    """Sets whether traced steps compute the cross-entropy of a sigmoid or softmax from its logits. They do by default.

    May be called in any context. Steps that are already compiled do not change, so call it before the first step.

    Args:
      enabled: False for the behaviour of Keras on JAX, which clips probabilities by `keras.config.epsilon()`.

    Raises:
      InvalidArgumentError: `enabled` is not a bool.

    Example:
      >>> import phalanx
      >>> phalanx.keras.set_logits_recovery(False)
      >>> phalanx.keras.set_logits_recovery(True)
    """
    settings.logits_recovery = arguments.flag("enabled", enabled)


def _sigmoid(original: Callable[..., Any], x: PyTree) -> Any:
    probability = original(x)
    if settings.logits_recovery and compat.is_lifting():
        _sources[probability] = _Source(compat.to_tensor(x), None)
    return probability


def _softmax(original: Callable[..., Any], x: PyTree, axis: Any = -1) -> Any:
    probability = original(x, axis=axis)
    if settings.logits_recovery and isinstance(axis, int) and compat.is_lifting():
        _sources[probability] = _Source(compat.to_tensor(x), axis % probability.ndim)
    return probability


def _follow(original: Callable[..., Any], x: PyTree, *args: PyTree, **kwargs: PyTree) -> Any:
    """Records the logits of a result if the argument is a probability and the function keeps its elements."""
    result = original(x, *args, **kwargs)
    # `convert_to_tensor` returns an array unchanged, and its source is known already.
    source = None if result is x else _sources.get(x)
    # A reshape may move or split the dim of the classes, so a softmax is followed only if no dim changes.
    if source is not None and (source.axis is None or result.shape == x.shape):
        _sources[result] = _Source(original(source.logits, *args, **kwargs), source.axis)
    return result


def _binary(original: Callable[..., Any], target: PyTree, output: PyTree, from_logits: bool = False) -> Any:
    source = None if from_logits else _sources.get(output)
    if source is None or source.axis is not None:
        return original(target, output, from_logits=from_logits)
    return original(target, source.logits, from_logits=True)


def _categorical(
    original: Callable[..., Any], target: PyTree, output: PyTree, from_logits: bool = False, axis: int = -1
) -> Any:
    source = None if from_logits else _sources.get(output)
    if source is None or source.axis != axis % source.logits.ndim:
        return original(target, output, from_logits=from_logits, axis=axis)
    return original(target, source.logits, from_logits=True, axis=axis)


compat.extend_backend("nn.sigmoid", _sigmoid)
compat.extend_backend("nn.softmax", _softmax)
# Modules of Keras call `cast` by either of its two names.
for _name in ("cast", "core.cast", "core.convert_to_tensor", "numpy.expand_dims", "numpy.squeeze", "numpy.reshape"):
    compat.extend_backend(_name, _follow)
compat.extend_backend("nn.binary_crossentropy", _binary)
compat.extend_backend("nn.categorical_crossentropy", _categorical)
compat.extend_backend("nn.sparse_categorical_crossentropy", _categorical)
