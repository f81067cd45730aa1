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
    ("in_memory", "is_begun", "waits", "is_alone", "width", "threads"),
    [
        (True, False, True, False, 1, 0),
        (True, False, False, True, 1, 0),
        (True, False, True, True, 1, 1),
        (True, False, False, True, 1 << 17, 1),
        (False, False, False, False, 1, 1),
        (False, True, False, False, 1, 0),
        (False, True, True, False, 1, 1),
        (False, True, False, True, 1 << 17, 1),
    ],
)
def test_who_reads_ahead(in_memory, is_begun, waits, is_alone, width, threads):
    """A thread. The consumer's thread reads on what it has begun, if batches are small.

    It also reads arrays in memory if somebody may write to them meanwhile, or if the thread would not help.
    """
    rows = np.repeat(np.arange(8)[:, None], width, axis=1)
    owner = Owner.CALLER if in_memory else Owner.UNTIL_READ
    facts = Facts(is_in_memory=in_memory, is_begun=is_begun, owner=owner)
    feed = Feed(Rows(rows), Landing(facts.owner, Pool()))
    batches = ReadAhead(feed, lambda steps, _: steps[0].piece.parts[0][:][:, 0], 2, facts, waits=waits)
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
