# SPDX-License-Identifier: Apache-2.0
"""Steps that are scheduled, and run by any worker."""
