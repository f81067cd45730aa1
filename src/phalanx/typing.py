# SPDX-License-Identifier: Apache-2.0
"""Types that appear in signatures of Phalanx. It imports neither JAX nor Keras."""

from typing import Any, TypeAlias

__all__ = ["PyTree"]

PyTree: TypeAlias = Any
"""A nest of dicts, lists, tuples and registered containers with arrays as leaves; one array is a nest too.

Python cannot express the leaves of a recursive container that other libraries extend, so that a type checker takes it for `Any`.
"""
