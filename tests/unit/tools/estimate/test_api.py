"""Predicted steps, beside programs that were really compiled and figures that were computed by hand."""

import dataclasses
import gc
import json
import sys

import jax
import keras
import numpy as np
import pytest
from predicted_trainings import batches, dense, fit, loop, mirrored, num_parameters

import phalanx
from phalanx._src.tools.estimate.api import Estimates, predicted
from phalanx._src.tools.estimate.chips import CHIPS
from phalanx._src.tools.estimate.step import at_first_step
from phalanx._src.tools.estimate.targets import Target
from phalanx.errors import InvalidArgumentError, MissingDependencyError, TraceError

F32 = 4
BATCH_BYTES = 32 * (64 + 4) * F32


def assert_reduced_once(found):
    """One all-reduce of all gradients, and of at most two numbers more."""
    (reduced,) = found.collectives
    assert (reduced.kind, reduced.dtype, reduced.group) == ("all-reduce", "f32", (0, 1))
    assert 0 <= reduced.num_bytes - F32 * num_parameters(512, 4) <= 8


@pytest.mark.cover(["train"], {fit})
@pytest.mark.parametrize("train", [fit, loop])
def test_figures_are_computed_by_hand(train):
    """Weights and two slots of Adam, and the batch of one replica; all but the batch is reused. Counters are 64 bytes at most."""
    (found,) = phalanx.estimate(train(mirrored(), 512, 4), ["cpu:2"])
    kept = 3 * F32 * num_parameters(512, 4)
    assert 0 <= found.memory.arguments - kept - BATCH_BYTES <= 64
    assert 0 <= found.memory.reused - kept <= 64
    assert (found.num_devices, found.num_replicas, found.rows_per_replica) == (2, 2, 32)
    assert_reduced_once(found)


@pytest.mark.cover(["train"], {fit})
@pytest.mark.parametrize("train", [fit, loop])
def test_central_storage_computes_gradients(train):
    """Devices get the weights and the batch, and return the sum of the gradients. Slots are with the parameter device."""
    strategy = lambda: phalanx.experimental.CentralStorageStrategy(["cpu:0"])  # noqa: E731
    (found,) = phalanx.estimate(train(strategy, 512, 4), ["cpu:2"])
    assert 0 <= found.memory.arguments - F32 * num_parameters(512, 4) - BATCH_BYTES <= 64
    assert_reduced_once(found)


def test_prediction_equals_what_is_compiled():
    """The program that `phalanx.function` really runs on so many devices has the same memory and operations."""
    estimates = phalanx.estimate(loop(mirrored(), 512, 4), ["cpu:1,2,4"])
    assert estimates.name.endswith("train.<locals>.step")
    for count, found in zip((1, 2, 4), estimates, strict=True):
        strategy = phalanx.MirroredStrategy(count)
        with strategy.scope():
            model, optimizer = dense(512, 4), keras.optimizers.Adam()

        def step(x, y, model=model, optimizer=optimizer):
            with phalanx.GradientTape() as tape:
                loss = phalanx.nn.compute_average_loss(keras.losses.mean_squared_error(y, model(x)))
            optimizer.apply(tape.gradient(loss, model.trainable_variables), model.trainable_variables)

        train = phalanx.function(lambda x, y, run=strategy.run, step=step: run(step, args=(x, y)))
        (batch, *_) = strategy.experimental_distribute_dataset(batches(32 * count, 4))
        real = train.lower(*batch).compile()
        memory = real.memory_analysis()
        assert found.memory.arguments == memory.argument_size_in_bytes
        assert found.memory.temporary == pytest.approx(memory.temp_size_in_bytes, rel=0.01)
        assert found.flops == pytest.approx(real.cost_analysis()["flops"], rel=0.01)


def test_every_pass_of_a_loop_counts():
    """Four gates of 64 units: forwards, for the weights, and backwards through the 20 steps, but not to the inputs."""
    steps, inputs, units, rows = 20, 32, 64, 32

    def train():
        with phalanx.MirroredStrategy(1).scope():
            model = keras.Sequential([keras.Input((steps, inputs)), keras.layers.LSTM(units)])
            model.compile("sgd", "mse")
        model.fit(np.ones((rows, steps, inputs)), np.ones((rows, units)), batch_size=rows, verbose=0)

    (found,) = phalanx.estimate(train, ["cpu:1"])
    assert found.flops == pytest.approx(rows * steps * 2 * 4 * units * (2 * inputs + 3 * units), rel=0.05)


def test_operations_are_computed_by_hand():
    """Each weight takes two operations per row forwards, two for its gradient, and two for the inputs' except in the first layer."""
    (found,) = phalanx.estimate(fit(mirrored(), 512, 512, 512), ["cpu:1"])
    products = 2 * 32 * (2 * 64 * 512 + 3 * 512 * 512 + 3 * 512 * 512)
    assert found.flops == pytest.approx(products, rel=0.15)  # The rest is Adam's: about 14 per weight.


def model_axis():
    return phalanx.MirroredStrategy(2, model_axis=("model", 2), layout=phalanx.fully_sharded("model", min_size=16))


@pytest.mark.cover(["topologies"], {"cpu:1,2,8", "cpu:8"})
@pytest.mark.parametrize(
    ("strategy", "topologies", "expected"),
    [
        pytest.param(mirrored(), "cpu:1,2,8", [(1, 1, 32), (2, 2, 32), (8, 8, 32)], id="one replica"),
        pytest.param(lambda: phalanx.MirroredStrategy(2), "cpu:4", [(4, 4, 16)], id="two replicas"),
        pytest.param(model_axis, "cpu:8", [(8, 4, 32)], id="an axis of the model: eight devices are four replicas"),
        pytest.param(phalanx.MultiWorkerMirroredStrategy, "cpu:2", [(2, 2, 4)], id="multi_worker"),
        pytest.param(phalanx.TPUStrategy, "cpu:2", [(2, 2, 4)], id="tpu"),
        pytest.param(lambda: phalanx.OneDeviceStrategy("cpu:0"), "cpu:2", [(2, 2, 32)], id="one_device"),
    ],
)
def test_topologies_have_as_many_rows_per_replica(strategy, topologies, expected):
    """A replica keeps the rows that it has in the script, whatever the number of replicas. All strategies are predicted."""
    found = phalanx.estimate(fit(strategy, 4), [topologies])
    assert [(e.num_devices, e.num_replicas, e.rows_per_replica) for e in found] == expected
    assert [e.topology for e in found] == [f"cpu:{count}" for count, _, _ in expected]
    assert len({e.memory.arguments for e in found}) == 1


def test_several_steps_of_one_program():
    """The figures of memory are those of the program, which takes the batches of four steps."""
    one, four = (phalanx.estimate(fit(mirrored(), 512, 4, steps_per_execution=n), ["cpu:2"])[0] for n in (1, 4))
    assert (one.steps_per_program, four.steps_per_program) == (1, 4)
    assert four.rows_per_replica == 32
    assert four.memory.arguments - one.memory.arguments == pytest.approx(3 * BATCH_BYTES, abs=64)


def test_divided_variables_take_their_share():
    """Each of four devices holds a quarter of the kernels and all small biases, and gathers the kernels."""
    (found,) = phalanx.estimate(fit(mirrored(layout=phalanx.fully_sharded()), 512, 512), ["cpu:4"])
    kernels, biases, batch = 64 * 512 + 512 * 512, 2 * 512, 32 * (64 + 512)
    assert found.memory.arguments == pytest.approx((3 * (kernels / 4 + biases) + batch) * F32, abs=64)
    assert "all-gather" in {c.kind for c in found.collectives}


def test_nothing_is_trained():
    """The script stops before its first step, so its variables still have their first values."""
    kept = []

    def train():
        with phalanx.MirroredStrategy(1).scope():
            model = dense(4)
            model.compile("adam", "mse")
        kept.extend([model, [np.array(w) for w in model.get_weights()]])
        model.fit(np.ones((32, 64)), np.ones((32, 4)), batch_size=32, verbose=0)

    phalanx.estimate(train, ["cpu:2"])
    model, before = kept
    jax.tree.map(np.testing.assert_array_equal, model.get_weights(), before)
    assert int(model.optimizer.iterations) == 0


def test_training_goes_on_afterwards():
    """A script that was predicted trains in the same process, with values in all its variables."""
    phalanx.estimate(fit(mirrored(), 8192, 64), ["cpu:2"])
    with phalanx.MirroredStrategy(2).scope():
        model = dense(8192, 64)
        model.compile("adam", "mse")
    losses = model.fit(np.ones((128, 64)), np.ones((128, 64)), batch_size=32, epochs=3, verbose=0).history["loss"]
    assert losses[-1] < losses[0]


def test_large_variables_have_no_values():
    """A model of 4.3 GB with its slots is predicted in much less: only what is read has values, which are zeros."""
    seen = []
    large_arrays = lambda: [x.shape for x in jax.live_arrays() if x.nbytes > 1 << 20]  # noqa: E731

    def train():
        with phalanx.MirroredStrategy(1).scope():
            model = dense(1 << 12, 1 << 16)
            model.compile("adam", "mse")
        seen.append(large_arrays())
        seen.append(float(keras.ops.sum(model.layers[-1].kernel[0])))
        model.fit(np.ones((8, 64)), np.ones((8, 1 << 16)), batch_size=8, verbose=0)

    gc.collect()
    before = large_arrays()
    (found,) = phalanx.estimate(train, ["cpu:1"])
    assert seen == [before, 0.0]
    assert found.memory.arguments > 3 * F32 * (1 << 28)


class Small(Target):
    """CPU devices with the memory of a chip that does not exist."""

    def devices(self):
        return jax.devices("cpu")[: self.num_devices]


def on(count, memory, train):
    """Returns the prediction for so many devices with so many bytes."""
    target = Small(f"small:{count}", dataclasses.replace(CHIPS["v5e"], memory=memory), (count, 1))
    return at_first_step(train, lambda step: predicted(step, [target]))[0]


KEPT = 3 * F32 * num_parameters(512, 512)


def test_divided_variables_are_advised(tmp_path, capsys):
    """Four devices with less memory than three copies of the weights need, but more than a quarter of that. Reports say so."""
    found = on(4, KEPT, fit(mirrored(weight_update_sharding=False), 512, 512, rows=4))
    assert not found.fits
    assert found.advice.startswith("layout=phalanx.fully_sharded(): ")
    sharded = on(4, KEPT, fit(mirrored(layout=phalanx.fully_sharded()), 512, 512, rows=4))
    assert sharded.fits
    assert f"{sharded.memory.peak / 1e9:.1f} GB per device" in found.advice
    estimates = Estimates("step", [found])
    estimates.print()
    printed = capsys.readouterr().out
    assert "small:4 does not fit: a device needs " in printed
    assert "HINT: layout=phalanx.fully_sharded(): " in printed
    for ending, begins in (("png", b"\x89PNG"), ("svg", b"<?xml"), ("pdf", b"%PDF")):
        estimates.save(tmp_path / f"found.{ending}")
        assert (tmp_path / f"found.{ending}").read_bytes().startswith(begins)


def test_fewer_rows_are_advised():
    """One device: what is kept fits, but not what each row needs."""
    found = on(1, 3 * KEPT, fit(mirrored(), 512, 512, rows=4096))
    assert found.advice.endswith(" GB per device")
    rows = int(found.advice.split()[0])
    assert on(1, 3 * KEPT, fit(mirrored(), 512, 512, rows=rows)).fits
    assert not on(1, 3 * KEPT, fit(mirrored(), 512, 512, rows=2 * rows)).fits


def test_nothing_is_advised_that_does_not_fit():
    """The weights alone are larger than all devices together."""
    found = on(2, KEPT / 3, fit(mirrored(), 512, 512, rows=2))
    assert (found.fits, found.advice) == (False, "")


def test_report_says_that_nothing_ran(tmp_path, capsys):
    """The table, the file and its figures."""
    found = phalanx.estimate(fit(mirrored(), 512, 4), ["cpu:1,2"])
    found.print()
    printed = capsys.readouterr().out
    assert "predicted, not run" in printed
    assert "cpu:2: 1 all-reduce of 141.3 kB f32 over 2 devices" in printed
    found.save(tmp_path / "found.json")
    read = json.loads((tmp_path / "found.json").read_text())
    assert (read["predicted"], read["run"], len(read["estimates"])) == (True, False, 2)
    assert read["estimates"][1]["memory"] == found[1].memory._asdict()
    assert read["estimates"][1]["collectives"] == [
        {"kind": "all-reduce", "dtype": "f32", "bytes": found[1].communicated, "devices": 2, "async": False}
    ]


@pytest.mark.parametrize("path", ["found.txt", "found", 3])
def test_other_files_are_refused(path):
    with pytest.raises(InvalidArgumentError, match=r"path=.*must .*\nHINT: estimates.save\(\"estimate.json\"\)"):
        Estimates("step", []).save(path)


def test_folder_of_a_report_is_absent(tmp_path):
    """The message names the command that makes it."""
    with pytest.raises(InvalidArgumentError, match=r"its folder does not exist.\nHINT: mkdir -p"):
        Estimates("step", []).save(tmp_path / "absent" / "found.json")


@pytest.mark.parametrize("ending", ["json", "png"])
def test_nothing_is_written_through_links(tmp_path, monkeypatch, ending):
    """Neither one that is there when the command starts nor one that another user makes while it runs."""
    file, victim = tmp_path / f"found.{ending}", tmp_path / "victim.json"
    victim.write_text("mine")
    file.symlink_to(victim)
    with pytest.raises(
        InvalidArgumentError, match=r"it is a link, a folder, a device or a pipe.\nHINT: estimates.save"
    ):
        Estimates("step", []).save(file)
    monkeypatch.setattr("phalanx.errors.arguments.json_or_picture", lambda name, path, hint: path)
    with pytest.raises(
        InvalidArgumentError, match=r"found.* cannot be written: .*It is a link.*\nHINT: the path of a new"
    ):
        Estimates("step", []).save(file)
    assert victim.read_text() == "mine"


def test_picture_without_matplotlib_names_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingDependencyError, match=r"matplotlib is not installed.*\nHINT: pip install"):
        Estimates("step", []).save("found.png")


def test_training_without_a_step():
    """It only evaluates."""

    def train():
        with phalanx.MirroredStrategy(1).scope():
            model = dense(4)
            model.compile("adam", "mse")
        model.evaluate(np.ones((32, 64)), np.ones((32, 4)), verbose=0)

    match = r"runs no training step: no model of a strategy .*\nHINT: with phalanx.MirroredStrategy"
    with pytest.raises(TraceError, match=match):
        phalanx.estimate(train, ["cpu:1"])


def test_loop_that_returns_its_state():
    """It has no optimizer, and no variables."""

    def train():
        strategy = phalanx.MirroredStrategy(1)
        weights = strategy.replicate(np.ones((64, 4), "float32")).value
        for batch in strategy.experimental_distribute_dataset(np.ones((32, 64), "float32"), batch_size=16):
            total = strategy.run(lambda x, w: (x @ w).sum(), args=(batch, weights))
            weights = strategy.run(lambda x, w: phalanx.Mirrored(w * x.sum()), args=(batch, weights)).value
        return total

    (found,) = phalanx.estimate(train, ["cpu:1"])
    assert found.rows_per_replica == 16
    assert found.memory.arguments >= F32 * (64 * 4 + 16 * 64)


def test_step_outside_strategies():
    """Plain Keras has no program for several devices."""

    def train():
        model = dense(4)
        model.compile("adam", "mse")
        model.fit(np.ones((32, 64)), np.ones((32, 4)), epochs=1, verbose=0)

    with pytest.raises((TraceError, InvalidArgumentError), match="HINT: with phalanx"):
        phalanx.estimate(train, ["cpu:1"])


def test_error_of_a_script_is_its_own():
    """An exception before the first step is not hidden, and the next script is predicted."""

    def train():
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        phalanx.estimate(train, ["cpu:1"])
    (found,) = phalanx.estimate(fit(mirrored(), 4), ["cpu:1"])
    assert found.fits


def test_topologies_are_checked_before_the_script_runs():
    """A typing error costs no time."""
    with pytest.raises(InvalidArgumentError, match="v9"):
        phalanx.estimate(lambda: pytest.fail("The script was run."), ["v9:4"])
