# SPDX-License-Identifier: Apache-2.0
"""Ready-made models: Estimators whose model function comes from a head and feature columns, or from a Keras model.

In: feature columns, sizes of layers, optimizers and a head; or a compiled Keras model.
Out: an `Estimator`. Nothing else is special about it: it trains, evaluates, predicts and exports like a custom one.
Always true: arguments, their order and their defaults are those of tf.estimator, and so are the names of the model's variables:
`vars_to_warm_start` and `get_variable_value` of a TensorFlow program keep working. tests/estimator compares recorded training runs.
"""
