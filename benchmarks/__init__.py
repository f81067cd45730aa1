# SPDX-License-Identifier: Apache-2.0
"""What Phalanx costs beside hand-written JAX and beside tf.distribute: `python -m benchmarks [name...] [--quick]`."""
