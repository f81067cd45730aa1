# SPDX-License-Identifier: Apache-2.0
"""Phalanx: the tf.distribute.Strategy system on JAX and Keras 3."""

import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

from phalanx.errors import InvalidArgumentError
from phalanx.errors.frames import hide_of_uncaught
from phalanx.errors.names import nearest, no_such_name

if TYPE_CHECKING:
    # Only for type checkers: at run time, `__getattr__` loads these names.
    from phalanx.api import *

    __version__: str


def _apply_environment() -> None:
    """Chooses Keras's backend and the number of CPU devices, which cannot change once Keras and JAX are imported."""
    if "keras" in sys.modules:
        importlib.import_module("phalanx._src.compat")  # It checks the backend.
    else:
        # Keras reads this once, when it is imported. Its default is TensorFlow.
        os.environ["KERAS_BACKEND"] = "jax"
    devices = os.environ.get("PHALANX_CPU_DEVICES")
    if not devices or not _is_count(devices):
        return
    if "jax" in sys.modules:
        importlib.import_module("phalanx._src.mesh.devices").set_virtual_cpu_devices(int(devices))
        return
    # JAX reads this at its import. This function does not import JAX, because the launcher does not need it.
    os.environ["JAX_NUM_CPU_DEVICES"] = devices
    if int(devices) > 1:
        # With fewer threads, XLA's all-reduce deadlocks. See `set_virtual_cpu_devices`.
        os.environ["NPROC"] = str(2 * int(devices))


def _is_count(text: str) -> bool:
    # The length comes first, because `int` takes long for thousands of digits.
    return text.isascii() and text.isdecimal() and len(text) < 6 and 0 < int(text) <= 1 << 16


def _require_count() -> None:
    """Refuses another number of devices than one. Not at import: the launcher is to say it without a stack."""
    devices = os.environ.get("PHALANX_CPU_DEVICES")
    if devices and not _is_count(devices):
        raise InvalidArgumentError(
            f"PHALANX_CPU_DEVICES={devices!r}", "must be a number of devices.", "PHALANX_CPU_DEVICES=2"
        )


_apply_environment()
hide_of_uncaught()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return importlib.import_module("importlib.metadata").version("phalanx")
    # Python and its tools ask for names such as `__path__` and `__wrapped__`, which must not load JAX.
    if name.startswith("__") and name != "__all__":
        raise no_such_name(__name__, name, "")
    # Modules first, and each alone: those of clusters and of the launcher know nothing of JAX.
    if importlib.util.find_spec(f"phalanx.{name}"):
        return importlib.import_module(f"phalanx.{name}")
    _require_count()
    api = importlib.import_module("phalanx.api")
    # From now on, Python finds these names without this function.
    globals().update({public: getattr(api, public) for public in api.__all__}, __all__=api.__all__)
    if name not in globals():
        raise no_such_name(__name__, name, _meant(name))
    return globals()[name]


_ROOMS = (
    "experimental",
    "coordinator",
    "cluster_resolver",
    "keras",
    "data",
    "elastic",
    "estimator",
    "estimator.experimental",
    "estimator.export",
    "feature_column",
    "lax",
    "nn",
    "summary",
    "summary.experimental",
    "summary.trackers",
    "tpu",
    "train",
    "tpu.experimental",
    "testing",
)


def _meant(name: str) -> str:
    """Returns a hint for a missing name: the same name in a submodule, or the nearest name."""
    if name == "distribute":
        return "phalanx itself has the names of tf.distribute, for example phalanx.MirroredStrategy"
    rooms = {f"phalanx.{room}": importlib.import_module(f"phalanx.{room}") for room in _ROOMS}
    # A name that several modules have is suggested from the first one in `_ROOMS`.
    same = next((f"{path}.{name}" for path, room in rooms.items() if hasattr(room, name)), "")
    return same or nearest(name, __name__, __dir__())


def __dir__() -> list[str]:
    return list(__getattr__("__all__"))
