# SPDX-License-Identifier: Apache-2.0
"""Authenticated connections between the processes of a cluster.

In: addresses and the secret of the cluster. Out: connections whose other end has proved that it knows the secret. Whoever
does not know it has no effect, and delays nobody.
"""
