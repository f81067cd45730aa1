# SPDX-License-Identifier: Apache-2.0
"""Variables without a value of their own: the rows of a table are made where they live."""

from collections.abc import Callable
from typing import Any

import keras
from keras import Variable
from keras.src.backend.common import global_state


def make_table(make: Callable[[], Variable]) -> Variable:
    """Returns the variable that `make` makes, without a value: only its initializer, as `initializer_of` gives it."""
    with keras.StatelessScope(initialize_variables=False):
        variable = make()
    waiting = global_state.get_global_attribute("uninitialized_variables", [])
    global_state.set_global_attribute("uninitialized_variables", [v for v in waiting if v is not variable])
    variable._phalanx_initializer, variable._initializer = variable._initializer, None
    return variable


def initializer_of(table: Variable) -> Any:
    """Returns what makes the rows of a table; None for other variables."""
    return vars(table).get("_phalanx_initializer")
