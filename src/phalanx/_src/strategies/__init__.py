# SPDX-License-Identifier: Apache-2.0
"""The strategies: each one decides where variables live and where replicas run, in a file of its own."""

# Importing any strategy must also register the default strategy, which is current outside all scopes.
from phalanx._src.strategies import single as single
