# SPDX-License-Identifier: Apache-2.0
"""Prints the mesh of a strategy and the placement of variables, and lists the shards of a dataset."""

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from phalanx._src.compat import Variable, dtype_of
from phalanx._src.input.distributed import check_options, shards_of
from phalanx._src.input.sharding import WorkerShard
from phalanx._src.mesh.devices import Held, device_name
from phalanx._src.mesh.topology import Topology
from phalanx._src.options import InputOptions
from phalanx._src.strategies.base import Strategy
from phalanx._src.tracing.strategy import check_strategy
from phalanx.errors import InvalidArgumentError, arguments, shown


def describe(strategy: Strategy, *objects: object, console: Any = None) -> None:
    """Prints the mesh of a strategy, the devices of each variable and the bytes per device.

    May be called in any context.

    Args:
      strategy: the strategy.
      *objects: variables, or objects with variables: models (with the optimizer if they are compiled), layers,
        optimizers and metrics.
      console: a `rich.console.Console`. None is the terminal.

    Raises:
      InvalidArgumentError: an object is not a variable and has no variables.

    Example:
      >>> import keras, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"], layout=phalanx.fully_sharded(min_size=1))
      >>> with strategy.scope():
      ...     v = keras.Variable(keras.ops.zeros((64, 32)), name="v")
      >>> phalanx.describe(strategy, v)  # doctest: +NORMALIZE_WHITESPACE
      2 replicas
        replica   device
       ──────────────────
              0   cpu:0
              1   cpu:1
      1 variable, 8.19 kB
        path             array   parts
       ────────────────────────────────────────
        v      float32[64, 32]   [0:32] cpu:0
                                 [32:64] cpu:1
      Bytes per device
        device    bytes
       ─────────────────
        cpu:0    4.1 kB
        cpu:1    4.1 kB
    """
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    check_strategy("strategy", strategy, "phalanx.describe(strategy, model)")
    variables = [v for o in objects for v in variables_of("describe", o)]
    if console is None:
        console = Console(highlight=False)
    arguments.instance("console", console, Console, "console=rich.console.Console()")
    # Under parameter servers, other tasks run the steps, on devices that this process does not see.
    tables = [_tasks(strategy.tasks) if strategy.tasks else mesh_of(strategy.topology)]
    if objects:
        held = [strategy.held(v) for v in variables]
        tables += [_places(variables, held, strategy.topology), _totals(held)]
    for title, columns, rows in tables:
        table = Table(box=box.SIMPLE)
        for name in columns:
            table.add_column(name, justify="right" if name in _NUMBERS else "left", overflow="fold")
        for row in rows:
            # `Text`, because Rich would take brackets in a name for markup.
            table.add_row(*map(Text, row))
        console.print(Text(title, style="bold"))
        console.print(table)


Shown = tuple[str, list[str], list[list[str]]]
"""The title of a table, the names of its columns, and its rows."""

_NUMBERS = ("replica", "array", "bytes")


def variables_of(method: str, thing: object) -> list[Variable]:
    """Returns the variables of an object.

    Args:
      method: the name of the public function that the caller used, for the message.
      thing: a variable, a model (its metrics and its optimizer are included), another object with variables, or a list.

    Raises:
      InvalidArgumentError: `thing` is not a variable and has no variables.
    """
    if isinstance(thing, Variable):
        return [thing]
    if isinstance(thing, list | tuple):
        return [v for x in thing for v in variables_of(method, x)]
    if isinstance(thing, keras.Model):
        # `Model.variables` lacks the variables of metrics and optimizers.
        optimizer = getattr(thing, "optimizer", None)
        return [*thing.variables, *thing.metrics_variables, *(optimizer.variables if optimizer else [])]
    if not hasattr(thing, "variables"):
        raise InvalidArgumentError(
            f"{method}({shown(thing)})", "the argument is not a variable and has no variables.", f"{method}(model)"
        )
    return list(thing.variables)


def mesh_of(topology: Topology) -> Shown:
    """Returns a table of the devices of each replica: one row per replica, one column per device of a replica."""
    if not topology.has_devices:
        return "1 replica, on JAX's default device", ["replica"], [["0"]]
    count = topology.num_replicas
    title = f"{count} replica{'s' * (count > 1)}" + "".join(f" x {name} of {size}" for name, size in topology.axes)
    sizes = [size for _, size in topology.axes]
    names = [
        " ".join(f"{name} {i}" for (name, _), i in zip(topology.axes, at, strict=True)) or "device"
        for at in np.ndindex(*sizes)
    ]
    rows = [[str(i), *map(device_name, topology.devices_of(i))] for i in range(count)]
    return title, ["replica", *names], rows


def _tasks(tasks: Sequence[str]) -> Shown:
    return f"{len(tasks)} tasks", ["task"], [[task] for task in tasks]


def _places(variables: Sequence[Variable], held: Sequence[Sequence[Held]], topology: Topology) -> Shown:
    everywhere = {device_name(d) for d in topology.devices} if topology.has_devices else None
    rows = [
        [v.path, f"{dtype_of(v)}{list(v.shape)}", _parts(v.shape, parts, everywhere)]
        for v, parts in zip(variables, held, strict=True)
    ]
    total = sum(math.prod(v.shape) * np.dtype(dtype_of(v)).itemsize for v in variables)
    title = f"{len(variables)} variable{'s' * (len(variables) != 1)}, {_size(total)}"
    return title, ["path", "array", "parts"], rows


def _totals(held: Sequence[Sequence[Held]]) -> Shown:
    totals: dict[str, int] = {}
    for part in (part for parts in held for part in parts):
        totals[part.place] = totals.get(part.place, 0) + part.num_bytes
    rows = [[name, _size(n)] for name, n in sorted(totals.items(), key=_order)]
    return "Bytes per device", ["device", "bytes"], rows


def _parts(shape: Sequence[int], parts: Sequence[Held], everywhere: set[str] | None) -> str:
    """Returns the shard of an array on each device of this process. Empty if every device holds the full array."""
    places: dict[str, list[str]] = {}
    for part in parts:
        places.setdefault(_range(part.index, shape), []).append(part.place)
    if list(places) == ["whole"] and (everywhere is None or set(places["whole"]) == everywhere):
        return ""
    # Without a part, the variable is on devices of other processes.
    return "\n".join(f"{part} {' '.join(names)}" for part, names in places.items()) or "not here"


def _range(index: Sequence[slice], shape: Sequence[int]) -> str:
    """Returns the Python notation of a part of an array, without trailing dims that are whole."""
    bounds = [(i.start or 0, n if i.stop is None else i.stop) for i, n in zip(index, shape, strict=True)]
    texts = [":" if b == (0, n) else f"{b[0]}:{b[1]}" for b, n in zip(bounds, shape, strict=True)]
    while texts and texts[-1] == ":":
        texts.pop()
    return f"[{', '.join(texts)}]" if texts else "whole"


def _order(item: tuple[str, int]) -> tuple[str, int]:
    platform, _, number = item[0].partition(":")
    return platform, int(number)  # As a number, so that cpu:10 follows cpu:9.


def _size(count: int) -> str:
    power = min(3, (len(str(count)) - 1) // 3)
    return f"{count / 1000**power:.3g} {('bytes', 'kB', 'MB', 'GB')[power]}"


def explain_sharding(
    dataset: object, strategy: Strategy, options: InputOptions | None = None, *, batch_size: int | None = None
) -> Sequence[WorkerShard]:
    """Returns the shard of a dataset that each worker of a strategy reads. May be called in any context.

    Args:
      dataset: the dataset passed to `Strategy.experimental_distribute_dataset`, or the result of that call.
      strategy: the strategy.
      options: the options passed to `Strategy.experimental_distribute_dataset`.
      batch_size: the global batch size passed to `Strategy.experimental_distribute_dataset`.

    Returns:
      One `WorkerShard` per worker.

    Raises:
      InputError: the dataset cannot be divided.
      InvalidArgumentError: `strategy` is not a strategy.

    Example:
      >>> import numpy as np, phalanx
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> for shard in phalanx.explain_sharding(np.arange(100), strategy, batch_size=8):
      ...     print(shard)
      worker 0 of 1 reads all records of 100 (DATA)
    """
    check_strategy("strategy", strategy, "explain_sharding(dataset, strategy)")
    return shards_of(dataset, strategy.topology, check_options(options), batch_size)
