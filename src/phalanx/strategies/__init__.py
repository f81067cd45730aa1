# SPDX-License-Identifier: Apache-2.0
"""Where variables live and where replicas run: one file a strategy, over `base`."""
