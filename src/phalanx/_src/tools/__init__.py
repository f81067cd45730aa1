# SPDX-License-Identifier: Apache-2.0
"""What `phalanx <command>` does: a file or a folder for each command, which has its options, and `cli`, which joins them.

In: a script, a file, or nothing. Out: a table for a person, and JSON for a program. A tool changes nothing of what it looks at.
"""
