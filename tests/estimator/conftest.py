"""Imports what changes the environment, before a test looks at it."""

import tensorboardX.event_file_writer  # noqa: F401
