# SPDX-License-Identifier: Apache-2.0
"""The engine. Nothing here is public: the modules of `phalanx` export its names, and `phalanx.keras` and the like are built on it.

A room imports only rooms below it, from the top: tools, elastic, checkpoint, strategies, parameter_server, input, programs, tracing,
collectives, compat, kernels, mesh, runtime, launch, cluster.
"""
