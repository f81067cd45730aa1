# SPDX-License-Identifier: Apache-2.0
"""Checkpoints of a graph: `model.ckpt-<step>` with the variables by name."""

import logging
import os
from collections.abc import Mapping
from typing import Any, final

import keras

from phalanx._src.checkpoint.checkpoint import of_chief
from phalanx.errors import CheckpointMismatchError
from phalanx.estimator.loop.graph import GLOBAL_STEP, Graph
from phalanx.train import Checkpoint, CheckpointManager, load_checkpoint

# The prefix of tf.estimator. Scripts that look for `model.ckpt-<step>` find checkpoints by it.
NAME = "model.ckpt"
_log = logging.getLogger("phalanx")


@final
class Saver:
    """Saves the variables of a graph in numbered files of a folder. The number is the training step.

    Args:
      graph: the graph.
      directory: the folder.
      max_to_keep: number of checkpoints to keep. None or 0 for all.
      keep_every_n_hours: also keep one checkpoint per this many hours, even if `max_to_keep` would delete it.
      name: the beginning of the file names.
    """

    def __init__(
        self,
        graph: Graph,
        directory: str,
        max_to_keep: int | None = 5,
        keep_every_n_hours: float | None = None,
        name: str = NAME,
    ) -> None:
        # 0 keeps all in TensorFlow's Saver, None does so in CheckpointManager.
        self._graph, checkpoint = graph, checkpoint_of(graph)
        self._manager = CheckpointManager(
            checkpoint, directory, max_to_keep or None, keep_every_n_hours, checkpoint_name=name
        )
        self._directory, self._name = directory, name

    def save(self, step: int) -> None:
        """Saves the variables, unless they are those of the checkpoint of this step."""
        path = os.path.join(self._directory, f"{self._name}-{step}")
        # The step that was just restored is on the disk already: a training run that stops at once writes nothing.
        if path != self._graph.checkpoint:
            with self._graph.strategy.scope():
                self._manager.save(step)
            self._graph.checkpoint = path
            _log.info("Saved step %d as %s.", step, path)

    def sync(self) -> None:
        """Waits until the file of the last save is on the disk."""
        self._manager.sync()

    def meet(self) -> None:
        """Waits until the file is there for all processes that train. All of them must call it."""
        self.sync()
        with self._graph.strategy.scope():
            of_chief("")


def checkpoint_of(graph: Graph) -> Checkpoint:
    """Returns the object that saves and restores the variables of a graph."""
    scaffold = graph.spec.scaffold
    if scaffold is not None and scaffold.saver is not None:
        return scaffold.saver
    return Checkpoint(_nested(graph.variables))


def _nested(variables: Mapping[str, keras.Variable]) -> dict[str, Any]:
    """Returns variables in dicts of dicts by the steps of their names, so that a checkpoint has them under these names.

    A key with a "/" is one step in a checkpoint, and is written with another sign for it.
    """
    root: dict[str, Any] = {}
    # In this order, a variable comes before those whose names begin with its name. Those keep the rest of their names in one step.
    for name in sorted(variables):
        folder, steps = root, name.split("/")
        while len(steps) > 1 and isinstance(inner := folder.setdefault(steps[0], {}), dict):
            folder, steps = inner, steps[1:]
        folder["/".join(steps)] = variables[name]
    return root


def restore(graph: Graph, path: str) -> None:
    """Restores the variables of a graph from a checkpoint.

    Raises:
      CheckpointMismatchError: the checkpoint lacks a variable of the graph.
    """
    with graph.strategy.scope():
        status = checkpoint_of(graph).restore(path)
    try:
        # Variables in the checkpoint that the graph lacks are fine: a prediction needs no state of the optimizer.
        status.assert_existing_objects_matched()
    except CheckpointMismatchError as e:
        raise CheckpointMismatchError(
            f"the checkpoint {path} in mode {graph.mode!r}",
            f"it lacks variables that the model_fn creates. {e.found}",
            "the model_fn that has saved it; or another model_dir",
        ) from e
    graph.checkpoint = path
    _log.info("Restored %s.", path)


def names_in(path: str) -> list[str]:
    """Returns the names of the variables in a checkpoint."""
    # save_counter belongs to tf.train.Checkpoint. Checkpoints of tf.estimator do not have it.
    return sorted(set(load_checkpoint(path).get_variable_to_shape_map()) - {"save_counter"})


def step_in(path: str | None) -> int:
    """Returns the number of steps in a checkpoint, or 0."""
    reader = None if path is None else load_checkpoint(path)
    return int(reader.get_tensor(GLOBAL_STEP)) if reader is not None and reader.has_tensor(GLOBAL_STEP) else 0
