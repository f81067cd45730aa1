"""Enums and options validate themselves."""

import dataclasses

import pytest

from phalanx import ReduceOp, RunOptions
from phalanx.errors import InvalidArgumentError, ReduceOpError
from phalanx.experimental import CollectiveCommunication, CommunicationImplementation, CommunicationOptions


@pytest.mark.parametrize("given", ["sum", "SUM", "Sum", ReduceOp.SUM])
def test_reduce_op_parse(given):
    """Names in either case, and members."""
    assert ReduceOp.parse(given) is ReduceOp.SUM


@pytest.mark.parametrize("given", ["MAX", "", None, 0])
def test_reduce_op_unknown(given):
    """The message lists the operations."""
    with pytest.raises(ReduceOpError, match="not a ReduceOp; the operations are SUM and MEAN"):
        ReduceOp.parse(given)


@pytest.mark.parametrize("given", ["nccl", "NCCL", CommunicationImplementation.NCCL])
def test_implementation_parse(given):
    """Names in either case, and members."""
    assert CommunicationOptions(implementation=given).implementation is CommunicationImplementation.NCCL


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("bytes_per_pack", -1, "bytes_per_pack=-1: must be 0 or more"),
        ("timeout_seconds", 0, "timeout_seconds=0: must be more than 0 seconds, or None"),
        ("timeout_seconds", -1.5, "timeout_seconds=-1.5: must be more than 0"),
        ("implementation", "FOO", "implementation='FOO': not a CommunicationImplementation"),
        ("implementation", 3, "implementation=3: not a CommunicationImplementation"),
        ("wire_dtype", "int8", 'wire_dtype=\'int8\': must be "bfloat16" or None.\nHINT: wire_dtype="bfloat16"'),
        ("wire_dtype", "float32", "wire_dtype='float32': must be"),
    ],
)
def test_bad_communication_options(field, value, match):
    """Refused when they are made."""
    with pytest.raises(InvalidArgumentError, match=match):
        CommunicationOptions(**{field: value})


def test_merge_prefers_what_is_set():
    """Fields that the other options set win."""
    ours = CommunicationOptions(bytes_per_pack=7, timeout_seconds=3, implementation="ring")
    merged = ours.merge(CommunicationOptions(timeout_seconds=9, wire_dtype="bfloat16"))
    assert merged == CommunicationOptions(7, timeout_seconds=9, implementation="ring", wire_dtype="bfloat16")
    assert ours.merge(None) is ours


@pytest.mark.parametrize("options", [CommunicationOptions(), RunOptions()])
def test_options_are_frozen(options):
    """They may be shared."""
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.eager = True


def test_older_name():
    """`experimental.CollectiveCommunication` is the same enum."""
    assert CollectiveCommunication is CommunicationImplementation
