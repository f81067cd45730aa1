"""Options, assignments, partitioners, clusters and resolvers with good arguments; bad values replace them one by one."""

import jax.numpy as jnp
from bad_values import ALL, COUNT, INDEX, INTEGER, NONE, NUMBERS, SECONDS, TEXTS, Case

import phalanx
import phalanx.testing
from phalanx import cluster_resolver, experimental
from phalanx.cluster_resolver import ClusterSpec
from phalanx.tpu import experimental as tpu

SPEC = ClusterSpec({"worker": ["a:1", "b:2"]})
TOPOLOGY = tpu.Topology(mesh_shape=(2, 2), device_coordinates=[[[0, 0], [0, 1], [1, 0], [1, 1]]])
ASSIGNMENT = tpu.DeviceAssignment.build(TOPOLOGY, [1, 2], num_replicas=2)


def of_options():
    """Values that hold what they are made of."""
    return {
        "CommunicationOptions": Case(
            experimental.CommunicationOptions,
            {
                "bytes_per_pack": 0,
                "timeout_seconds": None,
                "implementation": "auto",
                "wire_dtype": None,
                "compression": None,
                "error_feedback": True,
            },
        ),
        "PowerSGD": Case(
            experimental.PowerSGD, {"rank": 2, "start_step": 0}, takes={"rank": COUNT, "start_step": INDEX}
        ),
        "TopK": Case(experimental.TopK, {"fraction": 0.01}),
        "LocalSGD": Case(
            experimental.LocalSGD,
            {"every": 8, "replicas_per_group": 1},
            takes={"every": COUNT, "replicas_per_group": COUNT},
        ),
        "DiLoCo": Case(
            experimental.DiLoCo,
            {"outer_optimizer": None, "every": 8, "fragments": 1, "compression": None, "replicas_per_group": 1},
            takes={
                "outer_optimizer": NONE | {"function", "class"},
                "every": COUNT,
                "fragments": COUNT,
                "compression": NONE,
                "replicas_per_group": COUNT,
            },
        ),
        "ElasticOptions": Case(
            phalanx.elastic.ElasticOptions,
            {"donate": True, "copy_every": None, "scale_batch": False},
            takes={"donate": {"True"}, "copy_every": COUNT | NONE, "scale_batch": {"True"}},
        ),
        "CommunicationOptions.merge": Case(experimental.CommunicationOptions().merge, {"other": None}),
        "RunOptions": Case(
            phalanx.RunOptions,
            {
                "experimental_enable_dynamic_batch_size": True,
                "experimental_bucketizing_dynamic_shape": False,
                "experimental_xla_options": None,
                "eager": True,
            },
        ),
        "XLAOptions": Case(
            phalanx.tpu.XLAOptions,
            {
                "use_spmd_for_xla_partitioning": True,
                "enable_xla_dynamic_padder": True,
                "use_shardy_partitioner": True,
            },
        ),
        "InputOptions": Case(
            phalanx.InputOptions,
            {
                "experimental_fetch_to_device": None,
                "experimental_replication_mode": phalanx.InputReplicationMode.PER_WORKER,
                "experimental_place_dataset_on_device": False,
                "experimental_per_replica_buffer_size": 1,
                "auto_shard_policy": phalanx.data.AutoShardPolicy.AUTO,
            },
        ),
        "InputContext": Case(
            phalanx.InputContext,
            {"num_input_pipelines": 1, "input_pipeline_id": 0, "num_replicas_in_sync": 1},
        ),
        "InputContext.get_per_replica_batch_size": Case(
            phalanx.InputContext().get_per_replica_batch_size, {"global_batch_size": 8}
        ),
        "ValueContext": Case(experimental.ValueContext, {"replica_id_in_sync_group": 0, "num_replicas_in_sync": 1}),
        "NcclAllReduce": Case(phalanx.NcclAllReduce, {"num_packs": 1}),
        "HierarchicalCopyAllReduce": Case(phalanx.HierarchicalCopyAllReduce, {"num_packs": 1}),
        "ReductionToOneDevice": Case(
            phalanx.ReductionToOneDevice, {"reduce_to_device": None, "accumulation_fn": jnp.add}
        ),
        "fully_sharded": Case(phalanx.fully_sharded, {"axis": "replica", "min_size": 1}),
        "Variable": Case(
            phalanx.Variable,
            dict.fromkeys(
                ["trainable", "caching_device", "name", "variable_def", "dtype", "import_scope", "constraint", "shape"]
            )
            | {"initial_value": 1.0, "synchronization": "auto", "aggregation": "none", "validate_shape": True},
        ),
        "ReduceOp.parse": Case(phalanx.ReduceOp.parse, {"op": "sum"}),
        "CommunicationImplementation.parse": Case(experimental.CommunicationImplementation.parse, {"value": "auto"}),
        "FixedShardsPartitioner": Case(experimental.partitioners.FixedShardsPartitioner, {"num_shards": 2}),
        "MinSizePartitioner": Case(
            experimental.partitioners.MinSizePartitioner,
            {"min_shard_bytes": 1, "max_shards": 1, "bytes_per_string": 1},
        ),
        "MaxSizePartitioner": Case(
            experimental.partitioners.MaxSizePartitioner,
            {"max_shard_bytes": 1, "max_shards": None, "bytes_per_string": 1},
        ),
        "Partitioner.__call__": Case(
            experimental.partitioners.FixedShardsPartitioner(2), {"shape": (2, 3), "dtype": "float32", "axis": 0}
        ),
        "TPUTopology": Case(lambda **kw: tpu.Topology(**kw), {"mesh_shape": (1, 1), "device_coordinates": [[[0, 0]]]}),
        "TPUTopology(serialized)": Case(tpu.Topology, {"serialized": TOPOLOGY.serialized()}),
        "TPUTopology.task_ordinal_at_coordinates": Case(
            TOPOLOGY.task_ordinal_at_coordinates, {"device_coordinates": (0, 0)}
        ),
        "TPUTopology.tpu_device_ordinal_at_coordinates": Case(
            TOPOLOGY.tpu_device_ordinal_at_coordinates, {"device_coordinates": (0, 0)}
        ),
        "TPUTopology.tpu_device_name_at_coordinates": Case(
            TOPOLOGY.tpu_device_name_at_coordinates, {"device_coordinates": (0, 0), "job": None}
        ),
        "TPUTopology.cpu_device_name_at_coordinates": Case(
            TOPOLOGY.cpu_device_name_at_coordinates, {"device_coordinates": (0, 0), "job": None}
        ),
        "DeviceAssignment": Case(tpu.DeviceAssignment, {"topology": TOPOLOGY, "core_assignment": [[[0, 0]], [[0, 1]]]}),
        "DeviceAssignment.build": Case(
            tpu.DeviceAssignment.build,
            {
                "topology": TOPOLOGY,
                "computation_shape": None,
                "computation_stride": None,
                "num_replicas": 1,
                "device_order_mode": tpu.DeviceOrderMode.AUTO,
            },
        ),
        "DeviceAssignment.coordinates": Case(ASSIGNMENT.coordinates, {"replica": 0, "logical_core": 0}),
        "DeviceAssignment.tpu_ordinal": Case(ASSIGNMENT.tpu_ordinal, {"replica": 0, "logical_core": 0}),
        "DeviceAssignment.tpu_device": Case(ASSIGNMENT.tpu_device, {"replica": 0, "logical_core": 0, "job": None}),
        "DeviceAssignment.host_device": Case(ASSIGNMENT.host_device, {"replica": 0, "logical_core": 0, "job": None}),
        "DeviceAssignment.lookup_replicas": Case(ASSIGNMENT.lookup_replicas, {"task_id": 0, "logical_core": 0}),
    }


def of_clusters():
    """Clusters and their resolvers; those that ask a service are asked by their own tests."""
    resolver = cluster_resolver.SimpleClusterResolver(SPEC)
    of_master = {"task_type": "worker", "task_id": 0, "rpc_layer": None}
    return {
        "ClusterSpec": Case(ClusterSpec, {"cluster": {"worker": ["a:1"]}}),
        "ClusterSpec.num_tasks": Case(SPEC.num_tasks, {"job_name": "worker"}),
        "ClusterSpec.task_indices": Case(SPEC.task_indices, {"job_name": "worker"}),
        "ClusterSpec.job_tasks": Case(SPEC.job_tasks, {"job_name": "worker"}),
        "ClusterSpec.task_address": Case(SPEC.task_address, {"job_name": "worker", "task_index": 0}),
        "SimpleClusterResolver": Case(
            cluster_resolver.SimpleClusterResolver,
            {
                "cluster_spec": SPEC,
                "master": "",
                "task_type": None,
                "task_id": None,
                "environment": "",
                "num_accelerators": None,
                "rpc_layer": None,
            },
        ),
        "ClusterResolver.master": Case(resolver.master, of_master),
        "TFConfigClusterResolver": Case(
            lambda **kw: cluster_resolver.TFConfigClusterResolver(**kw).cluster_spec(),
            {"task_type": "worker", "task_id": 0, "rpc_layer": None, "environment": None, "environ": {}},
        ),
        "SlurmClusterResolver": Case(
            lambda **kw: cluster_resolver.SlurmClusterResolver(**kw).cluster_spec(),
            {
                "jobs": None,
                "port_base": 8888,
                "gpus_per_node": None,
                "gpus_per_task": None,
                "tasks_per_node": None,
                "auto_set_gpu": True,
                "rpc_layer": "grpc",
                "environ": {
                    "SLURM_PROCID": "0",
                    "SLURM_STEP_NUM_TASKS": "1",
                    "SLURM_STEP_NODELIST": "a",
                    "SLURM_STEP_TASKS_PER_NODE": "1",
                },
            },
        ),
        "SageMakerClusterResolver": Case(
            lambda **kw: cluster_resolver.SageMakerClusterResolver(**kw).cluster_spec(),
            {
                "port": 2223,
                "task_type": None,
                "task_id": None,
                "rpc_layer": None,
                "environment": None,
                "environ": {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a"},
            },
        ),
        "TPUClusterResolver": Case(
            lambda **kw: cluster_resolver.TPUClusterResolver(**kw).cluster_spec(),
            {
                "tpu": "local",
                "job_name": "worker",
                "coordinator_name": None,
                "coordinator_address": None,
                "port": 8482,
                "environ": {},
            },
        ),
        "TPUClusterResolver.set_tpu_topology": Case(
            cluster_resolver.TPUClusterResolver("local").set_tpu_topology,
            {"serialized_tpu_topology": TOPOLOGY.serialized()},
        ),
        "UnionResolver": Case(
            lambda a, **kw: cluster_resolver.UnionResolver(a, **kw),
            {"a": resolver, "task_type": None, "task_id": None, "rpc_layer": None},
        ),
        "initialize_tpu_system": Case(tpu.initialize_tpu_system, {"cluster_resolver": resolver}),
        "virtual_topology": Case(phalanx.testing.virtual_topology, {"mesh_shape": (2, 2)}),
        "VirtualNetwork": Case(
            phalanx.testing.VirtualNetwork, {"megabits_per_second": 100}, takes={"megabits_per_second": SECONDS}
        ),
        "VirtualNetwork.command": Case(
            phalanx.testing.VirtualNetwork().command,
            {"machine": 1, "command": ["ls"]},
            takes={"machine": {"0"}, "command": {"empty list", "empty tuple"}},
        ),
        "Server": Case(
            phalanx.Server,
            {
                "server_or_cluster_def": {"chief": ["a:1"], "worker": ["b:1"]},
                "job_name": "worker",
                "task_index": 0,
                "protocol": None,
            },
        ),
    }


GROUPS = {"options": of_options, "clusters": of_clusters}
"""Cases that share what they are made of."""

TAKES: dict[str, dict[str, set[str]]] = {
    "CommunicationOptions": {
        "bytes_per_pack": INDEX,
        "timeout_seconds": SECONDS,
        "wire_dtype": NONE,
        "compression": NONE,
        "error_feedback": {"True"},
    },
    "CommunicationOptions.merge": {"other": NONE},
    "RunOptions": {
        "experimental_enable_dynamic_batch_size": {"True"},
        "experimental_xla_options": NONE,
        "eager": {"True"},
    },
    "XLAOptions": {
        "use_spmd_for_xla_partitioning": {"True"},
        "enable_xla_dynamic_padder": {"True"},
        "use_shardy_partitioner": {"True"},
    },
    "InputOptions": {"experimental_fetch_to_device": {"None", "True"}, "experimental_per_replica_buffer_size": INDEX},
    "InputContext": {"num_input_pipelines": COUNT, "input_pipeline_id": INDEX, "num_replicas_in_sync": COUNT},
    "InputContext.get_per_replica_batch_size": {"global_batch_size": COUNT},
    "ValueContext": {"replica_id_in_sync_group": INDEX, "num_replicas_in_sync": COUNT},
    "NcclAllReduce": {"num_packs": INDEX | NONE},
    "HierarchicalCopyAllReduce": {"num_packs": INDEX | NONE},
    "ReductionToOneDevice": {"reduce_to_device": NONE, "accumulation_fn": {"None", "function of one"}},
    "fully_sharded": {"axis": {"text", "long text"}, "min_size": COUNT},
    "Variable": {
        "trainable": {"None", "True"},
        "caching_device": NONE,
        "name": NONE | TEXTS,
        "variable_def": NONE,
        "dtype": {"None", "class"},
        "import_scope": NONE,
        "shape": {"None", "empty list", "empty tuple"},
        "initial_value": NUMBERS
        | {
            "True",
            "empty list",
            "empty tuple",
            "range",
            "class",
            "array of NumPy",
            "empty array",
            "bool array",
            "array",
            "Mirrored",
            "variable",
        },
        "validate_shape": {"True"},
        "constraint": NONE,
    },
    "FixedShardsPartitioner": {"num_shards": COUNT},
    "MinSizePartitioner": {"min_shard_bytes": COUNT, "max_shards": COUNT, "bytes_per_string": COUNT},
    "MaxSizePartitioner": {"max_shard_bytes": COUNT, "max_shards": COUNT | NONE, "bytes_per_string": COUNT},
    "Partitioner.__call__": {"dtype": ALL, "axis": {"-1", "0"}},
    "TPUTopology.tpu_device_name_at_coordinates": {"job": NONE | TEXTS},
    "TPUTopology.cpu_device_name_at_coordinates": {"job": NONE | TEXTS},
    "DeviceAssignment.build": {"computation_shape": NONE, "computation_stride": NONE},
    "DeviceAssignment.coordinates": {"replica": {"0"}, "logical_core": {"0"}},
    "DeviceAssignment.tpu_ordinal": {"replica": {"0"}, "logical_core": {"0"}},
    "DeviceAssignment.tpu_device": {"replica": {"0"}, "logical_core": {"0"}, "job": NONE | TEXTS},
    "DeviceAssignment.host_device": {"replica": {"0"}, "logical_core": {"0"}, "job": NONE | TEXTS},
    "DeviceAssignment.lookup_replicas": {"task_id": {"0"}, "logical_core": {"0"}},
    "ClusterSpec": {"cluster": {"empty dict"}},
    "ClusterSpec.task_address": {"task_index": {"0"}},
    "SimpleClusterResolver": {
        "master": TEXTS,
        "task_type": NONE | TEXTS,
        "task_id": NONE | INTEGER,
        "environment": TEXTS,
        "num_accelerators": {"None", "empty dict"},
        "rpc_layer": NONE | TEXTS,
    },
    # Taken from the environment, where another test has virtual TPUs.
    "initialize_tpu_system": {"cluster_resolver": NONE},
    "ClusterResolver.master": {"task_type": NONE, "task_id": {"None", "0"}, "rpc_layer": NONE | TEXTS},
    "SlurmClusterResolver": {
        "jobs": {"None", "empty dict"},
        "gpus_per_node": {"None", "0"},
        "gpus_per_task": {"None", "0"},
        "tasks_per_node": NONE,
        "auto_set_gpu": {"True"},
        "rpc_layer": TEXTS,
    },
    "SageMakerClusterResolver": {
        "task_type": NONE | TEXTS,
        "task_id": NONE | INTEGER,
        "rpc_layer": NONE | TEXTS,
        "environment": NONE | TEXTS,
    },
    "TPUClusterResolver": {
        "job_name": TEXTS,
        "coordinator_name": NONE | TEXTS,
        "coordinator_address": NONE | TEXTS,
        "environ": {"None", "empty dict"},
    },
    "UnionResolver": {"task_type": NONE | TEXTS, "task_id": NONE | INTEGER, "rpc_layer": NONE | TEXTS},
    "Server": {"task_index": {"None", "0"}, "protocol": NONE | TEXTS},
}
"""Values that are good for an argument: sizes may be large, names any text, and so on."""
FUNCTIONS_OF = {"Variable": ("constraint", "initial_value")}
