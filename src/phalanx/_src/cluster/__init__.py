# SPDX-License-Identifier: Apache-2.0
"""Cluster description, handshake, and failure detection. Uses the standard library only.

In: the environment, addresses and a token. Out: who takes part (`spec`, `resolvers`), connections whose other end has proved that it knows the token
(`connections`), and a verdict if a process dies or stalls (`watch`). No other room listens or connects, and `untrusted` opens what other users may have
written.
"""
