# SPDX-License-Identifier: Apache-2.0
"""Where variables live and where replicas run: one file per strategy, over `base`."""

# It registers the default strategy, which is current outside all scopes, whichever strategy is imported.
from phalanx.strategies import single as single
