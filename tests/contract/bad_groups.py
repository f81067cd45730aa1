"""All groups of cases, and all public callables."""

import bad_cases
import bad_functions
import bad_verbs

GROUPS = {**bad_cases.GROUPS, **bad_verbs.GROUPS, **bad_functions.GROUPS}
