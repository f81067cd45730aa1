# SPDX-License-Identifier: Apache-2.0
"""A training run whose processes come and go: `phalanx run --workers 2:4`.

In: a step, a dataset and the group that the launcher has formed. Out: each step once, in order, in whatever group. After a loss
those that are left continue from the last finished step, and a process that joins has their variables before its first one.
"""
