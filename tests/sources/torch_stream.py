"""A stream of rows, in a module of its own: a loader's processes import it, and neither JAX nor Keras."""

try:
    import torch
    from torch.utils import data
except ImportError:
    pass  # `test_torch.py` is skipped.
else:

    class Stream(data.IterableDataset):
        """Rows one after the other; each loader process takes its own."""

        def __init__(self, *columns: torch.Tensor) -> None:
            super().__init__()
            self._columns = columns

        def __iter__(self):
            info = data.get_worker_info()
            own = slice(None) if info is None else slice(info.id, None, info.num_workers)
            return zip(*(column[own] for column in self._columns), strict=True)
