"""Measurements of real trainings: what bounds each is named, and scripts that cannot be measured are refused."""

import json
import re

import jax
import pytest

from phalanx._src.tools.bench import report
from phalanx._src.tools.bench.__main__ import main
from phalanx._src.tools.bench.session import Measured, Options, Script, measure, pairs, read, result_of
from phalanx._src.tools.bench.timeline import NAMES, Moments
from phalanx.errors import InvalidArgumentError, StartupError

pytestmark = pytest.mark.slow

FIT = """
import phalanx
import keras, numpy as np
strategy = phalanx.MultiWorkerMirroredStrategy()
with strategy.scope():
    model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(WIDTH, "relu"), keras.layers.Dense(10)])
    model.compile(keras.optimizers.SGD(0.01), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
x, y = np.ones((ROWS, 64), "float32"), np.zeros(ROWS, "int32")
"""
LOOP = """
import sys, time
import phalanx
import numpy as np
strategy = phalanx.MirroredStrategy(int(sys.argv[1]))
import keras
with strategy.scope():
    weights = keras.Variable(np.zeros((64, 64), "float32"))
    optimizer = keras.optimizers.SGD(0.01)
def step(x):
    with phalanx.GradientTape() as tape:
        loss = phalanx.nn.compute_average_loss(keras.ops.sum((x @ weights) ** 2, -1))
    optimizer.apply(tape.gradient(loss, [weights]), [weights])
    return loss
for _ in range(100):
    for batch in strategy.experimental_distribute_dataset(np.ones((64, 64), "float32"), batch_size=8):
        strategy.run(step, args=(batch,))
"""
WITHOUT_OPTIMIZER = """
import phalanx
import numpy as np
strategy = phalanx.MirroredStrategy(2)
weights = strategy.replicate(np.ones((64, 64), "float32")).value
with strategy.scope():
    variable = phalanx.Variable(np.ones((64, 64), "float32"), aggregation="only_first_replica")
def in_arguments(x, weights):
    return phalanx.Mirrored(phalanx.get_replica_context().all_reduce("SUM", (x @ weights).T @ x))
def in_a_variable(x):
    variable.assign(in_arguments(x, variable.value).value)
def outside(x):
    return phalanx.get_replica_context().all_reduce("SUM", (x @ variable.value).T @ x)
@phalanx.function
def update_outside(x):
    variable.assign(strategy.reduce("MEAN", strategy.run(outside, args=(x,)), axis=None))
for _ in range(100):
    for batch in strategy.experimental_distribute_dataset(np.ones((64, 64), "float32"), batch_size=8):
"""
MEASURED = Options(devices=2, processes=1, rounds=1, steps=10, timeout_s=600)


@pytest.fixture
def measured(tmp_path, forked):

    def run(source, arguments=(), **options):
        path = tmp_path / "train.py"
        path.write_text(source)
        chosen = Options(**{**vars(MEASURED), **options})
        return measure(Script(str(path), tuple(arguments)), chosen, lambda line: None)

    return run


def fit(end, width=64, rows=640):
    return FIT.replace("WIDTH", str(width)).replace("ROWS", str(rows)) + end


def test_fit_on_devices_and_processes(measured, tmp_path):
    """The parts add up to the step; speeds are those of the global batch; files of JSON can be compared."""
    found = measured(fit("model.fit(x, y, batch_size=32, epochs=50, verbose=0)"), processes=2)
    assert [(one.processes, one.devices, one.replicas) for one in found.results] == [(1, 1, 1), (1, 2, 2), (2, 1, 2)]
    for one in found.results:
        assert sum(one.parts.values()) * one.steps_per_s == pytest.approx(1.0)
        assert one.rows_per_s == pytest.approx(32 * one.steps_per_s)
        assert len(one.rounds) == 1
    path = tmp_path / "speed.json"
    report.save(found, path)
    report.save(found, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads(path.read_text())["results"][0]["verdict"].startswith("bound by")
    again = read(str(path))
    assert again == found
    assert again.machine["jax"] == jax.__version__
    assert [(a.name, b.name) for a, b in pairs(found, again)] == [(one.name,) * 2 for one in found.results]


@pytest.mark.exhaustive("test_timeline.py, and test_fit_on_devices_and_processes for what is measured")
def test_slow_input_is_named(measured):
    slow = """
import time
def rows():
    while True:
        time.sleep(0.2)
        yield np.ones((32, 64), "float32"), np.zeros(32, "int32")
model.fit(rows(), steps_per_epoch=30, epochs=50, verbose=0)
"""
    found = measured(fit(slow), devices=1)
    assert found.results[0].verdict.startswith("bound by its input"), found.results
    assert found.results[0].parts["input"] > 0.1


@pytest.mark.exhaustive("test_timeline.py, and test_fit_on_devices_and_processes for what is measured")
def test_slow_code_and_slow_rank_are_named(measured, tmp_path):
    """A callback that sleeps if it is alone, else before each step of rank 1. The parts add up to the steps that it sees."""
    slow = f"""
import time
path, is_alone = {str(tmp_path / "seen")!r}, strategy.num_replicas_in_sync == 1
class Slow(keras.callbacks.Callback):
    def on_train_batch_begin(self, batch, logs=None):
        time.sleep(0.2 * (strategy.cluster_resolver.task_id or 0))
    def on_train_batch_end(self, batch, logs=None):
        if is_alone:
            time.sleep(0.2)
            print(time.monotonic(), file=open(path, "a"))
model.fit(x, y, batch_size=32, epochs=50, verbose=0, callbacks=[Slow()])
"""
    # Of six seconds, a disturbance at either end is a small part.
    alone, two = measured(fit(slow), devices=1, processes=2, steps=30).results
    seen = list(map(float, (tmp_path / "seen").read_text().split()))
    assert sum(alone.parts.values()) == pytest.approx((seen[-1] - seen[4]) / (len(seen) - 5), rel=0.05)
    assert alone.verdict.startswith("bound by Python code between the steps"), alone
    assert alone.parts["host"] > 0.1
    assert (alone.processes, two.processes) == (1, 2)
    assert two.verdict.startswith("bound by rank 1, for which the others wait"), two
    assert two.parts["wait"] > 0.05


@pytest.mark.exhaustive("test_timeline.py, and test_fit_on_devices_and_processes for what is measured")
def test_slow_link_is_named(on_slow_link, tmp_path):
    """A large model on two machines, between which a cable of 100 Mbit/s runs."""
    path = tmp_path / "train.py"
    path.write_text(fit("model.fit(x, y, batch_size=32, epochs=50, verbose=0)", width=8192))
    on_slow_link("phalanx._src.tools.bench.recorder", "12", str(tmp_path / "moments"), "script", str(path))
    moments = [Moments.from_json(json.loads(file.read_text())) for file in tmp_path.glob("moments.*")]
    result = result_of((2, 1), [moments])
    assert result.verdict.startswith("bound by the exchange between replicas"), result


def test_comparison_of_two_measurements(capsys):
    """It shows the ratio of the speeds, the parts that have become longer, and in what the machines differ."""
    rounds = [
        [Moments(0, 1, 1, 8, starts(each), [], {"0": starts(each, 0.5)}, {"0": starts(each, 1)})] for each in (2, 1)
    ]
    before, after = (
        Measured("train.py", [result_of((1, 1), [one])], machine={"cores": cores, "jax": "0.10.2"})
        for one, cores in zip(rounds, ("2", "8"), strict=True)
    )
    report.print_comparison(before, after)
    shown = capsys.readouterr().out
    assert re.search(r"1 device +0\.50 +1\.00 +2\.00 ", shown), shown
    assert shown.endswith("\nThe machines or libraries differ: cores 2, then 8.\n")
    report.print_comparison(before, before)
    assert "differ" not in capsys.readouterr().out


@pytest.mark.exhaustive("test_fit_on_devices_and_processes")
def test_arguments_for_the_number_of_devices(measured):
    """A custom loop whose script takes the number; another script that ignores the devices is measured once."""
    found = measured(LOOP, ["{devices}"])
    assert [one.replicas for one in found.results] == [1, 2]
    assert not found.notes
    fixed = measured(LOOP, ["1"], processes=2)
    assert [one.replicas for one in fixed.results] == [1]
    assert "the script uses 1 of them" in fixed.notes[0]
    assert "2 processes: each trains alone" in fixed.notes[1]


@pytest.mark.cover(["call"], {"strategy.run(in_arguments, args=(batch, weights))"})
@pytest.mark.parametrize(
    "call", ["strategy.run(in_arguments, args=(batch, weights))", "strategy.run(in_a_variable, args=(batch,))"]
)
def test_loops_without_an_optimizer(measured, call):
    """Their steps assign trainable variables, or return the state that they take."""
    (found,) = measured(f"{WITHOUT_OPTIMIZER}        {call}\n", devices=2, steps=8).results[-1:]
    assert (found.replicas, found.steps_per_s > 0) == (2, True)
    assert found.rows_per_s == pytest.approx(8 * found.steps_per_s)


@pytest.mark.exhaustive("test_bad_files_are_refused")
def test_replicas_that_report_no_steps(measured):
    """The state is updated outside the replicas."""
    with pytest.raises(StartupError, match=r"have run 0 training steps in 15 calls(.|\n)*HINT: update the weights in"):
        measured(f"{WITHOUT_OPTIMIZER}        update_outside(batch)\n")


def test_parts_are_those_of_the_median_round():
    """Of an even number of rounds, the lower one of two."""
    rounds = [
        [Moments(0, 1, 1, 8, starts(each), [], {"0": starts(each, 0.5)}, {"0": starts(each, 1)})] for each in (0.3, 0.1)
    ]
    found = result_of((1, 1), rounds)
    assert found.rounds == pytest.approx([1 / 0.3, 10.0])
    assert sum(found.parts.values()) * found.steps_per_s == pytest.approx(1.0)


def starts(each, offset=0.0):
    """The moments of ten steps of so many seconds."""
    return [(number + offset) * each for number in range(10)]


@pytest.mark.exhaustive("test_fit_on_devices_and_processes: all of its measurements succeed")
def test_failures_with_some_devices_are_noted(measured, tmp_path):
    """The others are measured. The script imports from its own folder, as with Python itself."""
    (tmp_path / "beside.py").write_text("def check(n):\n    if n == 1:\n        raise ValueError('not with 1')\n")
    source = LOOP.replace(
        "import keras\n", "import keras\nfrom beside import check\ncheck(strategy.num_replicas_in_sync)\n"
    )
    found = measured(source, ["{devices}"])
    assert [one.replicas for one in found.results] == [2]
    assert found.notes[0].startswith("1 device: it has failed with exit code 1: ")
    assert found.notes[0].endswith("ValueError: not with 1")


@pytest.mark.exhaustive("test_bad_files_are_refused")
def test_scripts_that_cannot_be_measured(measured):
    for source, limit_s, message in (
        ("import phalanx", 600, r"it has not run 15 training steps(.|\n)*ended after 0 of 15 steps"),
        (fit("model.fit(x, y, batch_size=160, epochs=1, verbose=0)"), 600, r"ended after 4 of 15 steps"),
        ("1 / 0", 600, r"ZeroDivisionError"),
        ("import signal\nsignal.pause()", 1, r"it has not run 15 steps in 1 s"),
    ):
        with pytest.raises(StartupError, match=message):
            measured(source, devices=1, timeout_s=limit_s)


def test_bad_files_are_refused(tmp_path, capsys):
    """Before a measurement that takes minutes, and with what to write instead."""
    options = {"compare": [], "output": [], "target": "train.py", "arguments": [], "is_module": False}
    for path, message in (
        ("speed.txt", "must end with .json"),
        (str(tmp_path / "no" / "x.json"), "its folder does not exist"),
    ):
        assert main(json.dumps(options | {"output": [path]})) == 2
        assert message in capsys.readouterr().err
    (tmp_path / "links.json").write_text('{"links": []}')
    with pytest.raises(InvalidArgumentError, match="cannot be read as a measurement: it holds links"):
        read(str(tmp_path / "links.json"))
    (tmp_path / "lists.json").write_text("[" + "[]," * 4_000_000 + "1]")
    with pytest.raises(
        InvalidArgumentError, match=r"cannot be read as a measurement: the values in .* would fill 1.2 GB"
    ):
        read(str(tmp_path / "lists.json"))
    assert main(json.dumps(options | {"compare": ["none.json", "none.json"]})) == 2
    assert "--compare none.json: cannot be read as a measurement" in capsys.readouterr().err
    with pytest.raises(InvalidArgumentError, match="HINT: phalanx bench --output"):
        read(str(tmp_path))


@pytest.mark.parametrize(
    "changed",
    [
        {"results": "text"},
        {"machine": None},
        {"machine": [1]},
        {"steps_per_s": 0},
        {"steps_per_s": "fast"},
        {"parts": None},
        {"parts": {}},
        {"rounds": 5},
        {"rounds": ["\x1b[2J"]},
        {"rounds": [10**400]},
        {"devices": [1]},
    ],
)
def test_measurements_of_others_that_are_none(tmp_path, changed):
    """They are refused when they are read, and not by the table."""
    parts = dict.fromkeys(NAMES, 0.1)
    numbers = {"processes": 1, "devices": 1, "replicas": 1, "steps_per_s": 1.0, "rows_per_s": None, "latest": 0}
    result = numbers | {"parts": parts, "rounds": [1.0]}
    whole = {"script": "a.py", "machine": {}, "notes": []}
    file = tmp_path / "a.json"
    file.write_text(json.dumps(whole | {"results": [result]}))
    assert read(str(file)).results[0].rounds == [1.0]
    file.write_text(json.dumps(whole | {"results": [result | changed]} | changed))
    with pytest.raises(InvalidArgumentError, match="cannot be read as a measurement"):
        read(str(file))
    file.write_text("[" * 100_000)
    with pytest.raises(InvalidArgumentError, match="cannot be read as a measurement"):
        read(str(file))


def test_command_line_prints_a_table(tmp_path, bench, forked):
    (tmp_path / "train.py").write_text(fit("model.fit(x, y, batch_size=32, epochs=50, verbose=0)"))
    few = ("--devices", "1", "--processes", "1", "--rounds", "1", "--steps", "8")
    done = bench(*few, "--output", "a.json", "train.py")
    assert done.exit_code == 0, done.stderr
    assert "train.py: medians, and milliseconds of a step" in done.stdout
    assert "1 device: bound by" in done.stdout
    assert "round 1 of 1" in done.stderr
    compared = bench("--compare", "a.json", "a.json")
    assert " 1.00 " in compared.stdout, compared.stderr
    for arguments, message in (
        ((), "there is no script to run"),
        (("none.py",), "none.py"),
        (("--compare", "a.json", "a.json", "train.py"), "it measures nothing and prints a table"),
        (("--links", "train.py"), "it runs no script"),
    ):
        refused = bench(*arguments)
        assert refused.exit_code == 2
        assert message in refused.stderr
