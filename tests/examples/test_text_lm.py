"""`examples/text_lm.py` with a tiny model, run as a user runs it."""

import importlib.util
import re
import sys
from pathlib import Path

import numpy as np
import pytest
from event_files import written
from launching import run, started
from tests.waiting import wait_until

EXAMPLE = Path(__file__).parents[2] / "examples" / "text_lm.py"
# Three replicas cannot share a batch of 32 windows without padding.
TINY = ("--devices", 1, 3, "--steps", 8, "--batch", 32, "--width", 32, "--layers", 1, "--learning-rate", 1e-2)
WINDOW = 64


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where the example saves."""
    return tmp_path_factory.mktemp("text_lm")


@pytest.fixture(scope="module")
def printed(run_example, folder):
    """What the example prints."""
    return run_example("text_lm.py", *TINY, "--summaries", "--sample", folder=folder)


@pytest.fixture(scope="module")
def trainings(printed):
    """What it prints of the training on one device, and of that on three."""
    return re.split(r"─+ [13] devices? ─+", printed)[1:]


@pytest.fixture(scope="module")
def text_lm():
    """The module of the data."""
    spec = importlib.util.spec_from_file_location("text_lm_of_test", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, spec.name, module)
        spec.loader.exec_module(module)
        yield module


def losses(output):
    """Returns the losses of the steps."""
    return [float(x) for x in re.findall(r"^step +\d+ +loss ([\d.]+)$", output, re.MULTILINE)]


def held_out(output):
    """Returns the loss on the held-out files and the number of windows in them."""
    loss, windows = re.search(r"held-out loss: ([\d.]+) nats.* all (\d+) windows", output).groups()
    return float(loss), int(windows)


@pytest.mark.exhaustive("test_digits.py, tests/contract/test_law1_equals_one_device.py: the transformer")
def test_loss_falls_in_both(trainings):
    """An untrained model knows no word of 1,024 (6.9 nats); eight steps teach it which are frequent."""
    for training in trainings:
        assert len(losses(training)) == 8
        assert losses(training)[0] > 6.5
        assert losses(training)[-1] < losses(training)[0] - 0.5


@pytest.mark.exhaustive("test_digits.py, tests/contract/test_law1_equals_one_device.py: the transformer")
def test_three_devices_learn_what_one_learns(trainings, printed):
    """Padded batches of three replicas end where one device ends, and the program says by how much they differ."""
    one, three = trainings
    assert losses(one) == pytest.approx(losses(three), abs=2e-3)
    assert held_out(one) == pytest.approx(held_out(three), abs=2e-3)
    difference = float(
        re.search(r"^3 devices: .*largest difference of the weights to 1 device: (\S+)$", printed, re.M)[1]
    )
    assert 0 < difference < 1e-4


@pytest.mark.exhaustive("test_digits.py, tests/contract/test_law1_equals_one_device.py: the transformer")
def test_evaluates_every_window_once(trainings, text_lm):
    """All windows of the held-out files are counted, and no padding."""
    _, files = text_lm.source_files()
    tokens = [len(text_lm.tokens_of(text_lm.code_of(str(file)))) for file in files]
    assert held_out(trainings[1])[1] == sum(max(0, n - 1) // WINDOW for n in tokens)


@pytest.mark.exhaustive("tests/cluster/test_kills.py")
def test_goes_on_where_it_was_killed(tmp_path, trainings):
    """The losses of the steps, and on the held-out files, are those of a run that nobody disturbs."""
    command = [EXAMPLE, "--devices", "1", *TINY[3:], "--resume", "--save-every", "2"]
    optimized = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # As the training that it is compared with.
    with started(*command, merged=True, folder=tmp_path, **optimized) as killed:
        next(line for line in killed.stdout if line.startswith("step     4"))
        wait_until(lambda: list(tmp_path.glob("out/checkpoints_1/ckpt-2*")), killed)
    code, output, _ = run(*command, merged=True, folder=tmp_path, **optimized)
    assert code == 0, output
    restored = int(re.search(r"^restored step (\d+) from out/checkpoints_1/", output, re.M)[1])
    assert restored in (4, 6, 8)
    assert losses(output) == losses(trainings[0])[restored:]
    assert held_out(output) == held_out(trainings[0])
    assert not (tmp_path / "out" / "checkpoints_1").exists()


@pytest.mark.exhaustive("test_digits.py, tests/contract/test_law1_equals_one_device.py: the transformer")
def test_saves_the_curves_and_the_sample(printed, folder, text_lm):
    """The loss curves are a PNG, whose path is the last line, and the sample continues the prompt."""
    assert printed.splitlines()[-1] == "The picture of both: out/loss.png"
    assert (folder / "out" / "loss.png").read_bytes().startswith(b"\x89PNG\r\n")
    sample = (folder / "out" / "sample.txt").read_text(encoding="utf-8")
    assert sample.startswith(text_lm.PROMPT.strip("\n"))
    assert sample in printed


@pytest.mark.exhaustive("test_digits.py, tests/contract/test_law1_equals_one_device.py: the transformer")
def test_writes_summaries_of_both_trainings(trainings, folder):
    """The losses are those that are printed, and the weights of each layer have a histogram under the same name in both."""
    assert "Summaries: pip install tensorboard; tensorboard --logdir" in trainings[-1]
    one, three = (written(folder / "out" / "logs" / name) for name in ("1_device", "3_devices"))
    assert one.keys() == three.keys()
    assert "language_model/block/expand/kernel" in one
    for summaries, training in zip((one, three), trainings, strict=True):
        assert [step for step, _ in summaries["loss"]] == [*range(1, 9)]
        assert [float(value) for _, value in summaries["loss"]] == pytest.approx(losses(training), abs=1e-3)


def test_tokens_stand_for_the_code(text_lm):
    """Frequent words come back from their tokens, rare words are left out, and windows overlap by the token to predict."""
    assert text_lm.text_of(text_lm.tokens_of("\n\n    def read(self):\n        return None\n")) == (
        "\n\n    def read(self):\n        return None\n"
    )
    assert text_lm.tokens_of("quixotically") == [0]
    file = str(text_lm.source_files()[0][0])
    tokens, windows = text_lm.tokens_of(text_lm.code_of(file)), text_lm.windows_of(file)
    np.testing.assert_array_equal(windows[:, :-1].ravel(), tokens[: windows[:, :-1].size])
    np.testing.assert_array_equal(windows[:-1, -1], windows[1:, 0])


def test_code_has_no_comments_and_docstrings(text_lm, tmp_path):
    """Lines of comments and docstrings are cut out; strings in the code stay."""
    path = tmp_path / "module.py"
    path.write_text(
        '"""Says it."""\n\n# First.\ndef f():\n    r"""Does\n\n    it."""\n    return "# no"\n', encoding="utf-8"
    )
    assert text_lm.code_of(str(path)).split() == ["def", "f():", "return", '"#', 'no"']
