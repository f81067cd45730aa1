# SPDX-License-Identifier: Apache-2.0
"""Laws that code of your own can be tested against."""

from typing import Any

import jax
import numpy as np

from phalanx.input.distributed import DistributedDataset, DistributedIterator
from phalanx.input.state import from_text, to_text
from phalanx.values import is_distributed


def assert_restores_everywhere(dataset: DistributedDataset, *, steps: int | None = None) -> None:
    """Asserts that an iterator of `dataset` goes on equally from each of its positions. Outside all programs.

    It reads the dataset once, and once more from the position after each batch, which it passes through text as a file would.

    Args:
      dataset: what `Strategy.experimental_distribute_dataset` returned; each pass must give the same batches.
      steps: how many batches to read; None reads all.

    Raises:
      AssertionError: a batch after a restored position differs; the message says from which position, and which batch.

    Example:
      >>> import numpy as np, phalanx, phalanx.testing
      >>> strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
      >>> dataset = strategy.experimental_distribute_dataset(np.arange(10), batch_size=4)
      >>> phalanx.testing.assert_restores_everywhere(dataset)
    """
    iterator = iter(dataset)
    states = [to_text(iterator.get_state())]
    batches: list[Any] = []
    while (steps is None or len(batches) < steps) and (batch := next(iterator, None)) is not None:
        batches.append(_content(batch))
        states.append(to_text(iterator.get_state()))
    for position, text in enumerate(states):
        restored = iter(dataset)
        restored.set_state(from_text(text))
        _assert_goes_on(restored, batches, position, is_whole=steps is None)


def _assert_goes_on(iterator: DistributedIterator, batches: list[Any], position: int, *, is_whole: bool) -> None:
    for number in range(position, len(batches)):
        batch = next(iterator, None)
        where = f"batch {number}, after the position behind batch {position - 1} was restored,"
        assert batch is not None, f"{where} is missing"
        equal = jax.tree.map(np.array_equal, _content(batch), batches[number])
        assert all(jax.tree.leaves(equal)), f"{where} is {_content(batch)}, not {batches[number]}"
    assert not is_whole or next(iterator, None) is None, f"a batch too many follows the position {position}"


def _content(batch: Any) -> Any:
    """Returns the real rows of each local replica, as NumPy arrays."""
    return jax.tree.map(
        lambda x: [np.asarray(v) for v in x.values] if is_distributed(x) else [np.asarray(x)],
        batch,
        is_leaf=is_distributed,
    )
