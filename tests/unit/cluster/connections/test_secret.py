"""The secret of a cluster: where it comes from, and that proofs prove it."""

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx._src.cluster.connections.secret import Secret, new_token, secret_of
from phalanx.errors import StartupError

HERE, ELSEWHERE = ["127.0.0.1:1", "localhost:2", "[::1]:3"], ["host0:1", "host1:1"]
LONG = "0123456789abcdef"


def proofs(secret):
    return secret.proof("text")


def hmac_by_hand(key, message):
    """HMAC-SHA-256 as RFC 2104 writes it, for a key that is shorter than a block."""
    inner, outer = (bytes(b ^ pad for b in key.ljust(64, b"\0")) for pad in (0x36, 0x5C))
    return hashlib.sha256(outer + hashlib.sha256(inner + message).digest()).hexdigest()


def test_proof_of_the_same_texts():
    """Only the same secret and the same texts have the same proof, which is an HMAC."""
    secret = Secret("Jefe")
    assert secret.proof("a", "bc") == hmac_by_hand(b"Jefe", b"1:a2:bc")
    assert Secret("Jefe").proves(secret.proof("a", "bc"), "a", "bc")
    assert not secret.proves(secret.proof("a", "bc"), "ab", "c")
    assert not Secret("another").proves(secret.proof("a", "bc"), "a", "bc")
    assert not secret.proves(None, "a", "bc")
    assert not secret.proves("\ud800", "a", "bc")


def test_token_of_the_environment():
    """PHALANX_TOKEN, on one machine and on several."""
    for addresses in (HERE, ELSEWHERE):
        for written in (LONG, f" {LONG}\n"):
            assert proofs(secret_of(addresses, {"PHALANX_TOKEN": written})) == proofs(Secret(LONG))


def test_token_that_is_too_short():
    with pytest.raises(StartupError, match="PHALANX_TOKEN of 3 characters.*guessed") as raised:
        secret_of(HERE, {"PHALANX_TOKEN": "abc"})
    assert "secrets.token_hex(32)" in str(raised.value)


def test_no_token_for_several_machines():
    for environment in ({}, {"PHALANX_TOKEN": ""}):
        with pytest.raises(StartupError, match="2 processes at host0:1, host1:1: PHALANX_TOKEN is not set") as raised:
            secret_of(ELSEWHERE, environment)
    with pytest.raises(StartupError, match="2 processes at 127.0.0.1:1, host1:1: PHALANX_TOKEN is not set"):
        secret_of([HERE[0], ELSEWHERE[1]], {})
    assert 'HINT: export PHALANX_TOKEN=$(python -c "' in str(raised.value)


def test_token_of_a_user(tmp_path):
    """All processes of a user on a machine have the same one, which only this user can read."""
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with ThreadPoolExecutor(8) as pool:
        found = {proofs(s) for s in pool.map(lambda _: secret_of(HERE, environment), range(32))}
    assert len(found) == 1
    (file,) = (tmp_path / "state" / "phalanx").iterdir()
    assert found == {proofs(Secret(file.read_text().strip()))}
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_token_of_another_user(tmp_path, monkeypatch):
    """Is not that of this one."""
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    secret_of(HERE, environment)
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(StartupError, match=f"it belongs to the user {owner}"):
        secret_of(HERE, environment)


@pytest.mark.parametrize(
    ("make", "mode", "found"),
    [
        (lambda file: file.write_text("abc"), 0o600, "it holds no secret of at least 16 characters"),
        (lambda file: file.write_bytes(b"\xff" * 20), 0o600, "it is not UTF-8"),
        (lambda file: os.mkfifo(file), 0o600, "it holds no secret"),
        (lambda file: file.symlink_to("/dev/zero"), None, "it cannot be read or made"),
        (lambda file: file.write_text(LONG), 0o644, "other users can read or write it"),
        (lambda file: file.write_text(LONG), 0o620, "other users can read or write it"),
    ],
    ids=["short", "bytes", "pipe", "link", "read", "written"],
)
def test_file_that_holds_no_token(tmp_path, make, mode, found):
    """Is an error at once."""
    file = tmp_path / "phalanx" / "token"
    file.parent.mkdir()
    make(file)
    if mode is not None:
        file.chmod(mode)
    with pytest.raises(StartupError, match=found) as raised:
        secret_of(HERE, {"XDG_STATE_HOME": str(tmp_path)})
    assert f"HINT: rm {file}; or export PHALANX_TOKEN=" in str(raised.value)


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o720])
def test_folder_that_others_may_change(tmp_path, mode):
    """They could put the file of an earlier cluster there."""
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    secret_of(HERE, environment)
    (tmp_path / "phalanx").chmod(mode)
    with pytest.raises(StartupError, match="other users can put another file in its place") as raised:
        secret_of(HERE, environment)
    assert f"HINT: chmod 700 {tmp_path / 'phalanx'}; or export PHALANX_TOKEN=" in str(raised.value)


def test_user_without_a_home():
    """No folder is made beside the script, where the next process would not find it."""
    with pytest.raises(StartupError, match="this user has no home directory"):
        secret_of(HERE, {"XDG_STATE_HOME": "relative"})


def test_token_that_cannot_be_written(tmp_path):
    """A process that cannot write one says so."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="it cannot be read or made: Not a directory"):
        secret_of(HERE, {"XDG_STATE_HOME": str(tmp_path / "file")})


def test_new_tokens_differ():
    """And are long enough."""
    assert new_token() != new_token()
    secret_of(ELSEWHERE, {"PHALANX_TOKEN": new_token()})
