# SPDX-License-Identifier: Apache-2.0
"""The public names of `tf.summary`: records values of a training for TensorBoard, also inside compiled steps."""

from phalanx.summary import experimental
from phalanx.summary.ops import (
    audio,
    histogram,
    image,
    record_if,
    scalar,
    should_record_summaries,
    text,
    write,
)
from phalanx.summary.writer import SummaryWriter, create_file_writer, create_noop_writer, flush

__all__ = [
    "SummaryWriter",
    "audio",
    "create_file_writer",
    "create_noop_writer",
    "experimental",
    "flush",
    "histogram",
    "image",
    "record_if",
    "scalar",
    "should_record_summaries",
    "text",
    "write",
]
