"""All groups of cases, and all public callables: each has a case, or a reason why not."""

import enum
import functools
import importlib
import inspect

import bad_cases
import bad_checkpoints
import bad_estimators
import bad_forecasts
import bad_functions
import bad_servers
import bad_summaries
import bad_verbs
from bad_values import FEW, VALUES, answer

import phalanx
from phalanx._src.input.iterator import Optional
from phalanx._src.input.sources.records import NumpyDataset
from phalanx._src.programs.function import Function

GROUPS = {
    **bad_cases.GROUPS,
    **bad_verbs.GROUPS,
    **bad_functions.GROUPS,
    **bad_servers.GROUPS,
    **bad_checkpoints.GROUPS,
    **bad_summaries.GROUPS,
    **bad_estimators.GROUPS,
    **bad_forecasts.GROUPS,
}


@functools.cache
def answers(group, values=FEW):
    """Returns what the calls of a group raise on bad values, by name, argument and value."""
    return {
        (name, parameter, value): answer(case, parameter, VALUES[value]())
        for name, case in GROUPS[group]().items()
        for parameter in case.good
        for value in values
    }


ROOMS = [
    "phalanx",
    *(f"phalanx.{room}" for room in phalanx._ROOMS),
    "phalanx._src.parameter_server.variables.partitioners",
]


REASONS = {
    "Phalanx calls it: a strategy, or operations, of one's own override it": """
        CrossDeviceOps.batch_reduce_implementation CrossDeviceOps.broadcast_implementation
        CrossDeviceOps.for_devices CrossDeviceOps.reduce_implementation Strategy.aggregate_gradients
        Strategy.apply_update Strategy.divide_gradients Strategy.execute""",
    "Phalanx calls it, on what it has made itself": """
        Strategy.in_program Strategy.merged SynchronousStrategy.placed_on MultiWorkerMirroredStrategy.move
        DistributedIterator.state_at Strategy.on_all_workers SummaryWriter.write Tracker.log Tracker.start
        DistributedValues.first_steps DistributedValues.stacked DistributedIterator.advance
        DistributedIterator.expect DistributedIterator.look DistributedIterator.next_alike DistributedIterator.next_steps
        ClusterCoordinator.spec_of""",
    "a strategy of one's own has one, and Phalanx calls its methods; MirroredStrategy takes the same devices": """
        Topology Topology.devices_of Topology.dispatching Topology.divided_dim Topology.exchange Topology.from_chief
        Topology.from_source Topology.join_per_replica Topology.of Topology.put_per_replica Topology.put_replicated
        Topology.put_variable Topology.sharding_of Topology.take_back Topology.exchange_input Topology.local_devices_of
        Topology.require_equal Topology.sharding_of_new Topology.update_dim Topology.broadcast Topology.from_neighbours
        Topology.require_layout""",
    "Phalanx makes it, and users get it": """
        StepTimes Steps CheckpointReader DistributedDataset DistributedIterator Estimate Estimates Optional
        PerWorkerDataset PerWorkerValues Status Status.line TPUSystemMetadata WorkerShard CheckpointStatus""",
    "it needs a loop that has begun; tests/unit/elastic/test_steps.py has its messages": """
        Steps.set_state""",
    "it is that of the tuple that it holds": """
        Estimates.__getitem__""",
    "make_experimental_numpy_dataset makes it of the same argument": """
        NumpyDataset""",
    "phalanx.function makes it of the same arguments": """
        Function""",
    "a pytree: JAX makes it again of whatever a function of trees returns": """
        PerReplica Mirrored""",
    "JAX's own indexing, of the array that it acts as": """
        _ActsAsArray.__getitem__""",
    "it raises whatever the argument is": """
        RemoteValue.__getitem__ OptaxOptimizer.from_config""",
    "it takes no arguments": """
        _ActsAsArray.__len__""",
    "it needs processes of Ray, whose tests are in tests/cluster and tests/unit/coordinator": """
        ClusterCoordinator.create_per_worker_dataset ClusterCoordinator.create_per_worker_values
        ClusterCoordinator.fetch ClusterCoordinator.schedule Server.join""",
    "it asks a service, whose tests are its own": """
        TPUClusterResolver.connect""",
    "it passes its arguments to CheckpointManager.save": """
        PreemptionCheckpointHandler.save_checkpoint_if_preempted""",
    "it is print, with print's arguments and errors": """
        print_on_chief""",
    "it would end the system that the other cases use; initialize_tpu_system checks the same argument": """
        shutdown_tpu_system""",
    "Keras calls it": """
        BatchCounter.on_train_batch_begin BatchCounter.on_train_batch_end BatchCounter.on_train_begin
        ModelCheckpoint.on_epoch_end ModelCheckpoint.on_train_end BackupAndRestore.on_epoch_end
        BackupAndRestore.on_train_end SyncCheck.on_train_end ScalarCallback.on_epoch_begin
        ScalarCallback.on_epoch_end ScalarCallback.on_test_end ScalarCallback.on_train_end
        TensorBoard.on_test_batch_begin ShardedEmbedding.build ShardedEmbedding.call
        OptaxOptimizer.save_own_variables""",
}
EXEMPT = " ".join([*REASONS.values(), *bad_estimators.REASONS.values()]).split()
"""Public callables without a case, each with the reason."""


def public_callables():
    """Returns what the public names are, and their public methods, by name: `function`, `Class` and `Class.method`."""
    things = [*_public_things(), Function, NumpyDataset, Optional]
    found = {}
    for thing in things:
        if inspect.isclass(thing) and issubclass(thing, BaseException):
            continue
        is_made = inspect.isclass(thing) and (issubclass(thing, enum.Enum) or inspect.isabstract(thing))
        if not is_made and _takes_arguments(thing):
            found[thing.__name__] = thing
        if inspect.isclass(thing):
            found |= _methods(thing)
    return found


def _public_things():
    for room in ROOMS:
        module = importlib.import_module(room)
        for name in getattr(module, "__all__", None) or dir(module):
            thing = getattr(module, name)
            is_ours = callable(thing) and (thing.__module__ or "").startswith("phalanx")
            # A module without `__all__` has names of others, which it uses.
            if is_ours and not name.startswith("_") and (hasattr(module, "__all__") or _is_of(thing, module)):
                yield thing


def _is_of(thing, module):
    return thing.__module__ == module.__name__ or (module.__name__ == "phalanx.experimental" and inspect.isclass(thing))


def _methods(kind):
    """Returns the methods of a class under the name of the public class that has them first; overrides take the same arguments."""
    found, seen = {}, set()
    owners = [owner for owner in reversed(kind.__mro__) if owner.__module__.startswith("phalanx")]
    for owner in owners:
        public = next(c for c in owners if issubclass(c, owner) and not c.__name__.startswith("Abstract"))
        for name, method in vars(owner).items():
            method = method.__func__ if isinstance(method, (classmethod, staticmethod)) else method
            is_public = not name.startswith("_") or name in ("__call__", "__getitem__", "__len__")
            if is_public and name not in seen and inspect.isfunction(method) and _takes_arguments(method):
                seen.add(name)
                found[f"{public.__name__}.{name}"] = method
    return found


def _takes_arguments(thing):
    try:
        parameters = inspect.signature(thing).parameters
    except ValueError:
        return True
    return any(name not in ("self", "cls") for name in parameters)
