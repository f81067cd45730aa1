# SPDX-License-Identifier: Apache-2.0
"""A worker: it pulls values from the servers, runs steps on its own batches, and pushes the changes."""

import inspect
import itertools
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from phalanx._src.parameter_server.processes.calls import Busy, Sign
from phalanx._src.parameter_server.remote import worker_index
from phalanx._src.parameter_server.remote.plans import (
    FencedError,
    LostServerError,
    Placement,
    Push,
    Pushed,
    Pusher,
    Rows,
    ServerPart,
    Spec,
    StepCall,
    StepReport,
    WorkerProgram,
    load,
    require_rows,
)
from phalanx._src.parameter_server.remote.shared_memory import SharedMemoryConnection
from phalanx._src.runtime.memory import keep_freed_memory
from phalanx.errors import InvalidArgumentError, OutOfRangeError, shown
from phalanx.typing import PyTree


class Worker:
    """Runs steps. Calls must not overlap, except those of `ping`, `make`, `specs` and `value`.

    Args:
      pusher: identity of this worker.
      servers: actors of the parameter servers.
    """

    def __init__(self, pusher: Pusher, servers: Sequence[Any]) -> None:
        # Imported here, because Ray is an optional dependency.
        import ray

        self._ray = ray
        self._me, self._servers = pusher, servers
        self._resources: dict[int, _Resource] = {}
        self._programs: dict[int, dict[Any, _Program]] = {}
        self._numbers = itertools.count()
        self._version = 0
        self._lines: list[SharedMemoryConnection | None] = []
        self._busy = Busy()
        worker_index.worker_index = pusher.worker
        # Only XLA for CPUs takes the memory of a step from `malloc`.
        if jax.default_backend() == "cpu":
            keep_freed_memory()

    def ping(self) -> Sign:
        """Returns a heartbeat, with the user code that this worker is running."""
        return self._busy.sign(jax.default_backend())

    def meet(self, pusher: Pusher, servers: Sequence[Any]) -> None:
        """Sets new servers and a new identity, after a restart of servers. The numbers of pushes begin again."""
        self._me, self._servers, self._numbers, self._lines = pusher, servers, itertools.count(), []

    def make(self, name: int, fn: Callable[[], Any], described: str, is_dataset: bool) -> None:
        """Creates a per-worker dataset, at its beginning, or a per-worker value.

        Args:
          name: number by which steps refer to it.
          fn: returns the dataset or the value.
          described: description of `fn`, for messages.
          is_dataset: whether it is a dataset.
        """
        with self._busy.with_(f"calling {described}"):
            content = fn()
        self._resources[name] = _Resource(content, f"taking a batch of {described}", self._busy, is_dataset=is_dataset)

    def specs(self, names: Sequence[int]) -> list[Any]:
        """Returns the structure and shapes of the next batch of each resource, without taking the batch.

        Raises:
          OutOfRangeError: a dataset has no further batch.
        """
        return [self._resources[name].specs(1) for name in names]

    def drop(self, names: Sequence[int]) -> None:
        """Deletes per-worker datasets and values."""
        for name in names:
            self._resources.pop(name, None)

    def learn(self, step: int, key: object, program: WorkerProgram) -> None:
        """Compiles and stores the program of a step for batches with the shapes `key`."""
        self._programs.setdefault(step, {})[key] = _Program(program)

    def run(self, tasks: Sequence[StepCall]) -> StepReport:
        """Runs steps one after the other. A push and the pull for the next step share one round trip.

        Args:
          tasks: the steps.

        Returns:
          The results up to the first step that failed or has no program.
        """
        report, values = StepReport(), None
        ready: _Ready | _Unknown | Exception | None = None
        for task, following in itertools.zip_longest(tasks, tasks[1:]):
            try:
                ready = self._prepare(task) if ready is None else ready
                if isinstance(ready, Exception):
                    raise ready
                if isinstance(ready, _Unknown):
                    report.unknown = ready.specs
                    return self._ended(report, values)
                self._find_near()
                if values is None:
                    values = self._pull(ready)
                with self._busy.with_(f"computing a step of `{ready.program.plan.name}`"):
                    push = Push(self._me, next(self._numbers), self._version)
                    results, pushes = ready.compute(values, task.seeds, push)
                program, ready = ready.program, None if following is None else self._ahead(following)
                known = ready if isinstance(ready, _Ready) and not ready.program.is_pure else None
                if program.writes:
                    # If the answer is lost, the servers may have applied the push nevertheless.
                    report.pushed = Pushed(push.number, program.plan.variant, results)
                    values = self._exchange(pushes, known)
                    report.pushed = None
                else:
                    # A step without changes does not push, so the next step pulls on its own.
                    # No values: the step has pulled nothing, and no server waits for it.
                    self._ended(report, values or None)
                    values = None
            # Ray raises OutOfMemoryError, which is not a RayActorError, if it has killed a server for its memory.
            except (self._ray.exceptions.RayActorError, self._ray.exceptions.OutOfMemoryError, LostServerError):
                report.has_lost_server = True
                return report
            except FencedError:
                report.is_fenced = True
                return report
            except Exception as e:
                report.error = _sendable(e, self._me.worker, self._ray.cloudpickle)
                return self._ended(report, values)
            report.results.append((program.plan.variant, results))
        return report

    def _ended(self, report: StepReport, values: object) -> StepReport:
        # A pull has told the first server to wait for a push of this worker. There will be none.
        if values is not None:
            self._servers[0].release.remote(self._me)
        return report

    def _ahead(self, task: StepCall) -> "_Ready | _Unknown | Exception":
        """Prepares the next step. Returns an exception instead of raising it, so that the current step is still pushed."""
        try:
            return self._prepare(task)
        except Exception as e:
            return e

    def _prepare(self, task: StepCall) -> "_Ready | _Unknown":
        """Takes the batches of a step if there is a program for their shapes."""
        known, draws = self._programs.get(task.step, {}), (1,) * len(task.resources)
        while True:
            specs = tuple(self._resources[name].specs(n) for name, n in zip(task.resources, draws, strict=True))
            program = known.get(specs)
            if program is None:
                return _Unknown(specs)
            more = tuple(map(max, draws, program.plan.draws))
            if more == draws:
                break
            # How many batches a step takes may depend on their shapes. The program must be for the shapes of all of them.
            draws = more
        drawn = [self._resources[name].take(n) for name, n in zip(task.resources, program.plan.draws, strict=True)]
        return _Ready(program, [*task.inputs, *(x for batches in drawn for batch in batches for x in batch)])

    def _find_near(self) -> None:
        """Sets up shared memory with each server on this machine."""
        if not self._lines:
            lines = [SharedMemoryConnection(self._me) for _ in self._servers]
            replies = [s.near.remote(self._me, x.greeting()) for s, x in zip(self._servers, lines, strict=True)]
            self._lines = [x if is_near else None for x, is_near in zip(lines, self._ray.get(replies), strict=True)]

    def _pull(self, ready: "_Ready") -> dict[ServerPart, np.ndarray]:
        return {} if ready.program.is_pure else self._taken(ready, self._pulled(ready.requests))

    def _pulled(self, requests: Mapping[int, Mapping[ServerPart, Any]]) -> dict[int, Any]:
        replies = [self._servers[s].pull.remote(list(of.values()), self._me) for s, of in requests.items()]
        return dict(zip(requests, self._ray.get(replies) if replies else (), strict=True))

    def _exchange(self, pushes: dict[int, Push], following: "_Ready | None") -> dict[ServerPart, np.ndarray] | None:
        """Pushes the changes of a step, and pulls the values for the next one.

        Args:
          pushes: the changes, by server.
          following: the next step. None if it is unknown or needs no values.

        Returns:
          The values for the next step, or None.
        """
        # Servers on other machines get their part first, so that the first server can decide about the whole push.
        requests = {} if following is None else following.requests
        lines = {s: self._lines[s] for s in pushes}
        if far := [s for s, line in lines.items() if s and line is None]:
            self._ray.get([self._servers[s].hold.remote(pushes[s]) for s in far])
        peer_pushes = {s: line and line.pack(pushes[s]) for s, line in lines.items() if s}
        # Pull from servers on other machines directly. Through the first server, the values would cross the network twice.
        near: dict[int, Sequence[Any]] = {
            s: list(of.values()) for s, of in requests.items() if s == 0 or peer_pushes.get(s) is not None
        }
        push = replace(pushes[0], peer_pushes=peer_pushes, requests=near or None)
        sent = push if lines[0] is None else lines[0].pack(push)
        replies = self._ray.get(self._servers[0].exchange.remote(sent))
        if following is None:
            return None
        return self._taken(following, replies | self._pulled({s: of for s, of in requests.items() if s not in near}))

    def _taken(self, ready: "_Ready", replies: Mapping[int, Any]) -> dict[ServerPart, np.ndarray]:
        values: dict[ServerPart, np.ndarray] = {}
        for server, reply in replies.items():
            line = self._lines[server]
            version, arrays = reply if line is None else line.unpack(reply)
            if server == 0:
                self._version = version
            values.update(zip(ready.requests.get(server, ()), arrays, strict=True))
        return values


class _Program:
    """The compiled program of a step."""

    def __init__(self, plan: WorkerProgram) -> None:
        self.plan, self.run = plan, load(plan.module)
        self.find = load(plan.ids) if plan.ids else lambda inputs: []
        self.writes = bool(plan.updates or plan.added or plan.set)
        self.is_pure = not self.writes and all(p is None for p in plan.values)


class _Ready:
    """A step that needs only the values of its variables to run.

    Args:
      program: program of the step.
      inputs: leaves of its arguments and batches.

    Attributes:
      requests: by server and part, a key, or a pair of a key and row indices.
    """

    def __init__(self, program: _Program, inputs: list[Any]) -> None:
        self.program, self._inputs = program, inputs
        ids = [np.asarray(x) for x in program.find(inputs)]
        lookups = program.plan.lookups
        self._rows: dict[int, np.ndarray] = {}
        self._positions: list[Any] = [None] * len(ids)
        # Request each row of a table once, even if several lookups need it.
        for table in dict.fromkeys(lookups):
            indices = [i for i, t in enumerate(lookups) if t == table]
            self._rows[table], places = np.unique(
                np.concatenate([ids[i].ravel() for i in indices]), return_inverse=True
            )
            ends = np.cumsum([ids[i].size for i in indices])
            for i, inverse in zip(indices, np.split(places, ends[:-1]), strict=True):
                self._positions[i] = inverse.reshape(ids[i].shape).astype(np.int32)
        # Always send a request, even an empty one, to the first server. It returns the version and registers the step.
        self.requests: dict[int, dict[ServerPart, Any]] = {0: {}}
        for i, placement in enumerate(program.plan.values):
            if i in self._rows:
                _, name = program.plan.tables[i]
                require_rows(self._rows[i], placement or (), name)
            for part in placement or ():
                request = (part.key, self._local(i, part)) if i in self._rows else part.key
                self.requests.setdefault(part.server, {})[part] = request

    def compute(
        self, values: dict[ServerPart, np.ndarray], seeds: Sequence[np.ndarray], nothing: Push
    ) -> tuple[list[np.ndarray], dict[int, Push]]:
        """Runs the step.

        Args:
          values: values of the variables, by part.
          seeds: states of the random generators.
          nothing: an empty push of this step.

        Returns:
          The results, and one push per server: a copy of `nothing` with that server's changes.
        """
        plan, states = self.program.plan, iter(seeds)
        variable_values = [
            next(states) if placement is None else self._value(i, placement, values)
            for i, placement in enumerate(plan.values)
        ]
        results, added, new, gradients = self.program.run([*variable_values, *self._positions], self._inputs)
        pushes: dict[int, Push] = {}

        def to(server: int) -> Push:
            return pushes.setdefault(server, replace(nothing, updates={}, added={}, set={}))

        to(0)  # The first server decides about every push, even if it has no part in it.

        for numbers, arrays, kind in ((plan.added, added, "added"), (plan.set, new, "set")):
            for i, array in zip(numbers, arrays, strict=True):
                for part in plan.values[i] or ():
                    for server in plan.holders.get(part.key, (part.server,)):
                        getattr(to(server), kind)[part.key] = np.asarray(part.of(array))
        for (name, of_update), of_program in zip(plan.updates, gradients, strict=True):
            for (placement, table), array in zip(of_update, of_program, strict=True):
                whole = np.asarray(array)
                for part in placement:
                    gradient = part.of(whole) if table is None else self._own_rows(table, part, whole)
                    to(part.server).updates.setdefault(name, []).append(gradient)
        return [np.asarray(x) for x in results], pushes

    def _value(self, number: int, placement: Placement, values: dict[ServerPart, np.ndarray]) -> np.ndarray:
        parts = [values[part] for part in placement]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        if number not in self._rows:
            return whole
        num_rows, _ = self.program.plan.tables[number]
        room = num_rows - len(whole)
        return np.concatenate([whole, np.zeros((room, *whole.shape[1:]), whole.dtype)])

    def _range(self, table: int, part: ServerPart) -> slice:
        """Returns which of the requested rows of a table are in one part, as a slice of the sorted rows."""
        assert part.stop is not None
        return slice(*np.searchsorted(self._rows[table], [part.start, part.stop]))

    def _local(self, table: int, part: ServerPart) -> np.ndarray:
        return self._rows[table][self._range(table, part)] - part.start

    def _own_rows(self, table: int, part: ServerPart, gradient: np.ndarray) -> Rows:
        return Rows(self._local(table, part), gradient[: len(self._rows[table])][self._range(table, part)])


class _Unknown:
    """A step without a program for batches of these shapes. The coordinator must send one."""

    def __init__(self, specs: object) -> None:
        self.specs = specs


class _Resource:
    """A per-worker dataset or value. Its methods may be called in several threads.

    Args:
      content: the dataset or the value.
      described: description of the activity "taking a batch", for `busy`.
      busy: records that activity while user code runs.
      is_dataset: whether `content` is a dataset. A value is returned at each step instead.
    """

    def __init__(self, content: object, described: str, busy: Busy, *, is_dataset: bool) -> None:
        self.content, self._described, self._busy = content, described, busy
        self._iterator: Iterator[Any] = _batches_of(content) if is_dataset else itertools.repeat(content)
        self._ahead: list[tuple[Any, list[np.ndarray]]] = []
        self._lock = threading.Lock()

    def specs(self, count: int) -> PyTree:
        """Returns the structure and the shapes of the next `count` batches, without taking them.

        Raises:
          OutOfRangeError: there are fewer batches.
        """
        with self._lock:
            while len(self._ahead) < count:
                self._read()
            return tuple((tree, tuple(Spec(x.shape, x.dtype) for x in leaves)) for tree, leaves in self._ahead[:count])

    def take(self, count: int) -> list[list[np.ndarray]]:
        """Takes and returns the next `count` batches, which `specs` has read."""
        with self._lock:
            taken, self._ahead = self._ahead[:count], self._ahead[count:]
            return [leaves for _, leaves in taken]

    def _read(self) -> None:
        try:
            with self._busy.with_(self._described):
                leaves, tree = jax.tree.flatten(next(self._iterator))
        except StopIteration:
            raise OutOfRangeError(
                "the next batch of a per-worker dataset",
                "the dataset has no further batch.",
                "return dataset.repeat() from dataset_fn, or put `while True:` around the `yield` of a generator",
            ) from None
        self._ahead.append((tree, [np.asarray(x) for x in leaves]))


def _sendable(error: Exception, worker: int, pickle: Any) -> Exception:
    """Returns an error that can be sent to another process, with its traceback as a note."""
    error.add_note(f"On worker {worker}:\n" + "".join(traceback.format_exception(error)))
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # An attribute cannot be pickled, or the class cannot be called with the pickled arguments.
        return RuntimeError(f"{type(error).__name__}: {error}\n" + "\n".join(getattr(error, "__notes__", ())))
    return error


def _batches_of(dataset: Any) -> Iterator[Any]:
    if inspect.isroutine(dataset):
        dataset = dataset()  # A function that makes a generator.
    if hasattr(dataset, "__iter__") or hasattr(dataset, "__next__"):
        return iter(dataset)
    if hasattr(dataset, "__getitem__") and hasattr(dataset, "__len__"):
        return (dataset[i] for i in range(len(dataset)))
    raise InvalidArgumentError(
        "dataset_fn() on a worker",
        f"it returned {shown(dataset, 80)}, which is not iterable.",
        "end dataset_fn with: return dataset",
    )
