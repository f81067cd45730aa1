"""Law 6: what `import phalanx` brings along, in a fresh process."""

import subprocess
import sys

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
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=300)


def test_import_stays_away_from_optional_packages():
    """`phalanx` alone imports no optional or foreign package, but those that it needs, and prints nothing, not even a warning."""
    done = run("-W", "error", "-c", TRACE)
    assert (done.returncode, done.stderr) == (0, "")
    (line,) = done.stdout.splitlines()
    modules = set(line.split())
    assert not {"tensorflow", "torch", "ray", "grain", "orbax", "optax", "flax"} & modules
    assert {"phalanx", "jax", "keras", "numpy"} <= modules


def test_launcher_needs_no_jax():
    """What stands below the strategies imports neither JAX nor Keras."""
    names = "phalanx, phalanx.errors, phalanx.cluster_resolver, phalanx._src.tools.cli"
    done = run("-c", f"import {names}, sys; print({{'jax', 'keras', 'numpy'}} & set(sys.modules))")
    assert (done.stdout, done.stderr) == ("set()\n", "")


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
