# SPDX-License-Identifier: Apache-2.0
"""The strategies: each one decides where variables live and where replicas run, in its own file."""

# Importing any strategy must also register the default strategy, which is current outside all scopes.
from phalanx._src.strategies import single as single
