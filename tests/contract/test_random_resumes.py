"""`fit` of every kind of data with its usual shuffling, stopped in the middle of epochs and started again: each row counts once per epoch."""

import itertools
import tempfile

import hypothesis
import hypothesis.strategies as st
import keras
from benchmarks.elastic_data import BATCH, KINDS, ROWS
from benchmarks.elastic_data_script import counting, counts_of, data
from tests.draws import draws

import phalanx

EPOCHS = 3
STEPS = EPOCHS * ROWS // BATCH


class Stopped(Exception):
    pass


def stop(after):
    """A callback that stops after that many steps or groups of steps. Its count is its own: a backup contains the attributes of callbacks."""
    calls = itertools.count(1)

    def count(batch, logs):
        if next(calls) == after:
            raise Stopped

    return keras.callbacks.LambdaCallback(on_train_batch_end=count)


TRAININGS = {
    "kind": st.sampled_from(KINDS),
    "replicas": st.integers(1, 3),
    "steps": st.sampled_from([1, 1, 2, 3]),
    "save_freq": st.integers(1, 4),
    "stops": st.lists(st.integers(1, STEPS), min_size=1, max_size=3),
    "is_looked_at": st.booleans(),
}


@draws(3, 200)
@hypothesis.given(st.fixed_dictionaries(TRAININGS))
def test_any_data_continues_at_its_row(drawn):
    """Every program begins with other seeds, as a new process does."""
    with tempfile.TemporaryDirectory() as folder:

        def train(seed, after=STEPS + 1):
            keras.utils.set_random_seed(seed)
            strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(drawn["replicas"])])
            model, _ = counting(strategy, steps_per_execution=drawn["steps"])
            rows = data(drawn["kind"], strategy)
            if drawn["is_looked_at"] and isinstance(rows["x"], phalanx.DistributedDataset):
                assert rows["x"].element_spec
            backup = phalanx.keras.BackupAndRestore(folder, save_freq=drawn["save_freq"])
            model.fit(**rows, epochs=EPOCHS, verbose=0, callbacks=[backup, stop(after)])
            return counts_of(model)

        seeds = itertools.count()
        for after in drawn["stops"]:
            try:
                assert train(next(seeds), after) == [EPOCHS] * ROWS
                return  # It has come to its end before.
            except Stopped:
                pass
        assert train(next(seeds)) == [EPOCHS] * ROWS
