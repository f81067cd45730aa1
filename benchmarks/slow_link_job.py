# SPDX-License-Identifier: Apache-2.0
"""The numbers that the scripts of `slow_link` share."""

WARM_UP = 5
"""Steps before the measurement. The first one compiles."""
