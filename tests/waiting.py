"""How a test waits: for a condition, with a bound that only a hang reaches."""

import time

DEADLINE_S = 300


def wait_until(is_so, process=None):
    """Waits for something that must come true, while a process runs if one is given."""
    deadline = time.monotonic() + DEADLINE_S
    while not is_so():
        assert process is None or process.poll() is None, process.communicate()
        assert time.monotonic() < deadline
        time.sleep(0.01)
