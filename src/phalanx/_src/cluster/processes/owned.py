# SPDX-License-Identifier: Apache-2.0
"""Child processes that end with the process that owns them, and a folder for their files."""

import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from typing import Any, final

from typing_extensions import override

from phalanx._src.cluster.processes.guard import Guard, end_marked

SERVERS_FOLDER = "PHALANX_SERVERS_FOLDER"
"""The variable with which `phalanx run` tells a script the folder of processes that outlive the script."""

_MARK = "PHALANX_RAY"
_LONGEST_ROOT = 24
"""Longest path of the folder for temporary files. Paths of Unix sockets have at most 107 characters, and Ray appends the rest."""


@final
class _FoldersHere(list[str]):
    @override
    def extend(self, folders: Iterable[str]) -> None:
        # `ray.init` adds the folder of the script, and then the current one, by this method.
        super().extend(set(folders) & set(map(os.path.abspath, sys.path)))


def job_of_ray(ray: Any) -> Any:
    """Returns settings for `ray.init`: processes import from the folders from which this one does.

    Ray itself would add the current folder, which may be another user's, before all others.
    """
    job = ray.job_config.JobConfig()
    job._py_driver_sys_path = _FoldersHere()
    return job


@final
class MarkedProcesses:
    """Processes that are recognized by a variable of their environment, which their own children inherit.

    Args:
      folder: path of a folder for their files. It identifies the processes.

    Attributes:
      folder: path of the folder.
      variables: environment variables that mark the processes. Start them with these.
    """

    def __init__(self, folder: str) -> None:
        self.folder, self.variables = folder, {_MARK: folder}

    @property
    def mark(self) -> str:
        """The mark, as an entry of an environment: `NAME=value`."""
        return f"{_MARK}={self.folder}"

    def end(self, grace_s: float = 0.0) -> None:
        """Kills the processes that are still running after `grace_s` seconds."""
        end_marked(self.mark, self.folder, grace_s)


@final
class OwnedProcesses:
    """Marked processes that end with this process, however it ends. Only the current user can enter their folder.

    Attributes:
      marked: the processes.
    """

    def __init__(self) -> None:
        root = os.environ.get("RAY_TMPDIR") or tempfile.gettempdir()
        folder = tempfile.mkdtemp(prefix="phalanx-", dir=root if len(root) <= _LONGEST_ROOT else "/tmp")
        self.marked = MarkedProcesses(folder)
        self._guard = Guard(self.marked.mark, folder)

    def close(self, grace_s: float = 0.0) -> None:
        """Ends the processes and removes the folder."""
        self.marked.end(grace_s)
        shutil.rmtree(self.marked.folder, ignore_errors=True)
        # Last: if this process is killed before, the guard still ends the others.
        self._guard.release()
