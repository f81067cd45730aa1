"""Whole programs through the rewriter: what changes, what is marked, and what stays byte for byte."""

import tokenize
from io import BytesIO

import hypothesis.strategies as st
import pytest
from hypothesis import given
from tests.migrate.record import FOLDER, expressions

from phalanx._src.tools.migrate.program import migrate
from phalanx._src.tools.migrate.table import NameTable, Row, the_table

PROGRAMS = sorted((FOLDER / "programs").glob("*.py"))
HEAD = "import tensorflow as tf\n"


def migrated(source):
    """Returns the new source and the lines of the report that need a look."""
    migration = migrate(source.encode(), "train.py", the_table())
    looks = [f"{finding.line}: {finding.text}" for finding in migration.report.findings if finding.kind == "look"]
    return migration.source.decode(), looks


def comments(source):
    """Returns the comments of a program, but for those that the rewriter adds."""
    tokens = tokenize.tokenize(BytesIO(source.encode()).readline)
    found = [token.string for token in tokens if token.type == tokenize.COMMENT]
    return sorted(text for text in found if not text.startswith("# phalanx: "))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("x = tf.reduce_mean(a, 1, keepdims=True, name='m')", "x = keras.ops.mean(a, 1, keepdims=True)"),
        ("x = tf.reduce_sum(input_tensor=a)", "x = keras.ops.sum(x=a)"),
        ("x = tf.cast(a, tf.float32)", 'x = keras.ops.cast(a, "float32")'),
        ("x = tf.argmax(a)", "x = keras.ops.argmax(a, axis=0)"),
        ("x = tf.matmul(a, b, transpose_b=True)", "x = keras.ops.matmul(a, keras.ops.swapaxes(b, -1, -2))"),
        ("x = tf.split(a, [1, 2, 3], 1)", "x = keras.ops.split(a, [1, 3], axis=1)"),
        ("x = a[:, tf.newaxis]", "x = a[:, None]"),
        ("x = a.shape.as_list()", "x = list(a.shape)"),
        ("x = tf.nn.l2_loss(a) * 2", "x = (keras.ops.sum(keras.ops.square(a)) / 2) * 2"),
        ("x = tf.keras.optimizers.Adam(lr=0.1)", "x = keras.optimizers.Adam(learning_rate=0.1)"),
        ("x = tf.keras.losses.Reduction.NONE", 'x = "none"'),
        ("x = tf.compat.v2.keras.Model", "x = keras.Model"),
        ("x = tf.shape(a)[0]", "x = keras.ops.shape(a)[0]"),
        ("x = map(tf.square, a)", "x = map(keras.ops.square, a)"),
        ("x = tf.cond(a > 0, lambda: a, lambda: b)", "x = phalanx.cond(a > 0, lambda: a, lambda: b)"),
        ("x = f(act=tf.nn.gelu)", "x = f(act=lambda features: keras.ops.gelu(features, approximate=False))"),
        ("x, y = tf.math.top_k(a, k=2)", "x, y = keras.ops.top_k(a, 2, sorted=True)"),
        ("x = tf.config.list_physical_devices('CPU')", 'x = jax.devices("cpu")'),
        ("x = len(tf.config.list_logical_devices())", "x = len(jax.devices())"),
        ("x = tf.range(2, 5)", "x = keras.ops.arange(2, 5)"),
        ("x = tf.compat.v1.distribute.get_strategy()", "x = phalanx.get_strategy()"),
        ("x = tf.print('loss', a)", "x = jax.debug.print('loss {}', a)"),
    ],
)
def test_line_becomes_another(before, after):
    new, looks = migrated(f"{HEAD}a = b = 1\n{before}\n")
    assert looks == []
    assert new.splitlines()[-1] == after
    assert "tensorflow" not in new
    compile(new, "train.py", "exec")


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("tf.foo.bar(1)", "tf.foo.bar: the table of names does not have it"),
        ("tf.keras.layers.NoSuchLayer(1)", "does not have it"),
        ("tf.reduce_sum(1, no_such=1)", "the argument `no_such` has no counterpart"),
        ("tf.transpose(1, conjugate=True)", "the argument `conjugate` has no counterpart"),
        ("tf.split(1, sizes)", "it takes sizes"),
        ("tf.matmul(a, b, transpose_b=flag)", "unless it is False"),
        ("tf.where(a)", "HINT: jnp.argwhere"),
        ("tf.gather(a, b, batch_dims=n)", "unless it is"),
        ("tf.TensorArray(tf.float32)", "HINT: a Python list"),
        ("y = tf.shape(a) * 2", "its target is a tuple of numbers"),
        ("tf.keras.optimizers.Adam(decay=0.1)", "the argument `decay` has no counterpart"),
        ("tf.reduce_sum(*args)", "write the arguments of `*args` one by one"),
        ("v.scatter_nd_add(a, b)", "HINT: v.assign"),
        ("tf.config.list_physical_devices(kind)", "has no counterpart unless it is"),
        ("f = tf.config.list_physical_devices", "it must be called here"),
        ("m = tf.keras.Model(); m.save_weights('a.h5')", 'must end with ".weights.h5"'),
        ("x = tf.math.top_k(a)", "a pair without names"),
        ("getattr(tf, 'sum')(1)", "a module has no counterpart as a value"),
        ("use(tf)", "a module has no counterpart as a value"),
        ("tf.linalg.svd(a)", "HINT: u, s, vt"),
        ("tf.nn.conv2d(a, b, 1, 'SAME', **options)", "write the arguments of `**options` one by one"),
        ("tf.nn.max_pool2d(a, 2, 2)", "it has no counterpart without `padding`"),
        ("tf.split(a, 2, no_such=1)", "the argument `no_such` has no counterpart"),
        ("tf.print(a, summarize=3)", "the argument `summarize` has no counterpart"),
    ],
)
def test_unsafe_line_is_marked_and_not_guessed(line, reason):
    new, looks = migrated(f"{HEAD}{line}\n")
    assert len(looks) == 1
    assert reason in looks[0]
    lines = new.splitlines()
    assert lines[-2].startswith("# phalanx: ")
    assert reason in lines[-2]
    again, _ = migrated(new)
    assert again == new


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("from tensorflow import *\n", "write the names"),
        (f"{HEAD}getattr(tf, name)(1)\n", "not in the source"),
        (f"{HEAD}eval('tf.ones(1)')\n", "`eval`"),
        ("import tensorflow.compat.v1 as tf\nwith tf.Session() as s:\n    pass\n", "sessions of TensorFlow 1"),
        (f"{HEAD}tf = None\ntf.ones(1)\n", "something else"),
        (f"{HEAD}keras = 1\nx = tf.keras.Model\n", "the name `keras` stands for something else"),
        ("import importlib\ntf = importlib.import_module('tensorflow')\n", "write `import tensorflow as tf`"),
    ],
)
def test_program_that_cannot_be_migrated_stays_as_it_is(source, reason):
    new, looks = migrated(source)
    assert new == source
    assert len(looks) == 1
    assert reason in looks[0]


@pytest.mark.parametrize(
    "source", ["import tensorflow\nprint 'x'\n", "import tensorflow\ndef f(:\n", "tensorflow = '\n"]
)
def test_file_that_is_not_python_is_reported_with_its_line(source):
    migration = migrate(source.encode(), "train.py", the_table())
    assert migration.report.exit_code == 2
    assert migration.source == source.encode()
    assert "this is not Python 3" in migration.report.lines()[1]


@pytest.mark.parametrize(
    ("expression", "message"),
    [
        ("-" * 500 + "tf.ones(1)", "too deep"),
        ("-" * 100_000 + "tf.ones(1)", "too deep"),
        ("(" * 5000 + "tf.ones(1)" + ")" * 5000, "too many nested parentheses"),
        ("tf.ones(1)" + "()" * 20_000, "too deep"),
    ],
    ids=["signs", "more signs", "parentheses", "calls"],
)
def test_expression_that_is_too_deep_is_reported(expression, message):
    """libcst's parser would overflow the stack, which ends the process."""
    source = f"import tensorflow as tf\nx = {expression}\n".encode()
    migration = migrate(source, "train.py", the_table())
    assert (migration.report.exit_code, migration.source) == (2, source)
    assert message in migration.report.lines()[1]


def test_note_is_that_of_the_row_that_fits():
    rows = [
        Row.parse("tf.f\tkeras.ops.abs\tx way=1 / \tfirst"),
        Row.parse("tf.f\tkeras.ops.exp\tx way=2 / \tsecond"),
    ]
    report = migrate(f"{HEAD}tf.f(1, way=2)\n".encode(), "train.py", NameTable(rows)).report
    assert [finding.text for finding in report.findings] == ["tf.f -> keras.ops.exp (second)"]


@pytest.mark.parametrize("source", [b"", b"x = 1\r\n", b"\xff\xfe", b"# tensorflow\nimport numpy\n", b"def f(:\n"])
def test_file_without_tensorflow_stays_byte_for_byte(source):
    migration = migrate(source, "train.py", the_table())
    assert migration.source == source
    assert migration.report.exit_code == 0


def test_functions_of_datasets_stay_in_tensorflow():
    """With the functions that they call; layers of Keras in them become Keras's own."""
    new, looks = migrated(
        """\
import tensorflow as tf

resize = tf.keras.layers.Resizing(2, 2)

def helper(x):
    return tf.cast(x, tf.float32)

def scale(x):
    return resize(helper(x)) / tf.constant(255.0)

dataset = tf.data.Dataset.range(3).map(scale).filter(lambda x: tf.reduce_all(x > 0))
y = tf.cast(1, tf.float32)
"""
    )
    assert looks == []
    assert "import tensorflow as tf" in new
    assert "keras.layers.Resizing" in new
    for line in (
        "return tf.cast(x, tf.float32)",
        "tf.constant(255.0)",
        "tf.reduce_all(x > 0)",
        'ops.cast(1, "float32")',
    ):
        assert line in new


@pytest.mark.parametrize(
    ("names", "said"),
    [
        (["range"], "1 name of TensorFlow stays: tf.data.Dataset.range (line 2). HINT: "),
        (["range", "list_files", "range"], "2 names of TensorFlow stay: tf.data.Dataset.range (line 2), "),
        (["a", "b", "c", "d", "e"], "tf.data.Dataset.b (line 3), tf.data.Dataset.c (line 4), 2 more. HINT: "),
    ],
)
def test_report_names_what_stays_in_tensorflow(names, said):
    """Each name with its first line, up to three of them. They need no look."""
    source = "import tensorflow as tf\n" + "".join(f"tf.data.Dataset.{name}(3)\n" for name in names)
    report = migrate(source.encode(), "train.py", the_table()).report
    assert report.exit_code == 0
    assert said in report.lines()[-1]
    assert "experimental_distribute_dataset((x, y), batch_size=" in report.lines()[-1]


def test_aliases_are_followed():
    new, looks = migrated(
        """\
import tensorflow.compat.v2 as tf2
from tensorflow import keras, math as m
from tensorflow.keras.layers import Dense, Flatten as F
from tensorflow.keras import backend as K
layers = keras.layers
x = [layers.Dense(1), Dense(2), F(), K.square(1), m.log(2.0), tf2.ones(1)]
"""
    )
    assert looks == []
    assert new.splitlines() == [
        "import phalanx",
        "import keras",
        "from keras.layers import Dense, Flatten as F",
        "layers = keras.layers",
        "x = [layers.Dense(1), Dense(2), F(), keras.ops.square(1), keras.ops.log(2.0), keras.ops.ones(1)]",
    ]


def test_removed_statement_leaves_no_semicolon():
    new, looks = migrated("import os; import tensorflow as tf\nimport tensorflow; import re\nx = re, os\n")
    assert (new, looks) == ("import os\nimport re\nx = re, os\n", [])


def test_step_with_a_tape_is_compiled_if_it_has_no_side_effects():
    step = "def step(x):\n    with tf.GradientTape() as tape:\n        y = x\n    {}\n    return tape.gradient(y, x)\n"
    new, looks = migrated(HEAD + step.format("y = y"))
    assert looks == []
    assert "@phalanx.function\ndef step" in new
    new, looks = migrated(HEAD + step.format("print(y)"))
    assert "a tape records only in a compiled function" in looks[0]
    assert "@phalanx.function" not in new.replace("with @phalanx.function", "")


@pytest.mark.parametrize(
    ("line", "word"),
    [
        ("if tf.reduce_sum(x) > 0:", "if"),
        ("if x > 0:", "if"),
        ("while x < 3:", "while"),
        ("for i in tf.range(n):", "for"),
        ("for row in dataset:", "for"),
    ],
)
def test_control_flow_over_tensors_is_marked(line, word):
    _, looks = migrated(f"{HEAD}@tf.function\ndef step(x, n, dataset):\n    {line}\n        pass\n")
    assert len(looks) == 1
    assert looks[0].startswith(f"4: {word}: ")


@pytest.mark.parametrize(
    "line", ["if training:", "if x is None:", "if mode == 'a':", "if x.shape[0] > 1:", "if len(x) > 1:"]
)
def test_control_flow_over_python_values_is_left_alone(line):
    _, looks = migrated(f"{HEAD}@tf.function\ndef step(x, mode, training=False):\n    {line}\n        tf.ones(1)\n")
    assert looks == []


def test_calls_that_are_not_needed_are_removed():
    new, looks = migrated(
        f"{HEAD}for gpu in gpus:\n    # Grow.\n    tf.config.experimental.set_memory_growth(gpu, True)\nx = tf.ones(1)\n"
    )
    assert looks == []
    assert "    # Grow.\n    pass\n" in new


@pytest.mark.parametrize(
    "devices",
    [
        "cpu = tf.config.list_physical_devices('CPU')[0]\nset_devices(cpu, [Device()] * 2)",
        "cpus = tf.config.experimental.list_physical_devices('CPU')\nset_devices(cpus[0], [Device(), Device()])",
        "set_devices(tf.config.list_physical_devices('CPU')[0], logical_devices=[Device()] * 2)",
    ],
)
def test_virtual_devices_need_only_their_number(devices):
    """A list of the devices would start JAX before."""
    for name, device in (
        ("tf.config.set_logical_device_configuration", "tf.config.LogicalDeviceConfiguration"),
        (
            "tf.config.experimental.set_virtual_device_configuration",
            "tf.config.experimental.VirtualDeviceConfiguration",
        ),
    ):
        lines = devices.replace("set_devices", name).replace("Device()", f"{device}()")
        assert migrated(f"{HEAD}{lines}\n") == ("import phalanx\nphalanx.set_virtual_cpu_devices(2)\n", [])


def test_virtual_devices_that_come_too_late_are_marked():
    """Something else uses the devices before. Parts of a GPU have no counterpart."""
    call = "tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * 2)\n"
    lines = "cpu = tf.config.list_physical_devices('CPU')[0]\nprint(cpu)\n"
    new, looks = migrated(HEAD + lines + call)
    assert 'cpu = jax.devices("cpu")[0]\nprint(cpu)\n# phalanx: ' in new
    assert [look.partition(". HINT")[0] for look in looks] == [
        "4: tf.config.set_logical_device_configuration: it must run before anything uses the devices"
    ]
    new, looks = migrated(HEAD + lines + call.replace("Configuration()", "Configuration(memory_limit=9)"))
    assert "a GPU cannot be divided" in looks[-1]


@pytest.mark.parametrize(
    "lines",
    [
        "loss = tf.reduce_sum(each) * (1.0 / GLOBAL_BATCH_SIZE)",
        "loss = 1 / self.batch_size * tf.math.reduce_sum(each)",
        "loss = tf.reduce_sum(each) / tf.cast(GLOBAL_BATCH_SIZE, tf.float32)",
        "loss = tf.reduce_sum(each)\n        loss = loss / float(batch)",
        "loss = tf.reduce_sum(each)\n        loss /= GLOBAL_BATCH_SIZE",
    ],
)
def test_sum_over_the_global_batch_in_a_train_step_is_marked(lines):
    """Elsewhere it is right: Keras does not change what a function outside a train_step returns."""
    names = "import tensorflow as tf\nstrategy = tf.distribute.get_strategy()\n"
    method = f"    def train_step(self, each):\n        {lines}\n        return loss\n"
    new, looks = migrated(f"{names}class M(tf.keras.Model):\n{method}")
    (look,) = looks
    assert "HINT: phalanx.nn.compute_average_loss(per_example)" in look
    assert f"        # phalanx: {look.partition(': ')[2]}\n" in new
    for other in (
        f"class M(tf.keras.Model):\n{method.replace('train_step', 'compute_loss')}",
        f"def outer(self):\n{method}",
        "class M(tf.keras.Model):\n    def train_step(self, each):\n        return tf.reduce_sum(each) / 2.0 + tf.reduce_mean(each)\n",
    ):
        assert migrated(names + other)[1] == []


def test_train_step_without_a_strategy_is_marked():
    _, looks = migrated(
        "from tensorflow import keras\nclass M(keras.Model):\n    def train_step(self, data):\n        pass\n"
    )
    assert "your own steps need a strategy" in looks[0]


@pytest.mark.cover(("path",), PROGRAMS[::4])
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_of_another_library_stay_byte_for_byte(path):
    """The comment makes the rewriter look at the program, which has the same names as one of TensorFlow."""
    source = "# Not tensorflow.\n" + path.read_text().replace("tensorflow", "tensorflaw")
    assert migrated(source) == (source, [])


@pytest.mark.cover(("path",), PROGRAMS[::4])
@pytest.mark.parametrize("path", PROGRAMS, ids=lambda path: path.name)
def test_programs_keep_their_comments_and_change_once(path):
    source = path.read_text()
    new, _ = migrated(source)
    assert comments(new) == comments(source)
    assert migrated(new)[0] == new


@given(st.lists(st.sampled_from(expressions()), min_size=1, max_size=4), st.data())
def test_random_programs_parse_and_change_once(texts, data):
    """With comments and line breaks at random places where Python allows them."""
    lines = ["import tensorflow as tf  # the library", "def f(x, y):"]
    for i, text in enumerate(texts):
        at = [k for k, letter in enumerate(text) if letter in "([," and not text[:k].count("'") % 2]
        if at and data.draw(st.booleans()):
            k = data.draw(st.sampled_from(at)) + 1
            text = f"{text[:k]}  # inside {i}\n        {text[k:]}"
        lines.append(f"    # above {i}\n    z = ({text})  # behind {i}")
    source = "\n".join(lines) + "\n"
    new, _ = migrated(source)
    compile(new, "train.py", "exec")
    assert comments(new) == comments(source)
    assert migrated(new)[0] == new
