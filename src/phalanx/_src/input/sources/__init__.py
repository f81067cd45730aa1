# SPDX-License-Identifier: Apache-2.0
"""Sources of batches: adapters from the datasets of several libraries to one reader whose position can be saved.

In: arrays, iterables, functions, and datasets of Grain, torch, TensorFlow, Hugging Face and Keras, among which `adapt` chooses. Out: a reader of batches in
host memory, and facts, such as their number and who owns their memory. A reader that starts at a saved position continues with the next batch.
"""
