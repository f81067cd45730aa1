# SPDX-License-Identifier: Apache-2.0
"""Code that runs in the processes of parameter servers and workers. It does not import Keras.

In: values, plans of updates, programs and tasks. Out: applied updates, and results. A server applies the push of a step once, by its number, and refuses
those of workers that were declared lost.
"""
