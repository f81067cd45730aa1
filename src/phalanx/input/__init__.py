# SPDX-License-Identifier: Apache-2.0
"""How data reaches the replicas."""
