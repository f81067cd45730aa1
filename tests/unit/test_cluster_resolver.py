"""The public names of resolvers."""

import subprocess
import sys

import pytest

from phalanx import cluster_resolver


def test_public_names_are_sorted_and_exist():
    assert cluster_resolver.__all__ == sorted(cluster_resolver.__all__, key=str.lower)
    assert all(hasattr(cluster_resolver, name) for name in cluster_resolver.__all__)


@pytest.mark.slow
def test_resolvers_import_no_jax():
    """Neither JAX nor Keras nor NumPy is needed to look at a cluster."""
    code = "import sys, phalanx.cluster_resolver, phalanx._src.cluster.resolvers.environment; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"jax", "keras", "numpy", "click"} & {*done.stdout.split()}
