# SPDX-License-Identifier: Apache-2.0
"""The parts of Ray that Phalanx calls, as types. Ray is an optional dependency, so this module does not import it."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class TaskError(Exception):
    """The type of `ray.exceptions.RayTaskError`: a method of an actor raised `cause`."""

    cause: BaseException | None


class RayErrors(Protocol):
    """The module `ray.exceptions`."""

    RayError: type[Exception]
    RayActorError: type[Exception]
    RaySystemError: type[Exception]
    RayTaskError: type[TaskError]
    GetTimeoutError: type[Exception]


class RayUtil(Protocol):
    """The module `ray.util`."""

    def list_named_actors(self) -> list[str]:
        """Returns the names of the running actors that have names."""


class ActorOptions(Protocol):
    """A class of actors with options."""

    def remote(self, *args: object) -> Any:
        """Starts an actor, and returns its handle."""


class ActorClass(Protocol):
    """The result of `ray.remote` for a class."""

    def options(self, **options: object) -> ActorOptions:
        """Returns the class with resources and other options."""


class RuntimeContext(Protocol):
    """Facts about the running Ray."""

    gcs_address: str
    runtime_env: Mapping[str, Mapping[str, object]]


class Ray(Protocol):
    """The module `ray`. References to results are opaque objects."""

    @property
    def exceptions(self) -> RayErrors:
        """The Ray errors."""

    def init(self, **options: object) -> object:
        """Starts Ray."""

    def is_initialized(self) -> bool:
        """Whether this process uses a running Ray."""

    def get_runtime_context(self) -> RuntimeContext:
        """Returns facts about the running Ray, such as its address."""

    def shutdown(self) -> None:
        """Ends Ray."""

    def nodes(self) -> Sequence[Mapping[str, Any]]:
        """Returns descriptions of all machines."""

    def cluster_resources(self) -> Mapping[str, float]:
        """Returns the resources of all machines, by name."""

    @property
    def util(self) -> "RayUtil":
        """The module `ray.util`."""

    def get_actor(self, name: str, /) -> Any:
        """Returns the handle of a running actor that has a name."""

    def remote(self, kind: type, /) -> ActorClass:
        """Returns a class of actors."""

    def get(self, references: object, /, *, timeout: float | None = None) -> Any:
        """Waits for one result or a list of results, and returns it."""

    def put(self, value: object, /) -> Any:
        """Stores a value, and returns a reference to it."""

    def wait(
        self, references: Sequence[object], /, *, num_returns: int = 1, timeout: float | None = None
    ) -> tuple[list[object], list[object]]:
        """Returns the references whose results are ready, and the others."""

    def kill(self, actor: object, /, *, no_restart: bool) -> None:
        """Ends an actor."""
