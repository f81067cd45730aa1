# SPDX-License-Identifier: Apache-2.0
"""Implements `phalanx migrate`, which runs `python -m phalanx._src.tools.migrate`."""

import difflib
import errno
import io
import json
import os
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from phalanx._src.cluster.untrusted import new_file, read_data
from phalanx.errors import InvalidArgumentError, MissingDependencyError, PhalanxError
from phalanx.errors.printable import printable

# Address space only: the kernel commits a page of the stack when the thread touches it.
_STACK_BYTES = 512_000_000


def main(settings: str) -> int:
    """Migrates files and folders.

    Args:
      settings: the options of `phalanx migrate`, as JSON.

    Returns:
      The exit code: 0 if all is migrated, 1 if a line needs a look, and 2 if a file cannot be read.
    """
    options = json.loads(settings)
    try:
        return _run(Path(options["path"]), options["output"], options["in_place"], options["check"])
    except PhalanxError as e:
        print(f"phalanx: {e}", file=sys.stderr)
        return 2


def _run(path: Path, output: str | None, in_place: bool, check: bool) -> int:
    try:
        from phalanx._src.tools.migrate.notebooks import migrate_notebook
        from phalanx._src.tools.migrate.program import migrate
    except ImportError as e:
        raise MissingDependencyError(
            "phalanx migrate", "libcst is not installed.", 'pip install "phalanx[migrate]"'
        ) from e
    from phalanx._src.tools.migrate.table import the_table

    files = _files(path)
    if output is not None and path.is_dir() and Path(output).is_file():
        raise InvalidArgumentError(f"phalanx migrate {path} -o {output}", "a folder needs a folder.", "-o new_folder")
    codes = [0]  # A folder without programs is not an error.
    for file in files:
        try:
            source = _source_of(file)
            migration = (migrate_notebook if file.suffix == ".ipynb" else migrate)(source, str(file), the_table())
            codes.append(migration.report.exit_code)
            # To stderr: stdout has only the diff, for `phalanx migrate train.py | patch`.
            print(*map(printable, migration.report.lines()), sep="\n", file=sys.stderr)
            if check:
                continue
            if in_place or output is not None:
                # The user has named the file that a link leads to.
                target = file.resolve() if in_place else _target(file, path, Path(str(output)))
                # With -o, files that do not change are copied too, so that the new folder is complete.
                if not in_place or migration.source != source:
                    with new_file(target, Path(str(output)) if path.is_dir() and not in_place else None) as opened:
                        opened.write(migration.source)
            else:
                _print_diff(source, migration.source, file)
        except OSError as e:
            print(printable(f"{e.filename}: {e.strerror}"), file=sys.stderr)
            codes.append(2)
    return max(codes)


def _files(path: Path) -> list[Path]:
    # Unlike the methods of `Path`, these functions accept a name that is too long.
    if os.path.isdir(path):
        # Not through links, which may lead out of the folder.
        return sorted(
            file
            for suffix in (".py", ".ipynb")
            for file in path.rglob(f"*{suffix}")
            if file.is_file()
            and not file.is_symlink()
            # `.venv` has the programs of others, and `.ipynb_checkpoints` has copies.
            and not any(part.startswith(".") for part in file.relative_to(path).parts)
        )
    if os.path.isfile(path):
        return [path]
    problem = "it is a device or a pipe." if os.path.exists(path) else "there is no such file or folder."
    raise InvalidArgumentError(f"phalanx migrate {path}", problem, "phalanx migrate train.py")


def _source_of(file: Path) -> bytes:
    try:
        return read_data(file)
    except ValueError as e:
        raise OSError(errno.EINVAL, str(e), str(file)) from e


def _target(file: Path, root: Path, output: Path) -> Path:
    if root.is_dir():
        return output / file.relative_to(root)
    return output / file.name if output.is_dir() else output


def _print_diff(before: bytes, after: bytes, file: Path) -> None:
    # `patch` knows no line ends but "\n", so the diff must not split at others, as `str.splitlines` does.
    old, new = (io.StringIO(text.decode(errors="replace"), newline="\n").readlines() for text in (before, after))
    name = printable(str(file)).replace("\n", "\\n")  # Or else it could be a diff itself.
    lines = difflib.unified_diff(old, new, name, name)
    # A pipe gets the diff as it is, for `patch`.
    for line in map(printable, lines) if sys.stdout.isatty() else lines:
        # difflib does not write this line, without which `patch` would add a line feed to the last line.
        sys.stdout.write(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n")


def _run_with_a_large_stack(settings: str) -> int:
    """Python's parser accepts expressions of thousands of levels; for libcst's, these need more than the stack of the first thread."""
    threading.stack_size(_STACK_BYTES)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(main, settings).result()


if __name__ == "__main__":
    for stream in (sys.stdout, sys.stderr):
        # Names of files need not be text, and a terminal need not have all characters.
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    sys.exit(_run_with_a_large_stack(sys.argv[1]))
