# SPDX-License-Identifier: Apache-2.0
"""Starting and supervising the processes of a cluster on this machine: `phalanx run`. Imports no JAX."""
