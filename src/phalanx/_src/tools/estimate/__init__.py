# SPDX-License-Identifier: Apache-2.0
"""Predicts the steps of a training run on hardware that you don't have: the real compiler compiles them, and nothing runs."""
