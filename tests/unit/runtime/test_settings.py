"""Settings of the process, which a tool changes for a while."""

import pytest

from phalanx._src.runtime.settings import ProcessSettings


def test_settings_are_restored_after_an_error():
    """Those of the surrounding context; a name that is no setting changes nothing."""
    settings = ProcessSettings()
    with settings.changed(hollow_bytes=8, emulates_tpus=True):
        with settings.changed(hollow_bytes=16):
            assert (settings.hollow_bytes, settings.emulates_tpus) == (16, True)
        with pytest.raises(ZeroDivisionError), settings.changed(hollow_bytes=0):
            _ = 1 // settings.hollow_bytes
        assert settings.hollow_bytes == 8
    with pytest.raises(AttributeError), settings.changed(cpu_kernels=False, unknown=1):
        pass
    assert settings == ProcessSettings()
