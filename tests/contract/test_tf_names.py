"""Every public name of tf.distribute exists here, or the migration page says what to use instead."""

import enum
import pathlib

import keras
import pytest

import phalanx

PAGE = (pathlib.Path(__file__).parents[2] / "docs" / "from_tf_distribute.md").read_text()
LINES = (pathlib.Path(__file__).parent / "tf_names.txt").read_text().splitlines()
NAMES = dict(line.partition(": ")[::2] for line in LINES)
PLACES = {"tf.distribute.": "", "tf.": ""}


def found(path):
    """Returns what stands in the place of a name of TensorFlow; None if nothing does."""
    prefix = next(p for p in PLACES if path.startswith(p))
    value = phalanx
    for part in path.removeprefix(prefix).split("."):
        value = getattr(value, part, None)
    return value


def is_listed(name):
    """Whether the page names it, in the way that code is written."""
    return any(f"{before}{name}{after}" in PAGE for before in "`." for after in "`(:")


@pytest.mark.parametrize("path", NAMES)
def test_name_exists_or_is_listed(path):
    """And so does each of its public methods, attributes and members."""
    here = found(path)
    name = path.rpartition(".")[2]
    if here is None:
        assert is_listed(name), f"{path} neither exists nor is on the page"
        assert all(is_listed(member) for member in NAMES[path].split())
        return
    # All variables are of one class, which is Keras's.
    owner = keras.Variable if here is phalanx.Variable else here
    missing = [m for m in NAMES[path].split() if not has(owner, m) and not is_listed(m)]
    assert missing == []


def has(owner, member):
    is_field = member in getattr(owner, "__dataclass_fields__", {})
    is_member = isinstance(owner, enum.EnumType) and member in owner.__members__
    return is_field or is_member or hasattr(owner, member)


def test_page_is_asked():
    """A name that nobody knows is found nowhere."""
    assert not is_listed("no_such_name")
    assert found("tf.distribute.NoSuchName") is None
