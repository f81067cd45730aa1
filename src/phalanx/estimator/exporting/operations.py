# SPDX-License-Identifier: Apache-2.0
"""The operations that an exported program may have: those that compute from arrays, and reach neither Python nor the machine."""

import re

from jax.export import Exported
from jax.extend.mlir import ir
from jax.interpreters import mlir

_DIALECTS = frozenset(("builtin", "chlo", "func", "sdy", "stablehlo"))
_REACHING_OUT = frozenset(f"stablehlo.{name}" for name in ("infeed", "outfeed", "recv", "send"))
_CALLS = re.compile(
    r"lapack_\w+_ffi|cu(solver|sparse)_\w+_ffi|hipsolver_\w+_ffi|(cu|hip)_(threefry2x32_ffi|lu_pivots_to_permutation)"
    r"|stablehlo\.dynamic_\w+|Sharding|SPMD(FullToShard|ShardToFull)Shape|shape_assertion|annotate_device_placement|ApproxTopK|Eigh|Qr"
    r"|LuDecomposition|ProductOfElementaryHouseholderReflectors|AllocateBuffer"
)
"""The functions outside the program that JAX's own operations call. Others, such as callbacks to Python, take their arguments as addresses."""


def refused_operation(program: Exported) -> str | None:
    """Returns the first operation of an exported program that it may not have, or None.

    Args:
      program: what `jax.export.deserialize` returns, which compiles nothing.
    """
    refused: list[str] = []

    def see(operation: ir.Operation) -> ir.WalkResult:
        if (name := _refused(operation.name, operation.attributes)) is not None:
            refused.append(name)
            return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    # Parsing knows the dialects of JAX only, and runs nothing.
    with mlir.make_ir_context():
        ir.Module.parse(program.mlir_module()).operation.walk(see)
    return refused[0] if refused else None


def _refused(name: str, attributes: ir.OpAttributeMap) -> str | None:
    if name.partition(".")[0] not in _DIALECTS or name in _REACHING_OUT:
        return name
    if name != "stablehlo.custom_call":
        return None
    target = ir.StringAttr(attributes["call_target_name"]).value
    return None if _CALLS.fullmatch(target) else f"a call of {target!r}"
