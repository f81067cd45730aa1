# SPDX-License-Identifier: Apache-2.0
"""The public names of `tf.summary`: records values of a training run, even inside compiled steps."""

from phalanx.errors.names import suggest_names
from phalanx.summary import experimental, trackers
from phalanx.summary.ops import audio, histogram, image, record_if, scalar, should_record_summaries, text, write
from phalanx.summary.traces import graph, trace_export, trace_off, trace_on
from phalanx.summary.writer import SummaryWriter, create_file_writer, create_noop_writer, create_tracker_writer, flush

__all__ = [
    "SummaryWriter",
    "audio",
    "create_file_writer",
    "create_noop_writer",
    "create_tracker_writer",
    "experimental",
    "flush",
    "graph",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "should_record_summaries",
    "text",
    "trace_export",
    "trace_off",
    "trace_on",
    "trackers",
    "write",
]

suggest_names(__name__)
