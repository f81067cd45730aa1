# SPDX-License-Identifier: Apache-2.0
"""`phalanx checkpoint`: lists, shows, compares and exports checkpoints."""
