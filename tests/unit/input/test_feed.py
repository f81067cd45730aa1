"""Who reads ahead: a thread, or the consumer itself."""

import numpy as np
import pytest
from simulation import prefetching

from phalanx._src.input.feed import Form, ReadAhead
from phalanx._src.input.sources.base import AbstractReader, Facts, Piece


class Rows(AbstractReader):
    """Four pieces of two rows of one array, which the user may write into."""

    def __init__(self, rows):
        self.rows, self.position = rows, 0

    def read(self):
        start, self.position = self.position, self.position + 2
        return Piece([self.rows[start : start + 2]], [2], None) if start < 8 else None

    def get_state(self):
        return {"records": self.position}


@pytest.mark.parametrize(("in_memory", "waits", "threads"), [(True, False, 0), (True, True, 1), (False, False, 1)])
def test_who_reads_ahead(in_memory, waits, threads):
    """A thread, unless slicing arrays in memory is cheaper and the consumer could not do anything meanwhile."""
    rows = np.arange(8)
    facts = Facts(is_in_memory=in_memory, is_borrowed=True)
    batches = ReadAhead(Rows(rows), lambda steps, _: steps[0].piece.parts[0], 2, facts, waits=waits)
    first = batches.get(Form()).value
    assert len(prefetching()) == threads
    # What a thread reads is a copy, which the user cannot change afterwards.
    rows[:2] = 9
    assert first.tolist() == ([0, 1] if threads else [9, 9])
    found = []
    while (batch := batches.get(Form())) is not None:
        found += batch.value.tolist()
    assert found == [2, 3, 4, 5, 6, 7]
    batches.stop()
    assert prefetching() == []
