"""Enums and options validate themselves."""

import dataclasses
import enum

import jax.numpy as jnp
import keras
import pytest

import phalanx
from phalanx import ReduceOp, RunOptions
from phalanx.errors import InvalidArgumentError, ReduceOpError
from phalanx.experimental import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
)
from phalanx.options import InputOptions, InputReplicationMode

ON_DEVICE = {
    "experimental_place_dataset_on_device": True,
    "experimental_replication_mode": InputReplicationMode.PER_REPLICA,
}


@pytest.mark.parametrize("given", ["sum", "SUM", "Sum", ReduceOp.SUM])
def test_reduce_op_parse(given):
    """Names in either case, and members."""
    assert ReduceOp.parse(given) is ReduceOp.SUM


@pytest.mark.parametrize("given", ["MAX", "", None, 0])
def test_reduce_op_unknown(given):
    """The message lists the operations."""
    with pytest.raises(ReduceOpError, match="is not a ReduceOp. The operations are SUM and MEAN"):
        ReduceOp.parse(given)


@pytest.mark.parametrize("given", ["nccl", "NCCL", CommunicationImplementation.NCCL])
def test_implementation_takes_names_and_members(given):
    """Names in either case, and members."""
    assert CommunicationOptions(implementation=given).implementation is CommunicationImplementation.NCCL


@pytest.mark.parametrize(
    ("field", "value", "match"),
    [
        ("bytes_per_pack", -1, "bytes_per_pack=-1: must be 0 or more"),
        ("timeout_seconds", 0, "timeout_seconds=0: must be more than 0 seconds, or None"),
        ("timeout_seconds", -1.5, "timeout_seconds=-1.5: must be more than 0"),
        ("implementation", "FOO", "implementation='FOO': is not a CommunicationImplementation"),
        ("implementation", 3, "implementation=3: is not a CommunicationImplementation"),
        ("wire_dtype", "int8", 'wire_dtype=\'int8\': must be "bfloat16" or None.\nHINT: wire_dtype="bfloat16"'),
        ("wire_dtype", "float32", "wire_dtype='float32': must be"),
        ("bytes_per_pack", 1.5, "bytes_per_pack=1.5: must be 0 or more, and an integer"),
        ("bytes_per_pack", True, "bytes_per_pack=True: must be 0 or more, and an integer"),
        ("timeout_seconds", float("inf"), "timeout_seconds=inf: must be more than 0 seconds, or None"),
        ("timeout_seconds", "1", "timeout_seconds='1': must be more than 0 seconds, or None"),
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


def test_older_name_is_the_same_enum():
    """`experimental.CollectiveCommunication` is the same enum."""
    assert CollectiveCommunication is CommunicationImplementation


def test_hints_of_collectives():
    """`experimental.CollectiveHints`, which tf.distribute has deprecated, makes communication options."""
    assert CollectiveHints(bytes_per_pack=7, timeout_seconds=1.0) == CommunicationOptions(7, 1.0)


def test_merge_with_something_else():
    """Refused by name."""
    with pytest.raises(InvalidArgumentError, match="other=3: must be CommunicationOptions"):
        CommunicationOptions().merge(3)


def test_run_options_of_tensorflow():
    """What has a meaning is taken, in tf.distribute's order."""
    options = RunOptions(False, False, phalanx.tpu.XLAOptions(use_shardy_partitioner=True))
    assert (options.experimental_enable_dynamic_batch_size, options.eager) == (False, False)
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    assert float(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(()), options=options), axis=None)) == 2.0


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: RunOptions(eager=1), "eager=1: must be True or False"),
        (lambda: RunOptions("yes"), "experimental_enable_dynamic_batch_size='yes': must be True or False"),
        (
            lambda: RunOptions(experimental_bucketizing_dynamic_shape=True),
            "experimental_bucketizing_dynamic_shape=True: the shapes in a program are static.\nHINT: keras.utils.pad",
        ),
        (lambda: RunOptions(experimental_xla_options={}), "experimental_xla_options={}: must be XLAOptions"),
        (
            lambda: phalanx.tpu.XLAOptions(use_spmd_for_xla_partitioning=False),
            "use_spmd_for_xla_partitioning=False: every program has static shapes and is partitioned by XLA",
        ),
        (lambda: phalanx.tpu.XLAOptions(enable_xla_dynamic_padder=False), "enable_xla_dynamic_padder=False: every"),
        (lambda: phalanx.tpu.XLAOptions(use_shardy_partitioner=None), "use_shardy_partitioner=None: must be True or"),
    ],
)
def test_bad_run_options(make, match):
    """Refused when they are made."""
    with pytest.raises(InvalidArgumentError, match=match):
        make()


@pytest.mark.parametrize("name", ["aggregation", "synchronization"])
def test_enums_are_the_strings_of_keras(name):
    """Each member, for each of Keras's names."""
    kind = {"aggregation": phalanx.VariableAggregation, "synchronization": phalanx.VariableSynchronization}[name]
    for member in kind:
        assert getattr(keras.Variable(1.0, **{name: member}), name) == member.value


def test_reduce_op_of_tensorflow_is_taken():
    """A script that is half moved may still name TensorFlow's operation; another library's is refused."""
    of_tensorflow = enum.Enum("ReduceOp", ["SUM", "MEAN"], module="tensorflow.python.distribute.reduce_util")
    assert ReduceOp.parse(of_tensorflow.MEAN) is ReduceOp.MEAN
    with pytest.raises(ReduceOpError, match="is not a ReduceOp"):
        ReduceOp.parse(enum.Enum("ReduceOp", ["SUM"], module="elsewhere").SUM)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"experimental_fetch_to_device": 1}, "experimental_fetch_to_device=1: must be True or False"),
        ({"experimental_place_dataset_on_device": None}, "experimental_place_dataset_on_device=None: must be True or"),
        (
            {"experimental_per_replica_buffer_size": -1},
            "experimental_per_replica_buffer_size=-1: must be a number of batches, 0 or more.\nHINT: 1",
        ),
        (
            {"experimental_replication_mode": "PER_WORKER"},
            "replication_mode='PER_WORKER': must be an InputReplicationM",
        ),
        ({"auto_shard_policy": "DATA"}, "auto_shard_policy='DATA': must be an AutoShardPolicy.\nHINT: phalanx.data"),
        (
            {"experimental_place_dataset_on_device": True},
            "experimental_place_dataset_on_device=True: a dataset on a device belongs to one replica",
        ),
        (
            {"experimental_fetch_to_device": True, **ON_DEVICE},
            "=True with experimental_fetch_to_device=True: a dataset on the device has nothing to fetch",
        ),
    ],
)
def test_bad_input_options_are_refused(given, match):
    """Refused when they are made."""
    with pytest.raises(InvalidArgumentError, match=match):
        InputOptions(**given)


def test_batches_are_fetched_unless_refused():
    """Batches go to the devices ahead of time by default; a dataset that is there already may be asked not to."""
    assert InputOptions().fetches_to_device
    assert not InputOptions(experimental_fetch_to_device=False, **ON_DEVICE).fetches_to_device
    assert InputOptions(experimental_fetch_to_device=True).fetches_to_device
