# SPDX-License-Identifier: Apache-2.0
"""Positions of iterators: as text, marked with the size of their data, and those of several workers as one."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx._src.input.sources.base import Facts, State
from phalanx._src.input.wire import exchange_bytes
from phalanx.errors import InputError, shown
from phalanx.typing import PyTree

_BYTES, _DATA = "__bytes__", "data"


def to_text(state: State) -> str:
    """Returns a position as JSON.

    Raises:
      TypeError: the position contains something other than numbers, strings, bytes, lists and dicts.
    """
    return json.dumps(state, default=_encode)


def from_text(text: str) -> State:
    """Returns the position that `to_text` wrote."""
    state: State = json.loads(text, object_hook=_decode)
    return state


def marked(state: State, facts: Facts) -> State:
    """Returns a position that also records the size of its data, which does not depend on how the data is sharded."""
    facts = facts.whole or facts
    known = {"rows": facts.num_records}
    if "batches" in state:
        known |= {"batches": facts.num_batches, "batch_size": facts.batch_size}
    mark = {name: count for name, count in known.items() if count is not None and count >= 0}
    return {**state, _DATA: mark} if mark else state


def unmarked(state: State, facts: Facts) -> State:
    """Returns a position without the record that `marked` added.

    Raises:
      InputError: `state` is not a position, or belongs to other data.
    """
    if not isinstance(state, Mapping):
        raise InputError(
            f"set_state({shown(state, 100)})", "a position must be a dict.", "a state that get_state returned"
        )
    rest = {name: entry for name, entry in state.items() if name != _DATA}
    mark, expected = state.get(_DATA, {}), marked(rest, facts).get(_DATA, {})
    names = sorted(set(mark) & set(expected)) if isinstance(mark, Mapping) else ()
    differ = [
        f"{name}={mark[name]!r} in the position and {expected[name]} in this dataset"
        for name in names
        if mark[name] != expected[name]
    ]
    if differ:
        raise InputError(
            f"set_state({shown(state, 200)})",
            f"the position belongs to other data: {', '.join(differ)}.",
            f"use the dataset of the position; or, if the position is meant for this dataset, del state[{_DATA!r}]",
        )
    return rest


def of_all_workers(state: State, exchange: Callable[[np.ndarray], np.ndarray]) -> State:
    """Combines the positions of all workers into one. A collective call with the same result on every worker.

    Args:
      state: position of this worker.
      exchange: see `Topology.exchange`.
    """
    states = [from_text(text.decode()) for text in exchange_bytes(to_text(state).encode(), exchange)]
    if all("files" in s for s in states):
        # Each file is read by one worker; the others still have it at 0.
        return {"files": [max(each) for each in zip(*(s["files"] for s in states), strict=True)]}
    return {"workers": states}


def of_worker(state: State, index: int, count: int) -> State:
    """Returns one worker's position from the result of `of_all_workers`.

    Raises:
      InputError: the position was saved by another number of workers, and depends on that number.
    """
    if not isinstance(state, Mapping) or "workers" not in state:
        return state
    states: Sequence[Any] = state["workers"]
    if not isinstance(states, list) or set(state) != {"workers"}:
        raise InputError(
            f"set_state({shown(state, 200)})",
            "`workers` must be a list of positions and the only entry.",
            "a state that get_state returned",
        )
    if len(states) != count:
        raise InputError(
            f"set_state of a position of {len(states)} workers",
            f"the number of workers is now {count}, and each reads its own dataset.",
            "AutoShardPolicy.DATA or FILE, whose positions fit any number of workers",
        )
    return states[index]  # type: ignore[no-any-return]


def _encode(value: Any) -> PyTree:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"The position of an iterator must not contain an object of type {type(value).__name__}.")


def _decode(value: dict[str, Any]) -> PyTree:
    return base64.b64decode(value[_BYTES]) if set(value) == {_BYTES} else value
