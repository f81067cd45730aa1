# SPDX-License-Identifier: Apache-2.0
"""`phalanx env`: shows what a bug report needs."""
