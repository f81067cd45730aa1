"""The secret of a cluster: where it comes from, and that proofs prove it."""

import stat
from concurrent.futures import ThreadPoolExecutor

import pytest

from phalanx.cluster.secret import Secret, is_loopback, new_token, secret_of
from phalanx.errors import StartupError

HERE, ELSEWHERE = ["127.0.0.1:1", "localhost:2", "[::1]:3"], ["host0:1", "host1:1"]
LONG = "0123456789abcdef"


def proofs(secret):
    """What identifies a secret."""
    return secret.proof("text")


def test_proof_of_the_same_texts():
    """Only the same secret and the same texts have the same proof (RFC 4231 has the first value)."""
    secret = Secret("Jefe")
    assert Secret("Jefe").proves(secret.proof("a", "bc"), "a", "bc")
    assert not secret.proves(secret.proof("a", "bc"), "ab", "c")
    assert not Secret("another").proves(secret.proof("a", "bc"), "a", "bc")
    assert not secret.proves(None, "a", "bc")


def test_token_of_the_environment():
    """PHALANX_TOKEN, on one machine and on several."""
    for addresses in (HERE, ELSEWHERE):
        assert proofs(secret_of(addresses, {"PHALANX_TOKEN": LONG})) == proofs(Secret(LONG))


def test_token_that_is_too_short():
    """Can be guessed."""
    with pytest.raises(StartupError, match="PHALANX_TOKEN of 3 characters.*guessed") as raised:
        secret_of(HERE, {"PHALANX_TOKEN": "abc"})
    assert "secrets.token_hex(32)" in str(raised.value)


def test_no_token_for_several_machines():
    """Is an error that says what to do."""
    with pytest.raises(StartupError, match="2 processes on several machines: PHALANX_TOKEN is not set") as raised:
        secret_of(ELSEWHERE, {})
    assert 'HINT: export PHALANX_TOKEN=$(python -c "' in str(raised.value)


def test_token_of_a_user(tmp_path):
    """All processes of a user on a machine have the same one, which only this user can read."""
    environment = {"XDG_STATE_HOME": str(tmp_path / "state")}
    with ThreadPoolExecutor(8) as pool:
        found = {proofs(s) for s in pool.map(lambda _: secret_of(HERE, environment), range(32))}
    assert len(found) == 1
    (file,) = (tmp_path / "state" / "phalanx").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600


def test_token_that_others_can_read(tmp_path):
    """Is no secret."""
    environment = {"XDG_STATE_HOME": str(tmp_path)}
    secret_of(HERE, environment)
    file = tmp_path / "phalanx" / "token"
    file.chmod(0o644)
    with pytest.raises(StartupError, match="other users can read or write it") as raised:
        secret_of(HERE, environment)
    assert f"HINT: rm {file}" in str(raised.value)


def test_token_without_a_home(tmp_path):
    """A process that cannot write one says so."""
    (tmp_path / "file").write_text("")
    with pytest.raises(StartupError, match="it cannot be read or made: Not a directory"):
        secret_of(HERE, {"XDG_STATE_HOME": str(tmp_path / "file")})


def test_new_tokens_differ():
    """And are long enough."""
    assert new_token() != new_token()
    secret_of(ELSEWHERE, {"PHALANX_TOKEN": new_token()})


@pytest.mark.parametrize("address", HERE + ["127.1.2.3:4"])
def test_addresses_of_this_machine_only(address):
    """Names and numbers."""
    assert is_loopback(address)


@pytest.mark.parametrize("address", [*ELSEWHERE, "10.0.0.1:1", "0.0.0.0:1", "[2001:db8::1]:1"])
def test_addresses_that_others_reach(address):
    """Names of machines, too."""
    assert not is_loopback(address)
