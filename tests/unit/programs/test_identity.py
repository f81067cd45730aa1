"""Maps by identity."""

import keras

from phalanx._src.programs.identity import IdentityMap


def test_identity_map_forgets_the_dead():
    """Items go with their variable; variables that are equal by value are different keys."""
    seen, v, w = IdentityMap(), keras.Variable(1.0), keras.Variable(1.0)
    seen[v] = "v"
    seen[v] = "again"
    seen[w] = "w"
    assert (seen.get(v), seen.get(w)) == ("again", "w")
    seen.discard(w)
    assert seen.get(w) is None
    del v
    assert seen._items == {}
