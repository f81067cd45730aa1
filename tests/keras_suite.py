# SPDX-License-Identifier: Apache-2.0
"""Runs Keras's own tests in plain Keras, with Phalanx imported, and under a strategy with two replicas.

    python tests/keras_suite.py CHECKOUT keras/src/trainers/trainer_test.py keras/src/callbacks -k "not eager"

CHECKOUT is a clone of https://github.com/keras-team/keras at the version that is installed. The environment needs the
packages of Keras's tests beside Phalanx: absl-py, pandas, tensorflow-cpu and torch. Prints how many tests passed in each way, and
each test that ends otherwise than in plain Keras. `docs/keras_tests.md` has the reasons.

The same file is the pytest plugin that imports Phalanx and opens the scope.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

WAYS = ("plain", "imported", "replicas")
_WAY = "PHALANX_KERAS_SUITE"


def environment(way: str) -> dict[str, str]:
    """Returns the environment of a run: two CPU devices in each way."""
    devices = {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": "2", "NPROC": "4", "KERAS_BACKEND": "jax"}
    paths = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "src")]
    return dict(os.environ) | devices | {_WAY: way, "PYTHONPATH": os.pathsep.join(paths), "TF_CPP_MIN_LOG_LEVEL": "3"}


def outcomes(checkout: Path, way: str, arguments: list[str]) -> dict[str, str]:
    """Returns how each test ended: passed, failed or skipped."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "keras_suite"]
        command += ["--continue-on-collection-errors", f"--junitxml={report}", *arguments]
        subprocess.run(command, cwd=checkout, env=environment(way), check=False)
        cases = ET.parse(report).getroot().iter("testcase")
        return {f"{case.get('classname')}::{case.get('name')}": _outcome(case) for case in cases}


def _outcome(case: ET.Element) -> str:
    kinds = {child.tag for child in case}
    return "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"


def main() -> None:
    """Runs the tests in the ways that are asked for, and prints what differs from plain Keras."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--ways", nargs="+", choices=WAYS[1:], default=WAYS[1:], help="besides plain")
    options, arguments = parser.parse_known_args()
    plain = outcomes(options.checkout, "plain", arguments)
    print("plain", dict(Counter(plain.values())))
    for way in options.ways:
        found = outcomes(options.checkout, way, arguments)
        print(way, dict(Counter(found.values())))
        for name in sorted(plain.keys() | found.keys()):
            if plain.get(name) != found.get(name):
                print(f"  {name}: {plain.get(name)} -> {found.get(name)}")


if os.environ.get(_WAY) in WAYS[1:] and __name__ != "__main__":
    import phalanx

    phalanx.get_strategy()  # Imports all of Phalanx.

if os.environ.get(_WAY) == "replicas" and __name__ != "__main__":
    _strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])

    @pytest.fixture(autouse=True)
    def in_scope():
        """Runs each test in the scope of a strategy with two replicas."""
        with _strategy.scope():
            yield


if __name__ == "__main__":
    main()
