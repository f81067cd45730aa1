"""MultiWorkerMirroredStrategy in real processes: the numbers of one device, on every process."""

import jax
import keras
import numpy as np
import pytest
import training
from event_files import written
from reference_training import train_on_one_device

import phalanx

SIZES = [(2, 1), (2, 2), (4, 1)]
EVERYWHERE = pytest.mark.parametrize("size", SIZES, ids=["2x1", "2x2", "4x1"])


def same(ours, theirs, rtol=1e-5, atol=1e-6):
    """Asserts that two nests of numbers are equal."""
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=rtol, atol=atol), ours, theirs)


def replies(cluster, task, **kwargs):
    """What all workers return; equal to the last bit."""
    first, *others = found = cluster.call(task, **kwargs)
    assert not isinstance(first, str), first
    for other in others:
        same(other, first, rtol=0, atol=0)
    return found


# Two workers with a device each run such a loop in tests/guide/test_multi_worker_guide.py.
@pytest.mark.cover(["size", "model"], {((2, 2), "cnn")})
@EVERYWHERE
@pytest.mark.parametrize(
    ("model", "optimizer", "sizes"),
    [("mlp_l2", "adam", [24]), ("mlp", "momentum", [24, 13, 3]), ("cnn", "adam", [13]), ("lstm", "momentum", [24, 13])],
)
def test_custom_loop_equals_one_device(cluster_of, size, model, optimizer, sizes):
    """Twenty steps give the losses and weights of a hand-written step on one device; batches need not divide."""
    wanted = train_on_one_device(model, optimizer, tuple(sizes))
    got = replies(cluster_of(*size), "loop", model=model, optimizer=optimizer, sizes=sizes)[0]
    same(got["start"], wanted.start)
    same(got["losses"], wanted.losses)
    same(got["weights"], wanted.weights)


@pytest.mark.cover(["option"], {"DiLoCo", "weights"})
@pytest.mark.parametrize("option", ["LocalSGD", "DiLoCo", "weights", "auto"])
def test_options_that_change_no_result(cluster_of, option):
    """Local updates that are synchronized at every step, and shares of a batch that are unequal."""
    wanted = train_on_one_device("mlp", "momentum", (13,))
    got = replies(cluster_of(2, 1), "loop_with", option=option, model="mlp", optimizer="momentum", sizes=[13])[0]
    same(got["losses"], wanted.losses)
    same(got["weights"], wanted.weights)


def test_replicas_of_two_devices(cluster_of):
    """A mesh with a further axis: each process has one replica on its two devices."""
    wanted = train_on_one_device("mlp_l2", "adam", (24,))
    got = replies(cluster_of(2, 2), "loop_on_pairs", model="mlp_l2", optimizer="adam", sizes=[24])[0]
    assert got["replicas"] == 2
    same(got["losses"], wanted.losses)
    same(got["weights"], wanted.weights)


SHARDED = [((2, 1), 1), ((2, 1), 2), ((2, 2), 1), ((2, 2), 2), ((2, 2), 4), ((4, 1), 1), ((4, 1), 2)]
"""Sizes of clusters, and devices per replica: the shards belong to replicas, or to the devices of one, in one process or several."""


# Shards of replicas with one device each are trained in test_sharded_variables.py.
@pytest.mark.cover(["size", "devices", "model"], {((2, 1), 2, "lstm"), ((2, 2), 2, "mlp_l2")})
@pytest.mark.parametrize(("size", "devices"), SHARDED)
@pytest.mark.parametrize(
    ("model", "optimizer", "sizes"),
    [("mlp_l2", "adam", [24, 13, 3]), ("lstm", "momentum", [24, 13]), ("transformer", "adam", [24, 13])],
    ids=lambda x: x if isinstance(x, str) else "",
)
def test_sharded_variables_equal_one_device(cluster_of, size, devices, model, optimizer, sizes):
    """Twenty steps give the losses and weights of one device, though no process holds a whole variable."""
    wanted = train_on_one_device(model, optimizer, tuple(sizes))
    task = {"devices_per_replica": devices, "model": model, "optimizer": optimizer, "sizes": sizes}
    got = replies(cluster_of(*size), "loop_sharded", **task)[0]
    assert got["replicas"] == size[0] * size[1] // devices
    same(got["start"], wanted.start)
    same(got["losses"], wanted.losses)
    same(got["weights"], wanted.weights)


@pytest.fixture(scope="module")
def reference():
    """What Keras does with the same model on one device."""
    return training.fit_of(training.make_model())


@pytest.mark.cover(("size", "k"), {((2, 1), 8)})
@EVERYWHERE
@pytest.mark.parametrize("k", [1, 8])
def test_fit_equals_one_device_on_every_process(cluster_of, reference, size, k):
    """History, evaluation, all predictions and the weights of 1,003 rows in batches of 64, on every process."""
    got = replies(cluster_of(*size), "fit", steps_per_execution=k)[0]
    assert got["predict"].shape == (training.ROWS, training.CLASSES)
    same(got, reference, rtol=1e-4, atol=1e-5)


def one_device_model(optimizer=None):
    """The small model in this process."""
    return training.small_model(phalanx.OneDeviceStrategy("cpu:0"), optimizer)


def test_workers_choose_the_same_steps_per_execution(cluster_of):
    """The first worker decides, because each has measured other times."""
    got, alone = replies(cluster_of(2, 1), "fit_that_chooses")[0], one_device_model()
    alone.fit(training.X, training.Y, batch_size=6, shuffle=False, verbose=0)
    assert got["number"] == 16
    same(got["weights"], alone.get_weights())


def test_predict_of_an_eager_model(cluster_of):
    """Each process has the rows of all, also without a program that gathers them."""
    rows = replies(cluster_of(2, 1), "predict_eagerly")[0]
    same(rows, one_device_model().predict(training.X[:101], batch_size=training.BATCH, verbose=0))


@pytest.mark.cover(["size"], {(2, 2)})
@EVERYWHERE
def test_chiefs_first_values(cluster_of, size):
    """Each process draws other weights, and all go on with those of the first."""
    drawn, used = zip(*cluster_of(*size).call("first_values"), strict=True)
    assert any((d != drawn[0]).any() for d in drawn[1:])
    for values in used:
        same(values, drawn[0], rtol=0, atol=0)


# An all-to-all sends a part to each process, its own included.
@pytest.mark.cover(["options"], [{"wire_dtype": "bfloat16"}, {"compression": "int8"}])
@pytest.mark.parametrize(
    ("options", "sent"),
    [
        ({}, {"f32": [4060, 4060]}),
        ({"bytes_per_pack": 100}, {"f32": [30, 30, 30, 30, 4000, 4000]}),
        ({"wire_dtype": "bfloat16"}, {"u16": [2030, 2030, 4060]}),
        ({"compression": "int8"}, {"f32": [60, 60], "s8": [2080, 2080, 4160]}),
    ],
    ids=["default", "bytes_per_pack", "wire_dtype", "compression"],
)
def test_communication_options_change_only_what_is_sent(cluster_of, options, sent):
    """They change what crosses between two processes, and all hold the sum, to the last bit the same."""
    got = replies(cluster_of(2, 1), "one_step", **options)[0]
    assert got["sent"] == sent
    for weight, a, b in zip(got["weights"], training.gradients_of(0), training.gradients_of(1), strict=True):
        bound = {"wire_dtype": 0.01, "compression": 0.02}.get(next(iter(options), ""), 1e-6)
        size = (np.abs(a) + np.abs(b)).max() if "compression" in options else np.abs(a) + np.abs(b)
        assert (np.abs(weight + (a + b)) <= bound * size).all()
        assert weight.any()


def test_metrics_travel_with_gradients_and_tables_as_rows(cluster_of):
    """A step sends the gradient of the bias with the metric, and the ids and rows of the table that were looked up."""
    got = replies(cluster_of(2, 1), "metrics_and_a_table")[0]
    assert got["sent"] == {"f32": [16 + 2, 16 + 2, 24 * 16], "s32": [24]}
    rows, bias, mean = got["values"]
    same(rows, np.zeros(6))
    same(bias, np.full(16, -24.0))
    same(mean, got["ids"].mean())


def test_order_of_rows(cluster_of):
    """All shuffle alike: `fit` draws one order for all processes."""
    replies(cluster_of(2, 1), "shuffled")


@pytest.mark.cover(["size"], {(2, 2)})
@EVERYWHERE
def test_verbs_span_all_processes(cluster_of, size):
    """Replica numbers, sums, and who writes."""
    workers, devices = size
    n = workers * devices
    for index, got in enumerate(cluster_of(*size).call("verbs")):
        assert got == {
            "replicas": n,
            "local": list(range(index * devices, index * devices + devices)),
            "total": [n * (n - 1) // 2] * devices,
            "gathered": [list(range(n))] * devices,
            "sum": n * (n - 1) // 2,
            "closed over": (n * (n - 1) // 2, [*range(n)] * n),
            "count": n * (n - 1) // 2,
            "writes": (index == 0, index == 0),
            "task": ("worker", index),
        }


def test_names_of_own_devices(cluster_of):
    """Each process names its own devices, as it can use them; print_on_chief prints on the chief."""
    for index, got in enumerate(cluster_of(2, 2).call("devices")):
        assert got == {"names": ("cpu:0", "cpu:1"), "are own": True, "printed": "one-line\n" if index == 0 else ""}


@pytest.mark.cover(["verbose"], {2})
@pytest.mark.parametrize("verbose", [1, 2])
def test_only_one_worker_writes_files(cluster_of, tmp_path, verbose):
    """With the same paths on all workers there is one log, one set of files, and one progress bar."""
    chief, other = cluster_of(2, 1).call("writing", folder=str(tmp_path), verbose=verbose)
    assert "Epoch 2/2" in chief
    assert other == ""
    assert sorted(p.name for p in tmp_path.iterdir()) == ["1.keras", "2.keras", "board", "log.csv"]
    assert len((tmp_path / "log.csv").read_text().splitlines()) == 3
    assert len([p for p in (tmp_path / "board" / "train").iterdir() if p.is_file()]) == 1
    assert len(list((tmp_path / "board" / "train" / "plugins").rglob("*.xplane.pb"))) == 1


@pytest.mark.cover(["size"], {(2, 2)})
@EVERYWHERE
def test_summaries_are_written_by_the_chief(cluster_of, tmp_path, size):
    """One file, with the values of the replicas of all processes, as NumPy computes them."""
    cluster_of(*size).call("summaries", folder=str(tmp_path))
    assert len(list(tmp_path.iterdir())) == 1
    found, n = written(tmp_path), size[0] * size[1]
    values = np.arange(3) + 10 * np.arange(n)[:, None]
    counts, edges = np.histogram(values, bins=4)
    wanted = {
        "mean": values[:, 0].mean(),
        "values": np.stack([edges[:-1], edges[1:], counts], 1),
        "first": values[0],
        "everything": values.ravel(),
    }
    assert found.keys() == wanted.keys()
    for tag, of_tag in found.items():
        assert [step for step, _ in of_tag] == [0, 1]
        for _, value in of_tag:
            np.testing.assert_allclose(value, wanted[tag], rtol=1e-5)


def test_estimator_on_every_process(cluster_of, tmp_path):
    """All see the last checkpoint after a training, and each evaluates, predicts and exports by itself."""
    first, *others = cluster_of(2, 1).call("estimated", folder=str(tmp_path))
    assert not isinstance(first, str), first
    steps = [int(path.rpartition("-")[2]) for path in first["latest"]]
    assert 5 <= steps[0] < steps[1] == 10
    assert all(first.pop("served"))
    for other in others:
        assert all(other.pop("served"))
        same({**other, "latest": 0}, {**first, "latest": 0}, rtol=0, atol=0)
        assert other["latest"] == first["latest"]
    x, y = training.X[: 10 * training.BATCH], training.Y[: 10 * training.BATCH]
    np.testing.assert_allclose(first["outputs"], (x @ first["kernel"] + first["bias"])[0], rtol=1e-5, atol=1e-6)
    logits = x @ first["kernel"] + first["bias"]
    likelihoods = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    np.testing.assert_allclose(first["loss"], -likelihoods[np.arange(len(y)), y].mean(), rtol=1e-5)


@pytest.mark.cover(["shared"], {False})
@pytest.mark.parametrize("shared", [True, False])
def test_backup_and_restore(cluster_of, tmp_path, shared):
    """A training goes on from the chief's backup, whether or not the others see its disk."""
    got = replies(cluster_of(2, 1), "interrupted", folder=str(tmp_path), shared=shared)[0]
    model = one_device_model(keras.optimizers.Adam(0.01))
    model.fit(**training.THREE_EPOCHS)
    same(got, model.get_weights(), rtol=1e-4, atol=1e-5)


def test_saving_accumulated_gradients(cluster_of, tmp_path):
    """The chief alone saves what all have accumulated, and does not wait for the others in vain."""
    got = replies(cluster_of(2, 1), "accumulated", path=str(tmp_path / "{batch}.keras"))[0]
    model = one_device_model(keras.optimizers.Adam(0.01, gradient_accumulation_steps=3))
    model.fit(training.X[:640], training.Y[:640], batch_size=training.BATCH, shuffle=False, verbose=0)
    same(got, [v.numpy() for v in [*model.weights, *model.optimizer.variables]], rtol=1e-4, atol=1e-5)
    assert {p.name for p in tmp_path.iterdir()} == {"4.keras", "8.keras"}


@pytest.mark.cover(["size"], {(2, 2)})
@pytest.mark.parametrize(
    ("size", "where"),
    [
        ((2, 2), "rank 1 (replicas 2, 3 of 4) differs from replica 0"),
        ((4, 1), "rank 3 (replica 3 of 4) differs from most replicas"),
    ],
)
def test_divergence_is_found_on_all_workers(cluster_of, size, where):
    """A value that one worker has assigned alone is found on all, and named."""
    for text in cluster_of(*size).call("diverged"):
        assert text.startswith("DivergenceError: assert_in_sync of ")
        assert f"/bias' on {where}; 1 variable differs in total." in text


@pytest.mark.parametrize("ranks", [[0, 1], [1], [0]])
def test_any_worker_stops_all(cluster_of, ranks):
    """After the same batch or epoch, and at once if all want to."""
    first, second = cluster_of(2, 1).call("stopped", ranks=ranks)
    assert first == second
    assert first["epochs"] == 2
    assert first["updates"] == first["stop_training"] + 2
    loops = [first[flag] for flag in training.STOPPERS]
    assert first["rows"] == training.BATCH * loops[2]
    assert all(count == 4 if len(ranks) == 2 else 4 <= count < training.ROWS // training.BATCH for count in loops)


def test_callbacks_that_steer_apart(cluster_of):
    """A score of own rows, a learning rate, and a user's state are found on all workers before they train apart."""
    first, second = cluster_of(2, 1).call("steered_apart")
    assert first == second
    ends = [text.partition(", so that")[0].replace("\n", " ") for text in first]
    assert ends == [
        "fit on 2 workers, epoch 1: ReduceLROnPlateau.best is 1.0 on rank 0, 1.25 on rank 1",
        "fit on 2 workers, epoch 2: SGD.learning_rate is 0.1 on rank 0, 0.05 on rank 1",
        "fit on 2 workers, epoch 1: Counted.count is 1 on rank 0, 2 on rank 1",
    ]


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict", "loop"])
def test_arrays_of_different_lengths(cluster_of, method):
    """Equal numbers of batches, and of rows of the short one on each replica: before the first step all say so."""
    for text in cluster_of(2, 1).call("different_rows", rows=[1003, 1002], method=method, source="arrays"):
        assert text.startswith(
            "InputError: one dataset that is split over all workers: worker 0 has 1003 rows, 16 batches, 64"
        )
        assert (
            "; worker 1 has 1002 rows, 16 batches, 64 rows in a batch.\nHINT: the same data and batch_size on all"
            in text
        )


@pytest.mark.cover(["rows"], [[128, 129]])
@pytest.mark.parametrize(
    ("rows", "found"), [([200, 199], "8 rows on worker 0, 7 rows"), ([128, 129], "0 rows on worker 0, 1")]
)
def test_generators_of_different_lengths(cluster_of, rows, found):
    """At the batch that differs, and where the data of one end first."""
    for text in cluster_of(2, 1).call("different_rows", rows=rows, method="fit", source="generator"):
        assert text.startswith(f"InputError: the next batch: it has {found}")


def test_datasets_of_the_workers_own(cluster_of):
    """They may have as many rows as they like."""
    assert cluster_of(2, 1).call("different_rows", rows=[200, 65], method="fit", source="function") == [None, None]


@pytest.mark.cover(["options"], [{"save_freq": 1}])
@pytest.mark.parametrize("options", [{"save_freq": 1}, {"save_freq": "epoch"}, {"save_every_s": 1e-9}], ids=str)
def test_stopped_fit_goes_on_in_all_processes(cluster_of, tmp_path, options):
    """At the same batch, with the same bits."""
    for undisturbed, stopped in cluster_of(2, 1).call("backed_up_fit", folder=str(tmp_path), **options):
        for a, b in zip(undisturbed, stopped, strict=True):
            np.testing.assert_array_equal(a, b)
    assert not list(tmp_path.glob("backup*"))
