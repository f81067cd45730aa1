# SPDX-License-Identifier: Apache-2.0
"""The index of the worker that runs in this process. In its own module, so that workers do not import Keras for it."""

from phalanx.errors import ContextError

worker_index: int | None = None


def experimental_get_current_worker_index() -> int:
    """Returns the index of this worker, from 0.

    Must be called in a dataset function, or in a function for `create_per_worker_values`.

    Raises:
      ContextError: this process is not a worker.

    Source: tf.distribute.coordinator.experimental_get_current_worker_index.
    """
    if worker_index is None:
        raise ContextError(
            "experimental_get_current_worker_index()",
            "this process is not a worker. Steps do not run in a worker's Python either, but as one program for all.",
            "call it in dataset_fn, or pass coordinator.create_per_worker_values(experimental_get_current_worker_index)",
        )
    return worker_index
