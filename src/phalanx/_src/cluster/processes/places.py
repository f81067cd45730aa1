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
Needs = Sequence[tuple[str, Mapping[str, float]]]

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
      needs: returns for each process the name of its job, and its resources by Ray's names, such as `{"CPU": 4}`. While there is no
        room for them, it is called again: nodes come, and Ray notices late that one is lost.
      subject: what needs the places, for messages.
      hint: what to do if there is no room for them.
      timeout_s: how long to wait for them, in seconds.
      variables: environment variables of their processes, besides those of the node and of Ray's `runtime_env`.
      is_packed: whether to use as few nodes as possible.
    """

    def __init__(
        self,
        needs: Callable[[], Needs],
        *,
        subject: str,
        hint: str,
        timeout_s: float,
        variables: Mapping[str, str] | None = None,
        is_packed: bool = False,
    ) -> None:
        self._ray = optional_module("ray", subject, "ray")
        self._subject, self._hint, self._timeout_s = subject, hint, timeout_s
        self._options = {"runtime_env": {"env_vars": dict(variables)}} if variables else {}
        self._needs, self._strategy = needs, "PACK" if is_packed else "SPREAD"
        self._make(needs())

    def ask(self, function: Callable[[], R]) -> list[R]:
        """Calls a function at each place, once Ray has made all of them, and returns the results.

        Raises:
          StartupError: the cluster has no room for them, or Ray starts no processes.
        """
        deadline_s = time.monotonic() + self._timeout_s
        problem, noted = "had no place", ""
        try:
            while (left_s := deadline_s - time.monotonic()) > 0:
                if self._ray.wait([self._group.ready()], timeout=min(_NOTE_S, left_s))[0]:
                    problem = "started no process at the places"
                    return self._answers(function, left_s)
                if (needs := self._needs()) != self._made:
                    self.close()
                    self._make(needs)
                if noted != (noted := f"places for {self._described} in the Ray cluster. Free are {self._free()}."):
                    _log.warning("waiting for %s", noted)
        except self._ray.exceptions.GetTimeoutError:
            pass
        problem = f"after {self._timeout_s:g} s Ray {problem} for {self._described}. Free are {self._free()}."
        raise StartupError(self._subject, problem, self._hint)

    def _make(self, needs: Needs) -> None:
        self._made, self._resources = needs, [dict(resources) for _, resources in needs]
        counts = Counter((job, _listed(resources)) for job, resources in needs)
        texts = [f"{n} {job}{'s' * (n > 1)} with {each} each" for (job, each), n in counts.items()]
        self._described = " and ".join(texts)
        self._group = self._ray.util.placement_group(self._resources, strategy=self._strategy)

    def _answers(self, function: Callable[[], R], timeout_s: float) -> list[R]:
        call = self._ray.remote(function)
        references = [call.options(**self._at(i), num_cpus=0).remote() for i in range(len(self._resources))]
        answers: list[R] = self._ray.get(references, timeout=timeout_s)
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
        strategies = optional_module("ray.util.scheduling_strategies", self._subject, "ray")
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
