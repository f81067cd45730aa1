# SPDX-License-Identifier: Apache-2.0
"""Steps that any worker may run: `ClusterCoordinator.schedule`.

In: functions and their arguments. Out: remote values. A step whose worker is lost runs again on another one, and each step counts
once.
"""
