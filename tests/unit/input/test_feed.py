"""Who reads ahead: a thread, or the consumer itself."""

import numpy as np
import pytest
from simulation import prefetching

from phalanx._src.input.feed import Feed, Form, ReadAhead
from phalanx._src.input.landing import Landing
from phalanx._src.input.sources.base import AbstractReader, Facts, Owner, Piece
from phalanx._src.mesh.memory import Pool


class Rows(AbstractReader):
    """Four pieces of two rows of one array, which the user may write into."""

    def __init__(self, rows):
        self.rows, self.position = rows, 0

    def read(self):
        start, self.position = self.position, self.position + 2
        return Piece([self.rows[start : start + 2]], [2], None) if start < 8 else None

    def get_state(self):
        return {"records": self.position}


@pytest.mark.parametrize(
    ("in_memory", "waits", "is_alone", "threads"),
    [(True, True, False, 0), (True, False, True, 0), (True, True, True, 1), (False, False, False, 1)],
)
def test_who_reads_ahead(in_memory, waits, is_alone, threads):
    """A thread. Arrays in memory are read by the consumer, unless nobody writes to them meanwhile and the thread helps."""
    rows = np.arange(8)
    facts = Facts(is_in_memory=in_memory, owner=Owner.CALLER if in_memory else Owner.UNTIL_READ)
    feed = Feed(Rows(rows), Landing(facts.owner, Pool()))
    batches = ReadAhead(feed, lambda steps, _: steps[0].piece.parts[0][:], 2, facts, waits=waits)
    if is_alone:
        batches.read_beside()
    first = batches.get(Form()).value
    assert len(prefetching()) == threads
    # What was read is a copy, which the user cannot change afterwards.
    rows[:2] = 9
    assert first.tolist() == [0, 1]
    found = []
    while (batch := batches.get(Form())) is not None:
        found += batch.value.tolist()
    assert found == [2, 3, 4, 5, 6, 7]
    batches.stop()
    assert prefetching() == []
