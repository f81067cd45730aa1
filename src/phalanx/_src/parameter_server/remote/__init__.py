# SPDX-License-Identifier: Apache-2.0
"""Code that runs in the processes of parameter servers and workers. It does not import Keras."""
