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
        "unit/tracing/test_averages.py",
    ),
    Fault(
        "error feedback forgets the second rounding",
        "codes:coded_sum",
        " + jnp.where(is_own, shard - code.decode(result, x.dtype), 0)",
        "",
        "unit/collectives/test_compression.py",
    ),
    # runtime
    Fault(
        "every worker repeats the notes of the chief",
        "notes:note",
        "not is_this_chief()",
        "False",
        "unit/runtime/test_notes.py",
    ),
    Fault(
        "an installed plugin is reported as missing",
        "devices:_how_to_get",
        "not any(map(importlib.util.find_spec, plugins))",
        "True",
        "unit/mesh/test_devices.py",
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
    # nn
    Fault(
        "padding mask forgotten in an average loss",
        "nn:compute_average_loss",
        "loss = jnp.where(over_rows(mask, loss), loss, 0)",
        "pass",
        "unit/tracing/test_averages.py",
    ),
    Fault(
        "padding counted as rows in an average loss",
        "nn:compute_average_loss",
        "rows = None if replica is None else replica.num_examples",
        "rows = None",
        "unit/test_nn.py contract/test_law1_equals_one_device.py",
    ),
    # cluster and cluster_resolver
    Fault(
        "the proof of a client is not checked",
        "listener:Listener._hear",
        'if not self._secret.proves(message.get("proof"), "client", *nonces, text):',
        'if not message.get("proof"):',
        "unit/cluster/connections/test_listener.py",
    ),
    Fault(
        "the proof of a server is not checked",
        "listener:handshake",
        'if secret.proves(answer.get("proof"), "server", server_nonce, client_nonce):',
        'if answer.get("proof"):',
        "unit/cluster/connections/test_listener.py unit/cluster/connections/test_rollcall.py",
    ),
    Fault(
        "the group may read the secret",
        "secret:_secret_of_user",
        "(stat.S_IRWXG | stat.S_IRWXO)",
        "stat.S_IRWXO",
        "unit/cluster/connections/test_secret.py",
    ),
    Fault(
        "a cluster of several machines needs no secret",
        "secret:secret_of",
        "if not all(map(is_loopback, addresses)):",
        "if not any(map(is_loopback, addresses)):",
        "unit/cluster/connections/test_secret.py",
    ),
    Fault(
        "workers agree on a step that is over",
        "sync_point:SyncPoint._settle",
        "max([self._passed, *self._counts.values()]) + 1",
        "max([self._passed, *self._counts.values()])",
        "unit/cluster/watch/test_sync_point.py",
    ),
    Fault(
        "a lost worker is still waited for",
        "sync_point:SyncPoint.lose",
        "self._others.discard(rank)",
        "pass",
        "unit/cluster/watch/test_sync_point.py",
    ),
    Fault(
        "a stall has no deadline",
        "verdict:judge_progress",
        "if known_s - moved_s <= stall_s:",
        "if known_s - moved_s <= stall_s or behind:",
        "unit/cluster/watch/test_watch.py",
    ),
    Fault(
        "the end of a process is not noticed",
        "watch:Watch._listen",
        "self._members.by_rank[rank].is_cut_off()",
        "pass",
        "unit/cluster/watch/test_watch.py",
    ),
    Fault(
        "an earlier handler does not get SIGTERM",
        "notices:Notices._note",
        "earlier._note(number, frame)",
        "pass",
        "unit/cluster/processes/test_notices.py",
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
        "an option of the script is taken for one of the launcher",
        "misplaced:misplaced",
        """name not in options or f'"{name}"' in text or f"'{name}'" in text""",
        "name not in options",
        "unit/launch/test_misplaced.py",
    ),
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
        "None if self.unfinished else self.failed_evaluator",
        "None",
        "unit/launch/test_outcome.py unit/launch/test_evaluator.py",
    ),
    Fault(
        "a group that gives up has succeeded",
        "outcome:Outcome.exit_code",
        "TOO_FEW if self.unfinished else 0",
        "0",
        "unit/launch/test_outcome.py",
    ),
    Fault(
        "nobody judges when rank 0 has left",
        "verdict:Members.judge",
        "(self.rank == 0 or self.by_rank[0].is_gone)",
        "self.rank == 0",
        "unit/cluster/watch/test_watch.py",
    ),
    Fault(
        "a sign of life counts as a report",
        "verdict:Member.hear",
        "if not isinstance(message, SignOfLife):",
        "if True:",
        "unit/cluster/watch/test_watch.py",
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
        "a restart is not made",
        "supervise:run_group",
        "range(max_restarts + 1)",
        "range(max(1, max_restarts))",
        "unit/launch/test_supervise.py",
    ),
    Fault(
        "a new generation takes the variables of the slowest",
        "rendezvous:Rendezvous._form",
        "progress.index(max(progress))",
        "progress.index(min(progress))",
        "unit/launch/elastic/test_rendezvous.py",
    ),
    # compat
    Fault(
        "accumulated gradients are applied a step late",
        "optimizers:is_last_accumulated",
        "(optimizer._iterations.value + 1)",
        "optimizer._iterations.value",
        "unit/compat/test_optimizers.py",
    ),
    Fault(
        "padding is counted in a metric",
        "rows:_update_with_real_rows",
        "jnp.where(mask.reshape(mask.shape + (1,) * max(0, weight.ndim - 1)), weight, 0)",
        "weight",
        "unit/tracing/test_averages.py",
    ),
    Fault(
        "all replicas draw the same dropout",
        "seeds:_next_seed",
        "seed if scope is None else scope.fold_seed(seed, self.state)",
        "seed",
        "unit/compat/test_seeds.py unit/strategies/test_base.py unit/test_compat.py",
    ),
    Fault(
        "half of an update stays when it fails",
        "variables:transaction",
        "rollback()",
        "pass",
        "contract/test_law4a_interrupts.py",
    ),
    Fault(
        "the random numbers of the user are not restored",
        "reuse:VariableStore.reusing",
        "random.setstate(state)",
        "pass",
        "unit/compat/test_reuse.py",
    ),
    # coordinator
    Fault(
        "the error of a scheduled step is swallowed",
        "queue:ClosureQueue._raise_first_error",
        "raise error",
        "return",
        "unit/parameter_server/scheduling/test_queue.py",
    ),
    Fault(
        "a step that is queued behind a failure is never settled",
        "queue:ClosureQueue.fail",
        "self._cancel(self._queued)",
        "pass",
        "unit/parameter_server/scheduling/test_queue.py",
    ),
    Fault(
        "a step of a lost worker is not queued again",
        "queue:ClosureQueue.put_back",
        "self._queued.appendleft(closure)",
        "pass",
        "unit/parameter_server/scheduling/test_queue.py",
    ),
    Fault(
        "all scheduled steps draw the same numbers",
        "steps:StepCache.seeds",
        "state[:1] + _SEED_STRIDE",
        "state[:1]",
        "cluster/parameter_server/test_server_variables.py",
    ),
    # data and input
    Fault(
        "the first row of an uneven batch is lost",
        "shard:InputWorker._starts",
        "min(replica, longer)",
        "min(replica + 1, longer)",
        "unit/input/test_shard.py",
    ),
    Fault(
        "an error of the data is swallowed",
        "prefetch:_Shelf.fail",
        "self._failure = failure",
        "pass",
        "unit/input/test_prefetch.py",
    ),
    Fault(
        "batches that were read ahead are lost",
        "feed:ReadAhead.stop",
        "[step for batch in unused for step in batch.steps]",
        "[]",
        "unit/input/test_feed.py unit/input/test_iterator.py unit/input/test_distributed.py",
    ),
    Fault(
        "a batch that was not used counts as read",
        "iterator:DistributedIterator.get_state",
        "state = self._last[1]",
        "pass",
        "unit/input/test_iterator.py unit/checkpoint/test_preemption.py",
    ),
    Fault(
        "a worker whose data fail does not tell the others",
        "lockstep:Lockstep._agree",
        "failure = e",
        "raise",
        "unit/input/test_lockstep.py",
    ),
    Fault(
        "all workers continue at the position of the first",
        "state:of_worker",
        "return states[index]",
        "return states[0]",
        "unit/input/test_state.py unit/input/test_lockstep.py",
    ),
    Fault(
        "a saved position moves on",
        "files:_FileReader.get_state",
        "list(self._walk.consumed)",
        "self._walk.consumed",
        "unit/input/test_distributed.py sources/test_python.py",
    ),
    # elastic
    Fault(
        "a process that joins keeps its own weights",
        "copies:taken_over",
        "theirs.get(kind, value)",
        "value",
        "unit/elastic/test_copies.py",
    ),
    Fault(
        "a step that is undone is counted twice",
        "steps:_Loop.get_position",
        "self.begun - undone",
        "self.begun",
        "unit/elastic/test_steps.py",
    ),
    # errors
    Fault(
        "no message has a HINT",
        "errors:PhalanxError.__init__",
        '+ (f"\\nHINT: {hint}" if hint else "")',
        "",
        "unit/test_errors.py unit/errors",
    ),
    Fault(
        "an error of a background thread is swallowed",
        "deferred:guarded",
        "failures.append(e)",
        "pass",
        "unit/errors/test_deferred.py",
    ),
    # estimator
    Fault(
        "the newest exports are deleted",
        "exporters:_SavedModelExporter.export",
        "numbers[: -self._keep]",
        "numbers[self._keep :]",
        "unit/estimator/test_exporters.py",
    ),
    Fault(
        "a hook is one step late",
        "timer:SecondOrStepTimer.should_trigger_for_step",
        "step >= self._last_step + self._every_steps",
        "step > self._last_step + self._every_steps",
        "unit/estimator/hooks/test_timer.py",
    ),
    Fault(
        "a warm start takes over the counters",
        "warm_start:WarmStartSettings._is_meant",
        "variable.trainable and ",
        "",
        "unit/estimator/loop/test_warm_start.py",
    ),
    # experimental
    Fault(
        "the experimental strategy forgets its resolver",
        "experimental:MultiWorkerMirroredStrategy.__init__",
        "super().__init__(cluster_resolver, options)",
        "super().__init__(None, options)",
        "contract/test_law_bad_values.py",
    ),
    Fault(
        "the experimental TPU strategy forgets its assignment",
        "experimental:TPUStrategy.__init__",
        "super().__init__(tpu_cluster_resolver, device_assignment)",
        "super().__init__(tpu_cluster_resolver)",
        "guide/test_tpu_guide.py",
    ),
    # feature_column
    Fault(
        "missing categories are counted in a mean",
        "lookup:combined_rows",
        "factors.sum(axis=1, keepdims=True) if",
        "jnp.full((len(ids), 1), ids.shape[1]) if",
        "unit/feature_column/test_lookup.py unit/feature_column/test_dense.py",
    ),
    Fault(
        "a number at a boundary gets into the lower bucket",
        "numeric:BucketizedColumn._ids",
        'side="right"',
        'side="left"',
        "unit/feature_column/test_numeric.py",
    ),
    # forecast
    Fault(
        "one iteration of a loop is counted instead of all",
        "flops:_count",
        'params["length"] * sum(inner)',
        "sum(inner)",
        "unit/tools/estimate/test_flops.py",
    ),
    Fault(
        "a reduce-scatter is as small as its result",
        "hlo:_collective",
        "size *= len(group)",
        "pass",
        "unit/tools/estimate/test_hlo.py unit/tools/estimate/test_roofline.py",
    ),
    # keras
    Fault(
        "the generators are not restored",
        "backup:FitProgress.set_state",
        'set_generators(state["random"])',
        "pass",
        "unit/keras/test_backup.py contract/test_interrupted_fit.py",
    ),
    Fault(
        "an epoch that is resumed begins again",
        "data:EpochData.epoch",
        "done = self._done if restored else 0",
        "done = 0",
        "unit/keras/test_data.py unit/keras/test_backup.py",
    ),
    Fault(
        "a short batch weighs as much as a full one",
        "steps:_update_metrics",
        ".update_state(loss, sample_weight=rows)",
        ".update_state(loss)",
        "unit/keras/test_steps.py contract/test_law_fit_equals_keras.py",
    ),
    Fault(
        "predictions of padding are returned",
        "predictions:_rows_of",
        "[output.rows.cut(x, i) for i, x in enumerate(data)]",
        "list(data)",
        "unit/keras/test_training.py contract/test_keras_trainer_data.py",
    ),
    Fault(
        "the best value is forgotten when a run is resumed",
        "model_checkpoint:ModelCheckpoint.on_train_begin",
        'self.best = load_checkpoint(latest).values.get("best", self.best)',
        "pass",
        "unit/keras/test_model_checkpoint.py",
    ),
    # mesh
    Fault(
        "integers of 64 bits are narrowed silently",
        "arrays:as_array",
        "if array.dtype.itemsize >= 8:",
        "if value.dtype.itemsize > 8:",
        "unit/mesh/test_arrays.py contract/test_wide_numbers.py",
    ),
    Fault(
        "an all-reduce with too few threads deadlocks",
        "devices:require_threads",
        "if threads < needed:",
        "if threads < 1:",
        "unit/mesh/test_devices.py",
    ),
    Fault(
        "the slowest replica gets the most rows",
        "shares:Shares.adapt",
        "everyone.min() / everyone",
        "everyone / everyone.max()",
        "unit/mesh/test_shares.py",
    ),
    Fault(
        "a value of the chief is counted once per device",
        "topology:Topology._broadcast",
        "if d == device else",
        "if d.process_index == device.process_index else",
        "cluster/test_multi_worker.py",
    ),
    Fault(
        "every process believes that it is the chief",
        "bootstrap:is_this_chief",
        "return watchdog.rank == 0",
        "return True",
        "unit/runtime/test_bootstrap.py cluster/test_multi_worker.py",
    ),
    # options
    Fault(
        "merged options lose those of the first",
        "options:CommunicationOptions.merge",
        "replace(self, **changed)",
        "replace(other, **changed)",
        "unit/test_options.py",
    ),
    Fault(
        "a compression to nothing is accepted",
        "options:TopK.__post_init__",
        "not 0 < number < 1",
        "not 0 <= number < 1",
        "unit/test_options.py unit/collectives/test_compression.py",
    ),
    # programs
    Fault(
        "a layer that was frozen is trained",
        "cache:Settings.hold",
        "if [v.trainable for v in self._variables] != self._trainable:",
        "if len(self._variables) != len(self._trainable):",
        "unit/strategies/test_base.py contract/test_law_fit_options.py",
    ),
    Fault(
        "a signal in a step is swallowed",
        "interrupts:Interrupts._handle",
        "self._due.append(number)",
        "pass",
        "unit/programs/test_interrupts.py",
    ),
    Fault(
        "an array is donated of which the user holds a part",
        "state:_Variables.take",
        "bool(in_parts) and not in_parts.isdisjoint(map(id, arrays))",
        "False",
        "contract/test_law4a_interrupts.py",
    ),
    Fault(
        "a variable that differs between replicas is not combined",
        "replicas:_combine_at_boundary",
        "(e.diverged or e.policy.is_local)",
        "e.policy.is_local",
        "unit/tracing/test_policy.py unit/programs/test_replicas.py",
    ),
    # servers
    Fault(
        "a worker is one update staler than allowed",
        "staleness:Clock.ready",
        "self.version + 1 - v > self._bound",
        "self.version - v > self._bound",
        "unit/parameter_server/remote/test_staleness.py",
    ),
    Fault(
        "the last rows of a table belong to no server",
        "partitioners:split_rows",
        "shard * each + min(shard, longer)",
        "shard * each",
        "unit/parameter_server/variables/test_partitioners.py",
    ),
    Fault(
        "a server of another machine reads the memory of this one",
        "shared_memory:SharedMemoryConnection.understands",
        "greeting is None or greeting[0] != _machine()",
        "greeting is None",
        "unit/parameter_server/remote/test_shared_memory.py",
    ),
    Fault(
        "updates of several workers are added instead of averaged",
        "values:ServerValues.apply",
        "sum(each) / len(terms)",
        "sum(each)",
        "cluster/parameter_server/test_consistency.py",
    ),
    # strategies
    Fault(
        "padding is counted in the mean over a batch",
        "reduction:_reduce_global",
        "mean: jax.Array = (total / elements)",
        "mean: jax.Array = (total / math.prod(data.shape[d] for d in reduced))",
        "unit/strategies/test_results.py unit/strategies/test_base.py",
    ),
    Fault(
        "padding is gathered",
        "reduction:_",
        "[value.rows.cut(data[i], i) for i in range(num_replicas)]",
        "list(data)",
        "unit/strategies/test_results.py unit/strategies/test_base.py",
    ),
    Fault(
        "the scopes of two strategies are nested",
        "scope:_require_enterable",
        "if mode.strategy is not strategy:",
        "if mode.strategy is None:",
        "unit/strategies/test_base.py contract/test_law2_contexts.py",
    ),
    # summary
    Fault(
        "all steps of a call have the number of the first",
        "events:computed",
        "int(default_step) + int(i)",
        "int(default_step)",
        "unit/summary/test_ops.py",
    ),
    Fault(
        "summaries that cannot be written are lost silently",
        "writer:_QueueWriter._raise_error",
        "raise self._lost(error) from error",
        "pass",
        "unit/summary/test_ops.py unit/summary/test_trackers.py",
    ),
    # testing
    Fault(
        "the wrong replica is blamed",
        "testing:_odd_replicas",
        "usual if has_majority else texts[0]",
        "texts[0]",
        "unit/test_testing.py",
    ),
    Fault(
        "the law of positions compares no batches",
        "testing:_assert_goes_on",
        "assert all(jax.tree.leaves(equal)),",
        "assert batch is not None,",
        "unit/input/test_distributed.py",
    ),
    # tpu
    Fault(
        "the stride of a replica's cores is forgotten",
        "device_assignment:DeviceAssignment.build",
        "np.array(list(np.ndindex(*shape))) * stride",
        "np.array(list(np.ndindex(*shape)))",
        "unit/mesh/test_device_assignment.py",
    ),
    Fault(
        "a TPU system stays after its shutdown",
        "tpu_system:shutdown_tpu_system",
        "_virtual.clear()",
        "pass",
        "unit/strategies/test_tpu.py unit/mesh/test_device_assignment.py",
    ),
    # tracing
    Fault(
        "a mask that a loss makes is forgotten",
        "rows:_reduce_losses",
        'original(jnp.ones_like(values), weight, mask, "sum", dtype)',
        'original(jnp.ones_like(values), weight, None, "sum", dtype)',
        "contract/test_every_loss_and_metric.py",
    ),
    Fault(
        "a ratio is taken of the rows of one replica",
        "batch_functions:needs_all_rows",
        "values = _sampled(fn, *args)",
        "return False",
        "contract/test_every_loss_and_metric.py",
    ),
    Fault(
        "a replica takes the part for other rows than its own",
        "own_rows:DividedProgram.run",
        "jnp.asarray(self._share_of)[",
        "jnp.zeros_like(jnp.asarray(self._share_of))[",
        "unit/programs/test_own_rows.py",
    ),
    Fault(
        "what a replica without rows computes of padding is returned",
        "own_rows:DividedProgram.run",
        "jnp.where(rows > 0, results[i], jnp.zeros_like(results[i]))",
        "results[i]",
        "unit/programs/test_own_rows.py",
    ),
    Fault(
        "a batch normalization sees the rows of one replica",
        "averages:moments",
        "summed(total) / count",
        "total / jnp.maximum(local_count, 1)",
        "unit/keras/test_steps.py contract/test_law_fit_equals_keras.py",
    ),
    Fault(
        "what the other branch writes is lost",
        "control_flow:cond",
        "outer.discover_writes(false_fun, *operands)",
        "pass",
        "unit/tracing/test_control_flow.py",
    ),
    Fault(
        "a sum is restored on every replica",
        "policy:initial_components",
        "xp.zeros_like(value) if policy_of(variable).combine is Combine.SUM else value",
        "value",
        "unit/tracing/test_policy.py contract/test_law4_checkpoints.py",
    ),
    Fault(
        "weights are added instead of averaged",
        "local_updates:_average",
        "mean_of_parts(total, n, x.dtype)",
        "mean_of_parts(total, 1, x.dtype)",
        "unit/collectives/test_local_updates.py",
    ),
    Fault(
        "what compression has not sent is forgotten",
        "compressed:CompressedSum._sum",
        "[x + e for x, e in zip(arrays, unsent, strict=True)] if unsent else arrays",
        "arrays",
        "unit/collectives/test_compression.py",
    ),
    # train
    Fault(
        "a damaged checkpoint is read",
        "store:CheckpointFile.array",
        'if sum_of(array) != self.notes["sums"][name]:',
        'if name not in self.notes["sums"]:',
        "unit/checkpoint/test_store.py unit/checkpoint/test_reader.py",
    ),
    Fault(
        "checkpoint 9 is newer than checkpoint 10",
        "manager:numbered",
        "sorted(checkpoints)",
        "sorted(checkpoints, key=str)",
        "unit/checkpoint/test_manager.py",
    ),
    Fault(
        "two programs save into one folder",
        "manager:occupy",
        "fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)",
        "pass",
        "unit/checkpoint/test_manager.py",
    ),
    Fault(
        "a checkpoint that cannot be written is lost silently",
        "background:wait",
        "raise_deferred()",
        "pass",
        "unit/checkpoint/test_checkpoint.py unit/checkpoint/test_manager.py",
    ),
    Fault(
        "the batch of a step that was not made is lost",
        "preemption:PreemptionCheckpointHandler._pass",
        "with before_steps.none(), not_yet_used(unused):",
        "with before_steps.none():",
        "unit/checkpoint/test_preemption.py",
    ),
    Fault(
        "every rank writes the checkpoint",
        "checkpoint:Checkpoint._write",
        "is_chief = topology.is_chief",
        "is_chief = True",
        "cluster/test_multi_worker.py",
    ),
]
