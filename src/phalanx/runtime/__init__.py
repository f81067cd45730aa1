# SPDX-License-Identifier: Apache-2.0
"""Places where code of other processes runs."""
