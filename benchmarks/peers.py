# SPDX-License-Identifier: Apache-2.0
"""Environments for the libraries that Phalanx is measured against."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.parent import ROOT

TENSORFLOW = ("tensorflow-cpu==2.21.0", "tf_keras==2.21.0")
TORCH = ("torch==2.13.0", "numpy==2.4.6")
RAY_TRAIN = ("ray[train]==2.60.0", *TORCH)


def interpreter(name: str, packages: Sequence[str]) -> Path:
    """Makes an environment of its own with these packages, once, and returns its Python."""
    environment = ROOT / "benchmarks" / ".peers" / name
    python, made = environment / "bin" / "python", environment / "made"
    if not made.exists():
        print(f"making an environment with {', '.join(packages)}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", environment], check=True, timeout=120)
        subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True, timeout=1200)
        made.write_text("\n".join(packages) + "\n")
    return python
