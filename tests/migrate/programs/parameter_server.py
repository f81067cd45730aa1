"""Workers and servers on this machine, as the tutorial on parameter servers starts them, and a coordinator that schedules steps."""

import multiprocessing

import numpy as np
import tensorflow as tf

NUM_WORKERS, NUM_PS = 2, 1
PORTS = [13371, 13372, 13373]
rng = np.random.default_rng(0)
x = rng.normal(size=(16, 3)).astype("float32")
y = x.sum(-1, keepdims=True).astype("float32")


def create_in_process_cluster(num_workers, num_ps):
    """Creates and starts local servers and returns the cluster_resolver."""
    addresses = [f"localhost:{port}" for port in PORTS]
    cluster_spec = tf.train.ClusterSpec({"worker": addresses[:num_workers], "ps": addresses[num_workers:]})
    worker_config = tf.compat.v1.ConfigProto()
    if multiprocessing.cpu_count() < num_workers + 1:
        worker_config.inter_op_parallelism_threads = num_workers + 1
    for i in range(num_workers):
        tf.distribute.Server(cluster_spec, job_name="worker", task_index=i, config=worker_config, protocol="grpc")
    for i in range(num_ps):
        tf.distribute.Server(cluster_spec, job_name="ps", task_index=i, protocol="grpc")
    return tf.distribute.cluster_resolver.SimpleClusterResolver(cluster_spec, rpc_layer="grpc")


cluster_resolver = create_in_process_cluster(NUM_WORKERS, NUM_PS)
variable_partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(
    min_shard_bytes=256 << 10, max_shards=NUM_PS
)
strategy = tf.distribute.ParameterServerStrategy(cluster_resolver, variable_partitioner=variable_partitioner)

with strategy.scope():
    w = tf.Variable(tf.zeros([3, 1]))
    optimizer = tf.keras.optimizers.SGD(0.2)
    optimizer.build([w])


@tf.function
def step_fn():
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean(tf.square(tf.matmul(x, w) - y))
    gradient = tape.gradient(loss, w)
    w.assign_sub(0.2 * gradient)
    return loss


coordinator = tf.distribute.coordinator.ClusterCoordinator(strategy)
losses = []
for _ in range(20):
    result = coordinator.schedule(step_fn)
    coordinator.join()
    losses.append(float(result.fetch()))
