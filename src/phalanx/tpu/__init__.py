# SPDX-License-Identifier: Apache-2.0
"""TPU systems: the names of `tf.tpu` that strategies need."""

from phalanx.tpu import experimental as experimental
