# SPDX-License-Identifier: Apache-2.0
"""Draws the pictures of the README again, from runs of `make demo-crash`: `make pictures`. Takes four minutes on two idle cores.

docs/images/kill.svg      the losses of one process, and of three processes, one of which is killed
docs/images/terminal.svg  what the terminal shows
"""

import io
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "examples"))

IMAGES = ROOT / "docs" / "images"
WIDTH = 112
LEFT_OUT = r"^(\[worker \d+\])?$| reads |\[Gloo\]| training ━"
"""Empty lines, lines about files and connections, and the progress bar."""
STYLES = {
    r"^\[worker \d+\]": "bright_black",
    r"^Phalanx: .*": "cyan",
    r"(?<=\] )Phalanx: .*": "cyan",
    r"^worker \d.*|^A new worker.*|^The group.*": "bold yellow",
    r"loss [\d.]+": "green",
    r"^\$ .*": "bold white",
}


def main() -> None:
    """Runs the training alone and with a loss, and draws both pictures."""
    crashing = command_of("demo-crash")
    alone = (
        re.sub(r"--workers \S+|--crash-at \d+|--out \S+", "", crashing)
        + " --out out/demo-alone"
    )
    run(alone)
    # The first run compiles the program for two workers. Otherwise they wait for it, and the new worker joins one step after the loss.
    run(crashing)
    lines = run(crashing)
    IMAGES.mkdir(exist_ok=True)
    draw_terminal(crashing, lines)
    draw_losses(int(re.search(r"--crash-at (\d+)", crashing)[1]))


def command_of(target: str) -> str:
    """Returns the last command of a target of the Makefile, without its environment."""
    printed = subprocess.run(
        ["make", "-n", target], cwd=ROOT, check=True, capture_output=True, text=True
    ).stdout
    return re.search(r"bin/(phalanx run .*)", printed.replace("\\\n", " "))[1]


def run(command: str) -> list[str]:
    """Runs the command `phalanx` from the first step on, shows what it prints and returns its lines."""
    shutil.rmtree(ROOT / re.search(r"--out (\S+)", command)[1], ignore_errors=True)
    process = subprocess.Popen(
        [sys.executable, "-m", *command.split()],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": str(WIDTH)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    lines = []
    for line in process.stdout:
        print(line, end="", flush=True)
        lines.append(line.rstrip())
    if process.wait():
        raise SystemExit(f"{command} ended with exit code {process.returncode}.")
    return lines


def draw_terminal(command: str, lines: list[str]) -> None:
    """Draws a terminal with a command and the lines that it printed, except `LEFT_OUT`."""
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True)
    for line in [
        f"$ {command}",
        *(line for line in lines if not re.search(LEFT_OUT, line)),
    ]:
        text = Text(line)
        for pattern, style in STYLES.items():
            text.highlight_regex(pattern, style)
        console.print(text, soft_wrap=False)
    picture = console.export_svg(title="make demo-crash", clear=True)
    # A picture loads nothing from other hosts: the reader's own font for code is used.
    picture = re.sub(r"@font-face \{.*?\}", "", picture, flags=re.DOTALL).replace(
        "Fira Code", "ui-monospace"
    )
    (IMAGES / "terminal.svg").write_text(picture, encoding="utf-8")


def draw_losses(killed_after: int) -> None:
    """Draws the losses of both trainings, and after which steps a process is killed and another joins."""
    from text_lm import draw

    alone, together = (
        json.loads((ROOT / "out" / folder / "losses.json").read_text())
        for folder in ("demo-alone", "demo-crash")
    )
    workers = together["workers"]
    joined = next(
        step
        for step in range(killed_after + 1, len(workers))
        if workers[step] == workers[0]
    )
    draw(
        {
            "1 process": alone["losses"],
            f"{workers[0]} processes, one is killed": together["losses"],
        },
        "Training continues when a process is killed",
        IMAGES / "kill.svg",
        [
            (killed_after, "worker 1 is killed"),
            (joined, "a new worker joins"),
        ],
    )


if __name__ == "__main__":
    main()
