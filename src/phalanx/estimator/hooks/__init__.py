# SPDX-License-Identifier: Apache-2.0
"""Ready-made hooks, with the names of `tf.estimator`."""
