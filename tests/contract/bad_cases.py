"""Options, assignments, partitioners, clusters and resolvers with good arguments; bad values replace them one by one."""

import functools

import jax.numpy as jnp
from bad_values import ALL, ARRAYS, COUNT, FUNCTIONS, INDEX, INTEGER, NONE, SECONDS, TEXTS, Case, named

import phalanx
import phalanx.testing
from phalanx import cluster_resolver, experimental
from phalanx.cluster_resolver import ClusterSpec
from phalanx.tpu import experimental as tpu

SPEC = ClusterSpec({"worker": ["a:1", "b:2"]})
TOPOLOGY = tpu.Topology(mesh_shape=(2, 2), device_coordinates=[[[0, 0], [0, 1], [1, 0], [1, 1]]])
ASSIGNMENT = tpu.DeviceAssignment.build(TOPOLOGY, [1, 2], num_replicas=2)


def specified(make):
    """Returns what makes a resolver and asks for the cluster."""
    return functools.wraps(make)(lambda **given: make(**given).cluster_spec())


def of_options():
    """Values that hold what they are made of."""
    return named(
        Case(
            experimental.CommunicationOptions,
            {"implementation": "auto"},
            takes={"bytes_per_pack": INDEX, "timeout_seconds": SECONDS},
        ),
        Case(experimental.PowerSGD, takes={"rank": COUNT, "start_step": INDEX}),
        Case(experimental.TopK),
        Case(experimental.LocalSGD, takes={"every": COUNT, "replicas_per_group": COUNT}),
        Case(
            experimental.DiLoCo,
            {"every": 8},
            takes={
                "outer_optimizer": NONE | FUNCTIONS,
                "every": COUNT,
                "fragments": COUNT,
                "replicas_per_group": COUNT,
            },
        ),
        Case(phalanx.elastic.ElasticOptions, takes={"copy_every": COUNT | NONE}),
        Case(experimental.CommunicationOptions().merge, {"other": None}, takes={"other": NONE}),
        Case(phalanx.RunOptions, {"eager": True}, takes={"experimental_bucketizing_dynamic_shape": set()}),
        Case(phalanx.tpu.XLAOptions, {"use_shardy_partitioner": True}),
        Case(
            phalanx.InputOptions,
            takes={
                "experimental_fetch_to_device": {"None", "True"},
                "experimental_per_replica_buffer_size": INDEX,
                "experimental_place_dataset_on_device": set(),
            },
        ),
        Case(
            phalanx.InputContext,
            takes={"num_input_pipelines": COUNT, "input_pipeline_id": INDEX, "num_replicas_in_sync": COUNT},
        ),
        Case(
            phalanx.InputContext().get_per_replica_batch_size,
            {"global_batch_size": 8},
            takes={"global_batch_size": COUNT},
        ),
        Case(experimental.ValueContext, takes={"replica_id_in_sync_group": INDEX, "num_replicas_in_sync": COUNT}),
        Case(phalanx.NcclAllReduce, takes={"num_packs": INDEX | NONE}),
        Case(phalanx.HierarchicalCopyAllReduce, takes={"num_packs": INDEX | NONE}),
        Case(
            phalanx.ReductionToOneDevice,
            {"accumulation_fn": jnp.add},
            takes={"accumulation_fn": {"None", "function of one", "generator function"}},
        ),
        Case(phalanx.fully_sharded, {"min_size": 1}, takes={"axis": {"text", "long text"}, "min_size": COUNT}),
        Case(
            phalanx.Variable,
            {"initial_value": 1.0, "synchronization": "auto", "aggregation": "none"},
            takes={
                "trainable": {"None", "True"},
                "name": NONE | TEXTS,
                "dtype": {"None", "class"},
                "shape": {"None", "empty list", "empty tuple"},
                "initial_value": ARRAYS | {"True", "empty list", "empty tuple", "range", "class", "bool array"},
            },
            functions=("constraint", "initial_value"),
        ),
        Case(phalanx.ReduceOp.parse, {"op": "sum"}),
        Case(experimental.CommunicationImplementation.parse, {"value": "auto"}),
        Case(experimental.partitioners.FixedShardsPartitioner, {"num_shards": 2}, takes={"num_shards": COUNT}),
        Case(
            experimental.partitioners.MinSizePartitioner,
            {"min_shard_bytes": 1, "bytes_per_string": 1},
            takes={"min_shard_bytes": COUNT, "max_shards": COUNT, "bytes_per_string": COUNT},
        ),
        Case(
            experimental.partitioners.MaxSizePartitioner,
            {"max_shard_bytes": 1, "bytes_per_string": 1},
            takes={"max_shard_bytes": COUNT, "max_shards": COUNT | NONE, "bytes_per_string": COUNT},
        ),
        Case(TOPOLOGY.task_ordinal_at_coordinates, {"device_coordinates": (0, 0)}),
        Case(TOPOLOGY.tpu_device_ordinal_at_coordinates, {"device_coordinates": (0, 0)}),
        Case(TOPOLOGY.tpu_device_name_at_coordinates, {"device_coordinates": (0, 0)}, takes={"job": NONE | TEXTS}),
        Case(TOPOLOGY.cpu_device_name_at_coordinates, {"device_coordinates": (0, 0)}, takes={"job": NONE | TEXTS}),
        Case(tpu.DeviceAssignment, {"topology": TOPOLOGY, "core_assignment": [[[0, 0]], [[0, 1]]]}),
        Case(tpu.DeviceAssignment.build, {"topology": TOPOLOGY}, takes={"num_replicas": {"integer of NumPy"}}),
        Case(
            ASSIGNMENT.coordinates, {"replica": 0, "logical_core": 0}, takes={"replica": {"0"}, "logical_core": {"0"}}
        ),
        Case(ASSIGNMENT.tpu_ordinal, takes={"replica": {"0"}, "logical_core": {"0"}}),
        Case(ASSIGNMENT.tpu_device, takes={"replica": {"0"}, "logical_core": {"0"}, "job": NONE | TEXTS}),
        Case(ASSIGNMENT.host_device, takes={"replica": {"0"}, "logical_core": {"0"}, "job": NONE | TEXTS}),
        Case(
            ASSIGNMENT.lookup_replicas,
            {"task_id": 0, "logical_core": 0},
            takes={"task_id": {"0"}, "logical_core": {"0"}},
        ),
    ) | {
        "Partitioner.__call__": Case(
            experimental.partitioners.FixedShardsPartitioner(2),
            {"shape": (2, 3), "dtype": "float32"},
            takes={"dtype": ALL, "axis": {"-1", "0"}},
        ),
        "TPUTopology": Case(lambda **kw: tpu.Topology(**kw), {"mesh_shape": (1, 1), "device_coordinates": [[[0, 0]]]}),
        "TPUTopology(serialized)": Case(
            tpu.Topology,
            {"serialized": TOPOLOGY.serialized()},
            takes=dict.fromkeys(("mesh_shape", "device_coordinates"), ALL),
        ),
    }


def of_clusters():
    """Clusters and their resolvers; those that ask a service are asked by their own tests."""
    resolver = cluster_resolver.SimpleClusterResolver(SPEC)
    of_master = {"task_type": "worker", "task_id": 0, "rpc_layer": None}
    return named(
        Case(ClusterSpec, {"cluster": {"worker": ["a:1"]}}, takes={"cluster": {"empty dict"}}),
        Case(SPEC.num_tasks, {"job_name": "worker"}),
        Case(SPEC.task_indices, {"job_name": "worker"}),
        Case(SPEC.job_tasks, {"job_name": "worker"}),
        Case(SPEC.task_address, {"job_name": "worker", "task_index": 0}, takes={"task_index": {"0"}}),
        Case(
            cluster_resolver.SimpleClusterResolver,
            {"cluster_spec": SPEC},
            takes={
                "master": TEXTS,
                "task_type": NONE | TEXTS,
                "task_id": NONE | INTEGER,
                "environment": TEXTS,
                "num_accelerators": {"None", "empty dict"},
                "rpc_layer": NONE | TEXTS,
            },
        ),
        Case(specified(cluster_resolver.TFConfigClusterResolver), {"task_type": "worker", "task_id": 0, "environ": {}}),
        Case(
            specified(cluster_resolver.SlurmClusterResolver),
            {
                "environ": {
                    "SLURM_PROCID": "0",
                    "SLURM_STEP_NUM_TASKS": "1",
                    "SLURM_STEP_NODELIST": "a",
                    "SLURM_STEP_TASKS_PER_NODE": "1",
                }
            },
            takes={
                "jobs": {"None", "empty dict"},
                "port_base": {"integer of NumPy"},
                **dict.fromkeys(("gpus_per_node", "gpus_per_task"), {"None", "0", "integer of NumPy"}),
                "rpc_layer": TEXTS,
            },
        ),
        Case(
            specified(cluster_resolver.SageMakerClusterResolver),
            {"environ": {"SM_HOSTS": '["a"]', "SM_CURRENT_HOST": "a"}},
            takes={
                "port": {"integer of NumPy"},
                "task_type": NONE | TEXTS,
                "task_id": NONE | INTEGER,
                "rpc_layer": NONE | TEXTS,
                "environment": NONE | TEXTS,
            },
        ),
        Case(
            specified(cluster_resolver.TPUClusterResolver),
            {"tpu": "local", "environ": {}},
            takes={
                "job_name": TEXTS,
                "port": {"integer of NumPy"},
                "coordinator_name": NONE | TEXTS,
                "coordinator_address": NONE | TEXTS,
                **dict.fromkeys(("zone", "project", "discovery_url"), NONE | TEXTS),
                **dict.fromkeys(("credentials", "service"), ALL),
                "environ": {"None", "empty dict"},
            },
        ),
        Case(
            cluster_resolver.TPUClusterResolver("local").set_tpu_topology,
            {"serialized_tpu_topology": TOPOLOGY.serialized()},
        ),
        Case(tpu.initialize_tpu_system, {"cluster_resolver": resolver}),
        Case(phalanx.testing.virtual_topology, {"mesh_shape": (2, 2)}),
        Case(
            phalanx.testing.VirtualNetwork,
            {"megabits_per_second": 100, "machines": 2},
            takes={"megabits_per_second": SECONDS},
        ),
        Case(phalanx.testing.VirtualNetwork().pull_cable, {"machine": 1}, takes={"machine": {"0"}}),
        Case(phalanx.testing.VirtualNetwork().plug_cable, {"machine": 1}, takes={"machine": {"0"}}),
        Case(
            phalanx.testing.VirtualNetwork().command,
            {"machine": 1, "command": ["ls"]},
            takes={"machine": {"0"}, "command": {"empty list", "empty tuple"}},
        ),
        Case(
            phalanx.Server,
            {"server_or_cluster_def": {"chief": ["a:1"], "worker": ["b:1"]}, "job_name": "worker", "task_index": 0},
            takes={"task_index": {"None", "0"}, "protocol": NONE | TEXTS},
        ),
    ) | {
        "ClusterResolver.master": Case(
            resolver.master, of_master, takes={"task_id": {"None", "0"}, "rpc_layer": NONE | TEXTS}
        ),
        "UnionResolver": Case(
            lambda a, **kw: cluster_resolver.UnionResolver(a, **kw),
            {"a": resolver, "task_type": None, "task_id": None, "rpc_layer": None},
            takes={"task_type": NONE | TEXTS, "task_id": NONE | INTEGER, "rpc_layer": NONE | TEXTS},
        ),
    }


GROUPS = {"options": of_options, "clusters": of_clusters}
"""Cases that share what they are made of."""
