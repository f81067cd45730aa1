"""Compiled functions, control flow, gradients, losses and variables with good arguments."""

import jax.numpy as jnp
import keras
from bad_values import ALL, DISTRIBUTED, DTYPES, INDEX, NONE, NOT_HELD, NUMBERS, NUMERIC, TREES, Case, named

import phalanx
import phalanx.testing


def same(x=None):
    return x


def first(*args):
    return args[0] if args else None


def of_functions():
    compiled = phalanx.function(same)
    return {
        "function": Case(
            lambda **given: phalanx.function(**given)(1.0),
            {"fn": same, "input_signature": None, "autograph": True, "jit_compile": None, "reduce_retracing": False},
            takes={
                "input_signature": {"None", "empty list", "empty tuple"},
                "autograph": {"True"},
                "jit_compile": {"None", "True", "False"},
                "reduce_retracing": {"True"},
            },
            functions=("fn",),
        ),
        "function(input_signature of a call)": Case(
            lambda x: phalanx.function(same, input_signature=[x])(jnp.ones(3)),
            {"x": None},
            takes={"x": {"array of NumPy", "array", "deleted array"}},
        ),
        "Function.__call__": Case(compiled, {"x": 1.0}, takes={"x": ALL - NOT_HELD - {"PerReplica of text"}}),
        "Function.lower": Case(
            compiled.lower, {"x": 1.0}, takes={"x": ALL - {"2**70", "-2**70", "PerReplica of text"}}
        ),
    }


def of_control_flow():
    """Loops and branches, outside programs."""
    return named(
        Case(
            phalanx.scan,
            {"f": lambda carry, x: (carry, x), "init": 0.0, "xs": jnp.arange(3.0)},
            takes={
                "init": NUMERIC | {"key"},
                "xs": {"range", "array of NumPy", "empty array", "bool array", "array", "Mirrored", "variable"}
                | DTYPES,
                "length": NONE | {"integer of NumPy"},
                "unroll": INDEX | {"True"},
            },
            functions=("f",),
        ),
        Case(
            phalanx.while_loop,
            {"cond_fun": lambda x: False, "body_fun": same, "init_val": 1.0},
            takes={"init_val": NUMERIC | {"key"}},
            functions=("cond_fun", "body_fun"),
        ),
    ) | {
        "scan(of the length)": Case(
            lambda length: phalanx.scan(lambda carry, x: (carry, x), 0.0, length=length),
            {"length": 3},
            takes={"length": {"0", "integer of NumPy"}},
        ),
        "cond": Case(
            lambda pred, true_fun, false_fun, operands: phalanx.cond(pred, true_fun, false_fun, operands),
            {"pred": True, "true_fun": first, "false_fun": first, "operands": 1.0},
            takes={"pred": NUMBERS - {"1j"} | {"True"}, "operands": NUMERIC | {"key"}},
            functions=("true_fun", "false_fun"),
        ),
        "remat": Case(lambda fn: phalanx.remat(fn)(1.0), {"fn": same}, functions=("fn",)),
        "remat(of a value)": Case(lambda x: phalanx.remat(same)(x), {"x": 1.0}, takes={"x": NUMERIC | {"key"}}),
    }


def of_gradients():
    variable = keras.Variable(2.0)

    def gradient(**given):
        def step():
            with phalanx.GradientTape() as tape:
                y = variable * variable
            return tape.gradient(**{"target": y, "sources": variable, **given})

        return phalanx.function(step)()

    def watch(tensor):
        def step():
            with phalanx.GradientTape() as tape:
                tape.watch(tensor)

        phalanx.function(step)()

    return {
        "GradientTape": Case(phalanx.GradientTape),
        "GradientTape.watch": Case(
            watch, {"tensor": variable}, takes={"tensor": TREES | {"PerReplica of text", "variable"}}
        ),
        "GradientTape.gradient": Case(
            gradient,
            {"output_gradients": None, "unconnected_gradients": "none"},
            takes={"output_gradients": TREES | NUMBERS | {"True", "dict of int", "PerReplica of text"}},
        ),
        "GradientTape.gradient(of a target)": Case(gradient, {"target": 1.0}, takes={"target": NUMERIC | DISTRIBUTED}),
        "GradientTape.gradient(of sources)": Case(
            gradient,
            {"sources": variable},
            takes={"sources": TREES | {"array", "int4 array", "key", "deleted array", "variable"}},
        ),
        "value_and_grad": Case(
            lambda **given: phalanx.value_and_grad(**given)(),
            {"fn": lambda: variable * variable, "variables": [variable], "has_aux": False},
            takes={"variables": {"empty list", "empty tuple"}},
            functions=("fn",),
        ),
        "value_and_grad(of a value)": Case(
            lambda x: phalanx.value_and_grad(lambda: x, [variable])(),
            {"x": 1.0},
            takes={"x": {"1.5", "nan", "inf", "scalar of NumPy"}},
        ),
        "value_and_grad(of a variable)": Case(
            lambda x: phalanx.value_and_grad(lambda: variable * 1.0, [x])(), {"x": variable}, takes={"x": {"variable"}}
        ),
    }


def of_losses():
    """What a training loop calls beside a strategy."""
    return named(
        Case(
            phalanx.nn.compute_average_loss,
            {"per_example_loss": jnp.ones(3), "global_batch_size": 3},
            takes={
                "per_example_loss": {"empty list", "empty tuple", "range", "array of NumPy", "empty array", "array"}
                | {"Mirrored", "variable"}
                | DTYPES,
                "sample_weight": NONE | NUMBERS - {"1j"} | {"True", "array of NumPy", "array", "int4 array"},
                "global_batch_size": {"None", "0", "integer of NumPy"},
            },
        ),
        Case(
            phalanx.nn.scale_regularization_loss,
            {"regularization_loss": 1.0},
            takes={"regularization_loss": NUMERIC | DISTRIBUTED},
        ),
        Case(phalanx.set_virtual_cpu_devices, {"count": 8}),
    ) | {
        "describe": Case(
            lambda objects, **given: phalanx.describe(given["strategy"], objects, console=given["console"]),
            {"strategy": phalanx.OneDeviceStrategy("cpu:0"), "objects": keras.Variable(1.0), "console": None},
            takes={"strategy": {"strategy"}, "objects": {"empty list", "empty tuple", "variable"}, "console": NONE},
        ),
        "assert_in_sync": Case(
            lambda objects: phalanx.testing.assert_in_sync(objects),
            {"objects": keras.Variable(1.0)},
            takes={"objects": TREES - NONE | {"array", "Mirrored", "variable", "key"} | DTYPES},
        ),
    }


def of_variables(count):
    """What replicas, and the program between steps, assign."""
    strategy = phalanx.MirroredStrategy([f"cpu:{i}" for i in range(count)])
    with strategy.scope():
        variable = keras.Variable([1.0, 2.0], trainable=False, aggregation="sum")
    inside = lambda method: lambda value: strategy.run(lambda: getattr(variable, method)(value))  # noqa: E731
    cases = {}
    arrays = {"bool array", "Mirrored", "variable"}
    for method in ("assign", "assign_add", "assign_sub"):
        takes = {"value": arrays if method == "assign" else arrays | NUMBERS - {"1j"} | {"True"}}
        cases[f"Variable.{method}"] = Case(getattr(variable, method), {"value": [1.0, 2.0]}, takes)
        cases[f"Variable.{method}(in a step)"] = Case(inside(method), {"value": [1.0, 2.0]}, takes)
    return cases


GROUPS = {
    "functions": of_functions,
    "control_flow": of_control_flow,
    "gradients": of_gradients,
    "losses": of_losses,
    "variables_x1": lambda: of_variables(1),
    "variables_x2": lambda: of_variables(2),
}
