"""Hugging Face's datasets."""

import numpy as np
import pytest
from evaluation import BATCH, ROWS, X, Y
from laws import SourceLaws, batches, rows, slices, strategy_of

from phalanx.errors import InputError

datasets = pytest.importorskip("datasets", reason="Hugging Face's datasets is not installed: make test-sources")


def table():
    """All rows, in memory: `x` is a list of numbers for those who ask for no format."""
    return datasets.Dataset.from_dict({"x": X, "y": Y})


def stream():
    return table().to_iterable_dataset(num_shards=3)


def torch_loader():
    torch = pytest.importorskip("torch")
    return torch.utils.data.DataLoader(table().with_format("torch"), BATCH)


class TestHuggingFace(SourceLaws):
    """With random access and as streams, in each format."""

    SOURCES = {
        "dataset": rows(lambda _: table()),
        "dataset_in_numpy": rows(lambda _: table().with_format("numpy")),
        "dataset_in_torch": rows(lambda _: table().with_format("torch")),
        "dataset_in_jax": rows(lambda _: table().with_format("jax")),
        "shuffled_dataset": rows(lambda _: table().shuffle(seed=3).with_format("numpy")),
        "mapped_dataset": rows(lambda _: table().map(lambda row: {"x": np.float32(row["x"])}).with_format("numpy")),
        "iterable_dataset": rows(lambda _: stream()),
        "iterable_dataset_in_numpy": rows(lambda _: stream().with_format("numpy")),
        "torch_loader": batches(lambda _: torch_loader()),
    }


def test_token_lists_become_rows():
    """The commonest column of all: lists of integers, one length. Each list is one row of an array."""
    tokens = datasets.Dataset.from_dict({"input_ids": [[i, i + 1, i + 2] for i in range(10)]})
    (batch,) = strategy_of(2).experimental_distribute_dataset(tokens, batch_size=10)
    assert [part.shape for part in batch["input_ids"].values] == [(5, 3), (5, 3)]


@pytest.mark.parametrize(
    ("columns", "match"),
    [
        ({"input_ids": [list(range(i)) for i in range(1, 11)]}, "HINT: pad"),
        ({"text": ["a", "b"] * 5}, "(?s)a batch of dtype .*HINT: encode the text first"),
    ],
    ids=["ragged", "text"],
)
def test_columns_that_cannot_be_placed(columns, match):
    """Lists of different lengths have to be padded, and text has to be encoded."""
    dataset = datasets.Dataset.from_dict(columns)
    with pytest.raises(InputError, match=match):
        next(iter(strategy_of(2).experimental_distribute_dataset(dataset, batch_size=10)))


@pytest.mark.parametrize("make", [table, stream])
def test_dataset_without_batch_size(make):
    """It is one of rows; the error says what is missing."""
    with pytest.raises(InputError, match="a dataset of single rows needs a global batch size.\nHINT: pass batch_size="):
        strategy_of(2).experimental_distribute_dataset(make())


def test_reads_its_own_rows_only():
    """Random access: nothing is read twice, and nothing ahead of its turn but the next batch."""
    read = []
    dataset = table().with_transform(lambda rows: read.extend(rows["y"]) or {k: np.asarray(v) for k, v in rows.items()})
    assert len(list(strategy_of(2).experimental_distribute_dataset(dataset, batch_size=BATCH))) == len(slices())
    assert len(read) == ROWS
