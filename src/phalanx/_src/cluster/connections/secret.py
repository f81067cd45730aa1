# SPDX-License-Identifier: Apache-2.0
"""The secret that the processes of a cluster share, and how they prove to each other that they know it.

Uses the standard library only.
"""

import hashlib
import hmac
import os
import secrets
import stat
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import final

from phalanx._src.cluster.connections.hosts import is_loopback
from phalanx.errors import StartupError

TOKEN = "PHALANX_TOKEN"
"""The environment variable with the secret of a cluster. `phalanx run` sets it."""

_SHORTEST = 16
_HINT = (
    f'export {TOKEN}=$(python -c "import secrets; print(secrets.token_hex(32))"), '
    "the same value for all processes; srun passes it on"
)


@final
class Secret:
    """A secret, of which only proofs are sent.

    Args:
      token: the secret.
      origin: where the token comes from, for messages.

    Source: RFC 2104 (HMAC), with SHA-256.
    """

    def __init__(self, token: str, origin: str = TOKEN) -> None:
        self._key, self.origin = os.fsencode(token), origin

    def proof(self, *parts: str) -> str:
        """Returns a proof that only a process that knows the secret can compute from these texts."""
        # The lengths keep ("ab", "c") and ("a", "bc") apart.
        message = "".join(f"{len(part)}:{part}" for part in parts)
        return hmac.new(self._key, message.encode(errors="surrogatepass"), hashlib.sha256).hexdigest()

    def proves(self, proof: object, *parts: str) -> bool:
        """Returns whether a proof was computed from these texts and this secret."""
        expected_proof = self.proof(*parts).encode()
        return isinstance(proof, str) and hmac.compare_digest(proof.encode(errors="surrogatepass"), expected_proof)


def new_token() -> str:
    """Returns a token for a new cluster."""
    return secrets.token_hex(32)


def secret_of(addresses: Sequence[str], environment: Mapping[str, str] = os.environ) -> Secret:
    """Returns the secret of this process's cluster.

    It is the value of PHALANX_TOKEN. Without that variable, the processes of one user at addresses that only this machine can reach
    share a file that only this user can read.

    Args:
      addresses: `host:port` of all processes.
      environment: the environment variables of this process.

    Raises:
      StartupError: PHALANX_TOKEN is missing or too short, or others can read the file.
    """
    if token := environment.get(TOKEN, "").strip():
        if len(token) < _SHORTEST:
            raise StartupError(f"{TOKEN} of {len(token)} characters", "a secret this short can be guessed.", _HINT)
        return Secret(token)
    if not all(map(is_loopback, addresses)):
        raise StartupError(
            f"a cluster of {len(addresses)} processes at {', '.join(addresses[:2])}{', ...' if len(addresses) > 2 else ''}",
            f"{TOKEN} is not set. Other machines can reach these addresses, and anyone there could join.",
            _HINT,
        )
    return _secret_of_user(environment)


def _secret_of_user(environment: Mapping[str, str]) -> Secret:
    """Returns the secret in a file of this user. The first process creates the file."""
    home = environment.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    path = Path(home, "phalanx", "token")
    subject = f"the secret of this user, {path}"
    if not path.is_absolute():
        raise StartupError(subject, "this user has no home directory.", _HINT)
    try:
        if not path.exists():
            _write(path, new_token())
        # Rejects links, and does not block on a named pipe.
        with open(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), encoding="utf-8") as file:
            about, token = os.fstat(file.fileno()), file.read().strip()
        folder = path.parent.stat()
    except (OSError, ValueError) as e:
        reason = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
        raise StartupError(subject, f"it cannot be read or made: {reason}.", f"rm {path}; or {_HINT}") from e
    if about.st_uid != os.getuid():
        raise StartupError(subject, f"it belongs to the user {about.st_uid}.", _HINT)
    if folder.st_uid != os.getuid() or folder.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StartupError(
            subject, "other users can put another file in its place.", f"chmod 700 {path.parent}; or {_HINT}"
        )
    if about.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise StartupError(subject, "other users can read or write it.", f"rm {path}; or {_HINT}")
    if not stat.S_ISREG(about.st_mode) or len(token) < _SHORTEST:
        raise StartupError(subject, f"it holds no secret of at least {_SHORTEST} characters.", f"rm {path}; or {_HINT}")
    return Secret(token, f"the secret in {path}")


def _write(path: Path, token: str) -> None:
    """Writes the file atomically. Keeps an existing file that another process created first."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary_path = path.with_name(f"token.{secrets.token_hex(8)}")
    try:
        with open(os.open(temporary_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
            file.write(token + "\n")
        with suppress(FileExistsError):
            os.link(temporary_path, path)
    finally:
        temporary_path.unlink(missing_ok=True)
