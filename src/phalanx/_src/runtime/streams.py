# SPDX-License-Identifier: Apache-2.0
"""What libraries write to the standard streams of this process from C++, where `sys.stdout` cannot catch it."""

import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TextIO


@contextmanager
def filtered(stream: TextIO, descriptor: int, is_shown: Callable[[bytes], bool]) -> Iterator[None]:
    """Holds the output of the block back, and writes only some of its lines at the end.

    Args:
      stream: the stream of Python that writes to the descriptor.
      descriptor: 1 for the standard output, 2 for the standard error.
      is_shown: function of a line. Returns whether to write it.
    """
    stream.flush()
    try:
        original = os.dup(descriptor)
    except OSError:  # The stream is closed.
        yield
        return
    with tempfile.TemporaryFile() as file:
        # A file and not a pipe: nobody would empty a pipe while the block runs, and the writer would wait.
        os.dup2(file.fileno(), descriptor)
        try:
            yield
        finally:
            stream.flush()
            os.dup2(original, descriptor)
            os.close(original)
            file.seek(0)
            with suppress(OSError):
                os.write(descriptor, b"".join(line for line in file if is_shown(line)))
