# SPDX-License-Identifier: Apache-2.0
"""Compiled programs: a traced function with its variables, as one call of XLA.

In: a trace, and the arguments of a call. Out: results, and new values of the variables. A call that fails or is interrupted changes no variable. Other
numbers of rows per replica are stages of the same program (`own_rows`, `stages`), so that the user's code never sees padding.
"""
