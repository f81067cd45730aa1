# SPDX-License-Identifier: Apache-2.0
"""Poolings and convolutions for CPUs, for the cases in which XLA's own are slow. docs/benchmarks.md has the times of each.

XLA compiles the gradient of a max-pooling, and convolutions with groups, into plain loops on CPUs:
https://github.com/openxla/xla/issues/34273. `bodies` rewrites convolutions that XLA computes fast at the top level of a program only.
"""
