# SPDX-License-Identifier: Apache-2.0
"""Which worker this process is, where it is one."""

worker_index: int | None = None
