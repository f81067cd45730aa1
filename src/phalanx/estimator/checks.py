# SPDX-License-Identifier: Apache-2.0
"""Checks of what an `Estimator` is created with."""

import inspect
import logging
import tempfile
from collections.abc import Callable
from typing import Any

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.estimator.config import RunConfig
from phalanx.estimator.loop.warm_start import WarmStartSettings

_log = logging.getLogger("phalanx")

_PARAMETERS = ("features", "labels", "mode", "params", "config")


def parameters_of(model_fn: Callable[..., Any], params: object) -> set[str]:
    """Returns the names of the parameters of a model function.

    Raises:
      InvalidArgumentError: a parameter is unknown or missing.
    """
    names = [p.name for p in inspect.signature(model_fn).parameters.values()]
    # A misspelt parameter would otherwise get no value, and fail when the model function is called.
    unknown = [name for name in names if name not in _PARAMETERS]
    needed = ["features", *(["params"] if params is not None else [])]
    missing = [name for name in needed if name not in names]
    if unknown or missing:
        problem = f"it has the parameter {unknown[0]!r}" if unknown else f"it lacks the parameter {missing[0]!r}"
        raise InvalidArgumentError(
            f"model_fn={shown(model_fn)} with the parameters {names}",
            f"{problem}; the parameters are {_PARAMETERS}.",
            "def model_fn(features, labels, mode, params)",
        )
    return set(names)


def model_dir_of(model_dir: object, config: RunConfig) -> str:
    """Returns the folder of an Estimator.

    Raises:
      InvalidArgumentError: the config names a different folder, or the processes of a cluster have no folder.
    """
    if model_dir is not None:
        path = arguments.local_path("model_dir", model_dir)
        # Both may be given if they agree, as in tf.estimator, where scripts pass the flag to both.
        if config.model_dir is not None and str(config.model_dir) != path:
            raise InvalidArgumentError(
                f"model_dir={path!r}", f"the config has model_dir={str(config.model_dir)!r}.", "only one of them"
            )
        return path
    if config.model_dir is not None:
        return str(config.model_dir)
    if config.num_worker_replicas != 1 or config.num_ps_replicas:
        raise InvalidArgumentError(
            "an Estimator without model_dir in a cluster",
            "all processes need the same folder.",
            'model_dir="shared/model"',
        )
    # Not deleted at the end: the user may still want the model. tf.estimator keeps it and warns, too.
    folder = tempfile.mkdtemp()
    _log.warning("Using a temporary folder as model directory: %s", folder)
    return folder


def settings_of(warm_start_from: object) -> WarmStartSettings | None:
    """Returns the settings of a warm start from settings or a path."""
    if warm_start_from is None or isinstance(warm_start_from, WarmStartSettings):
        return warm_start_from
    return WarmStartSettings(arguments.path("warm_start_from", warm_start_from))
