"""`MultiWorkerMirroredStrategy` in one process."""

import pytest

import phalanx


@pytest.mark.parametrize("seconds", [0, -1.0, float("nan")])
def test_stall_timeout_must_be_positive(seconds):
    with pytest.raises(phalanx.errors.InvalidArgumentError, match=r"must be more than 0 seconds, or None"):
        phalanx.MultiWorkerMirroredStrategy(stall_timeout_s=seconds)


def test_scaled_batches_outside_elastic_groups():
    """They are whole, because no process can be missing."""
    strategy = phalanx.MultiWorkerMirroredStrategy(elastic="scale_batch")
    assert strategy.elastic == phalanx.elastic.ElasticOptions(scale_batch=True)
    assert len(strategy.experimental_distribute_dataset(list(range(8)), batch_size=4)) == 2


@pytest.mark.parametrize("elastic", ["scale-batch", True])
def test_elastic_must_be_options(elastic):
    """Or the one word that stands for some."""
    with pytest.raises(phalanx.errors.InvalidArgumentError, match='elastic=(.|\n)*HINT: elastic="scale_batch", or '):
        phalanx.MultiWorkerMirroredStrategy(elastic=elastic)
