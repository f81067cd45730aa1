# SPDX-License-Identifier: Apache-2.0
"""Every private name of Keras that Phalanx leans on, and every method of Keras that it extends.

`tests/unit/test_compat.py` has a test that names each. Nothing else in Phalanx touches Keras's internals.
"""

import os
import sys

from phalanx.errors import StartupError


def _require_jax_backend() -> None:
    if "keras" not in sys.modules:
        os.environ["KERAS_BACKEND"] = "jax"
    import keras

    if keras.backend.backend() != "jax":
        raise StartupError(
            f"import phalanx with the Keras backend {keras.backend.backend()!r}",
            "Keras was imported before phalanx, and its backend cannot change afterwards.",
            'import phalanx before keras, or set KERAS_BACKEND="jax" in the environment',
        )


_require_jax_backend()

# They import Keras, and each extends the methods of Keras that it is about.
from phalanx.compat.hooks import *  # noqa: E402
from phalanx.compat.layouts import *  # noqa: E402
from phalanx.compat.optimizers import *  # noqa: E402
from phalanx.compat.rows import *  # noqa: E402
from phalanx.compat.scope import *  # noqa: E402
from phalanx.compat.seeds import *  # noqa: E402
from phalanx.compat.tables import *  # noqa: E402
from phalanx.compat.trainer import *  # noqa: E402
from phalanx.compat.variables import *  # noqa: E402
