"""Names of topologies."""

import importlib.util
import re

import jax
import pytest

from phalanx._src.tools.estimate import targets
from phalanx.errors import DeviceError, InvalidArgumentError, MissingDependencyError


def one(name):
    (found,) = targets.parse([name])
    return found


@pytest.mark.parametrize(
    ("name", "sizes", "slices"),
    [
        ("v5e:16x16", (16, 16), 1),
        ("v5e:1", (1, 1), 1),
        ("v5e:2", (2, 1), 1),
        ("v5e:8", (2, 4), 1),
        ("v5e:16", (4, 4), 1),
        ("v5e:256", (16, 16), 1),
        ("v5e:4096", (16, 16), 16),
        ("2*v5e:16x16", (16, 16), 2),
        ("v5p:1", (1, 1, 1), 1),
        ("v5p:16", (2, 2, 4), 1),
        ("v5p:4096", (16, 16, 16), 1),
        ("2*v5p:2x2x2", (2, 2, 2), 2),
        ("h100:4", (1, 4), 1),
        ("h100:4096", (512, 8), 1),
        ("h200:2x4", (2, 4), 1),
        ("cpu:3", (3,), 1),
    ],
)
def test_names_are_parsed(name, sizes, slices):
    """A single number is that of all chips: in the most compact torus, in whole slices, or in whole hosts."""
    found = one(name)
    assert (found.sizes, found.slices) == (sizes, slices)


def test_sizes_after_a_comma_share_the_kind():
    found = targets.parse(["V5P:1, 16,4096", "cpu:2"])
    assert [t.name for t in found] == ["v5p:1", "v5p:16", "v5p:4096", "cpu:2"]
    assert [t.num_devices for t in found] == [1, 16, 4096, 2]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("v5e", "must be a kind of device, a colon and a size"),
        ("v5e:16x", "must be a kind of device, a colon and a size"),
        ("v5e:0", "must have 1 to 65536 devices"),
        ("h100:100000", "must have 1 to 65536 devices"),
        ("v5e:4x4x4", "a slice of v5e has 2 dims"),
        ("v5e:32x32", "a slice of v5e has at most 16x16 chips.\nHINT: 4*v5e:16x16"),
        ("v5p:4x4x64", "a slice of v5p has at most 16x20x28 chips.\nHINT: 2*v5p:16x20x28"),
        ("v5e:7", "no torus of v5e has 7 chips"),
        ("tpu9:8", "the known kinds of devices are v5e"),
        ("h100:12", "12 GPUs do not fill hosts of 8.\nHINT: h100:8"),
        ("h100:2x16", "a host has at most 8 GPUs"),
        ("2*h100:8", "only TPUs have slices"),
        ("cpu:2x2", "CPU devices have one size"),
        ("2*cpu:2", "CPU devices have one size"),
    ],
)
def test_other_names_are_refused(name, words):
    """The message says what a name must be, with an example."""
    with pytest.raises(InvalidArgumentError, match="HINT") as caught:
        one(name)
    assert words in str(caught.value)


@pytest.mark.parametrize("names", ["v5e:4x4", [], None, 1])
def test_names_must_be_a_list(names):
    """A text is not a list of names, although it is a sequence of texts; and a number is no name."""
    with pytest.raises(InvalidArgumentError, match=r"must be a list of names.*\nHINT: topologies="):
        targets.parse(names)
    with pytest.raises(InvalidArgumentError, match="topology 8: must be a str"):
        targets.parse([8])


def test_devices_of_this_process_are_its_first():
    """CPU devices exist; the message for more says how to declare them."""
    assert one("cpu:2").devices() == jax.devices("cpu")[:2]
    with pytest.raises(DeviceError, match=r"has 8 CPU devices.*\nHINT: .*set_virtual_cpu_devices\(9\)"):
        one("cpu:9").devices()


@pytest.mark.parametrize(
    ("name", "package", "module"),
    [("v5e:4x4", '"jax[tpu]', "libtpu"), ("h100:8", "jax-cuda12-plugin", "jax_cuda12_plugin")],
)
def test_compiler_that_is_absent(name, package, module):
    """The message names the package, in the version that fits JAX. `make test-topologies` tests with the compilers."""
    if importlib.util.find_spec(module):
        pytest.skip(f"{package} is installed")
    with pytest.raises(MissingDependencyError, match=re.escape(f"HINT: pip install {package}=={jax.__version__}")):
        one(name).devices()
