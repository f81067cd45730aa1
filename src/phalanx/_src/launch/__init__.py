# SPDX-License-Identifier: Apache-2.0
"""Starts and supervises the processes of a cluster on this machine: `phalanx run`. Does not import JAX.

In: a script, and a number of workers. Out: processes with a cluster description and a share of the cores, their lines of output with their names, and an
exit code that says how the training has ended. Each process is ended by its handle, and none outlives the launcher.
Which machines take part is told by `phalanx._src.cluster.resolvers`; `templates` writes job files for schedulers.
"""
