# SPDX-License-Identifier: Apache-2.0
"""First values of variables from another checkpoint."""

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, final

import keras
import numpy as np

from phalanx.errors import CheckpointMismatchError, InvalidArgumentError, arguments, shown
from phalanx.estimator.loop.graph import Graph
from phalanx.train import CheckpointReader, load_checkpoint

_log = logging.getLogger("phalanx")


@final
@dataclass(frozen=True)
class WarmStartSettings:
    """Chooses the variables that begin with the values of another checkpoint. May be created in any context.

    Args:
      ckpt_to_initialize_from: a checkpoint, or a folder, whose latest checkpoint counts.
      vars_to_warm_start: a regular expression for the names of trainable variables, or a list of such expressions for the names
        of all variables. `".*"` for all trainable variables.
      var_name_to_vocab_info: must be None: no variable is mapped from one vocabulary to another.
      var_name_to_prev_var_name: dict from names of variables to their names in the checkpoint.

    Raises:
      InvalidArgumentError: an argument has the wrong type, or is not supported.

    Source: tf.estimator.WarmStartSettings.

    Example:
      >>> import phalanx.estimator as estimator
      >>> settings = estimator.WarmStartSettings("other_model", vars_to_warm_start="dense.*")
    """

    ckpt_to_initialize_from: str
    vars_to_warm_start: str | Sequence[str] = ".*"
    var_name_to_vocab_info: None = None
    var_name_to_prev_var_name: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        arguments.path("ckpt_to_initialize_from", self.ckpt_to_initialize_from)
        if self.var_name_to_vocab_info:
            raise InvalidArgumentError(
                f"var_name_to_vocab_info={shown(self.var_name_to_vocab_info)}",
                "rows of a variable are not mapped from one vocabulary to another.",
                "assign the rows in a hook's after_create_session",
            )
        patterns = self.vars_to_warm_start
        for pattern in patterns if isinstance(patterns, (list, tuple)) else [patterns]:
            # Compiled here only to be checked: a wrong expression would otherwise
            # fail after the model function was traced.
            _compiled(pattern)
        if not isinstance(self.var_name_to_prev_var_name, (Mapping, NoneType)):
            raise InvalidArgumentError(
                f"var_name_to_prev_var_name={shown(self.var_name_to_prev_var_name)}",
                "must be a dict from names to names.",
                'var_name_to_prev_var_name={"new/kernel": "old/kernel"}',
            )

    def warm_start(self, graph: Graph) -> None:
        """Assigns the values of the checkpoint to the variables of a graph.

        Raises:
          CheckpointMismatchError: the checkpoint lacks a variable, or has another shape of it.
        """
        reader = load_checkpoint(self.ckpt_to_initialize_from)
        # Variables exist only after the model function was traced, so this runs between the trace and the first step.
        for name, variable in graph.variables.items():
            if self._is_meant(name, variable):
                variable.assign(self._value(reader, name, variable))
                _log.info("Warm-starting %s from %s", name, self.ckpt_to_initialize_from)

    def _is_meant(self, name: str, variable: keras.Variable) -> bool:
        patterns = self.vars_to_warm_start
        if isinstance(patterns, str):
            # A string selects trainable variables, a list all variables: the rule
            # of warm_starting_util.py, kept on purpose.
            return variable.trainable and _compiled(patterns).match(name) is not None
        return any(_compiled(pattern).match(name) is not None for pattern in patterns)

    def _value(self, reader: CheckpointReader, name: str, variable: keras.Variable) -> np.ndarray:
        old = (self.var_name_to_prev_var_name or {}).get(name, name)
        shapes = reader.get_variable_to_shape_map()
        # A shape that broadcasts would be assigned without an error, and train something else.
        if shapes.get(old) != list(variable.shape):
            problem = f"has the shape {shapes[old]}" if old in shapes else f"is not there; it contains {sorted(shapes)}"
            raise CheckpointMismatchError(
                f"a warm start of {name!r} from {self.ckpt_to_initialize_from}",
                f"{old!r} {problem}. The variable has the shape {list(variable.shape)}.",
                "vars_to_warm_start, matching only variables that have equal shapes",
            )
        return reader.get_tensor(old)


def _compiled(pattern: Any) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, TypeError) as e:
        raise InvalidArgumentError(
            f"vars_to_warm_start={shown(pattern)}", f"is not a regular expression: {e}.", 'vars_to_warm_start=".*"'
        ) from e
