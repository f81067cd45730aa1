"""Enums and options validate themselves."""

import dataclasses
import enum

import jax.numpy as jnp
import keras
import pytest

import phalanx
from phalanx import ReduceOp, RunOptions
from phalanx._src.options import InputOptions, InputReplicationMode
from phalanx.elastic import ElasticOptions
from phalanx.errors import InvalidArgumentError, ReduceOpError
from phalanx.experimental import (
    CollectiveCommunication,
    CollectiveHints,
    CommunicationImplementation,
    CommunicationOptions,
    PowerSGD,
    TopK,
)
from phalanx.tpu import XLAOptions

ON_DEVICE = {
    "experimental_place_dataset_on_device": True,
    "experimental_replication_mode": InputReplicationMode.PER_REPLICA,
}


def test_reduce_op_parse():
    """Names in either case, and members; of TensorFlow's class, too, in a script that is half moved. The message lists them."""
    of_tensorflow = enum.Enum("ReduceOp", ["SUM", "MEAN"], module="tensorflow.python.distribute.reduce_util")
    for given in ("sum", "SUM", "Sum", ReduceOp.SUM, of_tensorflow.SUM):
        assert ReduceOp.parse(given) is ReduceOp.SUM
    assert ReduceOp.parse(of_tensorflow.MEAN) is ReduceOp.MEAN
    for given in ("MAX", "", None, 0, enum.Enum("ReduceOp", ["SUM"], module="elsewhere").SUM):
        with pytest.raises(ReduceOpError, match="is not a ReduceOp. The operations are SUM and MEAN"):
            ReduceOp.parse(given)


def test_implementation_takes_names_and_members():
    """Names in either case, and members. Older names, which tf.distribute has deprecated, are the same."""
    for given in ("nccl", "NCCL", CommunicationImplementation.NCCL):
        assert CommunicationOptions(implementation=given).implementation is CommunicationImplementation.NCCL
    assert CollectiveCommunication is CommunicationImplementation
    assert CollectiveHints(bytes_per_pack=7, timeout_seconds=1.0) == CommunicationOptions(7, 1.0)


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda: CommunicationOptions(-1), "bytes_per_pack=-1: must be 0 or more"),
        (lambda: CommunicationOptions(1.5), "bytes_per_pack=1.5: must be 0 or more, and an integer"),
        (lambda: CommunicationOptions(0, float("inf")), "timeout_seconds=inf: must be more than 0 seconds, or None"),
        (lambda: CommunicationOptions(0, -1.5), "timeout_seconds=-1.5: must be more than 0"),
        (lambda: CommunicationOptions(0, "1"), "timeout_seconds='1': must be more than 0 seconds, or None"),
        (lambda: CommunicationOptions(implementation="FOO"), "='FOO': is not a CommunicationImplementation"),
        (lambda: CommunicationOptions(implementation=3), "implementation=3: is not a CommunicationImplementation"),
        (
            lambda: CommunicationOptions(wire_dtype="int8"),
            'wire_dtype=\'int8\': must be "bfloat16" or None.\nHINT: wire_dtype="bfloat16"',
        ),
        (lambda: TopK(1.0), "fraction=1.0: must be a number between 0 and 1.\nHINT: fraction=0.01"),
        (
            lambda: CommunicationOptions(compression="float8"),
            "compression='float8': must be .*int8.*, a PowerSGD, a TopK or None.\nHINT: compression=\"int8\"",
        ),
        (lambda: CommunicationOptions(compression=PowerSGD), "HINT: compression=PowerSGD\\(rank=2\\)"),
        (lambda: ElasticOptions(copy_every=0), "copy_every=0: must be a positive integer.\nHINT: copy_every=100"),
        (lambda: RunOptions(eager=1), "eager=1: must be True or False"),
        (lambda: RunOptions("yes"), "experimental_enable_dynamic_batch_size='yes': must be True or False"),
        (
            lambda: RunOptions(experimental_bucketizing_dynamic_shape=True),
            "experimental_bucketizing_dynamic_shape=True: the shapes in a program are static.\nHINT: keras.utils.pad",
        ),
        (lambda: RunOptions(experimental_xla_options={}), "experimental_xla_options={}: must be XLAOptions"),
        (
            lambda: XLAOptions(use_spmd_for_xla_partitioning=False),
            "use_spmd_for_xla_partitioning=False: every program has static shapes and is partitioned by XLA",
        ),
        (lambda: XLAOptions(enable_xla_dynamic_padder=False), "enable_xla_dynamic_padder=False: every"),
        (lambda: XLAOptions(use_shardy_partitioner=None), "use_shardy_partitioner=None: must be True or"),
        (lambda: InputOptions(1), "experimental_fetch_to_device=1: must be True or False"),
        (
            lambda: InputOptions(experimental_place_dataset_on_device=None),
            "experimental_place_dataset_on_device=None: must be True or",
        ),
        (
            lambda: InputOptions(experimental_per_replica_buffer_size=-1),
            "experimental_per_replica_buffer_size=-1: must be a number of batches, 0 or more.\nHINT: 1",
        ),
        (
            lambda: InputOptions(experimental_replication_mode="PER_WORKER"),
            "replication_mode='PER_WORKER': must be an InputReplicationM",
        ),
        (
            lambda: InputOptions(auto_shard_policy="DATA"),
            "auto_shard_policy='DATA': must be an AutoShardPolicy.\nHINT: phalanx.data",
        ),
        (
            lambda: InputOptions(experimental_place_dataset_on_device=True),
            "experimental_place_dataset_on_device=True: a dataset on a device belongs to one replica",
        ),
        (
            lambda: InputOptions(experimental_fetch_to_device=True, **ON_DEVICE),
            "=True with experimental_fetch_to_device=True: a dataset on the device has nothing to fetch",
        ),
    ],
)
def test_bad_options_are_refused(make, match):
    """When they are made."""
    with pytest.raises(InvalidArgumentError, match=match):
        make()


def test_merge_prefers_what_is_set():
    """Fields that the other options set win."""
    ours = CommunicationOptions(bytes_per_pack=7, timeout_seconds=3, implementation="ring")
    merged = ours.merge(CommunicationOptions(timeout_seconds=9, wire_dtype="bfloat16"))
    assert merged == CommunicationOptions(7, timeout_seconds=9, implementation="ring", wire_dtype="bfloat16")
    assert ours.merge(None) is ours
    with pytest.raises(InvalidArgumentError, match="other=3: must be CommunicationOptions"):
        CommunicationOptions().merge(3)


def test_options_are_frozen():
    """They may be shared."""
    for options in (CommunicationOptions(), RunOptions()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            options.eager = True


def test_run_options_of_tensorflow():
    """What has a meaning is taken, in tf.distribute's order."""
    options = RunOptions(False, False, XLAOptions(use_shardy_partitioner=True))
    assert (options.experimental_enable_dynamic_batch_size, options.eager) == (False, False)
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    assert float(strategy.reduce("SUM", strategy.run(lambda: jnp.ones(()), options=options), axis=None)) == 2.0


def test_enums_are_the_strings_of_keras():
    """Each member, for each of Keras's names."""
    kinds = {"aggregation": phalanx.VariableAggregation, "synchronization": phalanx.VariableSynchronization}
    for name, kind in kinds.items():
        for member in kind:
            assert getattr(keras.Variable(1.0, **{name: member}), name) == member.value


def test_batches_are_fetched_unless_refused():
    """Batches go to the devices ahead of time by default; a dataset that is there already may be asked not to."""
    assert InputOptions().fetches_to_device
    assert not InputOptions(experimental_fetch_to_device=False, **ON_DEVICE).fetches_to_device
    assert InputOptions(experimental_fetch_to_device=True).fetches_to_device
