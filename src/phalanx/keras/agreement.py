# SPDX-License-Identifier: Apache-2.0
"""What the processes of `fit` and `evaluate` agree on: when to stop, and that their callbacks steer all of them alike."""

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence

import keras
import numpy as np
from keras.callbacks import Callback

from phalanx._src import compat
from phalanx._src.checkpoint import text
from phalanx._src.cluster.watch import watch
from phalanx._src.input.wire import exchange_bytes
from phalanx._src.mesh.topology import Topology
from phalanx.errors import DivergenceError, listed, shown
from phalanx.keras.callbacks import digest_of, has_state
from phalanx.typing import PyTree

_STEERS = (keras.callbacks.EarlyStopping, keras.callbacks.ReduceLROnPlateau)
"""Keras's callbacks whose attributes decide about the training. What Keras sets in them must be equal in all processes."""

_OF_PROCESS = {"_model", "model", "params", "verbose"}
"""Attributes of them that may differ."""

_CLOSE = 1e-5
"""Relative difference of two numbers that different processors may compute from the same logs."""

States = Mapping[str, Mapping[str, PyTree]]
"""Attributes by their names, by the names of their owners."""


def stops(is_wanted: object, topology: Topology) -> bool:
    """Returns whether a loop stops after this batch: whether any process wants it. All processes must call it after each batch.

    Only messages of the watchdog are exchanged, and only once a process wants to stop. If all of them want to after the same batch,
    they stop there, otherwise after one that none has passed.

    Args:
      is_wanted: whether a callback of this process has asked for it.
      topology: the devices of all processes.
    """
    # There is no watch if the program itself has called `jax.distributed.initialize`.
    watchdog = None if topology.num_workers == 1 else watch.own()
    if watchdog is None:
        return bool(is_wanted)
    if is_wanted:
        watchdog.stop_point.ask(f"{watchdog.place} stops")
    if watchdog.stop_point.is_reached() is None:
        return False
    # `ask` requires a collective call at the point, so that no process asks again before all have stopped.
    return bool(topology.exchange(np.array([bool(is_wanted)])).any())


def settle_epoch(model: keras.Model, callbacks: Sequence[Callback], topology: Topology, epoch: int) -> bool:
    """Returns whether training stops after an epoch: whether any process wants it. All processes must call it.

    Args:
      model: the model.
      callbacks: the callbacks that this process runs.
      topology: the devices of all processes.
      epoch: the number of the epoch.

    Raises:
      DivergenceError: the learning rate, or a callback that steers the training, differs between processes.
    """
    if topology.num_workers > 1:
        states = json.dumps(_states_of(model, callbacks)).encode()
        # One exchange of a fixed size. What differs is sent only if something does.
        # As two numbers, because JAX has no 64 bits unless `jax_enable_x64` is set.
        digest = np.frombuffer(hashlib.blake2b(states, digest_size=8).digest(), np.uint32)
        rows = topology.exchange(np.array([bool(model.stop_training), *digest], np.uint32))
        if (rows[:, 1:] != rows[0, 1:]).any():
            # Digests also differ if numbers are only close, so this may find nothing wrong.
            _require_equal(list(map(json.loads, exchange_bytes(states, topology.exchange))), epoch)
        model.stop_training = bool(rows[:, 0].any())
    return bool(model.stop_training)


def _states_of(model: keras.Model, callbacks: Sequence[Callback]) -> States:
    """Returns the values that must be equal in all processes. Callbacks first, because they set the learning rate."""
    optimizers = [o for o in getattr(model.optimizer, "optimizers", [model.optimizer]) if o is not None]
    owners = [(c, _steering_of(c)) for c in callbacks]
    owners += [(o, {"learning_rate": compat.known_rate(o)}) for o in optimizers]
    states: dict[str, Mapping[str, PyTree]] = {}
    for owner, attributes in owners:
        kind = type(owner).__name__
        number = sum(name.partition(" ")[0] == kind for name in states)
        states[f"{kind} {number}" if number else kind] = dict(_encoded(attributes))
    return states


def _steering_of(callback: Callback) -> Mapping[str, PyTree]:
    """Returns the attributes of a callback that decide about the training: what its `get_state` returns, or Keras has set."""
    if has_state(callback):
        state = callback.get_state()
        return state if isinstance(state, dict) else {"get_state()": state}
    # Other attributes, such as a clock in a user's subclass, may differ.
    names = {name for kind in _STEERS if isinstance(callback, kind) for name in vars(kind())}
    return {name: value for name, value in vars(callback).items() if name in names - _OF_PROCESS}


def _encoded(state: Mapping[str, PyTree]) -> Iterator[tuple[str, PyTree]]:
    """Yields the values of a state that JSON can hold."""
    for name, value in state.items():
        try:
            yield str(name), text.encode(value.item() if isinstance(value, np.generic) else value, digest_of)
        except TypeError:
            continue  # A function, such as `monitor_op`. Keras derives it from `monitor` and `mode`, which are compared.


def _require_equal(states: Sequence[States], epoch: int) -> None:
    """Raises if a value differs from that of the first process.

    Args:
      states: the states of all processes, by rank.
      epoch: the number of the epoch.

    Raises:
      DivergenceError: a value differs.
    """
    differences = list(_differences(states))
    if differences:
        raise DivergenceError(
            f"fit on {len(states)} workers, epoch {epoch + 1}",
            f"{differences[0]}, so that the workers would train differently from here on; {len(differences)} "
            f"value{'s differ' if len(differences) > 1 else ' differs'} in total.",
            "compute it in all workers from values that all of them have: the epoch, the logs of fit, or metrics of compile, which see the "
            "rows of all",
        )


def _differences(states: Sequence[States]) -> Iterator[str]:
    """Yields a text about each value that is not that of the first process."""
    for owner, attributes in states[0].items():
        for name, first in attributes.items():
            # A process without the value cannot differ, so it counts as the first.
            values = [state.get(owner, attributes).get(name, first) for state in states]
            if not all(_is_close(value, first) for value in values):
                yield f"{owner}.{name} is {_by_rank(values)}"


def _is_close(a: PyTree, b: PyTree) -> bool:
    """Whether two values are equal, up to what processors of different kinds round differently."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=_CLOSE) or (math.isnan(a) and math.isnan(b))
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(_is_close, a, b))
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(_is_close(a[key], b[key]) for key in a)
    return bool(a == b)


def _by_rank(values: Sequence[PyTree]) -> str:
    """Returns the different values, each with its ranks."""
    ranks: dict[str, list[str]] = {}
    for rank, value in enumerate(values):
        ranks.setdefault(shown(value), []).append(str(rank))
    texts = [f"{value} on rank{'s' * (len(r) > 1)} {listed(r)}" for value, r in ranks.items()]
    return listed(texts, most=3)
