# SPDX-License-Identifier: Apache-2.0
"""Heads: from the logits of a model to its loss, its metrics and its predictions.

In: logits (rows, logits_dimension), labels as the input function yields them, and optional weights of the rows.
Out: an `EstimatorSpec` for the mode: predictions, and with labels a scalar loss, metrics and a `train_op`.
Always true: padded rows count neither in losses nor in metrics; names of metrics and of predictions are those of tf.estimator;
text becomes numbers on the host, before a batch reaches a device.
"""
