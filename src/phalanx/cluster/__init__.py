# SPDX-License-Identifier: Apache-2.0
"""What a process knows about its cluster. Standard library only."""
