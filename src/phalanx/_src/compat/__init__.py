# SPDX-License-Identifier: Apache-2.0
"""The adapter to Keras: every private name of Keras that Phalanx uses, and every method of Keras that it wraps.

No other package of Phalanx touches the internals of Keras. `tests/unit/test_compat.py` has one test per such name, so a new version
of Keras that changes one of them fails there first.
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
            "Phalanx needs the JAX backend, but Keras was imported first and cannot change its backend afterwards.",
            'import phalanx before keras, or set KERAS_BACKEND="jax" in the environment',
        )


_require_jax_backend()

# After the backend is set, because these modules import Keras. Importing them wraps the methods of Keras.
from phalanx._src.compat.batch_functions import *  # noqa: E402
from phalanx._src.compat.frozen import *  # noqa: E402
from phalanx._src.compat.hooks import *  # noqa: E402
from phalanx._src.compat.layouts import *  # noqa: E402
from phalanx._src.compat.optimizers import *  # noqa: E402
from phalanx._src.compat.recurrent import *  # noqa: E402
from phalanx._src.compat.rows import *  # noqa: E402
from phalanx._src.compat.saving import *  # noqa: E402
from phalanx._src.compat.scope import *  # noqa: E402
from phalanx._src.compat.seeds import *  # noqa: E402
from phalanx._src.compat.stored import *  # noqa: E402
from phalanx._src.compat.tables import *  # noqa: E402
from phalanx._src.compat.tracking import *  # noqa: E402
from phalanx._src.compat.trainer import *  # noqa: E402
from phalanx._src.compat.undo import *  # noqa: E402
from phalanx._src.compat.variables import *  # noqa: E402

# Last, because it wraps what the others have wrapped: nothing happens to a variable that exists already.
from phalanx._src.compat.reuse import *  # noqa: E402  # isort: skip
