"""Lines that libraries write to file descriptors."""

import os
import subprocess
import sys
from contextlib import suppress

from phalanx._src.runtime.streams import filtered


def test_lines_are_chosen_at_the_end(capfd):
    """An exception in the block hides nothing."""
    with suppress(KeyError), filtered(sys.stderr, 2, lambda line: b"secret" not in line):
        os.write(2, b"one\nsecret\ntwo\n")
        raise KeyError
    os.write(2, b"three\n")
    assert capfd.readouterr().err == "one\ntwo\nthree\n"


def test_closed_stream_is_left_closed():
    script = """
import os, sys
from phalanx._src.runtime.streams import filtered
os.close(2)
with filtered(sys.stderr, 2, bool):
    print("done")
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, timeout=300, check=True)
    assert (done.stdout, done.stderr) == (b"done\n", b"")
