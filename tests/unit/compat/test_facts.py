"""What is known about variables, without attributes on them."""

import copy
import weakref

import keras

from phalanx._src.compat import facts


def test_facts_end_with_their_variable(collect):
    """Neither a variable nor the one that is read instead of it is kept alive by what is known about them."""
    variable, outer = keras.Variable(1.0), keras.Variable(2.0)
    facts.note_facts(variable).outer = outer
    assert facts.facts_of(variable).outer is outer
    before, references = len(facts._facts), [weakref.ref(variable), weakref.ref(outer)]
    del variable, outer
    collect()
    assert [reference() for reference in references] == [None, None]
    assert len(facts._facts) < before


def test_copy_has_no_facts():
    """A copy of a variable is another variable, which no scope has made."""
    variable = keras.Variable(1.0)
    facts.note_facts(variable).maker = 3
    assert facts.facts_of(copy.copy(variable)).maker is None
    assert facts.facts_of(variable).maker == 3


def test_unknown_variable_stays_unknown():
    """Reading facts stores nothing."""
    variable, count = keras.Variable(1.0), len(facts._facts)
    assert not facts.facts_of(variable).is_of_metric
    assert len(facts._facts) == count
