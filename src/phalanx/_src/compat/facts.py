# SPDX-License-Identifier: Apache-2.0
"""What Phalanx knows about variables and layers. It is kept next to them, because Keras objects get no attributes of ours."""

import weakref
from dataclasses import dataclass
from typing import Any

from keras import Variable
from keras.initializers import Initializer

from phalanx.errors.frames import Place


@dataclass(slots=True)
class ObjectFacts:
    """The facts about one variable, or about one layer.

    Attributes:
      maker: number of the strategy in whose scope it was created. None outside all scopes.
      place: line of user code that created it while a function was traced. None for other variables.
      is_of_metric: whether a metric created it.
      is_residual: whether it holds what the replicas have not sent.
      is_hollow: whether it was created without a value.
      is_global_seed: whether it is the state of a global generator that a traced step has used.
      initializer: initializer of the rows of a table. None for other variables.
      outer: variable whose value is read outside the replicas instead of the mean of the replicas' values.
      reference: variable that a slot belongs to. Weak, so that a slot does not keep a dropped model alive.
      layout_path: path that decides the sharding of a slot: the path of the trained variable. None for its own path.
      is_elementwise: whether an update of a slot, and of its variable, uses each element of both without the others.
      is_scaled: whether a loss-scaling optimizer applies this one, which needs all gradients at once.
      chosen_name: name that a program or a file has given a layer, if it looks as if Keras had numbered it.
      architecture: configuration of a model as JSON. Empty if it has none, None if it was not asked yet.
    """

    maker: int | None = None
    place: Place | None = None
    is_of_metric: bool = False
    is_residual: bool = False
    is_hollow: bool = False
    is_global_seed: bool = False
    initializer: Initializer | None = None
    outer: Variable | None = None
    reference: weakref.ref[Variable] | None = None
    layout_path: str | None = None
    is_elementwise: bool = False
    is_scaled: bool = False
    chosen_name: str | None = None
    architecture: str | None = None


_NOTHING = ObjectFacts()
# By id, because variables compare by their values.
_facts: dict[int, tuple[weakref.ref[Any], ObjectFacts]] = {}


def facts_of(owner: object) -> ObjectFacts:
    """Returns the facts about a variable or a layer, to read them."""
    known = _facts.get(id(owner))
    # A copy of a variable, and a variable at the address of one that is being collected, have no facts.
    return known[1] if known is not None and known[0]() is owner else _NOTHING


def note_facts(owner: object) -> ObjectFacts:
    """Returns the facts about a variable or a layer, to add to them."""
    facts = facts_of(owner)
    if facts is _NOTHING:
        facts, key = ObjectFacts(), id(owner)
        _facts[key] = (weakref.ref(owner, lambda reference: _forget(key, reference)), facts)
    return facts


def _forget(key: int, reference: weakref.ref[Any]) -> None:
    if (known := _facts.get(key)) is not None and known[0] is reference:
        del _facts[key]
