# SPDX-License-Identifier: Apache-2.0
"""Datasets of TensorFlow: `tf.data.Dataset`."""

from typing import Any

from phalanx._src.input.sources.base import AbstractSource, Batching, Facts, Owner
from phalanx._src.input.sources.batches import BatchStream


def convert(dataset: Any, batching: Batching, tf: Any) -> AbstractSource | None:
    """Returns a source that reads `dataset`, or None if it is not a dataset of TensorFlow. See `adapt.Convert`."""
    if not isinstance(dataset, tf.data.Dataset):
        return None
    size, drop = batching.batch_size, batching.drop_remainder
    if size is not None:
        dataset = dataset.batch(size, drop_remainder=drop)
    shapes = [spec.shape for spec in tf.nest.flatten(dataset.element_spec)]
    # A static first dim means `drop_remainder=True`, so no batch is short.
    static = bool(shapes) and all(shape.rank and shape[0] is not None for shape in shapes)
    facts = Facts(
        batch_size=shapes[0][0] if static else size,
        is_full=static or drop,
        num_batches=int(dataset.cardinality()),
        owner=Owner.NOBODY,  # They are views of tensors, to which nobody can write.
    )
    return BatchStream(dataset.as_numpy_iterator, facts, drop_remainder=drop)
