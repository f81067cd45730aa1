# SPDX-License-Identifier: Apache-2.0
"""Places for processes on the nodes of a Ray cluster. Ray's scheduler and autoscaler see what each of them needs."""

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar, final

from phalanx._src.cluster.resolvers.base import optional_module
from phalanx.errors import StartupError

R = TypeVar("R")

_log = logging.getLogger("phalanx")

_NOTE_S = 10.0
"""Seconds before the log line about a wait."""
_OPTIONS = {"CPU": "num_cpus", "GPU": "num_gpus", "memory": "memory"}
"""The options of actors for resources that have one."""


def cores_per_process(cores: Sequence[int], processes: int) -> int:
    """Returns the most cores that every process can have, if each runs on one of the nodes with these cores.

    Example:
      >>> cores_per_process([8, 8], 2), cores_per_process([8, 8], 3), cores_per_process([8, 2], 2), cores_per_process([], 2)
      (8, 4, 4, 1)
    """
    return next((each for each in range(max(cores, default=1), 1, -1) if sum(n // each for n in cores) >= processes), 1)


def needs_gpus(environment: Mapping[str, str]) -> bool:
    """Returns whether JAX uses GPUs if its machine has some."""
    return bool({"cuda", "gpu"} & set((environment.get("JAX_PLATFORMS") or "cuda").split(",")))


@final
class Places:
    """Places for processes on the nodes of a Ray cluster: a placement group, which ends with this process.

    They are spread over the nodes. If a node is lost, Ray makes its places again on others.

    Args:
      needs: for each process the name of its job, and its resources by Ray's names, such as `{"CPU": 4}`.
      asked: what needs the places, for messages.
      hint: what to do if there is no room for them.
      timeout_s: how long to wait for them, in seconds.
      variables: environment variables of their processes, besides those of the node and of Ray's `runtime_env`.
      is_packed: whether to use as few nodes as possible.
    """

    def __init__(
        self,
        needs: Sequence[tuple[str, Mapping[str, float]]],
        *,
        asked: str,
        hint: str,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        is_packed: bool = False,
    ) -> None:
        self._ray = optional_module("ray", asked, "ray")
        self._asked, self._hint, self._timeout_s = asked, hint, timeout_s
        self._options = {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
        self._resources = [dict(resources) for _, resources in needs]
        counts = Counter((job, _listed(resources)) for job, resources in needs)
        self._described = " and ".join(
            f"{n} {job}{'s' * (n > 1)} with {each} each" for (job, each), n in counts.items()
        )
        strategy = "PACK" if is_packed else "SPREAD"
        self._group = self._ray.util.placement_group(self._resources, strategy=strategy)

    def ask(self, function: Callable[[], R]) -> list[R]:
        """Calls a function at each place, once Ray has made all of them, and returns the results.

        Raises:
          StartupError: the cluster has no room for them.
        """
        deadline_s = time.monotonic() + self._timeout_s
        call, ready = self._ray.remote(function), self._group.ready()
        # Ray runs each at its place, and therefore only once it has made that place, perhaps on a new node.
        references = [call.options(**self._at(i), num_cpus=0).remote() for i in range(len(self._resources))]
        if not self._ray.wait([ready], timeout=min(_NOTE_S, self._timeout_s))[0]:
            _log.warning("waiting for places for %s in the Ray cluster. Free are %s.", self._described, self._free())
        try:
            answers: list[R] = self._ray.get(references, timeout=max(0.0, deadline_s - time.monotonic()))
        except self._ray.exceptions.GetTimeoutError:
            is_ready = self._ray.wait([ready], timeout=0)[0]
            why = "started no process at the places" if is_ready else "had no place"
            free = "" if is_ready else f" Free are {self._free()}."
            problem = f"after {self._timeout_s:g} s Ray {why} for {self._described}.{free}"
            raise StartupError(self._asked, problem, self._hint) from None
        return answers

    def options(self, index: int) -> dict[str, Any]:
        """Returns the options of the actor at a place."""
        resources = self._resources[index]
        options = {
            option: resources.get(name, 0) for name, option in _OPTIONS.items() if name in {"CPU", "GPU", *resources}
        }
        custom = {name: amount for name, amount in resources.items() if name not in _OPTIONS}
        return {**self._at(index), **options, "resources": custom}

    def close(self) -> None:
        """Gives the places back. Ray ends the processes that are still there."""
        self._ray.util.remove_placement_group(self._group)

    def _at(self, index: int) -> dict[str, object]:
        strategies = optional_module("ray.util.scheduling_strategies", self._asked, "ray")
        place = strategies.PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=index)
        return {**self._options, "scheduling_strategy": place}

    def _free(self) -> str:
        free = self._ray.available_resources()
        return _listed({name: free.get(name, 0) for name in {x: 0 for each in self._resources for x in each}})


def _listed(resources: Mapping[str, float]) -> str:
    """Returns resources in words.

    Example:
      >>> _listed({"CPU": 4, "GPU": 0.5})
      '4 CPU, 0.5 GPU'
    """
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
