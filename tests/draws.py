"""How many random cases a property test draws: few in `make test`, many in `make draws`."""

import os

import hypothesis

MANY = bool(os.environ.get("PHALANX_TEST_DRAWS"))


def draws(usual, many=None):
    """Decorates a property test: the number of cases in `make test`, and in `make draws` (ten times as many by default)."""
    return hypothesis.settings(max_examples=(many or 10 * usual) if MANY else usual)
