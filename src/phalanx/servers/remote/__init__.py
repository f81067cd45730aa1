# SPDX-License-Identifier: Apache-2.0
"""What runs in the processes of parameter servers and of their workers; it needs no Keras."""
