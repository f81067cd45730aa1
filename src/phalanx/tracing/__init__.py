# SPDX-License-Identifier: Apache-2.0
"""A function that reads and writes variables, as a program."""
