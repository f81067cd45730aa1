# SPDX-License-Identifier: Apache-2.0
"""TPU systems: the names of `tf.tpu` that strategies need."""

from phalanx._src.options import XLAOptions
from phalanx.errors.names import suggest_names
from phalanx.tpu import experimental

__all__ = ["XLAOptions", "experimental"]

suggest_names(__name__)
