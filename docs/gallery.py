# SPDX-License-Identifier: Apache-2.0
"""Runs the programs of docs/examples.md and writes what they print, their time and their pictures: `make gallery`.

Takes five minutes on two idle cores. `python docs/gallery.py digits` runs only the programs whose command contains this word.
"""

import os
import re
import resource
import subprocess
import sys
import tempfile
from datetime import date
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "examples.md"
IMAGES = ROOT / "docs" / "images"
BLOCK = re.compile(
    r"^```console\n\$ (?P<command>.*)\n(?P<printed>(?:.*\n)*?)```$", re.MULTILINE
)
DATE = re.compile(r"(?<=`make gallery` wrote the blocks and pictures on )[\d-]+")
LAST_LINES = 12
WIDTH = 720  # pixels
COLORS = 64


def main() -> None:
    """Runs the programs, and rewrites the page and the pictures."""
    word = " ".join(sys.argv[1:])
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "examples").symlink_to(ROOT / "examples")
        for block in BLOCK.finditer(PAGE.read_text(encoding="utf-8")):
            command = block["command"]
            if word in command:
                shown = f"```console\n$ {command}\n{printed_by(command, folder)}```"
                PAGE.write_text(
                    PAGE.read_text(encoding="utf-8").replace(block[0], shown),
                    encoding="utf-8",
                )
        for picture in Path(folder).glob("out/**/*.png"):
            shrink(picture, IMAGES / picture.name)
    if not word:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(DATE.sub(f"{date.today()}", text), encoding="utf-8")


def printed_by(command: str, folder: str) -> str:
    """Runs a command in a folder, and returns the last lines that it prints and its CPU time."""
    print(f"$ {command}", flush=True)
    begin = cpu_seconds()
    environment = os.environ | {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "COLUMNS": "88",
        "JAX_PLATFORMS": "cpu",
        "NO_COLOR": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
    }
    result = subprocess.run(
        ["bash", "-c", command],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    lines = lines_of(result.stdout)
    cut = ["..."] if len(lines) > LAST_LINES else []
    seconds = f"# {cpu_seconds() - begin:.0f} s of CPU time"
    return "".join(f"{line}\n" for line in [*cut, *lines[-LAST_LINES:], seconds])


def lines_of(printed: str) -> list[str]:
    """Returns what a terminal shows, without empty lines, colors, and the progress of epochs."""
    printed = re.sub(r"\x1b\[[\d;?]*[A-Za-z]|\x08", "", printed)
    lines = [line.rpartition("\r")[2].rstrip() for line in printed.splitlines()]
    return [
        line for line in lines if line.strip() and not re.search(r"━|^Epoch \d+/", line)
    ]


def cpu_seconds() -> float:
    """Returns the CPU time of all processes that this one has waited for."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def shrink(picture: Path, smaller: Path) -> None:
    """Writes a picture with fewer pixels and colors."""
    from PIL import Image

    image = Image.open(picture).convert("RGB")
    image.thumbnail((WIDTH, WIDTH))
    image.quantize(COLORS).save(smaller, optimize=True)
    print(f"{smaller.relative_to(ROOT)}: {smaller.stat().st_size // 1024} kB")


if __name__ == "__main__":
    main()
