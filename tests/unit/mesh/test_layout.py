"""Over which axes of a mesh the dims of variables are divided."""

import math

import keras
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

import phalanx
from phalanx._src.mesh.layout import FullySharded, layout_of
from phalanx._src.mesh.topology import Topology
from phalanx.errors import InvalidArgumentError, SlipWarning

SIZES = {"replica": 2, "model": 2, "expert": 3}


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((4, 6), P("replica")),
        ((3, 6), P(None, "replica")),
        ((3, 5), P()),
        ((2, 2), P()),
        ((), P()),
        ((0, 8), P()),
        ((8,), P("replica")),
    ],
)
def test_first_dim_that_can_be_divided(shape, spec):
    """Of variables with eight elements or more."""
    assert phalanx.fully_sharded(min_size=8).spec("v", shape, SIZES) == spec


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(1, 8), st.integers(1, 50))
def test_fully_sharded_is_small(shape, count, min_size):
    """A variable is whole only where it is small, or cannot be divided."""
    spec = FullySharded("model", min_size).spec("v", tuple(shape), {"model": count})
    dims = [i for i, axis in enumerate(spec) if axis == "model"]
    if dims:
        assert len(dims) == 1
        assert shape[dims[0]] % count == 0
    else:
        assert count == 1 or math.prod(shape) < min_size or not any(n and n % count == 0 for n in shape)


RULES = {
    ".*dense.*kernel": (None, "model"),
    "exact.path": ("replica", None, None),
    "experts/.*": (("model", "expert"), "replica"),
    "whole/.*": (),
}


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("net/dense_1/kernel", (3, 8), P(None, "model")),
        ("dense/bias", (8,), P()),
        ("exact.path", (4, 1, 1), P("replica")),
        ("exact/path", (4, 1, 1), P("replica")),
        ("my/exact/path", (4, 1, 1), P()),
        ("experts/kernel", (6, 2), P(("model", "expert"), "replica")),
        ("whole/x", (8, 8), P()),
    ],
)
def test_rules_match_whole_paths(path, shape, spec):
    """As in Keras's LayoutMap: an exact path first, then patterns."""
    assert layout_of(RULES).spec(path, shape, SIZES) == spec


def test_layout_map_of_keras():
    """Its own mesh has no part in it; its rules are those of a dict."""
    mesh = keras.distribution.DeviceMesh((2, 2), ("batch", "model"), [f"cpu:{i}" for i in range(4)])
    rules = keras.distribution.LayoutMap(mesh)
    rules[".*kernel"] = (None, "model")
    rules["bias"] = keras.distribution.TensorLayout(["model"])
    layout = layout_of(rules)
    assert layout.axes == {"model"}
    assert layout.spec("dense/kernel", (3, 4), SIZES) == P(None, "model")
    assert layout.spec("bias", (4,), SIZES) == P("model")


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (phalanx.fully_sharded, r"fully_sharded\(\), or .*\nHINT: layout=phalanx.fully_sharded\(\)$"),
        (
            5,
            r'layout=5: must be a keras.distribution.LayoutMap, a dict, fully_sharded\(\), or "auto".\nHINT: layout=\{',
        ),
        ("fsdp", r"layout='fsdp': must be .*\nHINT: layout=phalanx.fully_sharded\(\)"),
        ({"(": ("model",)}, r"the pattern '\(' of a layout: is not a regular expression: .*\nHINT"),
        ({"a": "model"}, r"the rule 'a': 'model': must have one axis or None per dim"),
        ({"a": (1,)}, r"the rule 'a': \(1,\): must have one axis"),
        ({"a": ("model", "model")}, r"must not repeat an axis.\nHINT"),
    ],
)
def test_what_is_no_layout(layout, message):
    with pytest.raises(InvalidArgumentError, match=message):
        layout_of(layout)


@pytest.mark.parametrize(
    ("rules", "shape", "message"),
    [
        (
            {".*kernel": ("model",)},
            (5, 8),
            r"'dense/kernel' \(5, 8\) .*: the 2 devices of model do not divide dim 0, which has size 5.\nHINT: None",
        ),
        ({".*kernel": (("model", "expert"),)}, (4,), r"6 devices of model x expert do not divide dim 0"),
        (
            {".*kernel": (None, None, "model")},
            (4, 4),
            r"the rule has 3 dims, but the variable has 2.\nHINT: .* each of the 2 dims",
        ),
        ({".*": (), ".*kernel": ()}, (4,), r"'dense/kernel' matches several patterns: \['.\*', '.\*kernel'\].\nHINT"),
    ],
)
def test_rule_that_does_not_fit(rules, shape, message):
    with pytest.raises(InvalidArgumentError, match=message):
        layout_of(rules).spec("dense/kernel", shape, SIZES)


def test_misspelled_axis_is_corrected_in_hint():
    with pytest.raises(InvalidArgumentError, match=r'no axis \'models\'; .*\nHINT: "model"$'):
        layout_of({".*": ("models",)}).require_axes({"replica": 2, "model": 2})


def test_rule_without_a_variable():
    """The nearest path is named, in a rule that can be copied. Rules that are all used, or none, raise nothing."""
    layout = layout_of({".*dens_.*kernnel": (None, "model"), ".*bias": ()})
    for path in ("net/dense_1/kernel", "net/dense_1/bias", "net/norm/gamma"):
        layout.spec(path, (4, 4), SIZES)
    message = r"""the rule '.\*dens_.\*kernnel' .*nearest path is 'net/dense_1/kernel'.\nHINT: layout={".\*/dense_1/kernel": \(None, 'model'\)}"""
    with pytest.raises(InvalidArgumentError, match=message):
        layout.require_used()
    layout = layout_of({"v": ("model",)})
    layout.spec("v", (4,), SIZES)
    layout.require_used()
    phalanx.fully_sharded().require_used()


@pytest.mark.parametrize(
    ("path", "shape", "spec"),
    [
        ("net/expand/kernel", (64, 256), P("replica", "model")),
        ("net/contract/kernel", (256, 64), P("model", "replica")),
        ("net/square/kernel", (64, 64), P("replica", "model")),
        ("net/attention/query/kernel", (64, 2, 32), P("replica", "model")),
        ("net/mha_1/key/kernel", (64, 2, 32), P("replica", "model")),
        ("net/attention/attention_output/kernel", (2, 32, 64), P("model", None, "replica")),
        ("net/convolution/kernel", (4, 64, 64), P(None, "replica", "model")),
        ("net/odd/kernel", (63, 66), P(None, "model")),
        ("net/prime/kernel", (67, 67), P()),
        ("net/norm/gamma", (64,), P()),
        ("net/table/embeddings", (5000,), P("model")),
        ("net/empty", (0, 8), P()),
    ],
)
def test_auto_layout_shards_by_shape(path, shape, spec):
    """Over both axes, if two dims can be divided. The axis of the model gets what layers in a row share."""
    assert layout_of("auto").spec(path, shape, {"replica": 2, "model": 2}) == spec


def test_auto_layout_without_a_model_axis():
    assert layout_of("auto").spec("v", (64, 256), {"replica": 4}) == P(None, "replica")
    assert layout_of("auto").spec("v", (64, 256), {"replica": 1, "model": 2}) == P(None, "model")


def test_auto_layout_as_rules():
    """Its rules shard each variable alike: layers in a row have one, unless one of them differs."""
    sizes = {"replica": 2, "model": 2}
    shapes = {
        **{f"net/dense{end}/kernel": (64, 256) for end in ("", "_1", "_12")},
        **{f"net/dense{end}/bias": (256,) for end in ("", "_1", "_12")},
        "net/head_1/kernel": (64, 256),
        "net/head_2/kernel": (256, 64),
        "net/a_1/x": (64, 64),
        "net/a_1_2/x": (64, 64),
        "net/v.1": (64, 64),
        "net/v11": (4,),
    }
    layout = layout_of("auto")
    specs = {path: layout.spec(path, shape, sizes) for path, shape in shapes.items()}
    rules = layout.rules()
    assert rules[r"net/dense(_\d+)?/kernel"] == rules["net/head_1/kernel"] == rules["net/a_1/x"] == ("replica", "model")
    assert {path: layout_of(rules).spec(path, shape, sizes) for path, shape in shapes.items()} == specs
    assert [layout.news(), layout.news()] == [f"layout='auto' shards 8 variables, as layout={rules} does", ""]


@pytest.mark.parametrize("min_size", [0, -1, 1.5, True])
def test_min_size_must_be_positive(min_size):
    with pytest.raises(InvalidArgumentError, match=r"min_size=.*: must be (a positive|an) integer.\nHINT"):
        phalanx.fully_sharded(min_size=min_size)


@pytest.mark.parametrize(
    "layout", [phalanx.fully_sharded("expert_axis"), {".*": ("expert_axis",)}], ids=["sharded", "rules"]
)
def test_axis_of_another_mesh(layout):
    """The HINT is an argument of the strategy that the user has, which may be one of several processes."""
    message = (
        r"no axis 'expert_axis'; its axes are 'replica' of 2, 'model' of 2.\nHINT: model_axis=\(\"expert_axis\", 2\)$"
    )
    with pytest.raises(InvalidArgumentError, match=message):
        phalanx.MirroredStrategy([f"cpu:{i}" for i in range(4)], model_axis=("model", 2), layout=layout)


@pytest.mark.parametrize(
    ("layout", "shapes", "why"),
    [
        (
            phalanx.fully_sharded(),
            [(64, 16), (16,), (9,)],
            "layout=.* shards 0 of 3 variables, .*: 3 with fewer than 4096 elements.\nHINT: layout=phalanx.fully_sharded\\(min_size=1024\\)$",
        ),
        (
            phalanx.fully_sharded("model", min_size=100),
            [(9, 3), (8, 4), (15, 15)],
            "2 with fewer than 100 elements and 1 without a dim whose size is a multiple of 2."
            '\nHINT: layout=phalanx.fully_sharded\\("model", min_size=32\\)$',
        ),
        (
            phalanx.fully_sharded(min_size=8),
            [(33, 33)],
            ": 1 without a dim whose size is a multiple of 2.\nHINT: dims whose sizes are multiples of 2$",
        ),
        (
            "auto",
            [(4, 4)],
            "layout='auto' shards 0 of 1 variables, .*: 1 with fewer than 4096 elements.\nHINT: layout=",
        ),
    ],
)
def test_layout_that_shards_nothing_warns_in_training(layout, shapes, why):
    """Once, at the first step that trains the variables."""
    axis = {"model_axis": ("model", 2)} if getattr(layout, "axis", "") == "model" else {}
    strategy = phalanx.MirroredStrategy(4 if axis else 2, layout=layout, **axis)
    with pytest.warns(SlipWarning, match=why) as warned:
        _train(strategy, shapes)
    assert len(warned) == 1


@pytest.mark.parametrize("shapes", [[(64, 64), (3,)], [(3,), (64, 64)]], ids=["trained", "frozen"])
def test_layout_that_shards_one_variable_says_nothing(shapes):
    """The sharded one may be frozen, as under LoRA: the warning is about models that are whole on every device."""
    _train(phalanx.MirroredStrategy(2, layout=phalanx.fully_sharded()), shapes, trained=1)


def test_layout_on_one_replica_says_nothing():
    """There is nothing to shard over. Nor does a rule that shards a variable of another model."""
    _train(phalanx.MirroredStrategy(1, layout=phalanx.fully_sharded()), [(3,)])
    assert layout_of({"other": ("replica",)}).why_whole([(3,)], SIZES) is None


def test_other_workers_than_the_chief_say_nothing(monkeypatch):
    monkeypatch.setattr(Topology, "is_chief", False)
    _train(phalanx.MirroredStrategy(2, layout=phalanx.fully_sharded()), [(3,)])


def _train(strategy, shapes, trained=None):
    """Trains the first variables of a step that reads all."""
    with strategy.scope():
        variables = [keras.Variable(keras.ops.ones(shape)) for shape in shapes]
        optimizer = keras.optimizers.SGD(0.1)

    def step():
        sizes = [keras.ops.sum(v) for v in variables]
        optimizer.apply([keras.ops.ones(v.shape) * sizes[-1] for v in variables[:trained]], variables[:trained])

    for _ in range(2):
        strategy.run(step)
