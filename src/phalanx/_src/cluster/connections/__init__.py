# SPDX-License-Identifier: Apache-2.0
"""Authenticated connections between the processes of a cluster.

In: addresses and the secret of the cluster. Out: connections whose peer has proved that it knows the secret. A stranger has no
effect and delays nobody.
"""
