# SPDX-License-Identifier: Apache-2.0
"""Options of XLA for programs on CPUs."""

import jax
import pytest

import phalanx
from phalanx._src.kernels import optimization
from phalanx._src.kernels.platforms import compiled_for

_LEVEL = "xla_backend_optimization_level"
_OFF = "jax_disable_most_optimizations"


@pytest.fixture(autouse=True)
def optimized():
    """JAX with optimizations. The tests turn them off, except in `make test-all`."""
    before = jax.config.read(_OFF)
    jax.config.update(_OFF, False)
    yield
    jax.config.update(_OFF, before)


def test_only_programs_for_cpus_have_options(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
    assert optimization.compiler_options(jax.local_devices()) == {_LEVEL: "2"}
    assert optimization.compiler_options([]) == {_LEVEL: "2"}
    with compiled_for(["tpu"]):
        assert not optimization.compiler_options(jax.local_devices())


def test_level_that_the_user_has_chosen_stays(monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", f"--{_LEVEL}=1")
    assert not optimization.compiler_options(jax.local_devices())


def test_optimizations_that_the_user_has_turned_off_stay_off():
    jax.config.update(_OFF, True)
    assert not optimization.compiler_options(jax.local_devices())


def test_compiler_of_a_step_gets_the_options(monkeypatch):
    monkeypatch.setattr(optimization, "compiler_options", lambda devices: {f"option_of_{len(devices)}_devices": 1})
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(jax.errors.JaxRuntimeError, match="option_of_2_devices"):
        strategy.run(lambda: 1.0 * phalanx.get_replica_context().replica_id_in_sync_group)
