# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: a tree of objects becomes one file, and a file becomes the state of such a tree again.

In: objects with variables, datasets, and numbers. Out: files, and restored objects. A file knows nothing of devices or processes, it
is either whole or absent, and the processes of a group save after the same step. The chief writes it, and the others wait for it
(`checkpoint`, `background`); of variables that span processes, each process writes its own pieces first (`shards`).
"""
