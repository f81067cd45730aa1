# SPDX-License-Identifier: Apache-2.0
"""Exported models: the folder that `Estimator.export_saved_model` writes and `load_saved_model` reads.

In: the graph of the predictions, the values of a checkpoint, and the shapes and dtypes of the features that callers will send.
Out: a folder with the compiled program, the variables and the signature; from it, a `SavedModel` that predicts.
Always true: a folder appears complete or not at all; it is read without the model function, and predicts any number of rows;
what a device cannot hold (text, categories) is prepared on the host from the signature.
"""
