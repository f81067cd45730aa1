# SPDX-License-Identifier: Apache-2.0
"""Reads the text of compiled programs: their collectives, the bytes that they move, and their transfers to the host.

Source of the text format: https://openxla.org/xla/operation_semantics.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

_BITS = {
    "pred": 8,  # XLA stores a bool in a byte.
    "s4": 4,
    "u4": 4,
    "s8": 8,
    "u8": 8,
    "s16": 16,
    "u16": 16,
    "f16": 16,
    "bf16": 16,
    "s32": 32,
    "u32": 32,
}
_BITS |= {"f32": 32, "s64": 64, "u64": 64, "f64": 64, "c64": 64, "c128": 128, "f8e4m3fn": 8, "f8e5m2": 8}
_ARRAY = re.compile(r"\b(\w+)\[([\d,]*)\]")
_OPERATION = re.compile(r"^\s+(?:ROOT )?%?([\w.-]+) = (.*?) ([a-z][a-z0-9-]*)\((.*)$")
_OPENING = re.compile(r"^(ENTRY )?%?([\w.-]+) \(.*\{$")
_OPERAND = re.compile(r"%([\w.-]+)")
_CALLED = re.compile(r"(?:calls|to_apply|body|condition|true_computation|false_computation)=%?([\w.-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_BODY = re.compile(r"body=%?([\w.-]+)")
_TRIPS = re.compile(r'"known_trip_count":\{"n":"(\d+)"\}')
# XLA writes groups as lists, as a range of numbers in another shape, or as axes of a mesh.
_LISTED = re.compile(r"replica_groups=\{\{([\d,]+)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{(\{[\d,{}]*\})\}")
_COUNTS = re.compile(r"\b(?:replica_count|num_partitions)=(\d+)")
_AXIS = re.compile(r"'(\w+)'(?:=(\d+)|:\((\d+)\)(\d+))?")
_MEGASCALE = re.compile(r'_xla_megascale_transfer_type="(\w+)"')
_KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "collective-broadcast")
_FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "replica-id")
_TO_HOST = ("infeed", "outfeed")
_IS_SYNC = '"is_sync":true'
"""Marks, in programs for GPUs, the start of a collective that the program waits for at once."""
_CALLBACK = re.compile(r'custom_call_target="[^"]*callback')


@dataclass(frozen=True)
class Collective:
    """One kind of communication between devices in a program.

    Args:
      kind: for example "all-reduce".
      dtype: dtype of the largest array.
      num_bytes: bytes of the whole arrays, per execution of the program.
      group: the devices of the first group that communicate, as indices into the devices of the program.
      is_async: whether other operations run at the same time.
      is_between_slices: whether the runtime of TPUs carries it through the network of the data centre.
    """

    kind: str
    dtype: str
    num_bytes: int
    group: tuple[int, ...]
    is_async: bool = False
    is_between_slices: bool = False


@dataclass(frozen=True)
class _Operation:
    name: str
    shape: str
    kind: str
    rest: str


@dataclass
class HloProgram:
    """The contents of the text of a compiled program.

    Args:
      text: the text, from `jax.stages.Compiled.as_text()`.

    Attributes:
      collectives: the communication between devices, in order.
      num_transfers: number of transfers between device and host.
      num_bytes: bytes that its operations read and write. An estimate for compilers that do not report it.
      num_loops: number of its loops.
    """

    text: str
    collectives: list[Collective] = field(init=False)
    num_transfers: int = field(init=False, default=0)
    num_bytes: int = field(init=False, default=0)
    num_loops: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        self._computations, entry = _computations(self.text)
        # A collective that lists no devices is one of all devices.
        self._devices = tuple(range(math.prod(map(int, _COUNTS.findall(self.text.partition("\n")[0])))))
        self.collectives = []
        self._read(entry, 1, is_async=False, is_top=True)

    def _read(self, name: str, times: int, *, is_async: bool, is_top: bool) -> None:
        """Reads one computation, which runs `times` times. Only top-level operations move bytes."""
        operations = self._computations.get(name, [])
        shapes = {op.name: op.shape for op in operations}
        for op in operations:
            collective = _collective(op, times, self._devices)
            if collective is not None:
                self.collectives.append(_with(collective, is_async=is_async or collective.is_async))
            self.num_transfers += _is_transfer(op)
            self.num_loops += op.kind == "while"
            if is_top and op.kind not in _FREE and op.kind != "while":
                # Behind the parenthesis, attributes have names of computations, such as `to_apply=%add`.
                read = (shapes[x] for x in _OPERAND.findall(op.rest.partition("), ")[0]) if x in shapes)
                self.num_bytes += times * (_num_bytes(op.shape) + sum(map(_num_bytes, read)))
            self._read_called(op, times, is_async=is_async, is_top=is_top)

    def _read_called(self, op: _Operation, times: int, *, is_async: bool, is_top: bool) -> None:
        if op.kind in (
            "all-reduce",
            "reduce",
            "reduce-scatter",
            "scatter",
            "sort",
            "map",
            "reduce-window",
            "all-reduce-start",
        ):
            return  # They call a scalar function.
        body, trips = _BODY.search(op.rest), _TRIPS.search(op.rest)
        called = _CALLED.findall(op.rest)
        branches = _BRANCHES.search(op.rest)
        if branches:
            called += re.findall(r"%?([\w.-]+)", branches[1])
        for name in called:
            is_body = body is not None and name == body[1]
            self._read(
                name,
                times * int(trips[1]) if is_body and trips else times,
                is_async=is_async or op.kind == "async-start",
                # Inside a fusion, values stay in registers. Only the fusion itself moves bytes.
                is_top=is_top and op.kind in ("while", "call", "conditional"),
            )


def _computations(text: str) -> tuple[dict[str, list[_Operation]], str]:
    """Returns the operations of each computation, and the name of the entry computation."""
    computations: dict[str, list[_Operation]] = {}
    entry, current = "", None
    for line in text.splitlines():
        opening = _OPENING.match(line)
        if opening:
            current = computations.setdefault(opening[2], [])
            entry = opening[2] if opening[1] else entry
        elif current is not None and (match := _OPERATION.match(line)):
            current.append(_Operation(*match.groups()))
    return computations, entry


def _collective(op: _Operation, times: int, devices: tuple[int, ...]) -> Collective | None:
    if op.kind == "send" and (transfer := _MEGASCALE.search(op.rest)):
        # The result of a send also has a number and a token, so the array is the largest of it.
        kind = transfer[1].lower().replace("_", "-")
        return Collective(kind, _dtype(op.shape), times * _largest(op.shape), (), is_async=True, is_between_slices=True)
    kind = op.kind.removesuffix("-start")
    if kind not in _KINDS:
        return None
    group, is_started = _group(op.rest) or devices, op.kind != kind
    is_async = is_started and _IS_SYNC not in op.rest
    size = _num_bytes(op.shape)
    if kind in ("all-gather", "reduce-scatter") and is_started and group:
        # The result of a start has the operands too, so it has the whole arrays and the shards.
        size = size * len(group) // (len(group) + 1)
    elif kind == "reduce-scatter":
        # The result is one shard, and the bytes are those of the whole array.
        size *= len(group)
    elif kind != "all-reduce" and is_started:
        # The operands are in the result of these starts too, and are at most as large as what they become.
        size = _largest(op.shape)
    return Collective(kind, _dtype(op.shape), times * size, group, is_async=is_async)


def _with(found: Collective, *, is_async: bool) -> Collective:
    return Collective(found.kind, found.dtype, found.num_bytes, found.group, is_async, found.is_between_slices)


def _is_transfer(op: _Operation) -> bool:
    """Returns whether an operation exchanges data with the host. The transfers of slices pass through it, and do not count."""
    if op.kind in ("send", "recv") and "is_host_transfer=true" in op.rest:
        return _MEGASCALE.search(op.rest) is None
    return op.kind in _TO_HOST or (op.kind == "custom-call" and _CALLBACK.search(op.rest) is not None)


def _group(rest: str) -> tuple[int, ...]:
    """Returns the first group of devices."""
    if listed := _LISTED.search(rest):
        return tuple(map(int, listed[1].split(",")))
    if iota := _IOTA.search(rest):
        return tuple(_ids(iota[3], iota[4]).reshape(int(iota[1]), int(iota[2]))[0].tolist())
    if mesh := _MESH.search(rest):
        return _group_of_mesh(*mesh.groups())
    if pairs := _PAIRS.search(rest):
        return _group_of_pairs([(int(a), int(b)) for a, b in re.findall(r"(\d+),(\d+)", pairs[1])])
    return ()


def _group_of_pairs(pairs: list[tuple[int, int]]) -> tuple[int, ...]:
    """Returns the devices that the first pair of sender and receiver is connected with."""
    group: set[int] = set(pairs[0])
    # Each pass adds the neighbours of the group. No two of its devices are more steps apart than there are pairs.
    for _ in pairs:
        group = group.union(*(pair for pair in pairs if not group.isdisjoint(pair)))
    return tuple(sorted(group))


def _ids(sizes: str, order: str | None) -> Any:
    """Returns the numbers from 0 in an array of these sizes, whose dims are then put into another order."""
    dims = [int(n) for n in sizes.split(",")]
    return np.arange(math.prod(dims)).reshape(dims).transpose(None if order is None else [*map(int, order.split(","))])


def _group_of_mesh(mesh: str, sizes: str | None, order: str | None, group: str) -> tuple[int, ...]:
    """Returns the first group of a mesh with named axes. A group is along axes, or along parts of them: `'x':(2)4`."""
    axes = {name: int(size) for name, size, _, _ in _AXIS.findall(mesh)}
    total = math.prod(axes.values())
    ids = (np.arange(total) if sizes is None else _ids(sizes, order)).reshape(-1)
    strides = dict(zip(axes, np.cumprod([1, *[*axes.values()][:0:-1]])[::-1].tolist(), strict=True))
    places = np.zeros(1, int)
    for name, _, before, part in _AXIS.findall(group):
        # `(2)4` splits the axis into 2 x 4 x the rest. The group runs along the 4.
        length = int(part or axes[name])
        step = strides[name] * (axes[name] // (int(before) * length) if part else 1)
        places = np.add.outer(places, step * np.arange(length)).reshape(-1)
    return tuple(ids[places].tolist())


def _arrays(shape: str) -> Iterator[tuple[str, int]]:
    for dtype, dims in _ARRAY.findall(shape):
        if dtype in _BITS:
            yield dtype, _BITS[dtype] * math.prod(int(n) for n in dims.split(",") if n) // 8


def _num_bytes(shape: str) -> int:
    return sum(n for _, n in _arrays(shape))


def _largest(shape: str) -> int:
    return max((n for _, n in _arrays(shape)), default=0)


def _dtype(shape: str) -> str:
    return max(_arrays(shape), key=lambda pair: pair[1], default=("", 0))[0]
