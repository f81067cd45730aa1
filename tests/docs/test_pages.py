"""The Python blocks of pages, run as programs on two virtual CPU devices, and what the pages say that they print."""

import importlib.util
import json
import os
import re
import runpy
import sys
from pathlib import Path

import numpy as np
import pytest
from tests import forks

from phalanx._src.launch import templates
from phalanx._src.launch.plan import Request

ROOT = Path(__file__).parents[2]
PAGES = (
    "README.md",
    "docs/index.md",
    "docs/start.md",
    "docs/choose.md",
    "docs/from_keras_distribution.md",
    "docs/from_horovod.md",
    "docs/from_accelerate.md",
    "docs/from_jax.md",
    "docs/from_lightning.md",
    "docs/from_estimator.md",
    "docs/optax_and_flax.md",
    "docs/mixed_precision.md",
    "docs/reinforcement_learning.md",
    "docs/notebooks.md",
    "docs/side_by_side.md",
    "docs/feature_columns.md",
    "docs/saving.md",
    "docs/summaries.md",
    "docs/stopping.md",
    "docs/communication.md",
    "docs/recovery.md",
    "docs/how_it_works.md",
    "docs/model_parallel.md",
    "docs/troubleshooting.md",
)
DEADLINE_S = 300  # On a busy machine; alone, each takes less than a tenth of it.


def blocks(page, language):
    """Returns the fenced blocks of a language, each with the number of its first line."""
    text = (ROOT / page).read_text(encoding="utf-8")
    found = re.finditer(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [(text[: match.start(1)].count("\n"), match.group(1)) for match in found]


def program_of(page, language="python"):
    """Returns the blocks of a language as one program, whose line numbers are those of the page."""
    lines = []
    for start, block in blocks(page, language):
        lines += [""] * (start - len(lines)) + block.splitlines()
    return "\n".join(lines) + "\n"


def program_after(page):
    """Returns the program that the first diff of a page ends with."""
    (_, diff), *_ = blocks(page, "diff")
    return "".join(line[2:] for line in diff.splitlines(keepends=True) if not line.startswith("-"))


def run(program, path, **environment):
    """Runs a program in the folder of `path`, and returns the finished process."""
    path.write_text(program, encoding="utf-8")
    result = forks.run(
        [sys.executable, str(path)],
        cwd=path.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8", **environment},
        capture_output=True,
        encoding="utf-8",
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result


@pytest.mark.cover(
    # The guides in tests/guide are those programs for an Estimator that from_estimator.md translates. What from_lightning.md has beside calls
    # of the other pages, a `train_step` of one's own, is in tests/contract.
    ["page"],
    {page for page in PAGES if page == "README.md" or re.match("docs/(start|from_(?!estimator|lightning))", page)},
)
@pytest.mark.parametrize("page", PAGES)
def test_page_runs_and_prints_what_it_says(page, tmp_path):
    """The program ends without an error or a warning, and prints the page's `text` blocks in their order."""
    result = run(program_of(page), tmp_path / (Path(page).stem + ".py"), PHALANX_CPU_DEVICES="2")
    assert "Warning" not in result.stderr, result.stderr
    printed = result.stdout
    for _, expected in blocks(page, "text"):
        assert expected in printed
        printed = printed.partition(expected)[2]


def launched(program, path, workers):
    """Runs a program by `phalanx run`, and returns the lines that its workers print."""
    path.write_text(program, encoding="utf-8")
    result = forks.run(
        [sys.executable, "-m", "phalanx", "run", "--workers", workers, path.name],
        cwd=path.parent,
        env={**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=DEADLINE_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout.splitlines()


def test_readme_shows_what_two_workers_print(tmp_path):
    """`phalanx run --workers 2` with the program of the README's diff prints the lines that the README shows, but for times."""
    ((_, expected),) = blocks("README.md", "console")
    printed = launched(program_after("README.md"), tmp_path / "train.py", "2")[-len(expected.splitlines()) :]
    for line, shown in zip(printed, expected.splitlines(), strict=True):
        (words, figures), (shown_words, shown_figures) = words_and_figures(line), words_and_figures(shown)
        assert words == shown_words
        np.testing.assert_allclose(figures, shown_figures, rtol=0.01)  # Sums differ a little from CPU to CPU.


@pytest.mark.exhaustive("test_readme_shows_what_two_workers_print, and tests/cluster/test_elastic.py")
def test_first_page_trains_in_two_processes(tmp_path):
    """Its script, with fewer epochs."""
    program = program_of("docs/start.md", "python train").replace("epochs=5000", "epochs=2")
    assert [line for line in launched(program, tmp_path / "train.py", "1:2") if "11/11" in line]


def words_and_figures(line):
    """Returns a line without its numbers, and its numbers that are not times."""
    number = r"\d+(?:\.\d+)?"
    line = re.sub(rf"{number}m?s\b", "", line)
    return re.sub(number, "", line), [float(figure) for figure in re.findall(number, line)]


def test_figures_of_pages_are_those_of_the_benchmarks():
    """Each figure of a line of a page that links to a section of docs/benchmarks.md stands in that section."""
    sections = {
        re.sub(r"[^a-z -]", "", section.partition("\n")[0].lower()).replace(" ", "-"): section
        for section in re.split(r"\n##+ ", (ROOT / "docs/benchmarks.md").read_text(encoding="utf-8"))
    }
    claims = [
        (figure, sections[anchor])
        for page in (ROOT / "README.md", *(ROOT / "docs").glob("*.md"))
        for line in page.read_text(encoding="utf-8").splitlines()
        for anchor in re.findall(r"benchmarks\.md#([a-z-]+)", line)
        for figure in re.findall(r"\d+(?:\.\d+)?", line)
    ]
    assert len(claims) >= 8, "the pages have figures"
    assert [
        figure for figure, section in claims if not re.search(rf"(?<![\d.]){re.escape(figure)}(?![\d.]\d)", section)
    ] == []


@pytest.mark.parametrize(
    ("page", "language"), [("docs/from_keras_distribution.md", "keras"), ("docs/from_jax.md", "jax")]
)
def test_program_for_a_peer_prints_the_same(page, language, tmp_path):
    """The page's program for Keras or JAX alone prints what the page says that both programs print."""
    program = program_of(page, f"python {language}")
    printed = run(program, tmp_path / f"{language}_program.py", JAX_NUM_CPU_DEVICES="2", NPROC="4").stdout
    ((_, expected),) = blocks(page, "text")
    assert printed == expected


@pytest.mark.parametrize(
    ("page", "language"),
    [
        ("docs/from_horovod.md", "horovod"),
        ("docs/from_accelerate.md", "accelerate"),
        ("docs/from_lightning.md", "lightning"),
    ],
)
def test_program_of_a_peer_is_python(page, language):
    """The programs of libraries that are not installed here compile at least."""
    compile(program_of(page, f"python {language}"), page, "exec")


@pytest.mark.skipif(importlib.util.find_spec("tensorflow") is None, reason="it is a program for TensorFlow")
def test_tensorflow_program_prints_the_same(tmp_path):
    """The TensorFlow blocks of the page print what the page says that both programs print."""
    page = "docs/side_by_side.md"
    printed = run(
        program_of(page, "python tensorflow"), tmp_path / "tensorflow_program.py", KERAS_BACKEND="tensorflow"
    ).stdout
    for _, expected in blocks(page, "text"):
        assert expected in printed


def test_slurm_script_of_the_page_is_that_of_the_command():
    """The page shows the script for four nodes with four GPUs as `phalanx run --print slurm` writes it."""
    request = Request("train.py", workers=4, devices_per_worker=4)
    assert templates.slurm(request, max_restarts=3).strip("\n") + "\n" in [
        block for _, block in blocks("docs/clusters.md", "")
    ]


SLURM = {
    "SLURM_STEP_NUM_TASKS": "5",
    "SLURM_STEP_NODELIST": "n[1-3]",
    "SLURM_STEP_TASKS_PER_NODE": "2,1,2",
    "SLURM_DISTRIBUTION": "block",
}
KUBERNETES = {"PHALANX_NUM_PODS": "5", "JOBSET_NAME": "t", "REPLICATED_JOB_NAME": "worker"}
LAUNCHED = {"cluster": {"worker": [f"h:{port}" for port in range(1, 6)]}}


@pytest.mark.parametrize(
    ("resolver", "variables", "addresses"),
    [
        ("Slurm", lambda rank: {**SLURM, "SLURM_PROCID": f"{rank}"}, "n1:8888 n1:8889 n2:8888 n3:8888 n3:8889"),
        (
            "Kubernetes",
            lambda rank: {**KUBERNETES, "JOB_COMPLETION_INDEX": f"{rank}"},
            " ".join(f"t-worker-0-{i}.t:8470" for i in range(5)),
        ),
        (
            "TFConfig",
            lambda rank: {"TF_CONFIG": json.dumps({**LAUNCHED, "task": {"type": "worker", "index": rank}})},
            "h:1 h:2 h:3 h:4 h:5",
        ),
    ],
    ids=["Slurm", "Kubernetes", "phalanx run"],
)
def test_processes_of_a_group_get_jobs(resolver, variables, addresses, tmp_path, monkeypatch):
    """`roles.py` of the page runs the script as chief, evaluator, server and workers, with the arguments of the script."""
    (program,) = (block for _, block in blocks("docs/clusters.md", "") if "# roles.py" in block)
    (tmp_path / "roles.py").write_text(program.replace("SlurmClusterResolver", f"{resolver}ClusterResolver"))
    (tmp_path / "train.py").write_text(
        "import json, os, pathlib, sys\n"
        "pathlib.Path(sys.argv[1]).write_text(json.dumps([os.environ['TF_CONFIG'], *sys.argv[2:]]))\n"
    )
    tasks, clusters = [], []
    for rank in range(5):
        with monkeypatch.context() as patch:
            for name, value in variables(rank).items():
                patch.setenv(name, value)
            patch.setenv("TF_CONFIG", os.environ.get("TF_CONFIG", ""))
            patch.setattr(
                sys, "argv", ["roles.py", *map(str, (tmp_path / "train.py", tmp_path / "said", "--steps", 3))]
            )
            runpy.run_path(str(tmp_path / "roles.py"))
        config, *arguments = json.loads((tmp_path / "said").read_text())
        assert arguments == ["--steps", "3"]
        tasks.append(tuple(json.loads(config)["task"].values()))
        clusters.append(json.loads(config)["cluster"])
    assert tasks == [("chief", 0), ("evaluator", 0), ("ps", 0), ("worker", 0), ("worker", 1)]
    chief, evaluator, server, *workers = addresses.split()
    assert clusters == [{"chief": [chief], "evaluator": [evaluator], "ps": [server], "worker": workers}] * 5
