"""From which copy a group continues, and who gets which pieces: without processes, which the cluster tests have."""

import tracemalloc

import keras
import numpy as np
import pytest

import phalanx
from phalanx._src.checkpoint.shards import Division, box_of, whole_box
from phalanx._src.elastic.copies import EVERYONE, Copier, Copy, Holding, Kind, kinds_here
from phalanx._src.elastic.resharding import (
    Offer,
    choose,
    divisions_of_notes,
    move_pieces,
    notes_of_divisions,
    offer_of,
    places_here,
    values_of,
)
from phalanx._src.programs.identity import IdentityMap
from phalanx.errors import StateLostError

OLD, NEW = (4, 0, 0, ""), (8, 0, 0, "")


def offers_of(*held, key=NEW, owners=(0, 1, 2)):
    """The offers of processes that have the pieces of these owners."""
    return [[Offer(key, frozenset(owners), frozenset(each))] for each in held]


def test_survivors_of_one_process_have_all():
    """Whichever it is: the process after it has a copy. Each piece has one sender, and so has the rest."""
    for lost in range(3):
        held = [{rank, (rank - 1) % 3} for rank in range(3) if rank != lost]
        choice = choose(offers_of(*held))
        assert (choice.key, choice.source) == (NEW, 0)
        for owner in range(3):
            ranks = [rank for rank, each in enumerate(held) if owner in each]
            assert choice.senders.get(owner) == (None if len(ranks) == 2 else ranks[0])


def test_two_neighbours_are_too_many():
    """Unless they are not next to each other, in a larger group, or an older copy is complete."""
    assert choose(offers_of({0, 2})) is None
    assert choose(offers_of({1, 0}, {3, 2}, owners=range(4))).senders == {0: 0, 1: 0, 2: 1, 3: 1}
    assert choose([[], *offers_of({0, 2})]) is None
    assert choose([]) is None
    first, second = offers_of({0, 2}, {1, 0}, key=OLD)
    assert choose([[*first, *offers_of({0, 2})[0]], second]).key == OLD


def test_newest_copy_is_chosen():
    """Although others have only an older one, and a process that has just started has none."""
    whole = [[Offer(key, frozenset({0}), frozenset({0}))] for key in (OLD, NEW, NEW)]
    nothing = [Offer((-1, 0, 0, ""), frozenset(), frozenset())]
    choice = choose([*whole, nothing])
    assert (choice.key, choice.source, choice.senders) == (NEW, 1, {0: 1})
    assert choose(whole[1:]).senders == {}
    assert choose([nothing, nothing]) is None


def test_whole_variables_come_from_the_first_process():
    """Although it does not have the pieces of the first owner."""
    choice = choose(offers_of({2, 1, EVERYONE}, {0, 2, EVERYONE}, owners=(0, 1, 2, EVERYONE)))
    assert (choice.source, choice.senders) == (0, {0: 1, 1: 0})
    nothing = [Offer((-1, 0, 0, ""), frozenset(), frozenset())]
    choice = choose([nothing, *offers_of({2, 1, EVERYONE}, {0, 2, EVERYONE}, owners=(0, 1, 2, EVERYONE))])
    assert (choice.source, choice.senders) == (1, {EVERYONE: 1, 0: 2, 1: 1, 2: 1})


def test_offer_survives_its_notes():
    """What other processes read is what this one has written."""
    (offer,) = offers_of({0, 2})[0]
    assert Offer.of_notes(offer.notes()) == offer


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1), (4, 3)])
def test_pieces_become_those_of_another_group(before, after):
    """Along the same dim and along another one. No process has a whole variable at any time, unless it is alone."""
    rng = np.random.default_rng(0)
    size = (12, 256 * before * after)
    arrays = {Kind(name, 0, size, "float32"): rng.normal(size=size).astype("float32") for name in "ab"}
    scalar = Kind("iterations", 0, (), "int32")
    arrays[scalar] = np.int32(7)
    dims = {"a": (1, 1), "b": (1, 0), "iterations": (None, None)}

    def boxes(kind, count, turn):
        dim = dims[kind.path][turn]
        whole = whole_box(kind.shape)
        if dim is None or count == 1:
            return [whole] * count
        step = kind.shape[dim] // count
        return [
            tuple((r * step, (r + 1) * step) if i == dim else each for i, each in enumerate(whole))
            for r in range(count)
        ]

    divisions = {
        kind: Holding.whole(arrays[kind]).division
        if len(set(boxes(kind, before, 0))) == 1
        else Division(kind.shape, kind.dtype, tuple(enumerate(boxes(kind, before, 0))))
        for kind in arrays
    }
    pieces = {
        kind: {box: arrays[kind][tuple(slice(*pair) for pair in box)] for _, box in division.pieces}
        for kind, division in divisions.items()
    }

    def broadcast(values, sender):
        return [np.array(value) for value in values]

    for rank in range(after):
        places = {kind: {boxes(kind, after, 1)[rank]} for kind in arrays}
        tracemalloc.start()
        parts = move_pieces(pieces, divisions, places, dict.fromkeys([EVERYONE, *range(before)], 0), broadcast)
        most = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        total = sum(array.nbytes for array in arrays.values())
        assert most < total * (1 / before + 1 / after) + 100_000
        for kind, array in arrays.items():
            (place,) = places[kind]
            division = Division(kind.shape, kind.dtype, tuple((0, box) for box in parts[kind]))
            got = division.assemble(place, lambda _, box, kind=kind: parts[kind][box])
            np.testing.assert_array_equal(got, array[tuple(slice(*pair) for pair in place)])
            assert after == 1 or not kind.shape or all(part.nbytes < array.nbytes for part in parts[kind].values())


def test_pieces_that_all_have_do_not_travel():
    kind = Kind("v", 0, (2,), "float32")
    value = np.float32([1, 2])
    parts = move_pieces(
        {kind: {((0, 2),): value}}, {kind: Holding.whole(value).division}, {kind: {((0, 2),)}}, {}, lambda *_: None
    )
    assert parts[kind][((0, 2),)] is value


@pytest.fixture
def variables():
    """Two variables with one path, and another."""
    made = [keras.Variable([4.0], name="v"), keras.Variable([5.0], name="v"), keras.Variable([1.0], name="alone")]
    return [(v, kind) for v, kind in kinds_here() if any(v is each for each in made)]


def test_values_are_taken_over_by_kind(variables):
    """In any order. A variable that the other process does not have keeps its value, and one that nobody has is named."""
    copy = Copier().copy(0, [0, 0], {}, phalanx.OneDeviceStrategy("cpu:0").topology)
    (first, kind), (second, other), (alone, last) = variables
    places = places_here(phalanx.OneDeviceStrategy("cpu:0").topology, variables)
    box = ((0, 1),)
    parts = {other: {box: np.float32([7])}, kind: {box: np.float32([6])}}
    values = values_of(variables, parts, places, copy)
    assert [v is each for (v, _), each in zip(values, (first, second, alone), strict=True)] == [True] * 3
    assert [float(value[0]) for _, value in values] == [6, 7, 1]
    with pytest.raises(StateLostError, match=f"the values of {alone.path} were made in the step that failed"):
        values_of(variables, parts, places, Copy(0, [0, 0], {}, IdentityMap()))
    assert last.path == alone.path


def test_value_of_a_shard(variables):
    """A variable that the new group shards gets a function that returns its parts."""
    (v, kind), *_ = variables
    place = ((0, 2),)
    kind = kind._replace(shape=(4,))
    parts = {kind: {((0, 1),): np.float32([1]), ((1, 2),): np.float32([2])}}
    ((variable, part_of),) = values_of([(v, kind)], parts, {kind: {place}}, Copy(0, [0, 0], {}, IdentityMap()))
    assert variable is v
    assert box_of((slice(0, 2),), (4,)) == place
    np.testing.assert_array_equal(part_of((slice(0, 2),)), [1, 2])


def test_offer_of_a_copy():
    """Its key differs from that of a copy with other pieces, and not from one with other whole variables."""
    v, w = keras.Variable(np.zeros(4, "float32")), keras.Variable(1.0)
    halves = Division((4,), "float32", ((0, ((0, 2),)), (1, ((2, 4),))))

    def offer(pieces, division=halves, more=False):
        values = IdentityMap()
        values[v] = Holding(division, dict.fromkeys(pieces, np.zeros(2, "float32")))
        if more:
            values[w] = Holding.whole(np.float32(1))
        return offer_of(Copy(3, [1, 0], {}, values))

    first, both = offer([((0, 2),)]), offer([((0, 2),), ((2, 4),)], more=True)
    assert (first.owners, first.held) == ({0, 1}, {0})
    assert (both.owners, both.held) == ({0, 1, EVERYONE}, {0, 1, EVERYONE})
    assert first.key == both.key
    assert first.key[:3] == (3, 1, 0)
    whole = offer([((0, 4),)], Holding.whole(np.zeros(4, "float32")).division)
    assert (whole.owners, whole.held) == ({EVERYONE}, {EVERYONE})
    assert whole.key != first.key
    values = IdentityMap()
    values[v] = Holding(halves, {})
    copy = Copy(3, [1, 0], {}, values)
    assert list(divisions_of_notes(notes_of_divisions(copy)).values()) == [halves]
