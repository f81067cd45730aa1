# SPDX-License-Identifier: Apache-2.0
"""A worker: takes values from the servers, does steps on batches of its own, and pushes what they lead to."""

import itertools
import pickle
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from phalanx.errors import OutOfRangeError
from phalanx.parameters import here
from phalanx.parameters.line import Line, Packed
from phalanx.parameters.plans import FencedError, Part, Placement, Push, Pusher, Report, Spec, StepProgram, Task, load


class Worker:
    """Does steps. Its methods must not overlap, but for `ping`.

    Args:
      pusher: who it is.
      servers: the parameter servers.
    """

    def __init__(self, pusher: Pusher, servers: Sequence[Any]) -> None:
        # Where parameter servers are not used it need not be installed.
        import ray

        self._ray = ray
        self._me, self._servers = pusher, servers
        self._resources: dict[int, _Resource] = {}
        self._programs: dict[int, dict[Any, _Program]] = {}
        self._numbers = itertools.count()
        self._version = 0
        self._lines: list[Line | None] = []
        here.worker_index = pusher.worker

    def ping(self) -> str:
        """Returns the platform of this worker."""
        return jax.default_backend()

    def meet(self, pusher: Pusher, servers: Sequence[Any]) -> None:
        """Hears that there are other servers now, and who it is for them."""
        self._me, self._servers, self._numbers, self._lines = pusher, servers, itertools.count(), []

    def make(self, name: int, fn: Callable[[], Any], is_dataset: bool) -> None:
        """Makes a dataset, from its beginning, or a value of this worker's own."""
        self._resources[name] = _Resource(fn(), is_dataset=is_dataset)

    def specs(self, names: Sequence[int]) -> list[Any]:
        """Returns the shapes of the next batch of some resources, which are not taken.

        Raises:
          StopIteration: there is none.
        """
        return [self._resources[name].specs(1) for name in names]

    def value(self, name: int) -> Any:
        """Returns a value of this worker's own."""
        return self._resources[name].content

    def drop(self, names: Sequence[int]) -> None:
        """Forgets datasets and values."""
        for name in names:
            self._resources.pop(name, None)

    def learn(self, step: int, key: Any, program: StepProgram) -> None:
        """Hears how a step is done with batches of some shapes."""
        self._programs.setdefault(step, {})[key] = _Program(program)

    def run(self, tasks: Sequence[Task]) -> Report:
        """Does steps, one after the other."""
        report, values = Report(), None
        for task, following in itertools.zip_longest(tasks, tasks[1:]):
            try:
                program = self._program(task)
                if isinstance(program, _Unknown):
                    report.unknown = program.specs
                    return self._ended(report, values)
                self._find_near()
                if values is None:
                    values = self._pull(program)
                results, values = self._step(program, task, values, following)
            except self._ray.exceptions.RayActorError:
                report.has_lost_server = True
                return report
            except FencedError:
                report.is_fenced = True
                return report
            except Exception as e:
                report.error = _sendable(e)
                return self._ended(report, values)
            report.results.append(results)
        return report

    def _ended(self, report: Report, values: Any) -> Report:
        if values is not None:
            self._servers[0].release.remote(self._me)
        return report

    def _program(self, task: Task) -> "_Program | _Unknown":
        known = self._programs.get(task.step, {})
        draws = next(iter(known.values())).plan.draws if known else (1,) * len(task.resources)
        specs = tuple(self._resources[name].specs(n) for name, n in zip(task.resources, draws, strict=True))
        return known.get(specs) or _Unknown(specs)

    def _step(
        self, program: "_Program", task: Task, values: Any, following: Task | None
    ) -> tuple[tuple[int, list[Any]], Any]:
        drawn = [self._resources[name].take(n) for name, n in zip(task.resources, program.plan.draws, strict=True)]
        inputs = [*task.inputs, *(x for batches in drawn for batch in batches for x in batch)]
        results, *asked = program.run(program.complete(values, task.seeds), inputs)
        pushes = program.pushes(Push(self._me, next(self._numbers), self._version), *asked)
        wanted = None
        if following is not None:
            try:
                following_program = self._program(following)
            except Exception:  # It is raised when its turn comes.
                following_program = _Unknown(())
            wanted = following_program if isinstance(following_program, _Program) else None
        arrays = [np.asarray(x) for x in results]
        return (program.plan.variant, arrays), self._exchange(pushes, wanted)

    def _find_near(self) -> None:
        """Begins a line to each server that is on this machine."""
        if not self._lines:
            lines = [Line(self._me) for _ in self._servers]
            asked = [s.near.remote(self._me, x.greeting()) for s, x in zip(self._servers, lines, strict=True)]
            self._lines = [x if is_near else None for x, is_near in zip(lines, self._ray.get(asked), strict=True)]

    def _sent(self, server: int, push: Push) -> Push | Packed:
        line = self._lines[server]
        return push if line is None else line.pack(push)

    def _received(self, server: int, reply: Any) -> Any:
        line = self._lines[server]
        return reply if line is None else line.unpack(reply)

    def _pull(self, program: "_Program") -> dict[Part, np.ndarray]:
        asked = {s: [p.key for p in parts] for s, parts in program.pulls.items()}
        replies = [self._servers[s].pull.remote(keys, self._me) for s, keys in asked.items()]
        return self._taken(program, list(program.pulls), self._ray.get(replies))

    def _exchange(self, pushes: dict[int, Push], following: "_Program | None") -> dict[Part, np.ndarray] | None:
        """Pushes, and pulls what the following step needs."""
        first, others = pushes[0], {s: p for s, p in pushes.items() if s}
        prepared = [self._servers[s].prepare.remote(self._sent(s, p)) for s, p in others.items()]
        sent = self._sent(0, first)
        self._ray.get(prepared)
        pulls = {} if following is None else following.pulls
        keys = [p.key for p in pulls.get(0, ())]
        order = [0, *(s for s in pulls if s)]
        replies = [self._servers[0].exchange.remote(sent, None if following is None else keys)]
        for s in order[1:]:
            after = first.number if s in others else None
            replies.append(self._servers[s].pull.remote([p.key for p in pulls[s]], self._me, after))
        replies = self._ray.get(replies)
        return None if following is None else self._taken(following, order, replies)

    def _taken(self, program: "_Program", order: Sequence[int], replies: Sequence[Any]) -> dict[Part, np.ndarray]:
        values: dict[Part, np.ndarray] = {}
        for server, reply in zip(order, replies, strict=True):
            version, arrays = self._received(server, reply)
            if server == 0:
                self._version = version
            values.update(zip(program.pulls.get(server, ()), arrays, strict=True))
        return values


class _Program:
    """A step's program on this worker."""

    def __init__(self, plan: StepProgram) -> None:
        self.plan, self.run = plan, load(plan.module)
        self.pulls: dict[int, list[Part]] = {}
        for part in dict.fromkeys(p for placement in plan.values if placement for p in placement):
            self.pulls.setdefault(part.server, []).append(part)
        # The first server tells the version, and whose step is being computed.
        self.pulls.setdefault(0, [])

    def complete(self, values: dict[Part, np.ndarray], seeds: Sequence[np.ndarray]) -> list[Any]:
        """Returns the values of all variables, in order."""
        states = iter(seeds)
        return [next(states) if placement is None else _joined(values, placement) for placement in self.plan.values]

    def pushes(self, nothing: Push, added: Any, new: Any, gradients: Any) -> dict[int, Push]:
        """Returns what each server is asked, as that which asks `nothing` with something in it."""
        by_server: dict[int, Push] = {}

        def to(server: int) -> Push:
            return by_server.setdefault(server, replace(nothing, updates={}, added={}, set={}))

        for numbers, arrays, kind in ((self.plan.added, added, "added"), (self.plan.set, new, "set")):
            for i, array in zip(numbers, arrays, strict=True):
                for part in self.plan.values[i] or ():
                    for server in self.plan.holders.get(part.key, (part.server,)):
                        getattr(to(server), kind)[part.key] = np.asarray(part.of(array))
        for (name, placements), given in zip(self.plan.updates, gradients, strict=True):
            for placement, gradient in zip(placements, given, strict=True):
                whole = np.asarray(gradient)
                for part in placement:
                    to(part.server).updates.setdefault(name, []).append(part.of(whole))
        by_server[0] = replace(to(0), others=tuple(s for s in by_server if s))
        return by_server


class _Unknown:
    """No program is known for batches of these shapes."""

    def __init__(self, specs: Any) -> None:
        self.specs = specs


class _Resource:
    """A dataset, from which batches are taken in turn, or a value."""

    def __init__(self, content: Any, *, is_dataset: bool) -> None:
        self.content, self._is_dataset = content, is_dataset
        self._iterator: Iterator[Any] = iter(_iterable(content)) if is_dataset else itertools.repeat(content)
        self._ahead: list[tuple[Any, list[np.ndarray]]] = []

    def specs(self, count: int) -> Any:
        """Returns the structure and the shapes of the next batches."""
        while len(self._ahead) < count:
            leaves, tree = jax.tree.flatten(next(self._iterator))
            self._ahead.append((tree, [np.asarray(x) for x in leaves]))
        return tuple((tree, tuple(Spec(x.shape, x.dtype) for x in leaves)) for tree, leaves in self._ahead[:count])

    def take(self, count: int) -> list[list[np.ndarray]]:
        """Returns the next batches."""
        taken, self._ahead = self._ahead[:count], self._ahead[count:]
        return [leaves for _, leaves in taken]


def _sendable(error: Exception) -> Exception:
    """Returns an error, with its traceback, as one that can go to another process."""
    if isinstance(error, StopIteration):
        error = OutOfRangeError(
            "the next batch of a worker's dataset", "it has no further one.", "return dataset.repeat() from dataset_fn"
        )
    else:
        error.add_note("On the worker:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # One of its attributes is of this process.
        return RuntimeError(f"{type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", ())))
    return error


def _iterable(dataset: Any) -> Any:
    if hasattr(dataset, "__iter__") or hasattr(dataset, "__next__"):
        return dataset
    return (dataset[i] for i in range(len(dataset)))


def _joined(values: dict[Part, np.ndarray], placement: Placement) -> np.ndarray:
    return values[placement[0]] if len(placement) == 1 else np.concatenate([values[part] for part in placement])
