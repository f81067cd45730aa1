# SPDX-License-Identifier: Apache-2.0
"""Datasets of one's own, and how they are divided between workers."""

from phalanx._src.input.sharding import WorkerShard
from phalanx._src.input.sources.base import INFINITE as INFINITE_CARDINALITY
from phalanx._src.input.sources.base import UNKNOWN as UNKNOWN_CARDINALITY
from phalanx._src.input.sources.files import from_files
from phalanx._src.options import AutoShardPolicy
from phalanx.errors.names import suggest_names

__all__ = ["INFINITE_CARDINALITY", "UNKNOWN_CARDINALITY", "AutoShardPolicy", "WorkerShard", "from_files"]

suggest_names(__name__)
