# SPDX-License-Identifier: Apache-2.0
"""The strategies: each one decides where variables live and where replicas run, in its own file.

In: devices or a cluster, and a step of the user. Out: a topology, the place of each new variable, and calls of programs. `base` has the verbs of all
strategies, such as `run`, `reduce` and `gather`, and a strategy changes the places behind them.
"""

# Importing any strategy must also register the default strategy, which is current outside all scopes.
from phalanx._src.strategies import single as single
