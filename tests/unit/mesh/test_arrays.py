"""Host values as arrays: which ones enter programs, in which form, and which are refused."""

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.experimental import sparse

import phalanx
from phalanx._src.mesh import arrays
from phalanx.errors import InputError

WIDE = {
    "id": 2**40,
    "negative": -(2**31) - 1,
    "beyond_64_bits": 2**70,
    "float": 1e300,
    "complex": 1e300j,
    "int64": np.array([1, 2**40]),
    "scalar": np.int64(2**40),
    "uint64": np.array([2**33], np.uint64),
    "float64": np.array([np.nan, np.inf, -1e40]),
    "complex128": np.array([1e300j]),
}
NARROW = {
    "largest": 2**31 - 1,
    "smallest": -(2**31),
    "infinite": float("inf"),
    "int64": np.array([-(2**31), 2**31 - 1]),
    "uint64": np.array([2**32 - 1], np.uint64),
    "float64": np.array([np.nan, np.inf, 3e38]),
    "empty": np.zeros(0),
}


@pytest.fixture(params=[["cpu:0"], ["cpu:0", "cpu:1"]], ids=["one", "two"])
def strategy(request):
    return phalanx.MirroredStrategy(request.param)


def aligned(shape, value):
    """Returns an array whose memory a CPU device uses without a copy."""
    array = arrays.empty(shape, np.float32)
    array[...] = value
    return array


def unaligned(shape, value):
    """Returns an array whose memory a CPU device copies, a large one later."""
    memory = np.empty(int(np.prod(shape)) + 1, np.float32)
    first = 1 if arrays.address(memory) % arrays.ALIGNMENT == 0 else 0
    array = memory[first : first + int(np.prod(shape))].reshape(shape)
    array[...] = value
    return array


def double(batch):
    return jax.tree.map(lambda x: x * 2, batch)


@pytest.mark.parametrize("value", WIDE.values(), ids=WIDE.keys())
def test_arguments_that_do_not_fit(strategy, value):
    with pytest.raises(InputError, match=r"args\[0\]\['ids'\] with the number .*\nHINT: jax.config.update\(\"jax_en"):
        strategy.run(double, args=({"ids": value},))
    message = r"kwargs\['batch'\] with the number .*: it does not fit: jax_enable_x64 is off"
    with pytest.raises(InputError, match=message):
        phalanx.function(double)(batch=value)


@pytest.mark.parametrize("value", NARROW.values(), ids=NARROW.keys())
def test_arguments_that_fit(strategy, value):
    got = strategy.experimental_local_results(strategy.run(jnp.asarray, args=(value,)))
    np.testing.assert_allclose(np.asarray(got[0], np.asarray(value).dtype), value, rtol=1e-7)


FORMS = {
    "rows": lambda value: ({"ids": value}, 4),
    "batches": lambda value: ([{"ids": value}], None),
    "generator": lambda value: (lambda: iter([{"ids": value}]), None),
    "generator of rows": lambda value: (lambda: iter([{"ids": x} for x in value]), 4),
    "sequence": lambda value: ([{"ids": x} for x in value], 4),
}


@pytest.mark.parametrize("name", ["int64", "uint64", "float64"])
@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS.keys())
def test_datasets_that_do_not_fit(strategy, name, form):
    """At the latest when the batch is asked for."""
    dataset, batch_size = form(WIDE[name])
    with pytest.raises(InputError, match=r"\['ids'\] with the number .* of dtype .*64: it does not fit"):
        next(iter(strategy.experimental_distribute_dataset(dataset, batch_size=batch_size)))


def test_values_of_a_function_that_do_not_fit():
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with pytest.raises(InputError, match=r"value_fn's result\['id'\] with the number 1099511627776"):
        strategy.experimental_distribute_values_from_function(lambda context: {"id": 2**40})


@pytest.mark.parametrize(
    "value", [2**40, np.int64(2**40), np.array(2**40), 2**70], ids=["int", "scalar", "array", "big"]
)
def test_assignments_that_do_not_fit(strategy, value):
    """A variable of a strategy keeps its value; one of plain Keras does what Keras does."""
    with strategy.scope():
        variable = keras.Variable(1, dtype="int32")
    with pytest.raises(InputError, match=r"variable.*\.assign with the number .*\nHINT: jax.config.update"):
        variable.assign(value)
    assert int(variable.value) == 1


def test_numbers_of_64_bits_where_they_fit():
    """With `jax_enable_x64`, even in one thread alone, only numbers of more than 64 bits are refused."""
    with jax.enable_x64(True):
        for value in (2**40, np.array([2**63], np.uint64), 1e300, np.array([1e300j])):
            assert arrays.as_number(value) is value
        message = "number 1180591620717411303424: .*64 bits per number.\nHINT: numbers of at"
        with pytest.raises(InputError, match=message):
            arrays.as_number(2**70)
    with pytest.raises(InputError, match="1099511627776"):
        arrays.as_number(2**40)


def test_masked_arrays_are_refused(strategy):
    """Their mask would be dropped."""
    masked = np.ma.array([1.0, 2.0], mask=[True, False])
    for use in (
        lambda: strategy.experimental_distribute_dataset(masked, batch_size=2),
        lambda: list(strategy.experimental_distribute_dataset([masked])),
        lambda: strategy.run(double, args=(masked,)),
    ):
        with pytest.raises(InputError, match=r"that is a masked array: .*\nHINT: x.filled\(0\)"):
            use()


@pytest.mark.cover(
    ["strategy", "form"], [(["cpu:0"], "batches"), (["cpu:0", "cpu:1"], "rows"), (["cpu:0"], "generator of rows")]
)
@pytest.mark.parametrize("form", ["rows", "batches", "generator of rows"])
def test_sparse_arrays_become_dense(strategy, form):
    dense = np.float32([[0, 1, 0], [2, 0, 0], [0, 0, 3]])
    matrix = list(map(sparse.BCOO.fromdense, dense)) if form == "generator of rows" else sparse.BCOO.fromdense(dense)
    dataset, batch_size = FORMS[form](matrix)
    (batch,) = strategy.experimental_distribute_dataset(dataset, batch_size=batch_size)
    np.testing.assert_array_equal(strategy.gather(batch["ids"], axis=0), dense)


def test_deleted_arrays_are_refused(strategy):
    gone = jnp.ones((4, 2))
    gone.delete()
    for dataset, batch_size in ((gone, 2), ([gone], None)):
        with pytest.raises(InputError, match=r"that is a deleted array float32\[4, 2\]: .*\nHINT: jnp.copy"):
            next(iter(strategy.experimental_distribute_dataset(dataset, batch_size=batch_size)))


@pytest.mark.parametrize("made", [aligned, unaligned])
def test_an_argument_changed_afterwards(strategy, made):
    """Changes nothing, though the step still runs when Python continues."""
    square = lambda matrix: matrix @ matrix  # noqa: E731
    for _ in range(5):
        x = made((600, 600), 1)
        product = strategy.run(square, args=(x,))
        x[:] = -1
        assert all(float(p[0, 0]) == 600 for p in strategy.experimental_local_results(product))


@pytest.mark.parametrize("made", [aligned, unaligned])
def test_an_assigned_array_changed_afterwards(strategy, made):
    """Changes nothing, on no replica; the same holds for a first value."""
    x = made((64, 64), 1)
    with strategy.scope():
        variable = keras.Variable(x)
    x[:] = 7
    assert float(jnp.sum(variable.value)) == 64 * 64
    x = made((64, 64), 2)
    variable.assign(x)
    x[:] = 7
    sums = strategy.experimental_local_results(strategy.run(lambda: jnp.sum(variable.value)))
    assert [float(s) for s in sums] == [2 * 64 * 64] * len(sums)


@pytest.mark.cover(
    ["strategy", "made", "form", "width"],
    [
        (["cpu:0"], aligned, "rows", 16),
        (["cpu:0"], unaligned, "batches", 1 << 19),
        (["cpu:0"], aligned, "sequence", 1 << 19),
        (["cpu:0", "cpu:1"], unaligned, "rows", 1 << 19),
        (["cpu:0", "cpu:1"], aligned, "batches", 1 << 19),
        (["cpu:0", "cpu:1"], unaligned, "sequence", 16),
    ],
)
@pytest.mark.parametrize("made", [aligned, unaligned])
@pytest.mark.parametrize("form", ["rows", "batches", "sequence"])
@pytest.mark.parametrize("width", [16, 1 << 19])
def test_a_batch_changed_afterwards(strategy, made, form, width):
    """A batch that was handed out keeps its rows, even if its array is large and another thread copies it."""
    x = made((4, width), 1)

    class Batches(keras.utils.PyDataset):
        def __len__(self):
            return 1

        def __getitem__(self, index):
            return x

    dataset = {"rows": x, "batches": [x], "sequence": Batches()}[form]
    batch = next(iter(strategy.experimental_distribute_dataset(dataset, batch_size=4 if form == "rows" else None)))
    x[:] = -1
    assert all(float(jnp.min(part)) == 1 for part in strategy.experimental_local_results(batch))


def test_a_buffer_filled_again_and_again(strategy):
    """Rows of a generator, or of a sequence, that are all the same array."""
    buffer = np.zeros(3, np.float32)

    class Rows:
        def __len__(self):
            return 6

        def __getitem__(self, index):
            buffer[:] = index
            return {"x": buffer, "id": index}

    for dataset in (lambda: map(Rows().__getitem__, range(6)), Rows()):
        batches = list(strategy.experimental_distribute_dataset(dataset, batch_size=3))
        assert [strategy.gather(batch["x"], axis=0)[:, 0].tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]
        assert [strategy.gather(batch["id"], axis=0).tolist() for batch in batches] == [[0, 1, 2], [3, 4, 5]]


def test_a_copy_begins_where_devices_can_use_it():
    """Small copies are plain ones; arrays that nobody can change stay as they are."""
    large = unaligned((1 << 15,), 3)
    assert arrays.address(arrays.copied(large)) % arrays.ALIGNMENT == 0
    np.testing.assert_array_equal(arrays.copied(large), large)
    assert arrays.copied(np.arange(3)).tolist() == [0, 1, 2]
    for same in (jnp.ones(2), np.float32(1), "text"):
        assert arrays.copied(same) is same
    assert arrays.empty((0, 3), np.float32).shape == (0, 3)


@pytest.mark.parametrize("convert", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
def test_small_arrays_are_copied_to_all_devices(convert):
    """Like `device_put` does it; others are left to it."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:2]), ("x",))
    whole, divided = (jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(axis)) for axis in (None, "x"))
    host = np.arange(4, dtype=np.int32)
    value = convert(host)
    placed, expected = arrays.put_small(value, whole), jax.device_put(value, whole)
    host[:] = 0
    assert (placed.sharding, placed.dtype, placed.tolist()) == (expected.sharding, expected.dtype, [0, 1, 2, 3])
    assert arrays.put_small(convert(np.int64(3)), whole).dtype == jnp.asarray(np.int64(3)).dtype
    assert [arrays.put_small(x, s) for x, s in [(value, divided), (convert(np.zeros(1 << 15)), whole)]] == [None, None]
    assert arrays.put_small(expected, whole) is None


def test_arrays_of_the_caller_are_not_donated(strategy):
    """A step updates variables in place, but not the array that the caller has assigned, nor an argument."""
    x = jnp.zeros((64, 64)) + 1
    with strategy.scope():
        variable = keras.Variable(np.zeros((64, 64)), aggregation="sum")
    variable.assign(x)
    for _ in range(2):
        strategy.run(lambda y: variable.assign(variable + y), args=(x,))
    assert float(x[0, 0]) == 1
    assert float(variable.value[0, 0]) > 1
