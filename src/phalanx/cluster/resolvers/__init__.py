# SPDX-License-Identifier: Apache-2.0
"""The resolvers, one file each: how a process finds out which cluster it belongs to."""
