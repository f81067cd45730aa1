"""The faults of `make mutants`: what somebody could write by mistake, and what a user would suffer from."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Fault:
    """A text in a function, what stands there instead, and the tests that run first.

    Args:
        name: What is wrong.
        function: The name of a module, without those of its packages, and the qualified name of a function or class in it.
        text: A part of its source that is there once.
        replacement: What stands there instead.
        tests: Paths in `tests`, the cheapest first.
    """

    name: str
    function: str
    text: str
    replacement: str
    tests: str


FAULTS = [
    # collectives
    Fault(
        "sum of the replicas instead of their mean",
        "cross_device:mean_or_sum",
        "[s / lax.axis_size(REPLICA_AXIS) for s in sums] if op is ReduceOp.MEAN else sums",
        "sums",
        "unit/collectives/test_cross_device.py",
    ),
    Fault(
        "one half of the devices keeps its own sum",
        "cross_device:HierarchicalCopyAllReduce._sum_one",
        "[(a, b), (b, a)]",
        "[(a, b)]",
        "unit/collectives/test_cross_device.py",
    ),
    Fault(
        "replicas without rows are counted in a mean",
        "primitives:all_reduce",
        "jnp.maximum(psum(jnp.asarray(counts, jnp.int32), REPLICA_AXIS), 1)",
        "num_replicas",
        "unit/strategies/test_base.py unit/strategies/test_results.py contract/test_law1_equals_one_device.py",
    ),
    Fault(
        "error feedback forgets the second rounding",
        "codes:coded_sum",
        " + jnp.where(is_own, own - code.decode(result, x.dtype), 0)",
        "",
        "unit/collectives/test_compression.py",
    ),
    Fault(
        "small arrays take each other's places in a buffer",
        "packing:small_together",
        "[small[k] for k in pack]",
        "list(pack)",
        "unit/collectives/test_packing.py unit/collectives/test_cross_device.py",
    ),
    # kernels
    Fault(
        "the last of equal maxima gets the gradient",
        "pooling:_max_pool_jvp",
        "reversed(list(enumerate(places[:-1])))",
        "enumerate(places[:-1])",
        "unit/kernels/test_pooling.py",
    ),
    Fault(
        "padding is counted in an average",
        "pooling:average_pool",
        "if not any(map(any, windows.padding)):",
        "if windows.sizes:",
        "unit/kernels/test_pooling.py",
    ),
    Fault(
        "padding before and after are exchanged in a gradient",
        "convolution:_transposed_jvp",
        "(size - 1 - before, size - 1 - after)",
        "(size - 1 - after, size - 1 - before)",
        "unit/kernels/test_convolution.py",
    ),
    Fault(
        "kernels of CPUs in a program that is exported for GPUs",
        "platforms:are_cpus",
        "_platforms.get() or tuple(own)",
        "tuple(own)",
        "unit/programs/test_export.py unit/keras/test_kernels.py",
    ),
    # nn
    Fault(
        "padding mask forgotten in an average loss",
        "nn:compute_average_loss",
        "loss = jnp.where(over_rows(mask, loss), loss, 0)",
        "pass",
        "unit/test_nn.py contract/test_law1_equals_one_device.py",
    ),
    Fault(
        "padding counted as rows in an average loss",
        "nn:compute_average_loss",
        "rows: Any = replica.num_examples",
        "rows: Any = loss.shape[0] * replica.num_replicas_in_sync",
        "unit/test_nn.py contract/test_law1_equals_one_device.py",
    ),
    Fault(
        "regularization divided twice",
        "nn:scale_regularization_loss",
        "(1 if context.current().averaging else replica.num_replicas_in_sync)",
        "replica.num_replicas_in_sync",
        "unit/test_nn.py unit/tracing/test_local_updates.py",
    ),
    # cluster and cluster_resolver
    Fault(
        "the secret of a guest is not compared",
        "door:Door._hear",
        'if not self._secret.proves(message.get("proof"), "guest", *nonces, text):',
        'if not message.get("proof"):',
        "unit/cluster/test_door.py",
    ),
    Fault(
        "the secret of a host is not compared",
        "door:knock",
        'if secret.proves(answer.get("proof"), "host", nonce, own):',
        'if answer.get("proof"):',
        "unit/cluster/test_door.py unit/cluster/test_rollcall.py",
    ),
    Fault(
        "the group may read the secret",
        "secret:_secret_of_user",
        "(stat.S_IRWXG | stat.S_IRWXO)",
        "stat.S_IRWXO",
        "unit/cluster/test_secret.py",
    ),
    Fault(
        "a cluster of several machines needs no secret",
        "secret:secret_of",
        "if not all(map(is_loopback, addresses)):",
        "if not any(map(is_loopback, addresses)):",
        "unit/cluster/test_secret.py",
    ),
    Fault(
        "a process of the first group is left when the launcher dies",
        "guard:_main",
        "for group in groups:",
        "for group in groups[1:]:",
        "unit/cluster/test_guard.py",
    ),
    Fault(
        "workers agree on a step that is over",
        "sync_point:SyncPoint._settle",
        "max([self._passed, *self._counts.values()]) + 1",
        "max([self._passed, *self._counts.values()])",
        "unit/cluster/test_sync_point.py",
    ),
    Fault(
        "a lost worker is still waited for",
        "sync_point:SyncPoint.lose",
        "self._others.discard(rank)",
        "pass",
        "unit/cluster/test_sync_point.py",
    ),
    Fault(
        "a stall has no deadline",
        "verdict:judge_progress",
        "if known_s - moved_s <= stall_s:",
        "if known_s - moved_s <= stall_s or behind:",
        "unit/cluster/test_watch.py",
    ),
    Fault(
        "the end of a process is not noticed",
        "watch:Watch._listen",
        "self._members[rank].is_cut_off()",
        "pass",
        "unit/cluster/test_watch.py",
    ),
    Fault(
        "the variables after the fortieth are not compared",
        "agreement:shortened",
        "[*texts[:_LONGEST], *_hash_of(texts[_LONGEST:])]",
        "list(texts[:_LONGEST])",
        "unit/cluster/test_agreement.py",
    ),
    Fault(
        "a process of another cluster is let in",
        "rollcall:_Chief._require_same",
        "if about != self._call.about:",
        "if about is None:",
        "unit/cluster/test_rollcall.py",
    ),
    Fault(
        "an earlier handler does not get SIGTERM",
        "notices:Notices._note",
        "earlier._note(number, frame)",
        "pass",
        "unit/cluster/test_notices.py",
    ),
    Fault(
        "two tasks of a node share a GPU",
        "slurm:SlurmClusterResolver._own_gpus",
        "names[local * count : (local + 1) * count]",
        "names[:count]",
        "unit/cluster/resolvers/test_slurm.py",
    ),
    Fault(
        "worker 0 believes that it is the chief too",
        "spec:is_chief",
        "task in _trainers(spec)[:1]",
        "task.index == 0",
        "unit/cluster/test_spec.py unit/test_cluster_resolver.py",
    ),
    # launch
    Fault(
        "exit code of a killed worker lost",
        "outcome:Outcome.exit_code",
        "failure.code if failure.code > 0 else 128 - failure.code",
        "max(failure.code, 0)",
        "unit/launch/test_outcome.py",
    ),
    Fault(
        "failure of the evaluator lost",
        "outcome:Outcome.exit_code",
        "(self.culprit, self.first_failure, self.failed_evaluator)",
        "(self.culprit, self.first_failure)",
        "unit/launch/test_outcome.py unit/launch/test_evaluator.py",
    ),
    Fault(
        "nohup does not protect a run",
        "signals:Signals.__enter__",
        "[s for s in _ENDING if signal.getsignal(s) is not signal.SIG_IGN]",
        "list(_ENDING)",
        "unit/launch/test_supervise.py",
    ),
    Fault(
        "processes that a worker has started are left",
        "group:Group.end",
        "while self._alive() or strays(self._mark, self._workers):",
        "while self._alive():",
        "unit/launch/test_supervise.py",
    ),
    Fault(
        "last line of a worker lost",
        "output:Lines.rest",
        'return [rest.removesuffix(b"\\r")] if rest else []',
        "return []",
        "unit/launch/test_output.py",
    ),
    Fault(
        "a restart is not made",
        "supervise:run_group",
        "range(max_restarts + 1)",
        "range(max(1, max_restarts))",
        "unit/launch/test_supervise.py",
    ),
    Fault(
        "workers with the same GPUs",
        "plan:_shares_of_gpus",
        "gpus[rank * each : (rank + 1) * each]",
        "gpus[:each]",
        "unit/launch/test_plan.py",
    ),
    Fault(
        "a new generation takes the variables of the slowest",
        "rendezvous:Rendezvous._form",
        "progress.index(max(progress))",
        "progress.index(min(progress))",
        "unit/launch/test_rendezvous.py",
    ),
    Fault(
        "fewer workers than asked for go on",
        "rendezvous:Rendezvous._settle",
        "elif len(came) + len(newcomers) >= self._least or self._has_finished:",
        "elif came:",
        "unit/launch/test_rendezvous.py",
    ),
]
