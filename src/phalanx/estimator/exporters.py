# SPDX-License-Identifier: Apache-2.0
"""Exporters: what `train_and_evaluate` does with a model after an evaluation."""

import inspect
import logging
import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, final

from typing_extensions import override

from phalanx.errors import InvalidArgumentError, arguments, shown
from phalanx.estimator.estimator import Estimator
from phalanx.summary import events

_log = logging.getLogger("phalanx")
_RECEIVER_HINT = "serving_input_receiver_fn=estimator.export.build_raw_serving_input_receiver_fn(features)"


class Exporter(ABC):
    """Exports a model after an evaluation. A base class; may be created in any context.

    Source: tf.estimator.Exporter.

    Example:
      >>> import phalanx.estimator as estimator
      >>> class Printer(estimator.Exporter):
      ...     name = "printer"
      ...     def export(self, estimator, export_path, checkpoint_path, eval_result, is_the_final_export):
      ...         print(checkpoint_path, eval_result["loss"])
    """

    @property
    @abstractmethod
    def name(self) -> str:
        """The name of the exporter and of its folder."""

    @abstractmethod
    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: dict[str, Any],
        is_the_final_export: bool,
    ) -> object:
        """Exports the model, if it wants to.

        Args:
          estimator: the Estimator.
          export_path: folder for the exports.
          checkpoint_path: the checkpoint that was evaluated.
          eval_result: the metrics.
          is_the_final_export: whether the training run has ended.

        Returns:
          The path of the export, or None.
        """


class _SavedModelExporter(Exporter):
    """An exporter that calls `Estimator.export_saved_model`. Subclasses decide after which evaluations."""

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], object],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        if not isinstance(name, str) or not name:
            raise InvalidArgumentError(f"name={shown(name)}", "must be a str, not empty.", 'name="exporter"')
        arguments.function("serving_input_receiver_fn", serving_input_receiver_fn, _RECEIVER_HINT)
        if exports_to_keep is not None:
            arguments.integer("exports_to_keep", exports_to_keep)
        self._name, self._receiver_fn = name, serving_input_receiver_fn
        self._assets, self._as_text, self._keep = assets_extra, as_text, exports_to_keep

    @property
    @override
    def name(self) -> str:
        """The name of the exporter and of its folder."""
        return self._name

    @override
    def export(
        self,
        estimator: Estimator,
        export_path: str,
        checkpoint_path: str,
        eval_result: dict[str, Any],
        is_the_final_export: bool,
    ) -> str | None:
        """Exports the model if this evaluation calls for it, and deletes old exports. See `Exporter.export`."""
        if not self._is_due(estimator, export_path, eval_result, is_the_final_export):
            return None
        path = estimator.export_saved_model(
            export_path, self._receiver_fn, self._assets, self._as_text, checkpoint_path
        )
        if self._keep is not None:
            numbers = sorted(int(name) for name in os.listdir(export_path) if arguments.is_number(name))
            for number in numbers[: -self._keep]:
                # Another process may be reading an old export: what cannot be deleted now is deleted after the next export.
                shutil.rmtree(os.path.join(export_path, str(number)), ignore_errors=True)
        return path

    @abstractmethod
    def _is_due(
        self, estimator: Estimator, export_path: str, eval_result: dict[str, Any], is_the_final_export: bool
    ) -> bool:
        """Returns whether to export after this evaluation."""


@final
class LatestExporter(_SavedModelExporter):
    """Exports after each evaluation. May be created in any context.

    Args:
      name: name of the exporter and of its folder.
      serving_input_receiver_fn: function that returns a `ServingInputReceiver`.
      assets_extra: dict from paths in `assets.extra` to files to copy there.
      as_text: whether to write the text of the program too.
      exports_to_keep: number of exports to keep. None for all.

    Raises:
      InvalidArgumentError: an argument has the wrong type.

    Source: tf.estimator.LatestExporter.

    Example:
      >>> import numpy as np
      >>> import phalanx.estimator as estimator
      >>> receiver_fn = estimator.export.build_raw_serving_input_receiver_fn({"x": np.zeros((1, 4), "float32")})
      >>> exporter = estimator.LatestExporter("latest", receiver_fn)
    """

    @override
    def _is_due(
        self, estimator: Estimator, export_path: str, eval_result: dict[str, Any], is_the_final_export: bool
    ) -> bool:
        return True


@final
class FinalExporter(_SavedModelExporter):
    """Exports after the last evaluation. May be created in any context.

    Args:
      name: name of the exporter and of its folder.
      serving_input_receiver_fn: function that returns a `ServingInputReceiver`.
      assets_extra: dict from paths in `assets.extra` to files to copy there.
      as_text: whether to write the text of the program too.

    Raises:
      InvalidArgumentError: an argument has the wrong type.

    Source: tf.estimator.FinalExporter.

    Example:
      >>> import numpy as np
      >>> import phalanx.estimator as estimator
      >>> receiver_fn = estimator.export.build_raw_serving_input_receiver_fn({"x": np.zeros((1, 4), "float32")})
      >>> exporter = estimator.FinalExporter("final", receiver_fn)
    """

    def __init__(
        self,
        name: str,
        serving_input_receiver_fn: Callable[[], Any],
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
    ) -> None:
        # One training run makes one final export, so there is nothing to delete. As in tf.estimator, no argument asks for it.
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep=None)

    @override
    def _is_due(
        self, estimator: Estimator, export_path: str, eval_result: dict[str, Any], is_the_final_export: bool
    ) -> bool:
        return is_the_final_export


def _loss_smaller(best_eval_result: dict[str, Any], current_eval_result: dict[str, Any]) -> bool:
    """Returns whether the loss has become smaller."""
    return float(current_eval_result["loss"]) < float(best_eval_result["loss"])


def _parameters_of(fn: Callable[..., object]) -> set[str]:
    try:
        return set(inspect.signature(fn).parameters)
    except (TypeError, ValueError):  # No function, or one of C.
        return set()


@final
class BestExporter(_SavedModelExporter):
    """Exports after each evaluation that is better than all before. May be created in any context.

    A program that is started again reads the earlier evaluations from their summaries.

    Args:
      name: name of the exporter and of its folder.
      serving_input_receiver_fn: function that returns a `ServingInputReceiver`.
      event_file_pattern: files with the summaries of evaluations, in the model's folder. None to forget earlier ones.
      compare_fn: function of `best_eval_result` and `current_eval_result`. Returns whether the current one is better. By default
        a smaller loss is better.
      assets_extra: dict from paths in `assets.extra` to files to copy there.
      as_text: whether to write the text of the program too.
      exports_to_keep: number of exports to keep. None for all.

    Raises:
      InvalidArgumentError: an argument has the wrong type.

    Source: tf.estimator.BestExporter.

    Example:
      >>> import numpy as np
      >>> import phalanx.estimator as estimator
      >>> receiver_fn = estimator.export.build_raw_serving_input_receiver_fn({"x": np.zeros((1, 4), "float32")})
      >>> exporter = estimator.BestExporter("best", receiver_fn)
    """

    def __init__(
        self,
        name: str = "best_exporter",
        serving_input_receiver_fn: Callable[[], Any] | None = None,
        event_file_pattern: str | None = "eval/*.tfevents.*",
        compare_fn: Callable[..., bool] = _loss_smaller,
        assets_extra: Mapping[str, str] | None = None,
        as_text: bool = False,
        exports_to_keep: int | None = 5,
    ) -> None:
        # tf.estimator gives `name` a default and thereby also this argument, although no export works without it.
        arguments.function("serving_input_receiver_fn", serving_input_receiver_fn, _RECEIVER_HINT)
        assert serving_input_receiver_fn is not None
        super().__init__(name, serving_input_receiver_fn, assets_extra, as_text, exports_to_keep)
        parameters = {"best_eval_result", "current_eval_result"}
        # By name, as exporter.py of tf.estimator checks it: the two results are easy to swap by position.
        if _parameters_of(compare_fn) != parameters:
            raise InvalidArgumentError(
                f"compare_fn={shown(compare_fn)}",
                "must be a function of best_eval_result and current_eval_result.",
                "def compare_fn(best_eval_result, current_eval_result)",
            )
        if event_file_pattern is not None:
            arguments.path("event_file_pattern", event_file_pattern)
        self._compare, self._pattern = compare_fn, event_file_pattern
        self._best: dict[str, Any] | None = None
        self._model_dir: str | None = None

    @override
    def _is_due(
        self, estimator: Estimator, export_path: str, eval_result: dict[str, Any], is_the_final_export: bool
    ) -> bool:
        if self._model_dir != estimator.model_dir:
            self._model_dir = estimator.model_dir
            self._best = self._best_in(os.path.join(estimator.model_dir, self._pattern)) if self._pattern else None
            # The evaluation of this call has been written already. Without an export, it is the best.
            if not os.path.isdir(export_path):
                self._best = None
        if self._best is not None and not self._compare(best_eval_result=self._best, current_eval_result=eval_result):
            return False
        _log.info("Exporting the best model so far.")
        self._best = eval_result
        return True

    def _best_in(self, pattern: str) -> dict[str, Any] | None:
        """Returns the best of the evaluations in files, or None."""
        best: dict[str, Any] | None = None
        # Event files are the only memory of a job that was restarted. tf.estimator reads them for the same reason.
        for result in events.scalars_in(pattern).values():
            if "loss" in result and (best is None or self._compare(best_eval_result=best, current_eval_result=result)):
                best = dict(result)
        return best
