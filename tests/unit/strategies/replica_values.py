"""Values that differ between replicas, for tests of several modules."""

import numpy as np

import phalanx


def replica_id():
    """The number of the replica that runs, as a float."""
    return phalanx.get_replica_context().replica_id_in_sync_group * 1.0


def per_replica(strategy, *components):
    """A value with these components."""
    return strategy.experimental_distribute_values_from_function(
        lambda c: np.asarray(components[c.replica_id_in_sync_group])
    )
