# SPDX-License-Identifier: Apache-2.0
"""`phalanx doctor`: starts a cluster and checks it."""
