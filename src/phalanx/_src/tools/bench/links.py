# SPDX-License-Identifier: Apache-2.0
"""Measures the links between the devices of a cluster: all-reduces of all replicas, and messages between two, by size.

`phalanx bench --links` starts it in each process, as `python -m phalanx._src.tools.bench.links` does in a cluster that exists. Rank 0 reports.
"""

import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from phalanx._src.mesh.layout import REPLICA_AXIS
from phalanx._src.mesh.topology import Topology
from phalanx._src.runtime import bootstrap
from phalanx._src.strategies.multi_worker import MultiWorkerMirroredStrategy
from phalanx._src.tools import results
from phalanx._src.tools.bench.report import console, table
from phalanx._src.tools.bench.session import this_machine
from phalanx._src.typed_jax import partition_spec, ppermute, psum
from phalanx.errors import PhalanxError, StartupError

SIZES = tuple(1 << exponent for exponent in range(10, 27, 4))
"""Bytes of an array, from 1 KiB to 64 MiB."""
_ROUNDS = 5  # For each size. The median of them counts.
_LEAST_S = 0.05  # Programs repeat the operation for so long that the call does not count.
_MOST_S = 0.3  # From here on, one round is enough, and larger arrays are skipped.
_MOST_PAIRS = 12


@dataclass(frozen=True)
class Link:
    """How long arrays took on one way.

    Args:
      name: the way: "all-reduce", or two replicas.
      sizes: bytes of each array. Those that would take seconds are skipped.
      seconds: time of one operation for each size: the median over the rounds.
      sent: bytes that one replica sends for each byte of an array.
    """

    name: str
    sizes: list[int]
    seconds: list[float]
    sent: float

    @property
    def bandwidths(self) -> list[float]:
        """Bytes per second that a replica sends, for each size."""
        return [size * self.sent / s for size, s in zip(self.sizes, self.seconds, strict=True)]


def measure(topology: Topology, sizes: Sequence[int] = SIZES) -> list[Link]:
    """Measures the links between all replicas. All processes must call it.

    Args:
      topology: the devices.
      sizes: bytes of the arrays, in ascending order.

    Raises:
      StartupError: there is only one replica.
    """
    n = topology.num_replicas
    if n == 1:
        raise StartupError("--links with one device", "there is no link.", "--devices 2 or --processes 2")
    ways: dict[str, tuple[float, Callable[[jax.Array], jax.Array]]] = {
        # A ring sends all but one of n parts, once to add them up and once to pass on the sums.
        # Divided by n, because the sums of a loop would overflow.
        f"all-reduce of {n}": (2 * (n - 1) / n, lambda x: psum(x, REPLICA_AXIS) / n)
    }
    for a, b in itertools.islice(_pairs(topology), _MOST_PAIRS):
        ways[f"replicas {a} and {b}"] = (1.0, _back_and_forth(a, b))
    return [_measured(topology, sizes, name, *way) for name, way in ways.items()]


def _pairs(topology: Topology) -> Iterator[tuple[int, int]]:
    """Yields pairs of replicas: of a few all, of many only neighbours."""
    replicas = range(topology.num_replicas)
    few = topology.num_replicas * (topology.num_replicas - 1) // 2 <= _MOST_PAIRS
    yield from itertools.combinations(replicas, 2) if few else zip(replicas, replicas[1:], strict=False)


def _back_and_forth(a: int, b: int) -> Callable[[jax.Array], jax.Array]:
    # There and back: the loop needs a value to send again, and a sender that receives nothing gets zeros.
    return lambda x: ppermute(ppermute(x, REPLICA_AXIS, [(a, b)]), REPLICA_AXIS, [(b, a)])


def _measured(
    topology: Topology, sizes: Sequence[int], name: str, sent: float, operation: Callable[[jax.Array], jax.Array]
) -> Link:
    each = 1 if name.startswith("all") else 2  # Messages in one call of the operation.
    seconds: list[float] = []
    _seconds(topology, operation, sizes[0])  # The first use of a link takes longer.
    for size in sizes:
        seconds.append(_seconds(topology, operation, size) / each)
        if seconds[-1] > _MOST_S:
            break
    return Link(name, list(sizes[: len(seconds)]), seconds, sent)


def _seconds(topology: Topology, operation: Callable[[jax.Array], jax.Array], size: int) -> float:
    """Returns the time of one operation, without the time to call a program: many run in one program."""
    rows = np.ones((len(topology.local_replicas), size // 4), np.float32)
    x = topology.put_per_replica([rows])[0]

    def repeated(x: jax.Array, count: jax.Array) -> jax.Array:
        result: jax.Array = lax.fori_loop(0, count, lambda _, value: operation(value), x)
        return result

    spec = partition_spec(REPLICA_AXIS)
    in_specs = (spec, partition_spec())
    # JAX's check refuses the loop, whose value differs between replicas at first and no more after an all-reduce.
    program = jax.jit(jax.shard_map(repeated, mesh=topology.mesh, in_specs=in_specs, out_specs=spec, check_vma=False))

    def timed(count: int) -> float:
        began_s = time.perf_counter()
        # The count is an argument of the program, so that it is compiled once.
        program(x, jnp.int32(count)).block_until_ready()
        # All take the time of the slowest, so that they agree on what follows.
        return float(topology.exchange(np.asarray([time.perf_counter() - began_s])).max())

    timed(1)  # Compiles.
    count = 1
    while (taken_s := timed(count)) < _LEAST_S and count < 1 << 12:
        count *= 4
    rounds = _ROUNDS if taken_s < _MOST_S else 1
    return statistics.median(timed(count) for _ in range(rounds)) / count


def print_table(links: Sequence[Link], devices: str) -> None:
    """Prints the time and the bandwidth of each link, by size."""
    shown = table(f"Links between {devices}")
    shown.add_column("link")
    for size in SIZES:
        shown.add_column(_size(size), justify="right")
    for link in links:
        cells = zip(link.seconds, link.bandwidths, strict=True)
        shown.add_row(link.name, *(f"{1000 * s:.3g} ms\n{b / 1e9:.3g} GB/s" for s, b in cells))
    terminal = console()
    terminal.print(shown)
    terminal.print(
        "The time of one array, and the bytes that a replica sends per second. The time of the smallest is the latency."
    )


def save(links: Sequence[Link], path: Path) -> None:
    """Writes the links as JSON, or draws their bandwidths, depending on the suffix of the path."""
    if path.suffix == ".json":
        entries = [{**asdict(link), "bandwidths": link.bandwidths} for link in links]
        results.save(path, json.dumps({"machine": this_machine(), "links": entries}, indent=2))
        return
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for link in links:
        axes.plot(link.sizes, [b / 1e9 for b in link.bandwidths], "o-", label=link.name)
    axes.set(xscale="log", yscale="log", xlabel="bytes of an array", ylabel="GB/s sent by a replica", title="Links")
    axes.legend()
    results.save(path, figure)


def _size(size: int) -> str:
    return f"{size >> 20} MiB" if size >> 20 else f"{size >> 10} KiB"


def main(*paths: str) -> int:
    """Measures the links of the cluster that the environment describes, or of the devices of this process.

    Args:
      *paths: files to write, whose endings have been checked.

    Returns:
      The exit code.
    """
    try:
        topology = MultiWorkerMirroredStrategy().topology
        with bootstrap.without_lines_of_gloo():
            links = measure(topology)
    except PhalanxError as e:
        print(f"phalanx: {e}", file=sys.stderr)
        return 2
    if topology.worker_index == 0:
        kind = topology.devices[0].platform.upper()
        print_table(
            links,
            f"{topology.num_replicas} {kind}s in {topology.num_workers} process{'es' * (topology.num_workers > 1)}",
        )
        for path in paths:
            save(links, Path(path))
    topology.exchange(np.zeros(1))  # All processes end together.
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
