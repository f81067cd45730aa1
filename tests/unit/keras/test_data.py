"""What `fit` is given, as epochs of distributed batches; what the data raises."""

import numpy as np
import pytest
from twins import FIT, X, Y, compiled, failing_after, replicas, same, state, twins, under

from phalanx.keras.data import EpochData


def test_epochs_of_arrays(strategy):
    """Every epoch has all batches, the last one short."""
    data = EpochData(strategy, X, steps=None, group=1, y=Y, batch_size=16, shuffle=False)
    assert data.num_batches == 7
    assert [[(i, n) for i, n, _ in data.epoch()] for _ in range(2)] == [[(i, 1) for i in range(7)]] * 2


def test_groups(strategy):
    """Four batches at once, and the rest."""
    data = EpochData(strategy, X, steps=None, group=4, y=Y, batch_size=16, shuffle=False)
    assert [(first, count) for first, count, _ in data.epoch()] == [(0, 4), (4, 3)]


def test_groups_of_a_number_of_steps(strategy):
    """An epoch ends where it was told to, within a group."""
    data = EpochData(strategy, X, steps=6, group=4, y=Y, batch_size=16, shuffle=False)
    assert [(first, count) for first, count, _ in data.epoch()] == [(0, 4), (4, 2)]


@pytest.mark.parametrize("k", [1, 2])
def test_generator_that_raises(strategy, k):
    """The steps before it count, and its error reaches the caller."""
    ours, theirs = twins(strategy, compiled(steps_per_execution=k))
    with pytest.raises(ZeroDivisionError):
        ours.fit(failing_after(2), **(FIT | {"batch_size": None}))
    for i in (0, 4):
        theirs.train_on_batch(X[i : i + 4], Y[i : i + 4])
    same(state(ours)[:4], state(theirs)[:4])
    same(ours.evaluate(X, Y, verbose=0), theirs.evaluate(X, Y, verbose=0))
    ours.fit(X, Y, **FIT)


def test_no_program_anew_for_each_epoch(strategy):
    """One compilation serves all epochs and the short batch."""
    model, traced = under(strategy, compiled(steps_per_execution=4)), []
    model.fit(X, Y, **FIT)
    compute = model.compute_loss
    model.compute_loss = lambda *args, **kwargs: (traced.append(1), compute(*args, **kwargs))[1]
    model.fit(X, Y, **FIT, epochs=3)
    assert not traced


def test_integers_and_floats_of_other_widths(strategy):
    """Rows of float64 and int64 train as Keras's do."""
    ours, theirs = twins(strategy, compiled())
    given = X.astype("float64"), Y.astype("int64")
    same(*(m.fit(*given, **FIT).history for m in (ours, theirs)))


def test_predict_of_a_larger_batch_than_rows():
    """Fewer rows than a batch and than replicas."""
    model = under(replicas(4), compiled())
    same(model.predict(X[:3], verbose=0), np.asarray(model(X[:3])))
