# SPDX-License-Identifier: Apache-2.0
"""Variables without a stored value. The parameter servers initialize the rows of such a table."""

from collections.abc import Callable

import keras
from keras import Variable
from keras.src.backend.common import global_state

from phalanx._src.compat.facts import facts_of, note_facts


def make_table(make: Callable[[], Variable]) -> Variable:
    """Returns the variable that `make` creates, without its value. `initializer_of` returns its initializer."""
    with keras.StatelessScope(initialize_variables=False):
        variable = make()
    # Keras would initialize the variable when the outermost scope closes.
    waiting = global_state.get_global_attribute("uninitialized_variables", [])
    global_state.set_global_attribute("uninitialized_variables", [v for v in waiting if v is not variable])
    note_facts(variable).initializer, variable._initializer = variable._initializer, None
    return variable


def initializer_of(table: Variable) -> keras.initializers.Initializer | None:
    """Returns the initializer of the rows of a table; None for other variables."""
    return facts_of(table).initializer
