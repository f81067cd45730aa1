# SPDX-License-Identifier: Apache-2.0
"""Where batches come from: every library's datasets as one kind of reader, whose position can be saved and restored."""
