"""Python runs this file when a process of the tests starts.

Keras imports scikit-learn and matplotlib if it finds them, which takes half of the time that a process needs to start. Only
the examples use them, and their processes do not have this directory in PYTHONPATH. The collector runs seldom: imports leave
it little to collect.
"""

import gc
import sys

gc.set_threshold(50_000, 50, 20)

sys.modules["sklearn"] = sys.modules["matplotlib"] = None
