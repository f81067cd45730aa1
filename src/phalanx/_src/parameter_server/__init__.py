# SPDX-License-Identifier: Apache-2.0
"""Parameter servers: their processes, the variables that they hold, and waiting for their answers."""
