# SPDX-License-Identifier: Apache-2.0
"""Positions of iterators as text, for files and for other workers."""

import base64
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from phalanx.errors import InputError, shown
from phalanx.input.sources.base import Facts, State

_BYTES, _DATA = "__bytes__", "data"


def to_text(state: State) -> str:
    """Returns a position as JSON.

    Raises:
      TypeError: it holds something else than numbers, strings, bytes, lists and dicts.
    """
    return json.dumps(state, default=_encode)


def from_text(text: str) -> State:
    """Returns the position that `to_text` has written."""
    state: State = json.loads(text, object_hook=_decode)
    return state


def save(state: State, path: str | os.PathLike[str]) -> None:
    """Writes a position to a file, whole or not at all."""
    beside = f"{os.fspath(path)}.part"
    with open(beside, "w", encoding="utf-8") as file:
        file.write(to_text(state))
    os.replace(beside, path)


def load(path: str | os.PathLike[str]) -> State:
    """Reads what `save` has written.

    Raises:
      InputError: the file holds something else.
    """
    cause: Exception | None = None
    try:
        with open(path, encoding="utf-8") as file:
            state = from_text(file.read())
        if isinstance(state, Mapping):
            return state
    except (ValueError, RecursionError) as e:
        cause = e
    raise InputError(f"load_state({os.fspath(path)!r})", "it holds no position.", "a file of save_state") from cause


def marked(state: State, facts: Facts) -> State:
    """Returns a position with what is known of the data that it belongs to; nothing depends on how it is divided."""
    known = {"rows": facts.num_records}
    if "batches" in state:
        known |= {"batches": facts.num_batches, "batch_size": facts.batch_size}
    mark = {name: count for name, count in known.items() if count is not None and count >= 0}
    return {**state, _DATA: mark} if mark else state


def unmarked(state: State, facts: Facts) -> State:
    """Returns a position without what `marked` has added to it.

    Raises:
      InputError: it belongs to other data, or is no position.
    """
    if not isinstance(state, Mapping):
        raise InputError(f"set_state({shown(state, 100)})", "a position is a dict.", "a state that get_state returned")
    rest = {name: entry for name, entry in state.items() if name != _DATA}
    mark, own = state.get(_DATA, {}), marked(rest, facts).get(_DATA, {})
    names = sorted(set(mark) & set(own)) if isinstance(mark, Mapping) else ()
    differ = [f"{name}={mark[name]!r} there and {own[name]} here" for name in names if mark[name] != own[name]]
    if differ:
        raise InputError(
            f"set_state({shown(state, 200)})",
            f"it is a position of other data: {', '.join(differ)}.",
            f"the dataset whose position it is; or, if the position is meant for this one, del state[{_DATA!r}]",
        )
    return rest


def of_all_workers(state: State, exchange: Callable[[np.ndarray], np.ndarray]) -> State:
    """Makes one position of those of all workers; every worker calls it and gets the same.

    Args:
      state: this worker's.
      exchange: see `Topology.exchange`.
    """
    states = [from_text(text.decode()) for text in exchange_bytes(to_text(state).encode(), exchange)]
    if all("files" in s for s in states):
        return {"files": [max(each) for each in zip(*(s["files"] for s in states), strict=True)]}
    return {"workers": states}


def exchange_bytes(own: bytes, exchange: Callable[[np.ndarray], np.ndarray]) -> list[bytes]:
    """Returns what each worker told; all must call it.

    Args:
      own: what this worker tells.
      exchange: see `Topology.exchange`.
    """
    lengths = exchange(np.array([len(own)]))[:, 0]
    padded = np.zeros(lengths.max(), np.uint8)
    padded[: len(own)] = np.frombuffer(own, np.uint8)
    return [row[:n].tobytes() for row, n in zip(exchange(padded), lengths, strict=True)]


def of_worker(state: State, index: int, count: int) -> State:
    """Returns one worker's part of what `of_all_workers` returned.

    Raises:
      InputError: it is of another number of workers, and the position is not one that other workers could take over.
    """
    if not isinstance(state, Mapping) or "workers" not in state:
        return state
    states: Sequence[Any] = state["workers"]
    if not isinstance(states, list) or set(state) != {"workers"}:
        raise InputError(
            f"set_state({shown(state, 200)})",
            "`workers` is a list of positions, alone.",
            "a state that get_state returned",
        )
    if len(states) != count:
        raise InputError(
            f"set_state of {len(states)} workers",
            f"there are {count} now, and each has a dataset of its own.",
            "AutoShardPolicy.DATA or FILE, whose positions any number of workers can take over",
        )
    return states[index]  # type: ignore[no-any-return]


def _encode(value: Any) -> Any:
    if isinstance(value, bytes):
        return {_BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.integer):
        return int(value)
    raise TypeError(f"{type(value).__name__} in the position of an iterator")


def _decode(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[_BYTES]) if set(value) == {_BYTES} else value
