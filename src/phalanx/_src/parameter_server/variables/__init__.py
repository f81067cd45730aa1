# SPDX-License-Identifier: Apache-2.0
"""Variables that live on parameter servers, whole or in parts.

In: gradients of the workers. Out: values. A server applies updates one at a time, and has the only copy of its variables, apart from
snapshots.
"""
