"""Law 5, for arguments: what is made of options answers a bad value with an error of Phalanx, and never hangs."""

import pytest
from bad_groups import EXEMPT, GROUPS, answers, public_callables
from bad_values import FUNCTIONS, VALUES, Hung

from phalanx.errors import PhalanxError


def outcome(case, name, parameter, value, error):
    """Returns what is wrong with the answer to one bad value; None if nothing is."""
    is_function = value in FUNCTIONS and parameter in case.functions
    if isinstance(error, PhalanxError):
        return None if "HINT" in str(error) else f"{name}({parameter}={value}): no HINT: {error}"
    if isinstance(error, Hung):
        return f"{name}({parameter}={value}) hangs"
    if error is not None:
        # What another function raises when it is called with other arguments than it takes is its own, and so is what data raise.
        is_own = is_function or (value == "uncountable" and str(error) == "no")
        return None if is_own else f"{name}({parameter}={value}): {error!r:.200}"
    is_good = is_function or value in case.takes.get(parameter, ())
    return None if is_good else f"{name}({parameter}={value}) is accepted"


@pytest.mark.usefixtures("whole_tracebacks")
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("values", ["few", "all"])
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.cover(["group", "values"], {(group, "few") for group in GROUPS if not group.endswith("_x1")})
def test_bad_values_are_refused(group, values):
    """Each argument of each callable, by all the others being good."""
    cases = GROUPS[group]()
    given = answers(group) if values == "few" else answers(group, tuple(VALUES))
    wrong = [outcome(cases[name], name, parameter, value, error) for (name, parameter, value), error in given.items()]
    assert [text for text in wrong if text] == []


@pytest.mark.filterwarnings("ignore")
def test_every_public_callable_has_a_case():
    """Or stands in the list of exceptions, which has no name too many."""
    cases = {name.partition("(")[0] for group in GROUPS.values() for name in group()}
    public = set(public_callables())
    assert sorted(public - cases - set(EXEMPT)) == []
    assert sorted(set(EXEMPT) & cases | set(EXEMPT) - public) == []
