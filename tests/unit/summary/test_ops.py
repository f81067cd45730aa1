"""`phalanx.summary`: values leave compiled steps as outputs, and a thread writes them.

The values are compared with NumPy on the numbers of the replicas.
"""

import io
import sys
import threading
import wave

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from event_files import events, written
from PIL import Image
from tests import forks

import phalanx
from phalanx import summary
from phalanx.errors import ContextError, InvalidArgumentError, MissingDependencyError, NestedWriteError, SummaryError

KINDS = {
    "default": phalanx.get_strategy,
    "one_device": lambda: phalanx.OneDeviceStrategy("cpu:1"),
    "mirrored": lambda: phalanx.MirroredStrategy(["cpu:0", "cpu:1"]),
    "central_storage": lambda: phalanx.experimental.CentralStorageStrategy(["cpu:0", "cpu:1"]),
}


@pytest.fixture(params=KINDS)
def strategy(request):
    return KINDS[request.param]()


@pytest.fixture
def mirrored():
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1"])


@pytest.fixture
def writer(tmp_path):
    """A writer into `tmp_path`, which is the default writer."""
    writer = summary.create_file_writer(tmp_path)
    with writer.as_default():
        yield writer
    summary.experimental.set_step(None)
    writer.close()


@pytest.fixture
def recorded(writer, tmp_path):
    """Closes the writer, and returns what it has written."""

    def read():
        writer.close()
        return written(tmp_path)

    return read


def rows(strategy, size=4):
    """Returns one row of different numbers per replica, and what NumPy makes of them."""
    n = strategy.num_replicas_in_sync
    values = np.arange(n * size, dtype=np.float32).reshape(n, size) ** 2
    distributed = strategy.experimental_distribute_values_from_function(lambda c: values[c.replica_id_in_sync_group])
    return distributed, values


def run_in(strategy, how, fn, x):
    """Runs a replica function: alone, inside `phalanx.function`, or eagerly."""
    if how == "function":
        return phalanx.function(lambda x: strategy.run(fn, args=(x,)))(x)
    return strategy.run(fn, args=(x,), options=phalanx.RunOptions(eager=how == "eager"))


@pytest.mark.cover(
    ["strategy", "how"],
    {("mirrored", "run"), ("mirrored", "function"), ("one_device", "eager"), ("central_storage", "run")},
)
@pytest.mark.parametrize("how", ["run", "function", "eager"])
def test_values_of_a_replica_function(strategy, recorded, how):
    """Scalars are averaged, histograms count all replicas, and other values come from replica 0."""
    x, values = rows(strategy)

    def step(x):
        summary.scalar("mean", x.mean(), step=7)
        summary.scalar("sum", x.sum(), step=7, reduce_op="SUM")
        summary.histogram("values", x, step=7, buckets=5)
        summary.write("first", x, step=7)
        return x

    run_in(strategy, how, step, x)
    found = recorded()
    assert all(step == 7 for of_tag in found.values() for step, _ in of_tag)
    np.testing.assert_allclose(found["mean"][0][1], values.mean(), rtol=1e-6)
    np.testing.assert_allclose(found["sum"][0][1], values.sum(), rtol=1e-6)
    counts, edges = np.histogram(values, bins=5)
    np.testing.assert_allclose(found["values"][0][1], np.stack([edges[:-1], edges[1:], counts], 1), rtol=1e-5)
    np.testing.assert_array_equal(found["first"][0][1], values[0])


@pytest.mark.cover(["strategy"], {"mirrored", "one_device"})
def test_steps_of_run_steps(strategy, recorded):
    """Each step of a loop records its own values, and a default step counts on."""
    data = iter(strategy.experimental_distribute_dataset([np.full((4,), i, np.float32) for i in range(3)]))
    summary.experimental.set_step(10)

    def step(x):
        summary.scalar("x", x.sum(), reduce_op="SUM")

    strategy.run_steps(step, data, steps=3)
    assert [(s, float(v)) for s, v in recorded()["x"]] == [(10, 0.0), (11, 4.0), (12, 8.0)]


@pytest.mark.cover(["strategy"], {"mirrored", "default"})
def test_values_are_computed_only_while_recording_is_on(strategy, recorded):
    """Of ten steps, those with the numbers 0, 4 and 8 are recorded. The others run a program that contains no histogram."""
    traced = []

    @phalanx.function
    def step(x):
        def replica(x):
            traced.append(summary.should_record_summaries())
            summary.histogram("x", x)
            return x

        return strategy.run(replica, args=(x,))

    x, _ = rows(strategy)
    for i in range(10):
        summary.experimental.set_step(i)
        with summary.record_if(i % 4 == 0):
            step(x)
    assert [s for s, _ in recorded()["x"]] == [0, 4, 8]
    assert sorted(set(traced)) == [False, True]
    assert len(traced) <= 6  # Two programs, each traced no more than three times.


def test_program_without_recording_is_the_same(mirrored, tmp_path):
    """While recording is off, a step compiles to the text that it has without summaries."""
    x, _ = rows(mirrored)

    def text(fn):
        return phalanx.function(lambda x: mirrored.run(fn, args=(x,))).lower(x).as_text()

    def with_summary(x):
        summary.histogram("x", x, step=1)
        return x * 2

    bare = text(lambda x: x * 2)
    assert text(with_summary) == bare
    with summary.create_file_writer(tmp_path).as_default(), summary.record_if(False):
        phalanx.function(lambda x: mirrored.run(with_summary, args=(x,)))(x)
    assert not list(tmp_path.iterdir())


@pytest.mark.cover(["strategy"], {"mirrored", "central_storage"})
def test_condition_inside_a_program(strategy, recorded):
    """A traced condition decides at each run, in one program. If replicas disagree, replica 0 decides."""
    x, values = rows(strategy)

    @phalanx.function
    def step(x, i):
        def replica(x):
            with summary.record_if(x[0] + i == 3):
                summary.scalar("sum", x.sum(), step=i, reduce_op="SUM")
                summary.histogram("x", x, step=i)

        return strategy.run(replica, args=(x,))

    for i in range(5):
        step(x, i)
    found = recorded()
    assert [s for s, _ in found["x"]] == [3]
    ((at, total),) = found["sum"]
    assert (at, float(total)) == (3, values.sum())


def test_step_variable_is_read_in_the_program(mirrored, recorded):
    """The default step may be a variable that the step itself counts."""
    with mirrored.scope():
        count = keras.Variable(0, dtype="int32", trainable=False, aggregation="only_first_replica")
    summary.experimental.set_step(count)

    def step():
        summary.scalar("before", 1.0)
        count.assign_add(1)
        summary.scalar("after", 1.0)

    for _ in range(2):
        mirrored.run(step)
    found = recorded()
    assert [s for s, _ in found["before"]] == [0, 1]
    assert [s for s, _ in found["after"]] == [1, 2]


@pytest.mark.cover(["strategy"], {"mirrored", "one_device"})
def test_values_of_gradients_and_remat(strategy, recorded):
    """Records leave the functions that `value_and_grad` and `remat` trace, in programs and in eager code."""
    with strategy.scope():
        v = keras.Variable(3.0)

    def loss():
        summary.scalar("v", v.value, step=1)
        return phalanx.remat(lambda y: (summary.scalar("y", y, step=1), y * v.value)[1])(2.0)

    def step():
        return phalanx.value_and_grad(loss, [v])()[1][0]

    with strategy.scope():
        strategy.run(step)
        step()
    found = recorded()
    assert [float(x) for _, x in found["v"]] == [3.0, 3.0]
    assert [float(x) for _, x in found["y"]] == [2.0, 2.0]


@pytest.mark.cover(["strategy"], {"mirrored", "default"})
def test_values_of_a_tape_are_recorded_once(strategy, recorded):
    """The default strategy starts an eager step again as a program once it meets a tape. Its values are not doubled."""
    with strategy.scope():
        v = keras.Variable(3.0)

    def step():
        summary.scalar("before", 1.0, step=1)
        with phalanx.GradientTape() as tape:
            y = v * v
            summary.scalar("inside", y, step=1)
        return tape.gradient(y, v)

    with strategy.scope():
        strategy.run(step)
    assert {tag: len(x) for tag, x in recorded().items()} == {"before": 1, "inside": 1}


def test_step_that_fails_keeps_what_it_recorded(recorded):
    """In eager code, as in TensorFlow."""

    def step():
        summary.scalar("before", 1.0, step=1)
        raise KeyError("mine")

    with pytest.raises(KeyError):
        phalanx.get_strategy().run(step)
    assert "before" in recorded()


@pytest.mark.cover(["strategy"], {"mirrored", "default"})
def test_summary_of_a_layer_in_fit(strategy, tmp_path):
    """A layer records its activations while `fit` trains, with the optimizer's steps.

    Without a strategy, `fit` is Keras's own, which JAX compiles: nothing is recorded, and nothing fails.
    """

    @keras.saving.register_keras_serializable("summary")
    class Spy(keras.layers.Layer):
        def call(self, x):
            summary.histogram("activations", x)
            return x

    with strategy.scope():
        model = keras.Sequential([keras.Input((3,)), Spy(), keras.layers.Dense(1)])
        model.compile(keras.optimizers.SGD(0.1), "mse")
    writer = summary.create_file_writer(tmp_path)
    x = np.arange(24, dtype=np.float32).reshape(8, 3)
    with writer.as_default(step=model.optimizer.iterations):
        model.fit(x, x[:, :1], batch_size=4, epochs=2, shuffle=False, verbose=0)
    writer.close()
    if strategy is phalanx.get_strategy():
        assert not list(tmp_path.iterdir())
        return
    found = written(tmp_path)["activations"]
    assert [s for s, _ in found] == [0, 1, 2, 3]
    assert all(v[:, 2].sum() == 12 for _, v in found)
    assert (found[0][1][0, 0], found[0][1][-1, 1]) == (0.0, 11.0)


@pytest.mark.parametrize(
    ("data", "expected"),
    [([], [(0, 0), (0, 0)]), ([2.0, 2.0], [(1.5, 2.5), (0, 2)]), ([np.nan, 1.0, np.inf, 3.0], [(1.0, 3.0), (1, 1)])],
)
def test_histograms_of_odd_data(recorded, data, expected):
    """No values, one value, and values that are not finite."""
    summary.histogram("x", np.array(data, np.float32), step=0, buckets=2)
    ((_, found),) = recorded()["x"]
    (low, high), counts = expected
    if data:
        assert (found[0, 0], found[-1, 1]) == (low, high)
    assert tuple(found[:, 2]) == tuple(counts)


def test_histogram_of_replicas_within_a_tape(mirrored, recorded):
    """A tape around the summary differentiates the loss: a histogram over all replicas has no gradient."""
    with mirrored.scope():
        weight = keras.Variable(2.0)

    def step(x):
        with phalanx.GradientTape() as tape:
            y = weight * x
            summary.histogram("y", y, step=0, buckets=2)
            loss = y.sum()
        return tape.gradient(loss, weight)

    x, values = rows(mirrored)
    gradients = mirrored.run(phalanx.function(step), args=(x,)).values
    assert [float(g) for g in gradients] == values.sum(1).tolist()
    ((_, found),) = recorded()["y"]
    np.testing.assert_array_equal(found[:, 2], np.histogram(2 * values, bins=2)[0])


@pytest.mark.parametrize("channels", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [np.uint8, np.float32])
def test_images_can_be_read_again(recorded, channels, dtype):
    """Pixels are written as PNG, the first `max_outputs` of them."""
    pixels = np.random.default_rng(0).integers(0, 256, (4, 5, 6, channels)).astype(np.uint8)
    data = pixels if dtype is np.uint8 else pixels.astype(np.float32) / 255
    assert summary.image("im", data, step=0, max_outputs=2) is True
    ((_, (width, height, *encoded)),) = recorded()["im"]
    assert (width, height, len(encoded)) == (b"6", b"5", 2)
    for png, image in zip(encoded, pixels, strict=False):
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(png))).reshape(5, 6, channels), image)


def test_sounds_can_be_read_again(recorded):
    """As WAV with 16 bits."""
    tone = np.sin(np.arange(100) / 5)[None, :, None] * [1.0, 0.5]
    summary.audio("tone", tone, 8000, step=0)
    ((_, (wav, label)),) = recorded()["tone"]
    with wave.open(io.BytesIO(wav)) as file:
        assert (file.getframerate(), file.getnchannels(), file.getnframes(), label) == (8000, 2, 100, b"")
        found = np.frombuffer(file.readframes(100), "<i2").reshape(100, 2) / 32767
    np.testing.assert_allclose(found, tone[0], atol=1e-4)


def test_texts_and_descriptions(writer, tmp_path):
    """A text, a table of texts, and the text that describes a tag."""
    summary.text("one", "*a*", step=0, description="why")
    summary.text("table", [["a", "b"], ["c", "d"]], step=0)
    writer.close()
    values = {value.tag: value for _, value in events(tmp_path)}
    assert values["one"].metadata.summary_description == "why"
    assert list(values["one"].tensor.string_val) == [b"*a*"]
    assert [d.size for d in values["table"].tensor.tensor_shape.dim] == [2, 2]
    assert values["table"].metadata.plugin_data.plugin_name == "text"


def test_metadata_of_write(writer, tmp_path):
    from tensorboardX.proto.summary_pb2 import SummaryMetadata

    metadata = SummaryMetadata(summary_description="mine")
    metadata.plugin_data.plugin_name = "my_plugin"
    phalanx.function(lambda x: summary.write("x", x, step=3, metadata=metadata))(jnp.arange(3))
    writer.close()
    ((step, value),) = events(tmp_path)
    assert (step, value.metadata.plugin_data.plugin_name) == (3, "my_plugin")
    assert value.metadata.summary_description == "mine"


def test_writers_of_a_function(tmp_path):
    """A function may record with a writer of its own. Another default writer gets what a cached program records."""
    own, first, second = (summary.create_file_writer(tmp_path / name) for name in ("own", "first", "second"))

    @phalanx.function
    def step(x):
        summary.scalar("default", x, step=1)
        with own.as_default(step=x.astype(jnp.int32)):
            summary.scalar("own", x)

    for writer in (first, second):
        with writer.as_default():
            step(jnp.float32(5))
    step(jnp.float32(6))
    for writer in (own, first, second):
        writer.close()
    assert [s for s, _ in written(tmp_path / "own")["own"]] == [5, 5, 6]
    for name in ("first", "second"):
        assert list(written(tmp_path / name)) == ["default"]


def test_defaults_without_a_writer():
    """Nothing is recorded, and nothing is asked for."""
    assert summary.should_record_summaries() is False
    assert summary.scalar("x", 1.0) is False
    with summary.create_noop_writer().as_default(step=1):
        assert summary.scalar("x", 1.0) is True
    assert summary.experimental.get_step() is None


def test_set_as_default_stays(tmp_path):
    """Until another writer takes its place, or the same thread ends."""
    writer, seen = summary.create_file_writer(tmp_path, filename_suffix=".mine"), []

    def work():
        writer.set_as_default(step=4)
        seen.append(summary.scalar("x", 1.0))
        summary.flush()
        seen.append(written(tmp_path))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join(60)
    assert seen[0] is True
    assert [s for s, _ in seen[1]["x"]] == [4]
    assert summary.should_record_summaries() is False
    writer.close()
    writer.close()
    assert next(tmp_path.iterdir()).name.endswith(".mine")


def test_conditions_as_functions(recorded):
    """A function is asked at each summary in eager code, and once per run of a program."""
    asked = []
    step = phalanx.function(lambda x: summary.scalar("x", x, step=x.astype(jnp.int32)))
    with summary.record_if(lambda: asked.append(0) or len(asked) % 2 == 1):
        for i in range(4):
            step(jnp.float32(i))
        summary.scalar("eager", 1.0, step=9)
        summary.scalar("eager", 1.0, step=10)
    found = recorded()
    assert [s for s, _ in found["x"]] == [0, 2]
    assert [s for s, _ in found["eager"]] == [9]


def test_conditions_of_earlier_programs_do_not_stay(recorded):
    """What was decided for a program does not count for a gradient in eager code."""
    v = keras.Variable(2.0)
    gradient = phalanx.value_and_grad(lambda: (summary.scalar("v", v, step=1), v * v)[1], [v])
    with summary.record_if(lambda: False):
        phalanx.function(lambda: summary.scalar("v", 1.0, step=0))()
    gradient()
    with summary.record_if(lambda: True):
        gradient()
    with summary.record_if(lambda: False):
        gradient()
    assert [s for s, _ in recorded()["v"]] == [1, 1]


def test_queue_holds_a_step_back(tmp_path):
    """More summaries than the queue holds are all written, into a file that is created before the first."""
    folder = tmp_path / "deep" / "folder"
    writer = summary.create_file_writer(folder, max_queue=1, flush_millis=1)
    writer.init()
    assert len(list(folder.iterdir())) == 1
    with writer.as_default():
        for i in range(50):
            summary.scalar("x", i, step=i)
    assert [s for s, _ in written(folder)["x"]] == list(range(50))
    writer.close()


def test_program_that_ends(run_python, tmp_path):
    """It may use nothing but `phalanx.summary`, and loses nothing, although it never calls flush or close."""
    output = run_python(
        "import phalanx\n"
        f"with phalanx.summary.create_file_writer({str(tmp_path / 'block')!r}).as_default(step=2):\n"
        "    phalanx.summary.scalar('x', 1.5)\n"
        "    phalanx.summary.histogram('y', [1.0, 2.0])\n"
        "    phalanx.summary.image('z', [[[[0.5]]]])\n"
        f"tracker = phalanx.summary.trackers.CSVTracker({str(tmp_path / 'scalars.csv')!r})\n"
        "for writer in (\n"
        f"    phalanx.summary.create_file_writer({str(tmp_path / 'program')!r}),\n"
        "    phalanx.summary.create_tracker_writer(tracker),\n"
        "):\n"
        "    writer.set_as_default(step=2)\n"
        "    phalanx.function(lambda x: phalanx.summary.scalar('x', x))(1.5)\n",
        forks.run,
    )
    assert output == ""
    assert sorted(written(tmp_path / "block")) == ["x", "y", "z"]
    assert [(s, float(v)) for s, v in written(tmp_path / "program")["x"]] == [(2, 1.5)]
    assert (tmp_path / "scalars.csv").read_text() == "step,name,value\n2,x,1.5\n"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: summary.scalar("x", 1.0), "without a step"),
        (lambda: summary.scalar("", 1.0, step=1), "name=''"),
        (lambda: summary.scalar(3, 1.0, step=1), "name=3"),
        (lambda: summary.scalar("x", "a", step=1), "not an array of numbers"),
        (lambda: summary.scalar("x", 1j, step=1), "complex"),
        (lambda: summary.scalar("x", [1.0], step=1), "0 dims"),
        (lambda: summary.scalar("x", 1.0, step=1.5), "step=1.5"),
        (lambda: summary.scalar("x", 1.0, step=2**63), "must be an integer of 64 bits"),
        (lambda: summary.scalar("x", 1.0, step=jnp.float32(1)), "must be an integer"),
        (lambda: summary.scalar("x", 1.0, step=keras.Variable(1.0)), "must be an integer"),
        (lambda: summary.scalar("x", 1.0, step=1, description=2), "description=2"),
        (lambda: summary.scalar("x", 1.0, step=1, reduce_op="MAX"), "MAX"),
        (lambda: summary.histogram("x", [1.0], step=1, buckets=0), "buckets=0"),
        (lambda: summary.image("x", jnp.zeros((4, 4, 3)), step=1), r"x\[None\] for one image"),
        (lambda: summary.image("x", jnp.zeros((1, 4, 4, 5)), step=1), "channels"),
        (lambda: summary.image("x", jnp.zeros((1, 4, 4, 3)), step=1, max_outputs=0), "max_outputs=0"),
        (lambda: summary.audio("x", jnp.zeros((4, 1)), 8000, step=1), "3 dims"),
        (lambda: summary.audio("x", jnp.zeros((1, 4, 3)), 8000, step=1), "channels"),
        (lambda: summary.audio("x", jnp.zeros((1, 4, 1)), 0, step=1), "sample_rate=0"),
        (lambda: summary.text("x", 3, step=1), "data=3"),
        (lambda: summary.write("x", [1], step=1, metadata="text"), "metadata='text'"),
        (lambda: summary.record_if("yes").__enter__(), "condition='yes'"),
        (lambda: summary.record_if(jnp.zeros(2, bool)).__enter__(), "condition="),
        (lambda: summary.flush("x"), "writer='x'"),
        (lambda: summary.experimental.set_step("x"), "step='x'"),
        (lambda: summary.create_noop_writer().set_as_default(step="x"), "step='x'"),
        (lambda: summary.create_file_writer(3), "logdir=3"),
        (lambda: summary.create_file_writer("x", max_queue=0), "max_queue=0"),
        (lambda: summary.create_file_writer("x", flush_millis=0), "flush_millis=0"),
        (lambda: summary.create_file_writer("x", filename_suffix=0), "filename_suffix=0"),
    ],
)
def test_arguments_that_are_wrong(writer, call, message):
    with pytest.raises(InvalidArgumentError, match=f"(?s){message}.*HINT|HINT.*{message}"):
        call()


def test_records_that_cannot_leave(mirrored, writer):
    """A loop runs its body many times, and JAX's own transformations keep their values, in a step and outside."""

    def body(carry, x):
        summary.scalar("x", x, step=1)
        return carry, x

    for loop in (lambda: phalanx.scan(body, 0.0, jnp.arange(3.0)), lambda: jax.jit(body)(0.0, 1.0)):
        with pytest.raises(NestedWriteError, match=r"phalanx\.summary\.scalar\('x', \.\.\.\)"):
            mirrored.run(loop)
    with pytest.raises(NestedWriteError, match="HINT: phalanx.function instead of jax.jit"):
        jax.jit(lambda x: summary.scalar("x", x, step=1))(1.0)


def test_traced_values_do_not_become_defaults(tmp_path):
    """They do not exist after the function has been traced."""
    with pytest.raises(InvalidArgumentError, match="a value of a traced function"):
        phalanx.function(summary.experimental.set_step)(3)
    writer = summary.create_file_writer(tmp_path)
    with pytest.raises(ContextError, match="set_as_default"):
        phalanx.function(lambda x: writer.set_as_default())(3)


def test_writer_that_was_closed(tmp_path):
    writer = summary.create_file_writer(tmp_path)
    writer.close()
    with pytest.raises(InvalidArgumentError, match="the writer was closed"), writer.as_default(step=1):
        summary.scalar("x", 1.0)


def test_folder_that_cannot_be_written(tmp_path):
    """A file stands where the folder should."""
    (tmp_path / "file").write_text("")
    writer = summary.create_file_writer(tmp_path / "file")
    with pytest.raises(SummaryError, match="cannot be written"), writer.as_default(step=1):
        summary.scalar("x", 1.0)


def test_error_of_the_thread_is_raised(tmp_path):
    """The next flush raises it, and the thread goes on."""
    writer = summary.create_file_writer(tmp_path)
    with pytest.raises(SummaryError, match="cannot be written"), writer.as_default():
        summary.scalar("\ud800", 1.0, step=1)  # Half a character has no bytes.
    with writer.as_default():
        summary.scalar("x", 1.0, step=1)
    writer.close()
    assert [s for s, _ in written(tmp_path)["x"]] == [1]


def test_missing_libraries_are_named(monkeypatch, tmp_path):
    """With the command that installs them."""
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    with pytest.raises(MissingDependencyError, match=r'HINT: pip install "\.\[tensorboard\]"'):
        summary.create_file_writer(tmp_path)
