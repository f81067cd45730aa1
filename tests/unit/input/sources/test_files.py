"""Records in files: file by file, or every worker its rows of all files."""

import gzip
import itertools
import pathlib
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulation import (
    DATA,
    FILE,
    MOVES,
    SHAPES,
    assert_goes_on,
    assert_shared,
    batch_sizes,
    combined,
    open_all,
    rows,
    rows_of,
    take,
    through_text,
    workers,
)
from tests.draws import draws

import phalanx
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.files import FileRecords
from phalanx.data import from_files
from phalanx.errors import InputError, InvalidArgumentError

LAYOUTS = ([0], [5], [3, 4], [1, 0, 7], [4, 4, 4, 4], [9, 1, 1, 0, 2, 6], [0, 0, 3, 0, 5])
"""How many records are in each file."""


class Folder:
    """Files with the records 0, 1, ... one a line."""

    def __init__(self, path, sizes):
        self.sizes, self.num_records, numbers = sizes, sum(sizes), itertools.count()
        self.paths = [path / f"part-{i:02}.txt" for i in range(len(sizes))]
        for file, size in zip(self.paths, sizes, strict=True):
            file.write_text("".join(f"{next(numbers)}\n" for _ in range(size)))
        self.contents = {str(p): [int(x) for x in p.read_text().split()] for p in self.paths}

    def source(self, batch_size, interleave=1, **kwargs):
        """Returns a source of these files. The reader has random access to some files, and streams the others."""
        streams = {str(p) for i, p in enumerate(self.paths) if (i + self.sizes[0]) % 2}
        reader = lambda path: iter(self.contents[path]) if path in streams else self.contents[path]  # noqa: E731
        return FileRecords(from_files(self.paths, reader, interleave=interleave), batch_size, **kwargs)


@pytest.fixture(params=LAYOUTS, ids=str)
def folder(request, tmp_path):
    return Folder(tmp_path, request.param)


COVER = [(layout, 1 + i % 3) for i, layout in enumerate(LAYOUTS)]
"""Of the layouts and interleavings, each value of each."""


@pytest.mark.cover(["folder", "interleave"], COVER)
@pytest.mark.parametrize("interleave", [1, 2, 3])
def test_data_every_row_once_and_in_order(folder, interleave):
    """DATA: on any workers and replicas as under one worker."""
    for b in range(1, 10):
        source = folder.source(b, interleave)
        order = rows_of(take(open_all(source, (1, 1))))
        assert sorted(order) == list(range(folder.num_records))
        assert interleave > 1 or order == sorted(order)
        for shape in SHAPES:
            assert_shared(source, shape, batch_sizes(folder.num_records, b), order)


@pytest.mark.cover(["folder", "interleave"], COVER)
@pytest.mark.parametrize("interleave", [1, 2, 3])
def test_file_every_row_once(folder, interleave):
    """FILE: each worker reads its own files, in order if one after the other, even if a batch has fewer rows than workers.

    The shares of a worker's replicas differ by one at most, and are not more than its part of a global batch.
    """
    for shape, b in itertools.product(SHAPES, (1, 2, 3, 4, 6, 7, 9, 16, 17)):
        taken = take(open_all(folder.source(b, interleave), shape, FILE))
        assert sorted(rows_of(taken)) == list(range(folder.num_records)), (shape, b)
        for index in range(shape[0]):
            own = [x for pieces in taken for x in rows(pieces[index])]
            assert interleave > 1 or own == sorted(own)
        most = max(1, *(sum(w.shares(b)) for w in workers(*shape)))
        for piece in filter(None, itertools.chain(*taken)):
            assert len(piece.counts) == shape[1]
            assert max(piece.counts) - min(piece.counts) <= 1
            assert sum(piece.counts) <= most


@draws(15, 400)
@given(st.lists(st.integers(0, 60), min_size=1, max_size=12), st.integers(12, 99), st.integers(1, 6), st.integers(1, 4))
def test_file_every_row_once_at_larger_sizes(tmp_path_factory, sizes, b, count, interleave):
    folder = Folder(tmp_path_factory.mktemp("files"), sizes)
    taken = take(open_all(folder.source(b, interleave), (count, 2), FILE))
    assert sorted(rows_of(taken)) == list(range(folder.num_records))


@pytest.mark.parametrize(("before", "after"), [*MOVES[:4], ((3, 2), (1, 1)), ((1, 1), (3, 2))])
@pytest.mark.parametrize("interleave", [1, 3])
def test_file_goes_on_from_every_position(folder, interleave, before, after):
    """On as many workers and replicas, and on others: the positions of all workers make one, which fits DATA too."""
    source = folder.source(6, interleave)
    for steps in range(len(take(open_all(source, before, FILE))) + 1):
        readers = open_all(source, before, FILE)
        read = rows_of(take(readers, steps))
        state = combined([reader.get_state() for reader in readers])
        for shape, policy in ((before, FILE), (after, FILE), (after, DATA)):
            rest = rows_of(take(open_all(source, shape, policy, through_text(state))))
            assert sorted(read + rest) == list(range(folder.num_records)), (steps, shape, policy)


@pytest.mark.parametrize(("before", "after"), MOVES)
def test_data_goes_on_from_every_position(folder, before, after):
    """In the order of a single worker."""
    source = folder.source(4, 2)
    assert_goes_on(source, before, after, rows_of(take(open_all(source, (1, 1)))))


def test_interleave_takes_files_in_turn(tmp_path):
    folder = Folder(tmp_path, [2, 3, 1, 2])
    order = lambda k: rows_of(take(open_all(folder.source(3, k), (1, 1))))  # noqa: E731
    assert order(1) == [0, 1, 2, 3, 4, 5, 6, 7]
    assert order(2) == [0, 2, 1, 3, 4, 5, 6, 7]
    assert order(4) == [0, 2, 5, 6, 1, 3, 7, 4]


def test_drop_remainder_follows_the_policy(tmp_path):
    """Under DATA a short last batch, under FILE the short last one of each worker."""
    source = Folder(tmp_path, [5, 6]).source(4, drop_remainder=True)
    assert rows_of(take(open_all(source, (2, 1)))) == list(range(8))
    assert sorted(rows_of(take(open_all(source, (2, 1), FILE)))) == [0, 1, 2, 3, 5, 6, 7, 8, 9, 10]


class Recording(list):
    def __init__(self, values, read):
        super().__init__(values)
        self.read = read

    def __getitem__(self, i):
        self.read.append(super().__getitem__(i))
        return super().__getitem__(i)


@pytest.mark.parametrize("policy", [FILE, DATA])
def test_no_worker_reads_the_records_of_another(tmp_path, policy):
    """If a file has random access."""
    folder, read = Folder(tmp_path, [4, 4]), []
    files = from_files(folder.paths, lambda path: Recording(folder.contents[path], read))
    own = rows_of(take([FileRecords(files, 4).open(InputWorker(1, 2, 1), policy, None)]))
    assert own == read
    assert own == ([4, 5, 6, 7] if policy is FILE else [2, 3, 6, 7])


@pytest.mark.parametrize("policy", [FILE, DATA])
def test_file_that_disappears_between_epochs(tmp_path, policy):
    """It is missed when its turn comes. The records before it are delivered."""
    folder = Folder(tmp_path, [2, 2])
    source = folder.source(2)
    assert len(take([source.open(InputWorker(), policy, None)])) == 2
    folder.paths[1].unlink()
    reader = source.open(InputWorker(), policy, None)
    assert rows(reader.read()) == [0, 1]
    with pytest.raises(
        InputError,
        match=f"the file {folder.paths[1]}: the file has disappeared since the dataset was created.\nHINT: call phalanx.data",
    ):
        reader.read()


@pytest.mark.parametrize("policy", [FILE, DATA])
def test_records_without_arrays(tmp_path, policy):
    """They would be batches without rows."""
    folder = Folder(tmp_path, [2, 2])
    source = FileRecords(from_files(folder.paths, lambda path: [{}, {}]), 2)
    with pytest.raises(InputError, match="a record {}: it contains no array, so it has no rows"):
        source.open(InputWorker(), policy, None).read()


def test_position_of_other_files(tmp_path):
    with pytest.raises(InputError, match="set_state of 3 files: this dataset has 2"):
        Folder(tmp_path, [1, 1]).source(2).open(InputWorker(), FILE, {"files": [0, 0, 0]})


def test_pattern_is_sorted_and_list_keeps_order(tmp_path):
    """A glob pattern as text or path, whose matches are sorted; or a list, whose order is kept."""
    folder = Folder(tmp_path, [1, 1, 1])
    for pattern in (str(tmp_path / "part-*"), pathlib.Path(tmp_path / "part-*")):
        assert from_files(pattern, open).paths == tuple(map(str, folder.paths))
    assert from_files(reversed(folder.paths), open).paths == tuple(map(str, reversed(folder.paths)))
    assert repr(from_files(folder.paths, open)) == "3 files"


@pytest.mark.parametrize(
    ("pattern", "interleave", "error", "match"),
    [
        ("nowhere/*", 1, InputError, r"from_files\('nowhere/\*'\): no file matches. The current directory is /"),
        ([], 1, InputError, "no file matches"),
        (["a", "b", "a"], 1, InputError, "from_files of 3 paths: a is listed twice"),
        (["a"], 0, InvalidArgumentError, "interleave=0: must be a positive integer"),
    ],
)
def test_bad_files_are_refused_before_reading(pattern, interleave, error, match):
    with pytest.raises(error, match=match):
        from_files(pattern, open, interleave=interleave)


@pytest.mark.parametrize("content", [lambda data: data[:20], lambda data: data[:-8] + bytes(8)], ids=["cut", "changed"])
@pytest.mark.parametrize("module", [gzip, zlib])
def test_a_file_that_is_damaged(strategy, tmp_path, module, content):
    """The error names the file, whatever its decompressor says."""
    path = tmp_path / "a.compressed"
    path.write_bytes(content(module.compress(bytes(range(256)))))
    dataset = phalanx.data.from_files([path], lambda path: list(module.decompress(pathlib.Path(path).read_bytes())))
    message = r"the file .*compressed: its content is damaged or truncated: .*\nHINT: restore the file"
    with pytest.raises(InputError, match=message):
        list(strategy.experimental_distribute_dataset(dataset, batch_size=4))
