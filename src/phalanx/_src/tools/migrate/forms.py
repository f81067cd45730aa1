# SPDX-License-Identifier: Apache-2.0
"""Calls whose targets depend on more than the names of their arguments."""

import ast
from collections.abc import Callable, Mapping
from typing import final

import libcst as cst

from phalanx._src.tools.migrate.calls import source_of


@final
class LookError(Exception):
    """A call that a person must look at. The text says what to write."""


def _value(arg: cst.Arg | None) -> object:
    """Returns the value of an argument that is a literal, else None."""
    try:
        return ast.literal_eval(source_of(arg.value)) if arg is not None else None
    except (ValueError, SyntaxError):
        return None


def _args(call: cst.Call, *names: str) -> dict[str, cst.Arg]:
    """Returns the arguments of a call by name."""
    positional = [arg for arg in call.args if arg.keyword is None]
    keywords = {arg.keyword.value: arg for arg in call.args if arg.keyword is not None}
    return dict(zip(names, positional, strict=False)) | keywords


def _expression(template: str, args: Mapping[str, cst.Arg | None]) -> cst.BaseExpression:
    return cst.parse_expression(
        template.format(**{name: source_of(arg.value) for name, arg in args.items() if arg is not None})
    )


def _split(call: cst.Call) -> cst.BaseExpression:
    """TensorFlow takes sizes, and Keras takes indices."""
    args = _args(call, "value", "num_or_size_splits", "axis", "num", "name")
    count, axis = args.get("num_or_size_splits"), args.get("axis")
    sizes = count.value if count is not None else None
    if isinstance(sizes, cst.List | cst.Tuple) and all(_is_size(element) for element in sizes.elements):
        texts = [source_of(element.value) for element in sizes.elements]
        values = [_value(cst.Arg(element.value)) for element in sizes.elements]
        numbers = [value for value in values if isinstance(value, int)]
        are_known = len(numbers) == len(texts)
        indices = [
            str(sum(numbers[: i + 1])) if are_known else " + ".join(texts[: i + 1]) for i in range(len(texts) - 1)
        ]
        args["num_or_size_splits"] = cst.Arg(cst.parse_expression(f"[{', '.join(indices)}]"))
    elif not isinstance(_value(count), int):
        raise LookError(
            "it takes sizes, and keras.ops.split takes a number of parts or indices. "
            "HINT: keras.ops.split(x, 3, axis), or keras.ops.split(x, np.cumsum(sizes)[:-1], axis)"
        )
    return _expression("keras.ops.split({value}, {num_or_size_splits}" + (", axis={axis})" if axis else ")"), args)


def _is_size(element: cst.BaseElement) -> bool:
    """Whether an element of a list is one size. A negative one stands for the rest in TensorFlow."""
    return isinstance(element, cst.Element) and isinstance(element.value, cst.Integer | cst.Name | cst.Attribute)


def _strided(target: str, filters: str, window: str) -> Callable[[cst.Call], cst.BaseExpression]:
    """Convolutions and poolings: strides are numbers, or lists with ones for rows and channels."""
    names = ("input", filters, "strides", "padding", "data_format", "dilations", "name")

    def form(call: cst.Call) -> cst.BaseExpression:
        args = _args(call, *names)
        for name, allowed in (
            ("data_format", ("NHWC", "NWC")),
            ("dilations", (1, None)),
            ("padding", ("SAME", "VALID")),
        ):
            if name in args and _value(args[name]) not in allowed:
                raise LookError(f"the argument `{name}` must be {allowed[0]!r}. HINT: {target}(...)")
        sizes = [name for name in ("strides", filters) if name == "strides" or window == "pool_size"]
        for name in sizes:
            value = _value(args.get(name))
            if isinstance(value, list | tuple) and len(value) == 4 and value[0] == value[3] == 1:
                args[name] = cst.Arg(cst.parse_expression(repr(tuple(value[1:3]))))
            elif not isinstance(value, int):
                raise LookError(f"the argument `{name}` is not a number in the program. HINT: {target}(...)")
        padding = str(_value(args["padding"])).lower()
        if filters == "filters":  # Keras takes an array here, and no variable.
            args[filters] = cst.Arg(
                cst.parse_expression(f"keras.ops.convert_to_tensor({source_of(args[filters].value)})")
            )
        return _expression(f"{target}({{input}}, {{{filters}}}, strides={{strides}}, padding={padding!r})", args)

    return form


def _logical_devices(call: cst.Call) -> cst.BaseExpression:
    """Virtual devices: their number is the length of a list, and the list is of one of two kinds."""
    configurations = _args(call, "device", "logical_devices").get("logical_devices")
    value = configurations.value if configurations is not None else None
    if value is not None and "memory_limit" in source_of(value):
        raise LookError("a GPU cannot be divided. HINT: phalanx.set_virtual_cpu_devices(2)")
    if isinstance(value, cst.List):
        return cst.parse_expression(f"phalanx.set_virtual_cpu_devices({len(value.elements)})")
    if isinstance(value, cst.BinaryOperation) and isinstance(value.left, cst.List) and len(value.left.elements) == 1:
        return cst.parse_expression(f"phalanx.set_virtual_cpu_devices({source_of(value.right)})")
    raise LookError("HINT: phalanx.set_virtual_cpu_devices(2)")


def _print(call: cst.Call) -> cst.BaseExpression:
    """`tf.print` prints when a program runs, as `jax.debug.print` does."""
    values = [arg for arg in call.args if arg.keyword is None]
    if any(arg.star for arg in values):
        raise LookError('HINT: jax.debug.print("loss {}", loss)')
    texts, arrays = [], []
    for arg in values:
        value = _value(arg)
        if isinstance(value, str):
            # Braces in the text would be places for values in `jax.debug.print`.
            texts.append(value.replace("{", "{{").replace("}", "}}"))
        # An f-string is computed when the function is traced, and would show tracers.
        elif isinstance(arg.value, cst.FormattedString):
            raise LookError('HINT: jax.debug.print("loss {}", loss)')
        else:
            texts.append("{}")
            arrays.append(source_of(arg.value))
    return cst.parse_expression(f"jax.debug.print({', '.join([repr(' '.join(texts)), *arrays])})")


VIRTUAL_DEVICES = (
    "tf.config.experimental.set_virtual_device_configuration",
    "tf.config.set_logical_device_configuration",
)
"""Names of functions that make several devices of the first argument."""

FORMS: Mapping[str, Callable[[cst.Call], cst.BaseExpression]] = {
    **dict.fromkeys(VIRTUAL_DEVICES, _logical_devices),
    "tf.nn.avg_pool2d": _strided("keras.ops.average_pool", "ksize", "pool_size"),
    "tf.nn.conv2d": _strided("keras.ops.conv", "filters", "kernel"),
    "tf.nn.max_pool2d": _strided("keras.ops.max_pool", "ksize", "pool_size"),
    "tf.print": _print,
    "tf.split": _split,
}
"""The forms, by the name that is called. The table has these names too."""
