"""Pieces of arrays: how an array is divided, and how parts of it are put together from the pieces."""

import itertools
import re

import jax
import keras
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from phalanx._src.checkpoint import shards
from phalanx._src.checkpoint.shards import Division, box_of, delete, name_of, pieces_here
from phalanx._src.checkpoint.store import CheckpointFile, sum_of_contents, write
from phalanx._src.mesh.topology import Topology
from phalanx._src.programs.slots import parted, slot_of
from phalanx.errors import CheckpointError

NOTES = {"values": {}, "names": {}, "aliases": {}}


@st.composite
def cut_arrays(draw):
    """An array, a division of it into a grid of pieces that ranks write, and a part of it."""
    shape = draw(st.lists(st.integers(1, 7), max_size=3))
    cuts = [sorted({0, n, *draw(st.lists(st.integers(0, n), max_size=2))}) for n in shape]
    boxes = list(itertools.product(*(list(itertools.pairwise(c)) for c in cuts)))
    ranks = draw(st.lists(st.integers(0, 3), min_size=len(boxes), max_size=len(boxes)))
    part = [sorted(draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in shape]
    array = np.arange(int(np.prod(shape)), dtype="float32").reshape(shape)
    return array, Division(tuple(shape), "float32", tuple(zip(ranks, boxes, strict=True))), tuple(map(tuple, part))


def slices(box):
    """The slices of a box."""
    return tuple(itertools.starmap(slice, box))


@given(cut_arrays())
def test_any_part_of_any_grid(drawn):
    """A part has the values that NumPy finds there, and the division survives JSON."""
    array, division, part = drawn
    assert (
        Division.of_notes([list(division.shape), division.dtype, [[r, list(b)] for r, b in division.pieces]])
        == division
    )
    found = division.assemble(part, lambda rank, box: array[slices(box)])
    np.testing.assert_array_equal(found, array[slices(part)])


def test_array_without_elements():
    """Its pieces have none either."""
    division = Division((0, 4), "float32", ((0, ((0, 0), (0, 2))), (1, ((0, 0), (2, 4)))))
    assert Division.of_notes([list(division.shape), division.dtype, division.pieces]) == division
    assert division.assemble(((0, 0), (1, 4)), lambda rank, box: np.zeros(1)).shape == (0, 3)


@pytest.mark.parametrize(
    "notes",
    [
        pytest.param([[4], "float32", [[0, [[0, 2]]]]], id="a piece is missing"),
        pytest.param([[4], "float32", [[0, [[0, 5]]]]], id="outside"),
        pytest.param([[4], "float32", [[0, [[-1, 3]]]]], id="before the beginning"),
        pytest.param([[4], "float32", [[0, [[0, 4]]], [1, [[4, 0]]]]], id="backwards"),
        pytest.param([[4], "float32", [[0, [[0, 4], [0, 1]]]]], id="other dims"),
        pytest.param([[4], "object", [[0, [[0, 4]]]]], id="objects"),
        pytest.param([[4], "U1000000", [[0, [[0, 4]]]]], id="text"),
        pytest.param([[4], "i4,(1000,1000)f8", [[0, [[0, 4]]]]], id="records"),
        pytest.param([[4], "float32", [[0, [[0, 2]]], [1, [[0, 2]]]]], id="one piece twice"),
        pytest.param([[2**32, 2**32], "float32", []], id="more than 64 bits"),
        pytest.param([[4], "float99", [[0, [[0, 4]]]]], id="no dtype"),
        pytest.param([[4], "float32"], id="short"),
        pytest.param([4, "float32", []], id="no shape"),
        pytest.param([[4], "float32", [["x", [[0, 4]]]]], id="no rank"),
    ],
)
def test_notes_that_divide_nothing(notes):
    """They are refused before anything is read."""
    with pytest.raises((TypeError, ValueError)):
        Division.of_notes(notes)


def test_first_device_with_a_piece_writes_it():
    """Over a mesh of 2 x 2 devices, an array that is sharded along one axis has two pieces."""
    mesh = Topology.of(4, axes=(("model", 2),)).mesh
    array = jax.device_put(np.arange(8.0, dtype="float32"), NamedSharding(mesh, PartitionSpec("model")))
    division = Division.of(array)
    assert [box for _, box in division.pieces] == [((0, 4),), ((4, 8),)]
    here = pieces_here("a", array, division)
    np.testing.assert_array_equal(here["a@4:8"], [4, 5, 6, 7])
    assert sorted(here) == ["a@0:4", "a@4:8"]


def test_step_after_a_save_consumes_its_variables():
    """Although their shards were read. Shards that the user has read stay."""
    mesh = Topology.of(2).mesh
    arrays = [jax.device_put(np.arange(8.0), NamedSharding(mesh, PartitionSpec("replica"))) for _ in range(2)]
    slot_of(keras.Variable(0.0)).store(arrays[0], None)  # From now on, reads of shards are recorded.
    mine = arrays[1].addressable_shards
    for array in arrays:
        pieces_here("a", array, Division.of(array))
    assert [parted.get(array) for array in arrays] == [None, True]
    assert len(mine) == 2


@pytest.fixture
def saved(tmp_path):
    """A checkpoint with an array of two pieces, which two ranks have written."""
    file, array = tmp_path / "ckpt-1.safetensors", np.arange(6, dtype="float32")
    division = Division((6,), "float32", ((0, ((0, 4),)), (1, ((4, 6),))))
    for rank, box in division.pieces:
        write(shards.file_of_rank(file, rank), {name_of("a", box): array[slices(box)]}, NOTES)
    sums = {str(rank): sum_of_contents(shards.file_of_rank(file, rank)) for rank in (0, 1)}
    write(file, {"b": array}, {**NOTES, "divided": {"a": division}, "files": sums})
    return file


def test_divided_arrays_are_arrays(saved):
    """They are listed, described and read like others, and parts of them are read from the files that have these parts."""
    stored = CheckpointFile(saved)
    assert stored.names == {"a", "b"}
    assert stored.spec("a") == ((6,), np.dtype("float32"))
    np.testing.assert_array_equal(stored.array("a"), np.arange(6))
    shards.file_of_rank(saved, 1).unlink()
    np.testing.assert_array_equal(CheckpointFile(saved).part("a", ((1, 3),)), [1, 2])


def test_missing_piece_is_named(saved):
    """The message names the file."""
    shards.file_of_rank(saved, 1).unlink()
    with pytest.raises(
        CheckpointError, match=r"00001\.safetensors: there is no such file(?s:.*)HINT: the folder .*: copy it too"
    ):
        CheckpointFile(saved).array("a")


def test_pieces_of_another_checkpoint(saved):
    """Pieces of equal names and shapes, but with other values, are not taken."""
    file = shards.file_of_rank(saved, 1)
    file.unlink()
    write(file, {name_of("a", ((4, 6),)): np.zeros(2, "float32")}, NOTES)
    with pytest.raises(CheckpointError, match=re.escape("00001.safetensors belongs to another checkpoint")):
        CheckpointFile(saved).array("a")


def test_only_pieces_are_deleted(saved):
    """What somebody else has put into the folder stays."""
    folder = shards.folder_of(saved)
    (folder / "mine.safetensors").write_text("")
    (folder / ".00002.safetensors.77.part").write_text("")
    delete(saved)
    assert [each.name for each in folder.iterdir()] == ["mine.safetensors"]
    assert not saved.exists()


@pytest.mark.parametrize(
    "piece",
    [
        pytest.param(np.ones(1, "float32"), id="one value for all"),
        pytest.param(np.ones(3, "float32"), id="other shape"),
        pytest.param(np.ones(1, "int8"), id="other dtype"),
    ],
)
def test_pieces_that_are_less_than_the_notes_say(tmp_path, piece):
    """They are refused before memory is taken for the array: NumPy would make 4 GB of one value."""
    file, box = tmp_path / "c.safetensors", ((0, 10**9),)
    write(shards.file_of_rank(file, 0), {name_of("a", box): piece}, NOTES)
    division = Division((10**9,), "float32", ((0, box),))
    sums = {"0": sum_of_contents(shards.file_of_rank(file, 0))}
    write(file, {}, {**NOTES, "divided": {"a": division}, "files": sums})
    with pytest.raises(CheckpointError, match=r"00000\.safetensors does not have the piece a@0:"):
        CheckpointFile(file).array("a")


def test_links_in_place_of_folders(tmp_path):
    """Other users of the folder cannot choose where pieces are deleted or written."""
    other, file = tmp_path / "other.shards", tmp_path / "c.safetensors"
    other.mkdir()
    (other / "00000.safetensors").write_text("mine")
    shards.folder_of(file).symlink_to(other)
    delete(file)
    with pytest.raises(CheckpointError, match="the file cannot be written"):
        write(shards.file_of_rank(file, 1), {"a": np.ones(1)}, NOTES)
    assert [each.read_text() for each in other.iterdir()] == ["mine"]


def test_boxes_of_slices():
    """JAX leaves out the ends of a whole dim."""
    assert box_of((slice(None), slice(2, 4)), (3, 8)) == ((0, 3), (2, 4))


def test_pieces_that_the_chief_has_not_deleted(tmp_path):
    """The machines have disks of their own, so that it did not see them."""
    piece = shards.file_of_rank(tmp_path / "c.safetensors", 1)
    write(piece, {"a": np.ones(1)}, NOTES)
    with pytest.raises(CheckpointError, match="exists already.\nHINT: a folder that all machines share"):
        write(piece, {"a": np.ones(1)}, NOTES)
