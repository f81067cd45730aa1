"""One test for every private name of Keras, and every semi-public thing of JAX, that Phalanx leans on."""

import collections
import contextlib
import gc
import sys
import threading
import types

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest
from jax.extend import core as jex
from keras.src.backend.common import global_state, name_scope
from keras.src.utils import naming

import phalanx
from phalanx._src import compat
from phalanx._src.mesh.topology import Topology
from phalanx._src.runtime.settings import settings
from phalanx.errors import ContextError


class Recording(compat.AbstractLiftScope):
    """A scope that notes what Keras and the extended methods call. Every variable holds 7."""

    def __init__(self):
        super().__init__()
        self.calls, self.updates = [], 0

    def get_current_value(self, variable):
        self.calls.append("read")
        return jnp.float32(7)

    def add_update(self, update):
        self.calls.append(("assign", float(update[1])))

    def add_delta(self, variable, delta, *, negative=False):
        self.calls.append(("delta", float(delta), negative))
        return jnp.float32(0)

    def fold_seed(self, seed, state):
        assert state.shape == (2,)
        self.calls.append("seed")
        return seed

    def apply_gradients(self, optimizer, apply, grads, variables):
        self.calls.append(("apply", [float(g) for g in grads], self.updates))

    def updating(self):
        self.updates += 1
        return contextlib.nullcontext()

    def of(self, kind):
        return [call for call in self.calls if call[0] == kind]


Recording.__abstractmethods__ = frozenset()  # Keras calls no other method here.


def test_names_are_counted_in_a_global_attribute():
    """`object_name_uids` counts the names that Keras generates, `to_snake_case` forms them, and `auto_name` counts one.

    `current_path` joins the open name scopes, and is what the path of a new variable begins with.
    """
    before = global_state.get_global_attribute("object_name_uids")
    global_state.set_global_attribute("object_name_uids", collections.defaultdict(int))
    try:
        assert [naming.auto_name("JaxVariable") for _ in range(2)] == ["jax_variable", "jax_variable_1"]
        assert dict(global_state.get_global_attribute("object_name_uids")) == {"jax_variable": 2}
        assert naming.to_snake_case("JaxVariable") == "jax_variable"
    finally:
        global_state.set_global_attribute("object_name_uids", before)
    with keras.name_scope("outer"), keras.name_scope("inner"):
        assert name_scope.current_path() == "outer/inner"
        assert keras.Variable(0.0, name="v").path == "outer/inner/v"


def test_masks_of_arrays():
    array, mask = jnp.zeros((2, 3)), jnp.ones((2, 3), bool)
    assert compat.mask_of(array) is None
    assert compat.masked(array, None) is array
    assert compat.mask_of(compat.masked(array, mask)) is mask
    layer = keras.layers.Masking()
    np.testing.assert_array_equal(compat.mask_of(layer(jnp.zeros((2, 3, 1)))), np.zeros((2, 3)))


def test_metrics_of_compile_are_in_a_container():
    """`_compile_metrics` has them in the order of their results, and `_direction` says which are better; a user's may have none."""

    class Mine(keras.metrics.Mean):
        def update_state(self, y_true, y_pred, sample_weight=None):
            pass

    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse", metrics=["accuracy", "mean_absolute_error", Mine(name="mine")])
    assert compat.compiled_metrics(model) == {}
    model.compute_metrics(np.ones((2, 2)), np.ones((2, 1)), jnp.ones((2, 1)), None)
    names = ["accuracy", "mean_absolute_error", "mine"]
    assert [(name, m.name) for name, m in compat.compiled_metrics(model).items()] == list(
        zip(names, names, strict=True)
    )
    assert [compat.better(model, name) for name in [*names, "none"]] == ["max", "min", None, None]


def test_stateless_scope_is_a_global_attribute():
    """`global_state.get_global_attribute("stateless_scope")` is the innermost scope of a thread."""
    assert compat.active_scope() is None
    seen = []
    with keras.StatelessScope() as outer, keras.StatelessScope() as inner:
        assert global_state.get_global_attribute("stateless_scope") is compat.active_scope() is inner
        assert inner.original_scope is outer
        assert compat.lift_scope() is None
        thread = threading.Thread(target=lambda: seen.append(compat.active_scope()))
        thread.start()
        thread.join()
    assert seen == [None]
    with Recording() as scope:
        assert compat.lift_scope() is scope


def test_variable_value_is_the_stored_array():
    """`Variable._value` is the stored array, also inside a scope, and `Variable._dtype` its dtype, under autocast too.

    A variable made of a Python number is weakly typed, an array of a program is not.
    """
    v = keras.Variable(1.0)
    with keras.StatelessScope(state_mapping=[(v, jnp.float32(5))]):
        assert float(v.value) == 5
        assert float(compat.raw_value(v)) == 1
    with keras.src.backend.AutocastScope("bfloat16"):
        assert (v.dtype, compat.dtype_of(v)) == ("bfloat16", "float32")
    assert v.value.weak_type
    assert not jax.jit(lambda x: jax.lax.convert_element_type(x, "float32"))(1.0).weak_type
    array = jnp.float32(3)
    compat.set_raw_values([v], [array])
    assert v.value is array


def test_variable_is_new_until_scope_closes():
    """Its value is None until then."""
    with keras.StatelessScope():
        v = keras.Variable(lambda shape, dtype: jnp.ones(shape, dtype), shape=(2,))
        assert compat.is_new(v)
        assert compat.raw_value(v) is None
    assert not compat.is_new(v)
    assert v.numpy().tolist() == [1, 1]
    assert not compat.is_new(keras.Variable(1.0))


def test_variable_layout_is_that_of_distribution():
    """`Variable._layout` is what `get_variable_layout` of a DataParallel gave; an eager assignment keeps it."""
    topology = Topology.of(["cpu:3", "cpu:1"])
    with compat.variable_layout(topology.sharding_of, topology.mesh):
        v = keras.Variable(np.ones(2))
    with pytest.raises(KeyError), compat.variable_layout(topology.sharding_of, topology.mesh):
        raise KeyError
    assert keras.distribution.distribution() is None
    assert compat.layout_of(v) == topology.replicated
    assert v.value.sharding == topology.replicated
    assert compat.layout_of(keras.Variable(1.0)) is None
    v.assign([3, 4])
    assert len(v.value.devices()) == 2


@pytest.mark.parametrize("shape", [(), (5,), (5, 2)])
def test_data_layout_takes_any_rows(shape):
    """KerasHub's `generate` asks for it: rows that the devices cannot share equally are whole on each of them."""
    topology = Topology.of(["cpu:3", "cpu:1"])
    with compat.variable_layout(topology.sharding_of, topology.mesh):
        layout = keras.distribution.distribution().get_data_layout(shape)
    rows = keras.distribution.distribute_tensor(np.ones(shape), layout)
    assert rows.sharding.is_equivalent_to(topology.replicated, len(shape))


def test_path_of_a_slot():
    """`add_variable_from_reference` makes every slot that has its variable's shape; its layout is that of the variable."""
    model = keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3)])
    optimizer = keras.optimizers.Adam(gradient_accumulation_steps=2, use_ema=True)
    optimizer.build(model.trainable_variables)
    slots = [v for v in optimizer.variables if v.shape]
    paths = [v.path for v in model.trainable_variables]
    assert sorted(map(compat.layout_path, slots)) == sorted(paths * 4)
    assert compat.layout_path(optimizer.variables[0]) == optimizer.variables[0].path


def test_direct_assign_is_the_eager_assignment():
    """`Variable._direct_assign` is the one way of an eager assignment, so that logs can take it back. The outer log has all."""
    v = keras.Variable(1.0)
    with compat.undo_log() as outer:
        with compat.undo_log() as rollback:
            assert compat.is_undoable()
            v.assign(2.0)
            v.assign_add(5.0)
            made = keras.Variable(3.0)
            rollback()
        assert (v.numpy(), made.numpy()) == (1.0, 3.0)
        with compat.undo_log():
            v.assign(2.0)
        outer()
    assert v.numpy() == 1.0
    assert not compat.is_undoable()


def test_large_variables_get_no_value():
    """`Variable._initialize_with_initializer` is what gives a new variable its value, and `_initialize_layout` its layout."""
    topology = Topology.of(["cpu:0", "cpu:1"])
    with settings.changed(hollow_bytes=1024), compat.variable_layout(topology.sharding_of, topology.mesh):
        small, large = keras.Variable("ones", shape=(255,)), keras.Variable("ones", shape=(256,))
        given = keras.Variable(np.ones(256, "float32"))
    assert [compat.is_hollow(v) for v in (small, large, given)] == [False, True, False]
    assert compat.layout_of(large) is not None
    assert compat.raw_value(large) is None
    with settings.changed(hollow_bytes=1024):
        large.assign(np.full(256, 3.0))
    assert compat.is_hollow(large)
    assert float(keras.ops.sum(large)) == 0.0
    large.assign(np.full(256, 2.0))
    assert not compat.is_hollow(large)
    assert float(keras.ops.sum(large)) == 512.0
    after = keras.Variable("ones", shape=(256,))
    assert float(keras.ops.sum(after)) == 256.0
    compat.hollow(after)
    assert compat.is_hollow(after)
    compat.move_layout(after, topology.replicated)
    assert compat.layout_of(after) is topology.replicated


def test_reads_and_assigns_reach_the_scope():
    """`get_current_value`, `add_update`; increments come as such. What a user's `stateless_call` does not map is read in our scope."""
    v, w = keras.Variable(1.0), keras.Variable(2.0)
    with Recording() as scope:
        assert float(v.value) == 7
        v.assign(3.0)
        v.assign_add(2.0)
        v.assign_sub(4.0)
        with keras.StatelessScope(state_mapping=[(w, jnp.float32(5))]):
            assert (float(v.value), float(w.value)) == (7, 5)
    writes = [c for c in scope.calls if c != "read"]
    assert writes == [("assign", 3.0), ("delta", 2.0, False), ("delta", 4.0, True)]
    assert v.numpy() == 1.0


def test_plain_scope_keeps_the_increments_of_keras():
    """Outside our scopes nothing changed."""
    v = keras.Variable(1.0)
    with keras.StatelessScope() as scope:
        v.assign_add(2.0)
        assert float(scope.get_current_value(v)) == 3
    v.assign_sub(0.5)
    assert v.numpy() == 0.5


def test_variable_with_a_concrete_first_value_in_a_scope():
    """Keras refuses it; positional and keyword arguments keep their meaning."""
    with keras.StatelessScope(), pytest.raises(ValueError, match="initializer"):
        keras.Variable(1.0)
    with keras.StatelessScope(), Recording():
        v, w = keras.Variable([1, 2], (2,), "float16", False, name="v"), keras.Variable(3)
    assert (v.numpy().tolist(), v.dtype, v.trainable, v.name) == ([1, 2], "float16", False, "v")
    assert w.numpy() == 3


def test_zeros_compile_nothing(caplog):
    """Those of an optimizer's slots have many shapes. Copying many zeros would take longer than compiling."""
    dtypes = [None, "float16", "bfloat16", "int32", "bool"]
    with caplog.at_level("WARNING", logger="jax"), jax.log_compiles():
        few = [keras.initializers.Zeros()((3, 5, 7), dtype=dtype) for dtype in dtypes]
        assert not caplog.records
        many = keras.initializers.Zeros()((1025, 1025))
    assert "broadcast_in_dim" in caplog.text
    assert [(x.shape, x.dtype) for x in few] == [((3, 5, 7), dtype or "float32") for dtype in dtypes]
    assert not any(np.asarray(x).any() for x in [*few, many])


def test_seed_generator_next():
    """Every random layer and function draws its seeds through `SeedGenerator.next`."""
    seeds = keras.random.SeedGenerator(1)
    with Recording() as scope, keras.StatelessScope(state_mapping=[(seeds.state, jnp.array([1, 2], "uint32"))]):
        keras.random.normal((2,), seed=seeds)
    assert scope.calls.count("seed") == 1
    assert seeds.next().shape == (2,)


def test_optimizer_apply_opens_update_context():
    """`apply` and `apply_gradients` end in one method; the flag of tf.distribute opens the update context.

    LossScaleOptimizer has a method of its own, and is called once.
    """
    v, optimizer = keras.Variable(0.0), keras.optimizers.SGD(0.1)
    scaled = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(0.1))
    optimizer.build([v])
    scaled.build([v])
    with Recording() as scope:
        optimizer.apply([jnp.float32(1)], [v])
        optimizer.apply_gradients([(jnp.float32(2), v)])
        optimizer.apply_gradients([(jnp.float32(3), v)], skip_gradients_aggregation=True)
        scaled.apply([jnp.float32(4)], [v])
    assert scope.of("apply") == [("apply", [1.0], 0), ("apply", [2.0], 0), ("apply", [3.0], 1), ("apply", [4.0], 1)]


def test_joint_optimizer_gets_all_gradients_at_once():
    """`_backend_apply_gradients` is what `apply` calls for all variables that have a gradient."""
    calls = []
    optimizer = compat.JointOptimizer(lambda *pairs: calls.append(pairs), lambda: None, "joint")
    a, b = keras.Variable(1.0), keras.Variable(2.0)
    with pytest.warns(UserWarning, match="Gradients do not exist"):
        optimizer.apply([jnp.float32(3), None], [a, b])
    optimizer.apply([jnp.float32(3), jnp.float32(4)], [a, b])
    assert [(list(map(float, gradients)), variables) for gradients, variables in calls] == [
        ([3], [a]),
        ([3, 4], [a, b]),
    ]


def test_optimizer_outside_scope_is_that_of_keras():
    """Without a scope they are Keras's own, and take the flag too."""
    v, optimizer = keras.Variable(0.0), keras.optimizers.SGD(0.5)
    optimizer.apply([jnp.float32(1)], [v])
    for skip in (False, True):
        optimizer.apply_gradients([(jnp.float32(1), v)], skip_gradients_aggregation=skip)
    assert v.numpy() == -1.5


def test_stateless_apply_updates_loss_scaling_optimizer():
    """`stateless_apply`, `variables` and `_trainable_variables` update a loss-scaling optimizer."""
    for is_built in (False, True):
        v = keras.Variable(0.0)
        optimizer = keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0), initial_scale=2.0)
        if is_built:
            optimizer.build([v])
        compat.apply_stateless(optimizer, [jnp.float32(4)], None if is_built else [v])
        assert (v.numpy(), optimizer.inner_optimizer.iterations.numpy()) == (-2, 1)


def test_learning_rate_keeps_its_variable():
    """`_learning_rate` is the object that was given, or a variable; a new number keeps the variable."""
    schedule = keras.optimizers.schedules.ExponentialDecay(0.1, 1, 0.9)
    assert compat.learning_rate_of(keras.optimizers.SGD(schedule)) is schedule
    optimizer = keras.optimizers.SGD(0.1)
    held = compat.learning_rate_of(optimizer)
    optimizer.learning_rate = 0.2
    assert compat.learning_rate_of(optimizer) is held
    assert compat.learning_rate_of(keras.optimizers.LossScaleOptimizer(optimizer)) is held
    calls: list[int] = []
    optimizer = keras.optimizers.SGD(lambda: calls.append(1) or 0.5)
    held = compat.learning_rate_of(optimizer)
    with compat.known_learning_rate(optimizer):
        assert [optimizer.learning_rate, optimizer.learning_rate, len(calls)] == [0.5, 0.5, 1]
    assert compat.learning_rate_of(optimizer) is held


def test_metric_subclasses_still_reach_their_mixins():
    """The hook on Metric's subclasses passes on what is not its own."""
    seen = []

    class Registry:
        def __init_subclass__(cls, key=None, **kwargs):
            super().__init_subclass__(**kwargs)
            seen.append(key)

    class Mine(keras.metrics.Mean, Registry, key="mine"):
        pass

    assert seen == ["mine"]


def test_own_metrics_weigh_padded_rows():
    """Also a metric that is defined after phalanx was imported."""

    class Total(keras.metrics.Metric):
        def __init__(self):
            super().__init__()
            self.total = self.add_variable((), "zeros", aggregation="sum")

        def update_state(self, x, sample_weight=None):
            self.total.assign_add(jnp.sum(x if sample_weight is None else x * sample_weight))

        def result(self):
            return self.total

    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        metric = Total()
    (batch,) = strategy.experimental_distribute_dataset([np.float32([1, 2, 4])])
    strategy.run(metric.update_state, args=(batch,))
    assert float(metric.result()) == 7


def test_rows_of_variables_can_be_changed():
    """`_synchronization` and `_aggregation`. Parameter servers do not keep variables of metrics for the next start of a script."""
    metric, variable = keras.metrics.AUC(), keras.Variable(1.0)
    assert [compat.is_of_metric(v) for v in (*metric.variables, variable)] == [True] * 4 + [False]
    before = variable.synchronization, variable.aggregation
    compat.make_on_demand([variable], "mean")
    assert (variable.synchronization, variable.aggregation) == ("on_demand", "mean")
    compat.keep_equal([variable])
    assert (variable.synchronization, variable.aggregation) == before


def test_metric_of_values_that_differ():
    """Outside a replica function the error says where to call `update_state`, and the call works there."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    with strategy.scope():
        mean = keras.metrics.Mean(name="mean")
    value = strategy.run(lambda: phalanx.get_replica_context().replica_id_in_sync_group * 2.0)
    with pytest.raises(
        ContextError,
        match=r"a PerReplica used as an array by update_state of the metric 'mean'.*one component per replica"
        r".*\nHINT: call metric.update_state\(y, y_pred\) inside the function passed to strategy.run",
    ):
        mean.update_state(value)
    strategy.run(lambda x: mean.update_state(x), args=(value,))
    assert float(mean.result()) == 1


def test_extended_methods_keep_their_names():
    """Help and introspection show Keras's own."""
    for method in (keras.Variable.assign_add, keras.Variable.__init__, keras.optimizers.Optimizer.apply):
        assert (method.__doc__, method.__name__) == (method.__wrapped__.__doc__, method.__wrapped__.__name__)


FRESH = """
import glob, sys, jax
print("preemption", jax.config.jax_enable_preemption_service)
jax.config.update("jax_enable_preemption_service", False)
jax.jit(lambda x: x + 1)(1.0)
print("threads", [open(f + "/comm").read().strip() for f in glob.glob("/proc/self/task/*")].count("tf_XLAEigen"))
import phalanx, keras
print("backend", keras.backend.backend())
keras.backend.backend = lambda: "torch"
for name in [name for name in sys.modules if name.split(".")[0] == "phalanx"]:
    del sys.modules[name]
try:
    import phalanx
except RuntimeError as error:
    print(type(error).__name__, error)
"""


@pytest.mark.slow
def test_fresh_process_has_the_settings_of_jax(run_python):
    """SIGTERM stays with JAX until a worker switches its service off; `NPROC` sizes the thread pool; the backend must be JAX."""
    out = run_python(FRESH, KERAS_BACKEND="tensorflow", NPROC="7")
    assert "preemption True\n" in out
    assert "threads 7\n" in out or sys.platform != "linux"
    assert "backend jax\n" in out
    assert "StartupError import phalanx with the Keras backend 'torch'" in out
    assert 'HINT: import phalanx before keras, or set KERAS_BACKEND="jax"' in out


def test_references_are_counted():
    """`sys.getrefcount` tells whether somebody else holds a variable's array; a view of NumPy holds it, or is a copy."""
    v = keras.Variable(np.ones(1000, "float32"))
    v.assign(np.zeros(1000))
    gc.collect()
    arrays = compat.raw_values([v])
    assert list(compat.reference_counts(arrays)) == [compat.UNSHARED]
    held = v.value
    assert list(compat.reference_counts(arrays)) == [compat.UNSHARED + 1]
    del held
    assert list(compat.reference_counts(arrays)) == [compat.UNSHARED]
    view = np.asarray(v.value)
    shared = next(compat.reference_counts(arrays)) > compat.UNSHARED
    assert shared or not np.shares_memory(view, np.asarray(v.value))


def test_opaque_trace_state():
    """`get_opaque_trace_state` is equal in one trace, and not between a body and what is around it."""
    states = []

    def note(x, _=None):
        states.append(jex.get_opaque_trace_state())
        return x, None

    def fn(x):
        note(x)
        jax.lax.scan(note, x, length=2)
        return note(x)[0]

    jax.jit(fn)(1.0)
    assert states[0] == states[-1]
    assert all(s != states[0] for s in states[1:-1])
    outside = jex.get_opaque_trace_state()
    assert outside != states[0]
    for transform in (jax.jit, jax.checkpoint, jax.grad, lambda f: jax.vmap(f, axis_size=2, in_axes=None)):
        jax.make_jaxpr(transform(lambda x: note(x)[0]))(1.0)
        assert states[-1] != outside


def test_take_and_set_current_trace():
    """A value can be made in the trace around a body."""
    made = []

    def fn(x):
        with jex.take_current_trace() as trace:
            pass
        with jex.set_current_trace(trace):
            pass

        def body(carry, _):
            with jex.set_current_trace(trace):
                made.append(jnp.sin(x))
            return carry, None

        jax.lax.scan(body, x, length=2)
        return made[0] * 2

    jaxpr = jax.make_jaxpr(fn)(1.0).jaxpr
    assert [e.primitive.name for e in jaxpr.eqns].count("sin") == 1


def test_jaxpr_replace_and_debug_info():
    """A stretch of a jaxpr becomes a jaxpr of its own that `jax.core.eval_jaxpr` runs. `jaxprs_in_params` finds bodies.

    `jex.Primitive` with several results, bound with static parameters, appears in a jaxpr.
    """
    jaxpr = jax.make_jaxpr(lambda x: jnp.cos(jnp.sin(x)))(1.0).jaxpr
    first = jaxpr.eqns[0]
    ends = {"constvars": (), "invars": list(first.invars), "outvars": list(first.outvars)}
    stretch = jaxpr.replace(**ends, eqns=[first], debug_info=jaxpr.debug_info.with_unknown_names())
    np.testing.assert_allclose(jax.core.eval_jaxpr(stretch, (), 1.0), [np.sin(1.0)], rtol=1e-6)
    jaxpr = jax.make_jaxpr(lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x))(1.0).jaxpr
    (eqn,) = [e for e in jaxpr.eqns if e.primitive.name == "cond"]
    assert len(list(jex.jaxprs_in_params(eqn.params))) == 2
    primitive = jex.Primitive("phalanx_test")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *xs, tag: list(xs))
    (eqn,) = jax.make_jaxpr(lambda x: primitive.bind(x, x, tag=3))(1.0).jaxpr.eqns
    assert (eqn.primitive, eqn.params, len(eqn.outvars)) == (primitive, {"tag": 3}, 2)


def test_callbacks_have_callback_in_their_name():
    """So that programs with them are not given the variables' arrays."""

    def fn(x):
        jax.debug.callback(print, x)
        jax.debug.print("")
        return jax.pure_callback(abs, x, x)

    names = {e.primitive.name for e in jax.make_jaxpr(fn)(jnp.float32(1)).jaxpr.eqns}
    assert names
    assert all("callback" in n or "debug_print" in n for n in names)


def test_value_of_a_variable_without_an_array():
    """`Variable.value`: who stores arrays is asked first, and Keras's own placeholder comes where nobody has one."""
    v, asked = keras.Variable(jnp.zeros(2)), []
    v._initializer = keras.initializers.Ones()
    compat.on_first_read(asked.append)
    try:
        compat.set_raw_values([v], [None])
        np.testing.assert_array_equal(v.value, [1.0, 1.0])
    finally:
        compat.engine_hooks.filling.remove(asked.append)
    assert [variable is v for variable in asked].count(True) == 1


def test_accumulators_of_an_optimizer():
    """`_accumulated_gradients` and `_get_variable_index`. An optimizer that scales losses has no steps of accumulation."""
    weights = [keras.Variable(jnp.zeros(i)) for i in (2, 3)]
    optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=2)
    found = compat.accumulators(optimizer, weights[::-1])
    assert [v.shape for v in found] == [(3,), (2,)]
    assert not compat.is_last_accumulated(optimizer)
    optimizer._iterations.assign(1)
    assert compat.is_last_accumulated(optimizer)
    others = [keras.optimizers.SGD(), keras.optimizers.LossScaleOptimizer(optimizer)]
    assert list(map(compat.accumulation_steps, [optimizer, *others])) == [2, None, None]


def test_optimizer_knows_its_variables():
    """`_check_variables_are_known` looks for `_var_key` in `_trainable_variables_indices`; `_untrack_variable` forgets a slot."""
    known, unknown = keras.Variable(np.ones(2)), keras.Variable(np.ones(2))
    optimizer = keras.optimizers.SGD(1.0, momentum=0.9)
    optimizer.build([known])
    assert optimizer._trainable_variables_indices == {optimizer._var_key(known): 0}
    optimizer._check_variables_are_known([known])
    with pytest.raises(ValueError, match="Unknown variable"):
        optimizer._check_variables_are_known([unknown])
    optimizer._untrack_variable(optimizer.momentums[0])
    assert [v.shape for v in optimizer._variables] == [(), ()]


def test_states_of_recurrent_layers():
    """`_create_state_variables` makes one state per row, which `call` compares with `_expected_batch_size`; `_shape` is its shape."""
    layer = keras.layers.LSTM(2, stateful=True)
    layer.build((4, 3, 2))
    assert layer._expected_batch_size == 4
    assert [(type(v), v._shape) for v in layer.states] == [(compat.RowVariable, (4, 2))] * 2
    layer._create_state_variables(6)
    assert [v.shape for v in layer.states] == [(6, 2)] * 2


def test_updates_of_an_optimizer_are_counted():
    """`_iterations` counts the calls, of which several make one update if gradients are accumulated."""
    for steps, due in ((None, [2, 5, 8, 11]), (2, [4, 10])):
        optimizer, found = keras.optimizers.SGD(1.0, gradient_accumulation_steps=steps), []
        optimizer.build([keras.Variable(jnp.zeros(2))])
        for call in range(1, 12):
            optimizer._iterations.assign(call)
            if compat.is_due(optimizer, 3, 2):
                found.append(call)
        assert found == due


def test_optimizer_beside_another_is_no_part_of_it():
    """Files of Keras do not have its variables, and it is made once."""
    optimizer = keras.optimizers.SGD()
    before = len(optimizer.variables)
    made = [compat.optimizer_beside(optimizer, 0, keras.optimizers.Adam) for _ in range(2)]
    assert made[0] is made[1]
    assert len(optimizer.variables) == before
    dicts = [parts for _, kinds in compat.parts_of(optimizer) if isinstance(kinds, dict) for parts in kinds.values()]
    assert any(made[0] in dict(parts).values() for parts in dicts)


def test_batch_hooks_are_recognized():
    """`is_default`: nothing is called for callbacks that do not listen to batches."""

    class Listening(keras.callbacks.Callback):
        def on_batch_end(self, batch, logs=None):
            seen.append(batch)

    seen, nothing = [], compat.trainer._nothing
    deaf, ear = (keras.callbacks.CallbackList([c]) for c in (keras.callbacks.Callback(), Listening()))
    assert compat.batch_hooks(deaf, "train") == [nothing, nothing]
    begin, end = compat.batch_hooks(ear, "train")
    end(3, {})
    assert begin is nothing
    assert seen == [3]
    assert compat.batch_hooks(ear, "test")[1] is nothing


def test_callbacks_have_one_executor():
    """`_executor` of a list is None until a method begins, and that of its own is of several threads."""
    ours, theirs = keras.callbacks.CallbackList(), keras.callbacks.CallbackList()
    compat.call_in_order(ours)
    pool = ours._executor
    for callbacks in (ours, theirs):
        callbacks.on_train_begin()
    assert ours._executor is pool
    assert (ours._executor._max_workers, theirs._executor._max_workers > 1) == (1, True)
    for callbacks in (ours, theirs):
        callbacks.on_train_end()
        assert callbacks._executor is None


def test_function_of_a_metric():
    """`_fn` and `_fn_kwargs`: whether it makes one number of a batch."""
    given = {"y_true": jnp.zeros((4, 2)), "y_pred": jnp.zeros((4, 2))}
    metric = lambda fn: keras.metrics.MeanMetricWrapper(fn, axis=-1)  # noqa: E731
    assert compat.rows._is_number(metric(lambda y, p, axis: jnp.mean(y - p)), given)
    assert not compat.rows._is_number(metric(lambda y, p, axis: jnp.mean(y - p, axis=axis)), given)
    assert not compat.rows._is_number(keras.metrics.Mean(), {"values": jnp.zeros(4)})


def test_losses_are_reduced_by_one_function():
    """With the mask that a loss makes, and in the order of arguments that is wrapped."""
    values, mask = jnp.float32([1, 2, 6]), jnp.bool_([1, 0, 1])
    assert float(compat.rows.loss.reduce_weighted_values(values, None, mask, "sum_over_batch_size", None)) == 3.5
    assert float(compat.rows.loss.reduce_weighted_values(values, 2 * values, mask, "sum", None)) == 74
    wrapper = compat.rows.LossFunctionWrapper(lambda y, p: p - y)
    assert wrapper.fn(1, 3) == 2
    assert float(wrapper(jnp.zeros((2, 1)), jnp.ones((2, 1)))) == 1


def test_one_array_of_targets_for_several_outputs():
    """Keras takes it for a list of targets if it has as many rows as there are outputs."""
    y, p = jnp.zeros((2, 1)), [jnp.ones((2, 1)), jnp.ones((2, 3))]
    losses = compat.rows.CompileLoss(["mse", None])
    assert float(losses(y, p)) == 1


def test_padding_of_transposed_convolutions():
    """Keras computes it for JAX from the shapes and options of a layer."""
    assert compat.transposed_padding((1, 4, 4, 2), (3, 3, 5, 2), 2, "same", None, 1) == [(2, 1), (2, 1)]
    assert compat.is_channels_first("channels_first")
    assert not compat.is_channels_first(None)


def test_stateless_apply_of_a_trainer():
    """A trainer's step in Keras's own style has its gradients aggregated once; in other scopes Keras does as it does."""

    class Averaging(Recording):
        share = types.SimpleNamespace(is_averaging=True)

        def aggregated(self, grads):
            self.calls.append("aggregated")
            return [g * 10 for g in grads]

    optimizer = keras.optimizers.SGD(1.0)
    optimizer.build([keras.Variable(jnp.zeros(1))])
    given = [v.value for v in optimizer.variables], [jnp.ones(1)], [jnp.zeros(1)]
    (plain,), _ = optimizer.stateless_apply(*given)
    with Averaging() as scope:
        (aggregated,), _ = optimizer.stateless_apply(*given)
    assert (float(plain[0]), float(aggregated[0])) == (-1.0, -10.0)
    assert scope.calls.count("aggregated") == scope.updates == 1


def test_optimizer_of_some_variables():
    """`_trainable_variables`, `_variables` and `_model_variables_moving_average` are what an optimizer knows of."""
    a, b = keras.Variable(np.ones(2)), keras.Variable(np.ones(3))
    optimizer = keras.optimizers.SGD(0.5, momentum=0.9, use_ema=True)
    optimizer.build([a, b])
    of_all = list(optimizer.variables)
    with compat.restricted(optimizer, [b]):
        assert {tuple(v.shape) for v in optimizer.variables} == {(), (3,)}
        optimizer.apply([np.ones(3, "float32")], [b])
    assert all(x is y for x, y in zip(optimizer.variables, of_all, strict=True))
    plain = keras.Variable(np.ones(3))
    keras.optimizers.SGD(0.5, momentum=0.9).apply([np.ones(3, "float32")], [plain])
    np.testing.assert_array_equal(b, plain)
    averages = [v for v in optimizer.variables if "average" in v.path]
    assert [float(np.sum(v)) for v in averages] == [0.0, float(np.sum(plain))]


def test_clipping_gives_gradients_that_apply_uses():
    """`_clip_gradients`: the gradients that `apply` uses, before it divides them by a loss scale."""
    grads = [np.full(2, 8.0, "float32"), np.full(3, -8.0, "float32")]
    clipped = compat.clipped(keras.optimizers.SGD(clipvalue=0.5, loss_scale_factor=4.0), grads)
    np.testing.assert_array_equal(clipped[0], np.full(2, 2.0))
    norm = np.sqrt(sum(np.square(g).sum() for g in grads))
    clipped = compat.clipped(keras.optimizers.SGD(global_clipnorm=1.0), grads)
    np.testing.assert_allclose(clipped[1], grads[1] / norm, rtol=1e-6)


def test_global_seed_generator():
    """`global_seed_generator` makes a generator with a value, also where a step is traced; Keras keeps it."""

    class Lifting(Recording):
        def get_current_value(self, variable):
            return variable._value

        def add_update(self, update):
            assert update[0] is generators.global_seed_generator().state

    generators = keras.src.random.seed_generator

    def draw():
        with Lifting():
            return keras.random.normal(())

    jax.eval_shape(draw)
    generator = global_state.get_global_attribute(generators.GLOBAL_SEED_GENERATOR)
    assert generator.state.numpy().shape == (2,)
    assert compat.is_global_seed(generator.state)
    assert compat.active_scope() is None
    keras.utils.set_random_seed(1)
    compat.continue_global_seed(generator.state)
    assert generators.global_seed_generator().state is generator.state
    seed = int(generator.state.numpy()[0])
    keras.utils.set_random_seed(1)
    assert int(generators.global_seed_generator().state.numpy()[0]) == seed


def test_functions_of_the_backend(monkeypatch):
    """Activations, losses and conversions of Keras call `backend.nn`, `backend.core` and `backend.numpy`."""
    from keras.src import backend

    x, row, seen = jnp.ones((2, 1)), jnp.ones((2, 2)), set()

    def probe(name):
        def wrapper(original, *args, **kwargs):
            seen.add(name)
            return original(*args, **kwargs)

        return wrapper

    names = {
        "nn": "sigmoid softmax binary_crossentropy categorical_crossentropy sparse_categorical_crossentropy "
        "max_pool average_pool conv depthwise_conv conv_transpose",
        "core": "convert_to_tensor cast",
        "numpy": "expand_dims squeeze reshape",
    }
    names = ["cast", *(f"{module}.{name}" for module in names for name in names[module].split())]
    for name in names:
        module, _, attribute = name.rpartition(".")
        owner = getattr(backend, module) if module else backend
        monkeypatch.setattr(owner, attribute, getattr(owner, attribute))  # The original is back at the end of the test.
        compat.extend_backend(name, probe(name))
    keras.activations.sigmoid(x)
    keras.activations.softmax(row)
    keras.losses.binary_crossentropy(x, x)
    keras.losses.categorical_crossentropy(row, row)
    keras.losses.sparse_categorical_crossentropy(jnp.ones(2), row)
    keras.ops.convert_to_tensor(x)
    keras.ops.cast(x, "float16")
    keras.ops.squeeze(keras.ops.expand_dims(x, 0), 0)
    keras.ops.reshape(x, (1, 2))
    backend.cast(x, "float16")
    image, kernel = jnp.ones((1, 4, 4, 1)), jnp.ones((2, 2, 1, 1))
    keras.ops.max_pool(image, 2, 2)
    keras.ops.average_pool(image, 2, 2)
    keras.ops.conv_transpose(image, kernel, 1)
    keras.ops.separable_conv(image, kernel, jnp.ones((1, 1, 1, 1)))  # Calls the other two.
    assert seen == set(names)


@pytest.mark.slow
def test_methods_of_the_trainer():
    """`JAXTrainer` has the loops and steps that models inherit, and `Model.call` is what those without one have."""
    from keras.src.backend.jax.trainer import JAXTrainer

    for name in ("fit", "evaluate", "predict", "train_on_batch", "test_on_batch", "predict_on_batch"):
        assert getattr(keras.Model, name) is vars(JAXTrainer)[name]
    for kind in ("train", "test", "predict"):
        assert getattr(keras.Model, f"{kind}_step") is vars(JAXTrainer)[f"{kind}_step"]
    assert keras.Model().call.__func__ is keras.Model.call


def test_eval_context_is_outside_of_a_trace():
    """`next(iterator)` runs programs of its own while a function is traced, some of which JAX allows outside traces only."""

    def step(x):
        with jax.core.eval_context(), jax.set_mesh(jax.make_mesh((1,), ("x",))):
            y = jax.jit(lambda: jnp.ones(()) + 1)()
        assert float(y) == 2
        return x + y

    assert jax.make_jaxpr(step)(1.0).out_avals[0].shape == ()
