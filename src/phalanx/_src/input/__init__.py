# SPDX-License-Identifier: Apache-2.0
"""The input pipeline: from a user's dataset to batches on the devices of the replicas."""
