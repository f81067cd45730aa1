"""The links between devices: which are measured, that a slow one is found to be slow, and what is printed and written."""

import json
import subprocess
import sys

import numpy as np
import pytest

import phalanx
from phalanx._src.tools.bench import links
from phalanx._src.tools.bench.links import SIZES, Link
from phalanx.errors import StartupError

pytestmark = pytest.mark.slow


def topology_of(count):
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)]).topology


def test_all_pairs_and_the_all_reduce(tmp_path, capsys, monkeypatch):
    """For each size; as a table, as JSON and as a picture. How exact the numbers are does not matter here."""
    monkeypatch.setattr(links, "_LEAST_S", 0.002)
    found = links.measure(topology_of(3), SIZES[:2])
    assert [x.name for x in found] == [
        "all-reduce of 3",
        *(f"replicas {a} and {b}" for a, b in ((0, 1), (0, 2), (1, 2))),
    ]
    for link in found:
        assert link.sizes == list(SIZES[:2])
        assert all(s > 0 for s in link.seconds)
    links.print_table(found, "3 CPUs")
    assert "replicas 0 and 2" in capsys.readouterr().out
    for name in ("links.json", "links.png"):
        links.save(found, tmp_path / name)
    assert [x["name"] for x in json.loads((tmp_path / "links.json").read_text())["links"]] == [x.name for x in found]
    assert (tmp_path / "links.png").read_bytes().startswith(b"\x89PNG")


def test_operations_do_what_they_say():
    """An all-reduce is the mean of what all have, and a message comes back to the one that has sent it."""
    topology = topology_of(3)
    operations = [lambda x: links.psum(x, phalanx.REPLICA_AXIS) / 3, links._back_and_forth(0, 2)]
    for operation, wanted in zip(operations, ([2.0, 2.0, 2.0], [1.0, 0.0, 0.0]), strict=True):
        x = topology.put_per_replica([np.array([[1.0], [2.0], [3.0]], "float32")])[0]
        spec = links.partition_spec(phalanx.REPLICA_AXIS)
        mapped = links.jax.shard_map(operation, mesh=topology.mesh, in_specs=spec, out_specs=spec, check_vma=False)
        np.testing.assert_allclose(np.asarray(links.jax.jit(mapped)(x))[:, 0], wanted)


def test_neighbours_of_many():
    """Twelve pairs of six replicas are too many to measure them all."""
    assert list(links._pairs(topology_of(4))) == [(0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)]
    assert list(links._pairs(topology_of(6))) == [(i, i + 1) for i in range(5)]


def test_bandwidth_counts_what_a_replica_sends():
    """All but one of n parts, twice, for an all-reduce."""
    link = Link("all-reduce of 4", [1000, 4000], [0.001, 0.002], 1.5)
    assert link.bandwidths == [1.5e6, 3e6]


def test_one_device_has_no_links():
    with pytest.raises(StartupError, match=r"there is no link.\nHINT: --devices 2 or --processes 2"):
        links.measure(topology_of(1))


@pytest.mark.exhaustive("test_all_pairs_and_the_all_reduce")
def test_command_starts_processes(tmp_path, bench):
    """Two of one device each, and rank 0 prints."""
    command = [sys.executable, "-m", "phalanx", "bench", "--links", "--processes", "2", "--output", "links.json"]
    done = subprocess.run(command, check=False, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "Links between 2 CPUs in 2 processes" in done.stdout
    assert len(json.loads((tmp_path / "links.json").read_text())["links"]) == 2
    refused = bench("--links", "--output", "links.txt")
    assert (refused.exit_code, "must end with .json" in refused.stderr) == (2, True)


@pytest.mark.exhaustive("test_all_pairs_and_the_all_reduce")
def test_slow_cable_is_measured(on_slow_link, tmp_path):
    """At 100 Mbit/s, no more than 12.5 MB cross in a second, and some are in the buckets already."""
    on_slow_link("phalanx", "bench", "--links", "--output", "links.json")
    for link in json.loads((tmp_path / "links.json").read_text())["links"]:
        at_4_mib = link["bandwidths"][link["sizes"].index(4 << 20)]
        assert at_4_mib < 13.5e6, link
