# SPDX-License-Identifier: Apache-2.0
"""Which worker this process is, where it is one. Workers that look here import no Keras."""

from phalanx.errors import ContextError

worker_index: int | None = None


def experimental_get_current_worker_index() -> int:
    """Returns which worker this is, from 0. Must be called in a dataset function, or a function for per-worker values.

    Raises:
      ContextError: this process is no worker.

    Source: tf.distribute.coordinator.experimental_get_current_worker_index.
    """
    if worker_index is None:
        raise ContextError(
            "experimental_get_current_worker_index()",
            "this process is no worker, and a step is one program for all workers.",
            "call it in dataset_fn, or pass coordinator.create_per_worker_values(experimental_get_current_worker_index)",
        )
    return worker_index
