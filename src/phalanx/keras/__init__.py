# SPDX-License-Identifier: Apache-2.0
"""Keras's `fit`, `evaluate` and `predict` on the replicas of a strategy."""

from phalanx.keras import bridge as bridge
