"""Law 6: what `import phalanx` brings along, in a fresh process."""

import subprocess
import sys

import pytest

FOREIGN = ["tensorflow", "torch", "ray", "grain", "orbax", "optax", "flax"]

# An import that fails because the package is not installed is an import all the same.
TRACE = """
import sys
class Seen:
    names = set()
    def find_spec(self, name, path=None, target=None):
        self.names.add(name.partition(".")[0])
sys.meta_path.insert(0, Seen())
import phalanx
phalanx.MirroredStrategy
print(*sorted(Seen.names | {name.partition(".")[0] for name in sys.modules}))
"""


def run(*arguments):
    """A fresh Python."""
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=120)


@pytest.fixture(scope="module")
def modules():
    """The packages that `import phalanx` and the use of it load or look for."""
    done = run("-c", TRACE)
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


@pytest.mark.parametrize("package", FOREIGN)
def test_import_stays_away_from_optional_packages(modules, package):
    """`phalanx` alone imports no optional or foreign package."""
    assert package not in modules


def test_brings_what_it_stands_on(modules):
    """The fixture sees real modules: those that phalanx needs."""
    assert {"phalanx", "jax", "keras", "numpy"} <= modules


@pytest.mark.parametrize("module", ["phalanx", "phalanx.errors", "phalanx.cluster_resolver", "phalanx.launch.cli"])
def test_launcher_needs_no_jax(module):
    """What stands below the strategies imports neither JAX nor Keras."""
    done = run("-c", f"import {module}, sys; print({{'jax', 'keras', 'numpy'}} & set(sys.modules))")
    assert (done.stdout, done.stderr) == ("set()\n", "")


def test_import_prints_nothing():
    """Importing phalanx writes nothing to stdout or stderr, and no warning."""
    done = run("-W", "error", "-c", "import phalanx; phalanx.MirroredStrategy")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


FIT = """
import phalanx

strategy = phalanx.experimental.CentralStorageStrategy(["cpu:0"], "cpu:0")

import keras
import numpy as np

with strategy.scope():
    model = keras.Sequential([keras.Input((2,)), keras.layers.Lambda(lambda x: print(phalanx.get_strategy()) or x)])
    model.compile("sgd", "mse")
model.fit(np.zeros((4, 2)), np.zeros((4, 2)), verbose=0)
"""


def test_fit_with_an_experimental_strategy_alone():
    """A script that names no other part of Phalanx trains on its strategy all the same."""
    done = run("-W", "error", "-c", FIT)
    assert done.returncode == 0, done.stderr
    assert set(done.stdout.splitlines()[1:]) == {"CentralStorageStrategy(['cpu:0'])"}
