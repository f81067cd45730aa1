"""PyTorch's datasets."""

import multiprocessing

import numpy as np
import pytest
from evaluation import BATCH, ROWS, X, Y
from laws import SourceLaws, batches, rows, strategy_of

from phalanx.errors import InputError

torch = pytest.importorskip("torch", reason="PyTorch is not installed: make test-sources")
data = torch.utils.data
Stream = pytest.importorskip("torch_stream").Stream

multiprocessing.set_forkserver_preload(["torch"])


class Rows(data.Dataset):
    def __len__(self):
        return ROWS

    def __getitem__(self, index):
        if not 0 <= index < ROWS:
            raise IndexError(index)
        return {"x": torch.from_numpy(X[index]), "y": int(Y[index])}


def tensors():
    """All rows in two tensors; labels in torch's int64."""
    return data.TensorDataset(torch.from_numpy(X), torch.from_numpy(Y).long())


def loader(dataset, workers=0, **kwargs):
    """A loader of global batches. Its processes are not forked from this one, in which JAX has threads."""
    context = "forkserver" if workers else None
    return data.DataLoader(dataset, BATCH, num_workers=workers, multiprocessing_context=context, **kwargs)


class TestTorch(SourceLaws):
    """Loaders and datasets."""

    SOURCES = {
        "loader": batches(lambda _: loader(tensors())),
        "loader_of_dicts": batches(lambda _: loader(Rows())),
        "loader_of_stream": batches(lambda _: loader(Stream(*tensors().tensors))),
        "loader_with_sampler": batches(lambda _: loader(tensors(), sampler=range(ROWS))),
        "tensor_dataset": rows(lambda _: tensors()),
        "map_style_dataset": rows(lambda _: Rows()),
        "iterable_dataset": rows(lambda _: Stream(*tensors().tensors)),
        "subset": rows(lambda _: data.Subset(Rows(), list(reversed(range(ROWS))))),
    }


class TestTorchProcesses(SourceLaws):
    """Loaders with processes of their own, which each pass starts anew."""

    RESTORED_STEPS = 3
    SOURCES = {
        "loader": batches(lambda _: loader(tensors(), 2)),
        "loader_of_stream": batches(lambda _: loader(Stream(*tensors().tensors), 2)),
    }


def test_loader_that_drops_the_last_batch():
    """Is believed: no batch is short, so none carries a mask."""
    dataset = strategy_of(2).experimental_distribute_dataset(loader(tensors(), drop_last=True))
    assert [x.rows for x, _ in dataset] == [None] * (ROWS // BATCH)


@pytest.mark.parametrize(
    ("make", "batch_size", "match"),
    [
        (
            tensors,
            None,
            "dataset=TensorDataset: a dataset of single rows needs a global batch size.\nHINT: pass batch_size=",
        ),
        (lambda: loader(tensors()), BATCH, f"batch_size={BATCH} for a DataLoader: the dataset already yields batches"),
    ],
    ids=["rows without", "batches with"],
)
def test_wrong_batch_size(make, batch_size, match):
    with pytest.raises(InputError, match=match):
        strategy_of(2).experimental_distribute_dataset(make(), batch_size=batch_size)


def test_failure_in_a_loader_process():
    """Reaches the caller; the batches before it are handed out."""
    subset = data.Subset(tensors(), [*range(BATCH), ROWS + 1])
    iterator = iter(strategy_of(2).experimental_distribute_dataset(loader(subset, 1)))
    assert [len(part) for part in next(iterator)[1].values] == [BATCH // 2] * 2
    with pytest.raises(IndexError):
        next(iterator)


def test_bfloat16_tensors_reach_the_devices():
    """NumPy has no such dtype; either they arrive, or the error says what to do."""
    dataset = strategy_of(2).experimental_distribute_dataset(torch.ones(6, 2, dtype=torch.bfloat16), batch_size=4)
    assert [np.asarray(p, "float32").sum() for b in dataset for p in b.values] == [4, 4, 2, 2]
