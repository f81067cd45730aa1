# SPDX-License-Identifier: Apache-2.0
"""Communication between the replicas of one program."""
