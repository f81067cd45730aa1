"""What holds for the datasets of every library. A test module has one subclass, with the table of its library."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import evaluation
import numpy as np
import pytest
from evaluation import BATCH, Evaluation

import phalanx
from phalanx.testing import assert_restores_everywhere

Source = Callable[[phalanx.Strategy, Path], phalanx.DistributedDataset]
"""Distributes a dataset of all rows; the folder is for files."""


def batches(make: Callable[[Path], Any], **kwargs: Any) -> Source:
    """Returns a row of the table: a dataset of global batches."""
    return lambda strategy, folder: strategy.experimental_distribute_dataset(make(folder), **kwargs)


def rows(make: Callable[[Path], Any]) -> Source:
    """Returns a row of the table: a dataset of single rows."""
    return batches(make, batch_size=BATCH)


def slices(batch_size: int = BATCH) -> list[slice]:
    return [slice(i, i + batch_size) for i in range(0, evaluation.ROWS, batch_size)]


@functools.cache
def mirrored(replicas: int) -> Evaluation:
    """Returns the evaluation on some replicas, whose step is compiled once for all sources of one layout."""
    return Evaluation(strategy_of(replicas))


@functools.cache
def strategy_of(replicas: int) -> phalanx.Strategy:
    return phalanx.MirroredStrategy([f"cpu:{i}" for i in range(replicas)])


class SourceLaws:
    """Every row exactly once, on any number of replicas, and from any position."""

    SOURCES: ClassVar[dict[str, Source]]
    RESTORED_STEPS: ClassVar[int | None] = None

    @pytest.mark.cover(["replicas"], {3})
    @pytest.mark.parametrize("replicas", [1, 2, 3, 4])
    def test_evaluation_is_exact(self, source, replicas, folder):
        """Loss and accuracy are those of NumPy on all rows, to 1e-6, though the last batch is short."""
        result = mirrored(replicas).run(source(strategy_of(replicas), folder))
        assert result == pytest.approx(evaluation.expected(), rel=0, abs=1e-6)

    def test_iterator_restores_from_every_position(self, source, folder):
        """From the position after each batch the rest follows, batch by batch."""
        assert_restores_everywhere(source(strategy_of(2), folder), steps=self.RESTORED_STEPS)


class PositionLaws(SourceLaws):
    """What also holds if a dataset does not depend on the replicas."""

    def test_positions_fit_other_replicas(self, source, folder):
        """They continue in the same order. The default strategy restores its own positions too."""

        def features(batches):
            each = [batch["x"] if isinstance(batch, dict) else batch[0] for batch in batches]
            return np.concatenate([np.asarray(part) for x in each for part in x.values])

        two, three = (source(strategy_of(replicas), folder) for replicas in (2, 3))
        before, after = iter(two), iter(three)
        read = features([next(before), next(before)])
        after.set_state(before.get_state())
        np.testing.assert_array_equal(np.concatenate([read, features(after)]), features(two))
        assert_restores_everywhere(source(phalanx.get_strategy(), folder))
