# SPDX-License-Identifier: Apache-2.0
"""The input pipeline: from a user's dataset to batches on the devices of the replicas.

In: any dataset (`sources`). Out: batches with one part per replica (`feed`, `placement`), and a position from which another process can continue
(`state`). Each row is in one part. A batch does not change after it was handed over, and is copied at most once. Processes that read different rows agree
before each step, on the end of the data and on errors (`lockstep`).
"""
