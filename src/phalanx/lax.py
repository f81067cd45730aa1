# SPDX-License-Identifier: Apache-2.0
"""Control flow of `jax.lax` whose bodies may assign variables, and rematerialization. All names are at the root too."""

from phalanx._src.tracing.control_flow import cond, remat, scan, while_loop
from phalanx.errors.names import suggest_names

__all__ = ["cond", "remat", "scan", "while_loop"]

suggest_names(__name__)
