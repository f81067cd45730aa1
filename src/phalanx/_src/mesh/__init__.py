# SPDX-License-Identifier: Apache-2.0
"""Devices, their mesh, and the values that are placed on it.

In: devices, layouts and arrays. Out: a topology, which knows the replicas and processes of the devices, shardings, and `PerReplica` and `Mirrored` values.
A layout depends on the names and shapes of variables and on the mesh, so that all processes choose the same one.
"""
