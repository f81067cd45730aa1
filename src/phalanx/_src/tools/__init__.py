# SPDX-License-Identifier: Apache-2.0
"""What `phalanx <command>` does: bench, checkpoint, describe, doctor, env, estimate.

In: a script, a file, or nothing. Out: a table for a person, and JSON for a program. A tool changes nothing of what it looks at.
"""
