# SPDX-License-Identifier: Apache-2.0
"""The topology of the default strategy, which has no devices of its own."""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar, final

from jax.sharding import NamedSharding
from jax.typing import ArrayLike
from typing_extensions import override

from phalanx._src.mesh.shares import Shares
from phalanx._src.mesh.topology import Topology
from phalanx.typing import PyTree


@final
class Nowhere(Topology):
    """The topology of the default strategy: one replica without dedicated devices. Values stay where they are."""

    has_devices: ClassVar[bool] = False

    def __init__(self) -> None:
        # A null object. It skips the constructor of `Topology`, which needs devices and derives everything from them.
        vars(self).update(
            devices=(),
            axes=(),
            layout=None,
            source=0,
            shards_updates=False,
            replicated=None,
            shares=Shares(),
            num_replicas=1,
            is_single=True,
            num_workers=1,
            worker_index=0,
            input_workers=(0,),
            input_index=0,
            local_devices=(),
            local_replicas=range(1),
        )

    @override
    def default_device(self) -> AbstractContextManager[Any]:
        return nullcontext()

    @override
    def put_replicated(self, tree: PyTree) -> PyTree:
        return tree

    @override
    def put_variable(self, value: ArrayLike, sharding: NamedSharding) -> PyTree:
        return value


NOWHERE = Nowhere()
"""The only instance, because topologies of variables are compared by identity."""
