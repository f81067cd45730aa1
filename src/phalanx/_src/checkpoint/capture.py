# SPDX-License-Identifier: Apache-2.0
"""Copies the objects of a program into a snapshot, and computes its size."""

import json
import math
from typing import Any

import keras
import numpy as np

from phalanx._src import compat
from phalanx._src.checkpoint import text
from phalanx._src.checkpoint.names import Holder, Names, Naming, is_numbered, is_owner, refuse_name
from phalanx._src.checkpoint.objects import Snapshot, kind_of_optimizer, part_of, refuse_object
from phalanx._src.compat import Variable
from phalanx._src.compat.facts import facts_of, note_facts
from phalanx.errors import PhalanxError


def capture(objects: Holder, snapshot: Snapshot) -> None:
    """Copies all objects into a snapshot. An object with several paths is saved once, under its shortest path.

    Raises:
      CheckpointError: an object cannot be saved.
    """
    first: dict[int, str] = {id(objects): ""}
    new: set[int] = set()

    def enter(owner: Any, path: str) -> bool:
        is_new = id(owner) in new
        new.discard(id(owner))
        return is_new

    for path, value, owner, *_ in Names(Naming()).below([(objects, "")], enter):
        if is_owner(value) or isinstance(value, Variable):
            if id(value) in first:
                if first[id(value)] != path:
                    snapshot.aliases[path] = first[id(value)]
                continue
            first[id(value)] = path
            new.add(id(value))
        if is_owner(value):
            # An inner model is a part of the architecture of the outer one.
            if owner is objects and isinstance(value, keras.Model) and (architecture := _architecture(value)):
                snapshot.models[path] = architecture
            if (kind := kind_of_optimizer(value)) is not None:
                snapshot.optimizers[path] = kind
                snapshot.accumulation[path] = compat.accumulation_steps(value) or 1
            # Other paths contain the name that the user has chosen.
            if is_numbered(path) and (name := compat.chosen_name(value)) is not None:
                snapshot.chosen[path] = name
            continue
        part = part_of(value)
        if part is None:
            raise refuse_object(path, value)
        if path in snapshot.taken:
            raise refuse_name(path)
        snapshot.taken.add(path)
        try:
            part.save(path, snapshot)
        except PhalanxError:
            raise
        except Exception as e:
            raise refuse_object(path, value, e) from e


def size_of(objects: Holder) -> int:
    """Returns the bytes of the arrays that a checkpoint of some objects contains."""
    sizes: dict[int, int] = {}
    met: set[int] = set()

    def enter(owner: Any, path: str) -> bool:
        is_new = id(owner) not in met
        met.add(id(owner))
        return is_new

    for _, value, *_ in Names(Naming()).below([(objects, "")], enter):
        if isinstance(value, Variable):
            sizes[id(value)] = math.prod(value.shape) * np.dtype(compat.dtype_of(value)).itemsize
        elif text.is_array(value):
            sizes[id(value)] = value.nbytes
    return sum(sizes.values())


def _architecture(model: keras.Model) -> str | None:
    """Returns the configuration of a model as JSON, without its optimizer. None if the model has none, or no variables yet."""
    if not model.built:
        return None
    if (architecture := facts_of(model).architecture) is None:
        try:
            config = json.loads(model.to_json())
        except Exception:
            # Whatever `get_config` of a model raises, its variables can be saved.
            config = None
        # Empty for none, so that the next save does not try again.
        architecture = "" if config is None else json.dumps(config | {"compile_config": None})
        note_facts(model).architecture = architecture
    return architecture or None
