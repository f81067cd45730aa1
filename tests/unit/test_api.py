"""What `phalanx` exports is sorted, complete and real."""

import sys

import pytest

import phalanx

_MADE_BY_OTHERS = [
    "DistributedDataset",
    "DistributedIterator",
    "DistributedValues",
    "Estimate",
    "Estimates",
    "HierarchicalCopyAllReduce",
    "NcclAllReduce",
    "Strategy",
    "StrategyExtended",
]


def test_all_is_sorted():
    """`__all__` is in the order that ruff and a reader expect."""
    constants = [n for n in phalanx.__all__ if n.isupper()]
    classes = [n for n in phalanx.__all__ if n[0].isupper() and not n.isupper()]
    assert phalanx.__all__ == [
        *sorted(constants),
        *sorted(classes),
        *sorted({*phalanx.__all__} - {*constants, *classes}),
    ]


def test_all_is_what_is_importable():
    """Every name in `__all__` exists, and every public name that is no module of ours is in it."""
    modules = {name.split(".")[1] for name in sys.modules if name.startswith("phalanx.")}
    public = {name for name in vars(phalanx.api) if not name.startswith("_")}
    assert {*phalanx.__all__} <= public
    assert public - modules <= {*phalanx.__all__}


@pytest.mark.parametrize("name", [n for n in phalanx.__all__ if callable(getattr(phalanx, n))])
def test_every_public_name_is_documented(name):
    """Every exported class and function has a docstring with an example, or is a type that others return."""
    doc = getattr(phalanx, name).__doc__
    assert doc
    assert ">>>" in doc or name in {*_MADE_BY_OTHERS}


def test_distribute_is_the_package_itself():
    """Who types the module of tf.distribute is told where its names are."""
    with pytest.raises(AttributeError, match=r"'distribute'\nHINT: phalanx itself .*phalanx.MirroredStrategy"):
        _ = phalanx.distribute
