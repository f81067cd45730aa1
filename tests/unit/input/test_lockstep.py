"""Workers that read different rows: all take the same steps, whoever runs out first."""

import collections

import numpy as np
import pytest
from simulation import prefetching, rows, together

from phalanx._src.input.feed import Feed, Form
from phalanx._src.input.lockstep import AHEAD, Lockstep, require_same_data
from phalanx._src.input.shard import InputWorker
from phalanx._src.input.sources.base import AbstractReader, Facts, Piece
from phalanx.errors import InputError

REPLICAS = 2
Row = collections.namedtuple("Row", ["x"])


class Counted(AbstractReader):
    """Pieces of these numbers of rows, each changed by a function; then the end, or a failure."""

    def __init__(self, sizes, failure=None, change=lambda piece: piece):
        self.sizes, self.failure, self.change, self.position = sizes, failure, change, 0

    def read(self):
        if self.position == len(self.sizes):
            if self.failure is not None:
                raise self.failure
            return None
        n = self.sizes[self.position]
        self.position += 1
        return self.change(Piece([np.arange(n)], [-(-n // 2), n // 2], None))

    def get_state(self):
        return {"batches": self.position}


def place(steps, room):
    return [(sum(s.piece.counts), s.rows, max(s.counts)) for s in steps]


def lockstep(reader, index, count, exchange, ahead=True):
    return Lockstep(Feed(reader), place, InputWorker(index, count, REPLICAS), exchange, ahead=ahead)


def drained(batches, form=None):
    got = list(iter(lambda: batches.get(form or Form()), None))
    batches.stop()
    return got


def run(all_sizes, form=None, ahead=True):

    def work(index, exchange):
        return drained(lockstep(Counted(all_sizes[index]), index, len(all_sizes), exchange, ahead), form)

    return together(len(all_sizes), work)


def test_a_stop_loses_nothing():
    """It ends the thread. What was read ahead comes when the next batch is asked for."""
    every = {}

    def begin(index, exchange):
        every[index] = lockstep(Counted([4] * (3 * AHEAD)), index, 2, exchange)
        first = [every[index].get(Form()).value for _ in range(3)]
        every[index].stop()
        every[index].stop()
        return first

    assert together(2, begin) == [[[(4, 8, 2)]] * 3] * 2
    assert prefetching() == []
    rest = together(2, lambda index, _: [batch.value for batch in drained(every[index])])
    assert rest == [[[(4, 8, 2)]] * (3 * AHEAD - 3)] * 2
    assert prefetching() == []


@pytest.mark.parametrize("ahead", [True, False])
def test_no_more_is_read_than_will_be_taken(ahead):
    """Later, others may be taken."""

    def work(index, exchange):
        reader, most = Counted([4] * (3 * AHEAD)), AHEAD + 3
        batches = lockstep(reader, index, 2, exchange, ahead)
        first = [batches.get(Form(), left) for left in range(most, 0, -1)]
        batches.stop()
        return None not in first, reader.position, len(drained(batches))

    assert together(2, work) == [(True, AHEAD + 3, 2 * AHEAD - 3)] * 2


@pytest.mark.parametrize("ahead", [True, False])
@pytest.mark.parametrize(
    "all_sizes",
    [
        ([4, 4, 1], [4]),
        ([], [], [5, 1]),
        ([4] * 20, [4] * 7, [4] * 9),
        ([4] * 8, [2] * 8),
        ([3] * 8, []),
        ([4] * 16, [4] * 17),
        ([], []),
        ([5, 3, 1], [2, 2], [7], [1, 1, 1, 1]),
    ],
    ids=str,
)
def test_all_take_the_same_steps(all_sizes, ahead):
    """As many as the worker with the most data has; each knows how many rows there are in all, and at most.

    The positions are those of the batches that were handed out, not of what was read ahead.
    """
    results = run(all_sizes, ahead=ahead)
    longest = max(map(len, all_sizes))
    sizes = [[*s, *[0] * (longest - len(s))] for s in all_sizes]
    for own, own_sizes, got in zip(all_sizes, sizes, results, strict=True):
        assert len(got) == longest
        states = [{"batches": i + 1} for i in range(len(own))] + [None] * (longest - len(own))
        assert [batch.state for batch in got] == states
        for step, batch in enumerate(got):
            everyone = [s[step] for s in sizes]
            assert batch.value == [(own_sizes[step], sum(everyone), -(-max(everyone) // 2))]


def test_exhausted_worker_gets_empty_batches():
    """It pads with a row of its own, or with one of another worker if it never had any, so it knows the shape."""
    never, short, _ = ([b.steps[0].piece for b in batches] for batches in run(([], [2], [4, 4, 4])))
    assert [rows(piece) for piece in short] == [[0, 1], [], []]
    assert [rows(piece) for piece in never] == [[], [], []]
    for piece in (*short[1:], *never):
        assert (piece.counts, piece.parts[0].tolist(), piece.parts[0].dtype) == ([0, 0], [0], int)


@pytest.mark.parametrize(("sizes", "step", "found"), [([4, 4, 3], 2, "3 rows"), ([4] * 9, 9, "0 rows")])
def test_batches_that_all_divide(sizes, step, found):
    """If each worker takes its part of the same batches, the first one that differs is an error on all."""

    def work(index, exchange):
        reader = Counted([[4] * 10, sizes][index], change=lambda piece: piece._replace(rows=sum(piece.counts)))
        batches = lockstep(reader, index, 2, exchange)
        assert all(batches.get(Form()) for _ in range(step))
        message = f"the next batch: it has 4 rows on worker 0, {found} on worker 1, but each"
        with pytest.raises(InputError, match=message):
            batches.get(Form())
        batches.stop()
        return True

    assert together(2, work) == [True, True]


@pytest.mark.parametrize(
    ("other", "found"),
    [
        (Facts(batch_size=4, num_batches=3, num_records=11), "11 rows, 3 batches, 4 rows in a batch"),
        (Facts(batch_size=4, num_batches=3, num_records=2**33), f"{2**33} rows, 3 batches, 4 rows in a batch"),
        (Facts(), "an unknown number of rows"),
    ],
)
def test_data_that_all_divide(other, found):
    """What is known of them must be the same, before they are read."""
    facts = Facts(batch_size=4, num_batches=3, num_records=10)
    together(2, lambda _, exchange: require_same_data(other, exchange))

    def work(index, exchange):
        with pytest.raises(InputError) as e:
            require_same_data([facts, other][index], exchange)
        return str(e.value)

    text = f"worker 0 has 10 rows, 3 batches, 4 rows in a batch; worker 1 has {found}.\nHINT: the same data and batch_size on all"
    assert all(text in said for said in together(2, work))


@pytest.mark.parametrize("form", [Form(3), Form(3, 3)])
def test_steps_of_one_batch(form):
    """All have equal numbers of rows, on all workers."""
    one, two = run(([4] * 7, [4] * 2), form)
    assert [len(b.steps) for b in one] == [len(b.steps) for b in two] == [2, 3, 2]
    assert [b.value[0] for b in two] == [(4, 8, 2), (0, 4, 2), (0, 4, 2)]
    assert two[2].state is None


@pytest.mark.parametrize("failing", [0, 1, 2])
@pytest.mark.parametrize("after", [0, 3, AHEAD, AHEAD + 3])
def test_failure_of_one_is_raised_on_all(failing, after):
    """On the others as an error that names the worker; none waits for ever."""

    def work(index, exchange):
        reader = Counted([4] * after, OSError("disk gone")) if index == failing else Counted([4] * 30)
        batches, got = lockstep(reader, index, 3, exchange), 0
        try:
            while batches.get(Form()) is not None:
                got += 1
        except Exception as e:
            return got, e
        finally:
            batches.stop()

    results = together(3, work)
    assert {got for got, _ in results} == {after // AHEAD * AHEAD}
    for index, (_, error) in enumerate(results):
        assert isinstance(error, OSError if index == failing else InputError)
        assert index == failing or f"the data of worker {failing} failed" in str(error)


def test_named_tuples_as_padding_are_refused_by_all():
    """A worker without rows needs a row of another one; that one stops too, instead of waiting for it in a step."""
    named = lambda piece: piece._replace(parts=[Row(*piece.parts)])  # noqa: E731

    def work(index, exchange):
        try:
            drained(lockstep(Counted([4] * index, change=named), index, 2, exchange))
        except InputError as e:
            return str(e)

    first, second = together(2, work)
    assert first == second
    assert "a worker without rows, while the batches of other workers are PyTreeDef(CustomNode(namedtuple[Row]" in first


def test_batch_put_back_comes_again():
    """The batch that was handed out last comes again, in whatever form is asked for."""

    def work(index, exchange):
        batches = lockstep(Counted([4] * (5 - index)), index, 2, exchange)
        first = batches.get(Form(2))
        batches.put_back(first)
        return first.value, [b.value for b in drained(batches)]

    for index, (first, again) in enumerate(together(2, work)):
        assert [[x] for x in first] == again[:2]
        assert len(again) == 5
        assert again[4] == [(4 if index == 0 else 0, 4, 2)]


def test_one_exchange_for_several_steps():
    """No extra collective per step, and two once to share a row of padding."""
    calls = [0, 0]

    def work(index, exchange):
        def counted(values):
            calls[index] += 1
            return exchange(values)

        return len(drained(lockstep(Counted([4] * 20), index, 2, counted)))

    assert together(2, work) == [20, 20]
    assert calls == [20 // AHEAD + 1 + 2] * 2
