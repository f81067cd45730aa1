"""Calls with random arguments compute after the migration what they compute in TensorFlow, or the report names them.

Each function draws calls of a family: shapes that broadcast, empty and single ones, dtypes, axes from both ends, keepdims, edge values.
"""

import math

import numpy as np
import pytest
from tests.migrate.record import plain

from phalanx._src.tools.migrate.program import migrate
from phalanx._src.tools.migrate.table import the_table

tf = pytest.importorskip("tensorflow")

DRAWS = 60

pytestmark = pytest.mark.filterwarnings("ignore")  # Of 64 bits, and of a softmax over one number.
EDGES = [0.0, -0.0, 1.0, -1.0, 0.5, -0.5, 1.5, 2.5, -2.5, 3.0, 1e-6, 1e6]


class Draw:
    """Random parts of a call. Arrays get names, which the call uses.

    Args:
      rng: the generator.
    """

    def __init__(self, rng):
        self.rng, self.arrays = rng, {}

    def one(self, *options):
        """Returns one of the options."""
        return options[int(self.rng.integers(len(options)))]

    def shape(self, low=0, high=3, *, is_empty=True):
        """Returns a shape with some number of axes. A size is rarely 0."""
        sizes = [1, 2, 3, 4] + ([0] if is_empty and self.rng.random() < 0.1 else [])
        return tuple(int(self.rng.choice(sizes)) for _ in range(int(self.rng.integers(low, high + 1))))

    def array(self, shape, dtype="float32", *, has_edges=True):
        """Returns the name of an array."""
        if dtype == "bool":
            values = self.rng.random(shape) > 0.5
        elif dtype.startswith("int"):
            values = self.rng.integers(-6, 7, shape)
        else:
            values = np.asarray(self.rng.normal(0, 2, shape))
            if has_edges:
                at = self.rng.random(shape) < 0.3
                values = np.where(at, self.rng.choice(EDGES, shape), values)
        return self.named(np.asarray(values).astype(dtype))

    def named(self, array):
        """Returns a name for an array."""
        name = f"v{len(self.arrays)}"
        self.arrays[name] = array
        return name

    def axis(self, rank):
        """Returns an axis, from one end or the other."""
        return int(self.rng.integers(-rank, rank))

    def axes(self, rank):
        """Returns no axis, one, or several."""
        kind = self.rng.random()
        if kind < 0.2 or not rank:
            return None
        if kind < 0.6:
            return self.axis(rank)
        chosen = sorted(int(i) for i in self.rng.choice(rank, int(self.rng.integers(1, rank + 1)), replace=False))
        return [i - rank if self.rng.random() < 0.5 else i for i in chosen]


UNARY = [
    "abs", "acos", "acosh", "asin", "asinh", "atan", "atanh", "ceil", "cos", "cosh", "digamma", "erf", "erfc", "erfinv", "exp", "expm1", "floor",
    "is_finite", "is_inf", "is_nan", "lgamma", "log", "log1p", "log_sigmoid", "negative", "reciprocal", "reciprocal_no_nan", "rint", "round", "rsqrt",
    "sigmoid", "sign", "sin", "sinh", "softplus", "softsign", "sqrt", "square", "tan", "tanh", "bessel_i0", "bessel_i1", "bessel_i0e", "bessel_i1e",
    "ndtri", "zero_fraction", "log_softmax", "softmax", "conj", "real", "imag", "angle", "cumulative_logsumexp",
]  # fmt: skip
BINARY = [
    "add", "subtract", "multiply", "divide", "divide_no_nan", "floordiv", "floormod", "mod", "truediv", "pow", "maximum", "minimum", "atan2",
    "squared_difference", "multiply_no_nan", "xlogy", "xlog1py", "xdivy", "equal", "not_equal", "less", "less_equal", "greater", "greater_equal",
    "nextafter", "truncatediv", "truncatemod", "floor_div",
]  # fmt: skip
REDUCTIONS = [
    "reduce_sum", "reduce_mean", "reduce_max", "reduce_min", "reduce_prod", "reduce_std", "reduce_variance", "reduce_logsumexp",
    "reduce_euclidean_norm", "count_nonzero", "reduce_all", "reduce_any",
]  # fmt: skip


def unary(d):
    name = d.one(*UNARY)
    return f"tf.math.{name}({d.array(d.shape(), d.one('float32', 'float32', 'int32'))})"


def activations(d):
    x = d.array(d.shape(1))
    return d.one(
        f"tf.nn.relu({x})", f"tf.nn.relu6({x})", f"tf.nn.elu({x})", f"tf.nn.selu({x})", f"tf.nn.crelu({x})",
        f"tf.nn.leaky_relu({x}, alpha={d.one(0.1, 0.3)})", f"tf.nn.leaky_relu({x})", f"tf.nn.silu({x})",
        f"tf.nn.swish({x}, beta={d.one(1.0, 0.5)})", f"tf.nn.gelu({x}, approximate={d.one(True, False)})",
        f"tf.nn.gelu({x})", f"tf.nn.softmax({x}, axis={d.axis(d.arrays[x].ndim)})", f"tf.nn.softplus({x})",
        f"tf.nn.log_softmax({x}, {d.axis(d.arrays[x].ndim)})", f"tf.nn.tanh({x})", f"tf.nn.softsign({x})",
        f"tf.nn.l2_normalize({x}, axis={d.axes(d.arrays[x].ndim)})", f"tf.nn.l2_loss({x})",
        f"tf.math.l2_normalize({x}, {d.axis(d.arrays[x].ndim)}, epsilon={d.one(1e-12, 0.1)})",
    )  # fmt: skip


def binary(d):
    shape, dtype = d.shape(), d.one("float32", "float32", "int32")
    other = d.one(shape, shape[1:], tuple(1 for _ in shape), ())
    x, y = d.array(shape, dtype), d.array(other, dtype)
    i, p = (
        d.named(d.rng.integers(1, 4, shape).astype("float32")),
        d.named(d.rng.uniform(0.1, 5, shape).astype("float32")),
    )
    return d.one(*[f"tf.math.{d.one(*BINARY)}({x}, {y})"] * 6, f"tf.math.polygamma({i}, {p})",
                 f"tf.math.zeta({i} + 1, {p})", f"tf.math.igamma({i}, {p})", f"tf.math.igammac({i}, {p})", f"tf.math.lbeta([{i}, {p}])")  # fmt: skip


def logical(d):
    shape = d.shape()
    x, y = d.array(shape, "bool"), d.array(d.one(shape, ()), "bool")
    i, j = d.array(shape, "int32"), d.array(shape, "int32")
    return d.one(
        f"tf.logical_and({x}, {y})", f"tf.logical_or({x}, y={y})", f"tf.math.logical_xor({x}, {y})",
        f"tf.logical_not({x})", f"tf.bitwise.bitwise_and({i}, {j})", f"tf.bitwise.bitwise_xor({i}, {j})",
        f"tf.bitwise.invert({i})", f"tf.where({x}, {i}, {j})", f"tf.where(condition={x}, x={i}, y=0)",
    )  # fmt: skip


def reductions(d):
    name = d.one(*REDUCTIONS)
    shape = d.shape(is_empty=name not in {"reduce_max", "reduce_min"})  # Keras refuses to take the maximum of nothing.
    dtype = "bool" if name in {"reduce_all", "reduce_any"} else d.one("float32", "float32", "int32")
    if name in {"reduce_mean", "reduce_euclidean_norm"}:
        dtype = "float32"  # Those of integers are floats, as the report says.
    x, axis = d.array(shape, dtype), d.axes(len(shape))
    end = d.one("", f", {axis}", f", axis={axis}", f", axis={axis}, keepdims=True", f", {axis}, True")
    return f"tf.math.{name}({x}{end})"


def orders(d):
    shape = d.shape(1)
    x, axis = d.array(shape, d.one("float32", "int32"), has_edges=False), d.axis(len(shape))
    k = int(d.rng.integers(0, shape[-1] + 1))
    return d.one(
        f"tf.argmax({x})", f"tf.argmax({x}, {axis})", f"tf.math.argmin({x}, axis={axis}, output_type=tf.int32)",
        f"tf.sort({x}, axis={axis}, direction={d.one('ASCENDING', 'DESCENDING')!r})", f"tf.sort({x})",
        f"tf.argsort({x}, {axis}, stable=True)", f"tf.argsort({x}, axis={axis}, direction='DESCENDING', stable=True)",
        f"tf.cumsum({x}, {axis})", f"tf.cumsum({x}, axis={axis}, exclusive=True)", f"tf.cumsum({x}, reverse=True)",
        f"tf.math.cumprod({x}, {axis}, {d.one(True, False)}, {d.one(True, False)})", f"tf.math.top_k({x}, {k})[0]",
        f"tf.math.top_k({x}, k={k})[1]", f"tf.math.top_k({x})[0]",
        f"tf.math.cumulative_logsumexp({x}, axis={axis}, exclusive={d.one(True, False)})",
        f"tf.math.in_top_k({d.named(d.rng.integers(0, 3, 4))}, {d.named(d.rng.random((4, 3), dtype='float32'))}, 2)",
        f"tf.unique({d.named(d.rng.integers(0, 4, 7))})[0]", f"tf.searchsorted([1, 3, 5], [0, 3, {k}], side='right')",
        f"tf.searchsorted([1, 3, 5], [0, 3, {k}])", f"tf.math.bincount({d.named(d.rng.integers(0, 5, 9))})",
        f"tf.math.bincount({d.named(d.rng.integers(0, 5, 9))}, minlength={d.one(0, 3, 8)})",
    )  # fmt: skip


def shapes(d):
    shape = d.shape(1)
    rank, x = len(shape), d.array(shape, d.one("float32", "int32", "bool"))
    axis, size = d.axis(rank), math.prod(shape)
    permutation = [int(i) for i in d.rng.permutation(rank)]
    ones = d.array(tuple(1 for _ in range(rank)) + (2,))
    repeats = [int(i) for i in d.rng.integers(0, 3, rank)]
    pads = [[int(i), int(j)] for i, j in d.rng.integers(0, 2, (rank, 2))]
    return d.one(
        f"tf.reshape({x}, [-1])" if size else f"tf.reshape({x}, [0])", f"tf.reshape({x}, ({size}, 1))",
        f"tf.transpose({x})", f"tf.transpose({x}, {permutation})", f"tf.transpose({x}, perm={permutation})",
        f"tf.expand_dims({x}, {d.axis(rank + 1)})", f"tf.expand_dims({x}, axis={d.axis(rank + 1)})",
        f"tf.squeeze({ones})", f"tf.squeeze({ones}, {d.one(0, -2)})", f"tf.squeeze({ones}, axis=[0])",
        f"tf.tile({x}, {repeats})", f"tf.repeat({x}, {d.one(0, 1, 2)}, axis={axis})", f"tf.repeat({x}, repeats=2)",
        f"tf.roll({x}, {d.one(-1, 1, 5)}, {axis})", f"tf.roll({x}, shift=[1, -1], axis=[0, {axis}])",
        f"tf.reverse({x}, [{axis}])", f"tf.pad({x}, {pads})",
        f"tf.pad({x}, paddings={pads}, mode='CONSTANT', constant_values={d.one(0, 1)})",
        f"tf.pad({x}, {pads}, {d.one('REFLECT', 'SYMMETRIC')!r})", f"tf.broadcast_to({x}, {(2, *shape)})",
        f"tf.rank({x})", f"tf.size({x})", f"tf.shape({x})[{axis}]", f"tf.zeros_like({x})", f"tf.ones_like({x})",
        f"tf.identity({x})", f"tf.concat([{x}, {x}], {axis})", f"tf.concat(values=[{x}, {x}], axis={axis})",
        f"tf.stack([{x}, {x}], axis={d.axis(rank + 1)})", f"tf.stack([{x}, {x}])", f"tf.unstack({x}, axis={axis})[-1]",
        f"tf.split({x}, 1, {axis})[0]", f"tf.split({x}, [0, {shape[axis]}], axis={axis})[1]",
        f"tf.cast({x}, tf.{d.one('float32', 'int32', 'bool', 'uint8')})", f"tf.linalg.matrix_transpose({ones})",
        f"tf.cast({x}, dtype={d.one('float32', 'int32')!r})", f"tf.boolean_mask({x}, {x} == {x})",
    )  # fmt: skip


def casts(d):
    x = d.array(d.shape(), "float32")
    small = d.named(np.clip(d.arrays[x], -100, 100))
    positive = d.named(np.abs(d.arrays[small]))
    return d.one(
        f"tf.cast({small}, tf.int32)", f"tf.cast({positive}, tf.uint8)", f"tf.cast({x}, tf.bool)",
        f"tf.cast({small}, tf.float16)", f"tf.cast({x}, tf.float64)", f"tf.cast({small}, 'int64')", f"tf.saturate_cast({small}, tf.uint8)",
        f"tf.dtypes.cast({small}, tf.int8)", f"tf.dtypes.saturate_cast({x}, tf.int16)",
    )  # fmt: skip


def creations(d):
    shape, start, stop, n = list(d.shape()), d.one(0, 1, -2), d.one(0, 3, 5), d.one(1, 2, 4)
    dtype = d.one("tf.float32", "tf.int32", "tf.bool")
    length = d.array(d.shape(0, 2), "int32")
    indices = d.named(d.rng.integers(-1, 4, d.shape(0, 2)).astype("int32"))
    return d.one(
        f"tf.zeros({shape})", f"tf.ones({shape}, {dtype})", f"tf.zeros({shape}, dtype={dtype})",
        f"tf.fill({shape}, {start})", f"tf.range({stop})", f"tf.range({start}, {stop})",
        f"tf.range({stop}, {start}, -1)", f"tf.range({start}, {stop}, {d.one(1, 2)}, dtype=tf.float32)",
        f"tf.range(start={start}, limit={stop}, delta={d.one(0.5, 1)})", f"tf.range({float(stop)})",
        f"tf.linspace({float(start)}, {float(stop)}, {n})", f"tf.linspace({float(start)}, {float(stop)}, num={n})",
        f"tf.eye({n})", f"tf.eye({n}, {d.one(1, 3)}, dtype={dtype})", f"tf.constant({start})",
        f"tf.eye({n}, num_columns={n + 1}, batch_shape=[2])", f"tf.constant({start}, shape={shape})",
        f"tf.constant([{start}, {stop}], dtype={dtype})", f"tf.constant({float(start)})",
        f"tf.convert_to_tensor([[{start}, {stop}]], tf.float32)", f"tf.sequence_mask({length}, {n})",
        f"tf.sequence_mask({length}, maxlen={n}, dtype=tf.float32)", f"tf.one_hot({indices}, {n})",
        f"tf.one_hot({indices}, depth={n}, on_value={d.one(1.0, 5.0)}, off_value={d.one(0.0, -1.0)})",
        f"tf.one_hot({indices}, {n}, axis={d.axis(d.arrays[indices].ndim + 1)})",
        f"tf.one_hot({indices}, {n}, dtype={dtype})", f"tf.meshgrid(tf.range(3), tf.range(2), indexing={d.one('ij', 'xy')!r})[0]",
        "tf.meshgrid(tf.range(2), tf.range(3))[1]",
    )  # fmt: skip


def gathers(d):
    rank = d.one(1, 2, 3)
    shape = tuple(int(i) for i in d.rng.integers(2, 4, rank))
    axis = d.axis(rank)
    x = d.array(shape)
    i = d.named(d.rng.integers(0, shape[axis], d.shape(0, 2)).astype("int32"))
    rows = d.named(d.rng.integers(0, shape[0], d.shape(0, 2)).astype("int32"))
    points = d.named(d.rng.integers(0, 2, (3, d.one(*range(1, rank + 1)))).astype("int32"))
    batch = d.array((2, 4, 3))
    columns = d.named(d.rng.integers(0, 4, (2, 5)).astype("int32"))
    ids = d.named(np.sort(d.rng.integers(0, 3, shape[0])).astype("int32"))
    return d.one(
        f"tf.gather({x}, {i}, axis={axis})", f"tf.gather(params={x}, indices={rows})", f"tf.gather({x}, {rows})",
        f"tf.gather({batch}, {columns}, batch_dims=1)", f"tf.gather({batch}, {columns}, axis=1, batch_dims=1)",
        f"tf.gather_nd({x}, {points})", f"tf.nn.embedding_lookup({x}, {rows})",
        f"tf.math.segment_sum({x}, {ids})", f"tf.math.segment_max({x}, segment_ids={ids})",
        f"tf.math.unsorted_segment_sum({x}, {ids}, 4)", f"tf.math.unsorted_segment_sum({x}, {ids}, num_segments=3)",
        f"tf.math.segment_mean({x}, {ids})", f"tf.tensor_scatter_nd_update({x}, {points}, tf.zeros_like(tf.gather_nd({x}, {points})))",
        f"tf.tensor_scatter_nd_add({x}, {points}, tf.ones_like(tf.gather_nd({x}, {points})))",
        f"tf.scatter_nd({points}, tf.ones_like(tf.gather_nd({x}, {points})), {list(shape)})",
    )  # fmt: skip


def products(d):
    n, m, k = (int(i) for i in d.rng.integers(1, 5, 3))
    batch = d.one((), (2,), (2, 1))
    ta, tb = d.one(True, False), d.one(True, False)
    a = d.array((*batch, *((m, n) if ta else (n, m))), has_edges=False)
    b = d.array((*d.one((), (3,) if len(batch) != 1 else batch), *((k, m) if tb else (m, k))), has_edges=False)
    v, w, s = d.array((m,)), d.array((m,)), d.array((*batch, n, n), has_edges=False)
    x, y = d.array((n, m)), d.array((m, k))
    c, e = d.array((n, 3)), d.array((n, 3))
    return d.one(
        f"tf.matmul({a}, {b}, transpose_a={ta}, transpose_b={tb})", f"tf.matmul({a}, {b}, {ta}, {tb})",
        f"tf.linalg.matmul({a}, {b}, adjoint_a={ta}, transpose_b={tb})", f"tf.linalg.matvec({x}, {v})",
        f"tf.tensordot({x}, {y}, {d.one(0, 1)})", f"tf.tensordot({x}, {y}, axes=[[1], [0]])",
        f"tf.einsum('ij,jk->ki', {x}, {y})", f"tf.linalg.einsum('ij,jk', {x}, {y})", f"tf.linalg.cross({c}, {e})",
        f"tf.linalg.trace({s})", f"tf.linalg.diag({v})", f"tf.linalg.diag_part({s})", f"tf.linalg.tensor_diag({v})",
        f"tf.linalg.band_part({s}, {d.one(-1, 0, 1)}, {d.one(-1, 0, 1)})", f"tf.linalg.tensor_diag_part({d.array((n, n))})",
        f"tf.norm({x}, axis={d.axis(2)}, keepdims={d.one(True, False)})", f"tf.norm({x})", f"tf.norm({x}, {d.one(1, 2)})",
        f"tf.norm({x}, ord={d.one(1, 2, 'np.inf')}, axis={d.axis(2)})", f"tf.linalg.normalize({x}, axis=0)[0]",
        f"tf.linalg.global_norm([{x}, {v}])", f"tf.linalg.adjoint({x})", f"tf.linalg.diag({v}, k={d.one(1, -1)})",
        f"tf.linalg.set_diag({s}, tf.linalg.diag_part({s}))", f"tf.tensordot({v}, {w}, axes=1)", f"tf.linalg.eye({n})",
    )  # fmt: skip


def solutions(d):
    n, k, batch = d.one(1, 2, 3), d.one(1, 2), d.one((), (2,))
    root = d.rng.normal(size=(*batch, n, n))
    m = d.named((root @ np.swapaxes(root, -1, -2) + 2 * np.eye(n)).astype("float32"))
    g = d.named((root + 3 * np.eye(n)).astype("float32"))
    r = d.array((*batch, n, k), has_edges=False)
    lower, adjoint = d.one(True, False), d.one(True, False)
    return d.one(
        f"tf.linalg.cholesky({m})", f"tf.linalg.inv({g})", f"tf.linalg.det({g})", f"tf.linalg.solve({g}, {r})",
        f"tf.linalg.solve({g}, {r}, adjoint={adjoint})", f"tf.linalg.inv({g}, adjoint={adjoint})",
        f"tf.linalg.triangular_solve({g}, {r}, lower={lower}, adjoint={adjoint})", f"tf.linalg.logdet({m})",
        f"tf.linalg.triangular_solve({g}, {r})", f"tf.linalg.eigvalsh({m})", f"tf.linalg.eigh({m})[0]",
        f"tf.linalg.slogdet({g})[1]", f"tf.linalg.lstsq({g}, {r})", f"tf.linalg.cholesky_solve(tf.linalg.cholesky({m}), {r})",
        f"tf.linalg.pinv({g})", f"tf.linalg.expm({g})", f"tf.linalg.matrix_rank({g})", f"tf.linalg.qr({g})[1] ** 2",
    )  # fmt: skip


def losses(d):
    n, c = d.one(1, 3), d.one(2, 4)
    logits, other = d.array((n, c)), d.array((n, c))
    labels = d.named(d.rng.dirichlet(np.ones(c), n).astype("float32"))
    ids = d.named(d.rng.integers(0, c, n).astype(d.one("int32", "int64")))
    axes = d.one([0], [1], [0, 1])
    low, high = d.one((-1.0, 1.0), (0.0, 2.0))
    return d.one(
        f"tf.nn.softmax_cross_entropy_with_logits({labels}, {logits})",
        f"tf.nn.softmax_cross_entropy_with_logits(labels={labels}, logits={logits}, axis=-1)",
        f"tf.nn.sparse_softmax_cross_entropy_with_logits(labels={ids}, logits={logits})",
        f"tf.nn.sparse_softmax_cross_entropy_with_logits({ids}, {logits})",
        f"tf.nn.sigmoid_cross_entropy_with_logits(labels={labels}, logits={logits})",
        f"tf.nn.weighted_cross_entropy_with_logits({labels}, {logits}, {d.one(1.0, 2.0)})",
        f"tf.nn.log_poisson_loss({labels}, {logits})", f"tf.nn.moments({logits}, axes={axes})[1]",
        f"tf.nn.moments({logits}, {axes}, keepdims=True)[0]", f"tf.clip_by_value({logits}, {low}, {high})",
        f"tf.clip_by_value({logits}, clip_value_min={low}, clip_value_max={high})",
        f"tf.clip_by_norm({logits}, {high})", f"tf.clip_by_norm({logits}, {high}, axes={axes})",
        f"tf.clip_by_global_norm([{logits}, {other}], {high})[0][1]", f"tf.nn.bias_add({logits}, tf.ones([{c}]))",
        f"tf.nn.batch_normalization({logits}, tf.zeros([{c}]), tf.ones([{c}]), None, None, {d.one(0.001, 0.1)})",
        f"tf.nn.batch_normalization({logits}, 0.5, 2.0, offset=1.0, scale=3.0, variance_epsilon=0.001)",
        f"tf.add_n([{logits}, {other}])", f"tf.math.accumulate_n([{logits}, {other}])", f"tf.nn.zero_fraction({logits})",
        f"tf.nn.scale_regularization_loss(tf.reduce_sum({logits}))",
    )  # fmt: skip


def windows(d):
    h, w, c, f = d.one(4, 5), d.one(4, 6), d.one(1, 2), d.one(1, 3)
    x, k = d.array((2, h, w, c), has_edges=False), d.array((d.one(1, 2, 3), d.one(2, 3), c, f), has_edges=False)
    s, t = d.array((2, h, c), has_edges=False), d.array((2, c, f), has_edges=False)
    stride, padding = d.one(1, 2), d.one("SAME", "VALID")
    depthwise = d.array((2, 2, c, 2), has_edges=False)
    return d.one(
        f"tf.nn.conv2d({x}, {k}, {stride}, {padding!r})", f"tf.nn.conv2d({x}, {k}, [1, {stride}, {stride}, 1], {padding!r})",
        f"tf.nn.conv2d({x}, filters={k}, strides={stride}, padding={padding!r})", f"tf.nn.conv1d({s}, {t}, {stride}, {padding!r})",
        f"tf.nn.max_pool2d({x}, {d.one(2, 3)}, {stride}, {padding!r})", f"tf.nn.max_pool({x}, 2, 2, {padding!r})",
        f"tf.nn.avg_pool2d({x}, ksize=[1, 2, 2, 1], strides=[1, 2, 2, 1], padding={padding!r})",
        f"tf.nn.depthwise_conv2d({x}, {depthwise}, [1, {stride}, {stride}, 1], {padding!r})",
        f"tf.image.flip_left_right({x})", f"tf.image.flip_up_down({x})", f"tf.image.resize({x}, [{h * 2}, {w}], method='nearest')",
        f"tf.image.resize({x}, [{d.one(2, 3, 8)}, {w + 2}])", f"tf.image.rgb_to_grayscale({d.array((2, 3, 3, 3))})",
        f"tf.nn.space_to_depth({d.array((1, 4, 4, c))}, 2)", f"tf.nn.depth_to_space({d.array((1, 2, 2, 4))}, 2)",
        f"tf.image.adjust_brightness({x}, 0.1)", f"tf.image.central_crop({x}, 0.5)", f"tf.image.rot90({x})",
        f"tf.image.crop_to_bounding_box({x}, 1, 0, 2, 3)", f"tf.image.pad_to_bounding_box({x}, 1, 0, 8, 9)",
        f"tf.image.per_image_standardization({x})", f"tf.image.total_variation({x})",
        f"tf.signal.fft(tf.cast({d.array((4,))}, tf.complex64))", f"tf.signal.rfft({d.array((6,))})",
    )  # fmt: skip


FAMILIES = [
    unary, activations, binary, logical, reductions, orders, shapes, casts, creations, gathers, products, solutions, losses,
    windows,
]  # fmt: skip


def drawn(family, seed):
    """Returns random calls with the values that they have in TensorFlow. Calls that it refuses are left out."""
    calls = []
    for i in range(DRAWS):
        draw = Draw(np.random.default_rng([seed, i]))
        text = family(draw)
        try:
            calls.append((text, draw.arrays, plain(eval(text, {"tf": tf, "np": np, **draw.arrays}))))
        except (tf.errors.OpError, ValueError, TypeError, AttributeError, NotImplementedError):
            continue
    assert len(calls) > DRAWS // 3
    return calls


def difference(value, expected):
    """Says in what two values differ. Empty if they do not."""
    for what in ("shape", "kind"):
        if value[what] != expected[what]:
            return f"{what} {value[what]} instead of {expected[what]}"
    try:
        np.testing.assert_allclose(value["numbers"], expected["numbers"], rtol=1e-3, atol=1e-4)
    except AssertionError as e:
        return str(e)
    return ""


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_random_calls_have_the_values_of_tensorflow(family):
    """A call whose line the report names is not compared: nobody is misled by it."""
    calls = drawn(family, FAMILIES.index(family))
    lines = [f"functions.append(lambda {', '.join(arrays)}: {text})\n" for text, arrays, _ in calls]
    source = "import numpy as np\nimport tensorflow as tf\nfunctions = []\n" + "".join(lines)
    migration = migrate(source.encode(), "calls.py", the_table())
    named = {finding.line - 4 for finding in migration.report.findings if finding.kind == "look"}
    stay = {i for i in named if 0 <= i < len(calls)}
    names = {"tf": None}
    exec(migration.source.decode().replace("import tensorflow as tf\n", ""), names)
    wrong = []
    for i, (text, arrays, expected) in enumerate(calls):
        if i in stay:
            continue
        try:
            found = difference(plain(names["functions"][i](**arrays)), expected)
        except Exception as e:
            found = f"{type(e).__name__}: {e}"
        if found:
            shown = ", ".join(f"{name}={arrays[name].tolist()}" for name in arrays if name in text)
            wrong.append(f"{text}\n    {shown}\n    {found}")
    assert not wrong, "\n".join(wrong)
    assert len(stay) < len(calls) // 2
