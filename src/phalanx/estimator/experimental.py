# SPDX-License-Identifier: Apache-2.0
"""The public names of `tf.estimator.experimental`."""

from phalanx.errors.names import suggest_names
from phalanx.estimator.early_stopping import (
    make_early_stopping_hook,
    read_eval_metrics,
    stop_if_higher_hook,
    stop_if_lower_hook,
    stop_if_no_decrease_hook,
    stop_if_no_increase_hook,
)
from phalanx.estimator.missing import INSTEAD

__all__ = [
    "make_early_stopping_hook",
    "read_eval_metrics",
    "stop_if_higher_hook",
    "stop_if_lower_hook",
    "stop_if_no_decrease_hook",
    "stop_if_no_increase_hook",
]

suggest_names(__name__, INSTEAD)
