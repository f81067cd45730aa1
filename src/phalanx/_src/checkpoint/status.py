# SPDX-License-Identifier: Apache-2.0
"""`CheckpointStatus`: what was restored, and what was not."""

import logging
import weakref
from typing import Any, Self

from phalanx._src.checkpoint.names import Holder
from phalanx._src.checkpoint.restoration import Restoration, with_nearest
from phalanx.errors import CheckpointMismatchError

_log = logging.getLogger("phalanx")


class CheckpointStatus:
    """The result of `Checkpoint.restore` and `Checkpoint.read`: what was restored, and what is still missing.

    Source: the status objects of tf.train.Checkpoint.restore.

    Example:
      >>> import keras, os, phalanx, tempfile
      >>> with tempfile.TemporaryDirectory() as folder:
      ...     path = phalanx.train.Checkpoint(step=keras.Variable(3)).write(os.path.join(folder, "first"))
      ...     status = phalanx.train.Checkpoint(step=keras.Variable(0)).read(path)
      ...     _ = status.assert_consumed()
    """

    def __init__(self, restoration: Restoration | None, objects: Holder) -> None:
        # The restoration itself does not keep the objects alive.
        self._restoration, self._objects = restoration, objects
        self._at_end: weakref.finalize[[Restoration, Holder], Any] | None = None
        if restoration is not None:
            # Only when nobody holds this object any more is it known that nobody asks it, or expects a difference.
            # Python calls it at its end too, when tf.train warns.
            self._at_end = weakref.finalize(self, _tell_differences, restoration, objects)

    def _is_answered(self) -> None:
        """Notes that the program knows what was not restored."""
        if self._at_end is not None:
            self._at_end.detach()

    def assert_consumed(self) -> Self:
        """Checks that everything in the checkpoint was restored, and that every object of the program was in it.

        May be called in cross-replica context.

        Returns:
          This object.

        Raises:
          CheckpointMismatchError: something in the checkpoint or in the program has no counterpart. The message names it.
        """
        restoration = self._complete("assert_consumed")
        if unused := restoration.unused():
            raise self._refuse("assert_consumed", "contains objects that the program does not have", unused, [])
        return self

    def assert_existing_objects_matched(self) -> Self:
        """Checks that every object that the program has so far was restored. May be called in cross-replica context.

        Returns:
          This object.

        Raises:
          CheckpointMismatchError: an object was not in the checkpoint. The message names it.
        """
        self._complete("assert_existing_objects_matched")
        return self

    def assert_nontrivial_match(self) -> Self:
        """Checks that something besides the counter of saves was restored. May be called in cross-replica context.

        Returns:
          This object.

        Raises:
          CheckpointMismatchError: nothing was restored.
        """
        restoration = self._of_file("assert_nontrivial_match")
        if not restoration.matched:
            raise self._refuse(
                "assert_nontrivial_match",
                "contains nothing that the program has; it contains",
                restoration.unused(),
                restoration.missing(),
            )
        return self

    def expect_partial(self) -> Self:
        """Declares that only a part of the checkpoint is meant to be restored. May be called in any context.

        Without this call, and without an assertion, a warning names what the checkpoint contains and the program lacks, and the reverse.

        Returns:
          This object.
        """
        self._is_answered()
        if self._restoration is not None:
            self._restoration.left_out.has_optimizers = True
        return self

    def _complete(self, method: str) -> Restoration:
        """Returns the restoration, after checking that every object of the program was restored."""
        restoration = self._of_file(method)
        if missing := restoration.missing():
            problem = "does not contain these objects of the program"
            raise self._refuse(method, problem, missing, restoration.unused())
        return restoration

    def _of_file(self, method: str) -> Restoration:
        """Returns the restoration, with what became possible since the last call."""
        if self._restoration is None:
            raise CheckpointMismatchError(
                f"{method}() after restore(None)",
                "there was no checkpoint to restore.",
                "if path: checkpoint.restore(path)",
            )
        self._is_answered()
        # A new item in a list or dict was not reported to `hear`, as an attribute is.
        self._restoration.resume()
        return self._restoration

    def _refuse(self, method: str, problem: str, names: list[str], unused: list[str]) -> CheckpointMismatchError:
        assert self._restoration is not None
        return CheckpointMismatchError(
            f"{method}() of the checkpoint {self._restoration.stored.file}",
            f"it {problem}: {with_nearest(names, unused)}.",
            "create the objects as in the program that saved it; or call expect_partial() and no assertion",
        )


def _tell_differences(restoration: Restoration, objects: Holder) -> None:
    """Warns about what a checkpoint contains and the program lacks, and the reverse. `objects` are alive until then."""
    # Files of `write` have no counter, but `restore` makes one.
    surplus, lacking = ([name for name in names if name != "save_counter"] for names in restoration.differences())
    parts = [
        f"{text}: {with_nearest(names, others)}"
        for text, names, others in (
            ("it contains what the program lacks", surplus, lacking),
            ("the program has what it does not contain", lacking, surplus),
        )
        if names
    ]
    if parts:
        _log.warning(
            "the checkpoint %s was restored in part. %s.\nHINT: restore(path).expect_partial(), if you have changed the model or the optimizer; else the names of the program that saved it",
            restoration.stored.file,
            "; ".join(parts),
        )
