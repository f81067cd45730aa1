"""The roll call, with real sockets: who comes, who does not, and what all are told."""

import contextlib
import socket
import threading
import time

import pytest

from phalanx.cluster.rollcall import call_roll
from phalanx.cluster.secret import Secret
from phalanx.errors import StartupError
from phalanx.launch.plan import free_ports

pytestmark = pytest.mark.slow

SHORT_S = 0.6
OURS, THEIRS = Secret("a secret of the cluster"), Secret("a secret of another one")


@pytest.fixture
def addresses():
    """Of four ranks."""
    return [f"127.0.0.1:{port}" for port in free_ports(4)]


class Process(threading.Thread):
    """One process, as a thread: it calls the roll after a while, and keeps what it was told."""

    def __init__(self, addresses, rank, about="us", timeout_s=5.0, after_s=0.0, secret=OURS):
        super().__init__()
        self._given, self._after_s, self.said = (addresses, rank), after_s, "nothing"
        self._options = {"about": about, "timeout_s": timeout_s, "secret": secret}
        self.connections = {}
        self.start()

    def run(self):
        """Calls the roll."""
        time.sleep(self._after_s)
        try:
            self.connections = call_roll(*self._given, **self._options)
            self.said = "go"
        except StartupError as e:
            self.said = str(e)


def connected(address):
    """A connection to an address, as soon as a process listens there."""
    host, port = address.split(":")
    deadline = time.monotonic() + 5
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=5)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def said(*processes):
    """What they were told in the end; their connections are closed."""
    for process in processes:
        process.join(timeout=30)
        assert not process.is_alive()
        for connection in process.connections.values():
            connection.close()
    return [process.said for process in processes]


@pytest.mark.parametrize("late", [0, 1, 3])
def test_roll_call_succeeds_in_any_order(addresses, late):
    """In any order. The port is free afterwards, for JAX, while the connections stay open."""
    ranks = [Process(addresses, rank, after_s=0.3 * (rank == late)) for rank in range(4)]
    for process in ranks:
        process.join(timeout=30)
    with socket.create_server(("127.0.0.1", int(addresses[0].split(":")[1]))):
        chief = ranks[0].connections
        assert sorted(chief) == [1, 2, 3]
        for rank in chief:
            chief[rank].sendall(b"%d" % rank)
            assert ranks[rank].connections[0].recv(10) == b"%d" % rank
    assert said(*ranks) == ["go"] * 4


def test_missing_ranks_are_named(addresses):
    """Rank 0 knows who has not come, and those that have are told."""
    came = [Process(addresses, rank, timeout_s=SHORT_S) for rank in (0, 2)]
    for text in said(*came):
        assert f"rank 1 ({addresses[1]}), rank 3 ({addresses[3]}) had not connected to rank 0" in text
        assert "HINT: look at the output of the missing processes" in text


def test_many_missing_ranks_fit_into_one_message(addresses):
    """The first ones are named and the others counted, so that the error of a large cluster reaches the ranks that came."""
    many = [addresses[0], *(f"worker-{rank}.training.svc:2222" for rank in range(1, 4096))]
    for text in said(*(Process(many, rank, timeout_s=SHORT_S) for rank in (0, 3))):
        assert "rank 9 (worker-9.training.svc:2222) and 4086 more had not connected to rank 0" in text


@pytest.mark.parametrize("is_equal", [True, False])
def test_long_views_of_the_cluster_are_compared_as_a_whole(addresses, is_equal):
    """The view of 4,096 addresses is longer than a message of the roll call, and may differ in the last of them only."""
    about = ", ".join(f"worker-{rank}.training.svc:2222" for rank in range(4096))
    both = Process(addresses[:2], 0, about), Process(addresses[:2], 1, about if is_equal else f"{about[:-1]}3")
    for text in said(*both):
        assert (text == "go") == is_equal
        assert is_equal or f"another cluster, {about[:1000]}... ({len(about)} characters, SHA-256 " in text


def test_no_rank_0(addresses):
    """The others say whom they could not reach, and why."""
    (text,) = said(Process(addresses, 2, timeout_s=SHORT_S))
    assert text.startswith(
        f"rank 0 ({addresses[0]}): rank 2 could not reach it for 0.6 s ([Errno 111] Connection refused)"
    )


def test_rank_started_twice(addresses):
    """The second one is told, the first one goes on."""
    first = Process(addresses[:3], 1)
    chief = Process(addresses[:3], 0)
    second = Process(addresses[:3], 1, after_s=0.3)
    (text,) = said(second)
    assert f"rank 1 ({addresses[1]}): a process with this rank has connected already" in text
    last = Process(addresses[:3], 2)
    assert said(chief, first, last) == ["go"] * 3


@pytest.mark.parametrize(
    ("answer", "told"),
    [
        (b"\x00\x00\x18\x04\x00\x00\x00\x00\x00\n", ["rank 1 ({1}): a process with this rank has connected already"]),
        (
            b"SSH-2.0-OpenSSH_9.6\r\n",
            [
                "rank 0 ({0}): another program answers there: b'SSH-2.0-OpenSSH_9.6",
                "HINT: use a free port in the address of the first worker",
            ],
        ),
    ],
    ids=["JAX", "SSH"],
)
def test_rank_that_comes_to_another_program(addresses, answer, told):
    """Once the cluster has started the port is that of JAX's service. The first words of any other program are shown."""
    host, port = addresses[0].split(":")
    with socket.create_server((host, int(port))) as service:
        late = Process(addresses[:2], 1)
        connection, _ = service.accept()
        with connection:
            connection.sendall(answer)
            (text,) = said(late)
    for part in told:
        assert part.format(*addresses) in text


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_roll_call_at_other_names_of_this_machine(host):
    """By name, and by IPv6."""
    addresses = [f"{host}:{port}" for port in free_ports(2)]
    assert said(Process(addresses, 0), Process(addresses, 1)) == ["go"] * 2


def test_flood_of_connections(addresses):
    """While two threads connect again and again, a rank comes in."""
    chief, is_over = Process(addresses[:2], 0, timeout_s=20), threading.Event()
    host, port = addresses[0].split(":")

    def flood():
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), timeout=1).close()

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        time.sleep(0.3)
        other = Process(addresses[:2], 1, timeout_s=20)
        other.join(timeout=30)
    finally:
        is_over.set()
        for thread in threads:
            thread.join(timeout=30)
    assert said(chief, other) == ["go"] * 2


def test_rank_that_comes_to_a_silent_service(addresses):
    """Something listens at the address of rank 0 and never answers: the rank gives up after its time."""
    host, port = addresses[0].split(":")
    with socket.create_server((host, int(port))):
        (text,) = said(Process(addresses[:2], 1, timeout_s=SHORT_S))
    assert text.startswith(
        f"rank 0 ({addresses[0]}): it closed the connection, or did not reply, while rank 1 waited for"
    )


def test_rank_0_started_twice(addresses):
    """The second one finds the port taken."""
    first = Process(addresses[:2], 0)
    (text,) = said(Process(addresses[:2], 0, after_s=0.2))
    assert "another process has the port, perhaps a second rank 0" in text
    assert said(first, Process(addresses[:2], 1)) == ["go"] * 2


def test_address_of_another_machine(addresses):
    """An address that this machine does not have."""
    (text,) = said(Process(["192.0.2.1:2222", addresses[1]], 0))
    assert text.startswith("rank 0 at 192.0.2.1:2222: it cannot listen there")


def test_member_of_another_cluster_is_told_to_all(addresses):
    """All are told who was started for what."""
    ranks = [Process(addresses[:2], 0), Process(addresses[:2], 1, about="them")]
    for text in said(*ranks):
        assert f"rank 1 ({addresses[1]}): it was started for another cluster, them, than rank 0, us" in text


def test_rank_with_another_secret(addresses):
    """It is told so, and rank 0 says how many came with another one."""
    ranks = Process(addresses[:2], 0, timeout_s=SHORT_S), Process(addresses[:2], 1, secret=THEIRS)
    chief, other = said(*ranks)
    assert f"rank 1 ({addresses[1]}) had not connected to rank 0 ({addresses[0]}). Connections with" in chief
    assert "another secret than PHALANX_TOKEN: 1.\nHINT: set the same PHALANX_TOKEN for all processes" in chief
    assert f"PHALANX_TOKEN: the process that it connected to, {addresses[0]}, has another secret." in other
    assert "HINT: set the same PHALANX_TOKEN for all processes of the cluster" in other


def test_strangers_do_not_matter(addresses):
    """While one is silent and others come with other secrets, all ranks meet."""
    chief = Process(addresses[:3], 0)
    first = Process(addresses[:3], 1)
    stranger = Process(addresses[:3], 2, secret=THEIRS)
    assert "has another secret" in said(stranger)[0]
    with connected(addresses[0]):
        assert said(chief, first, Process(addresses[:3], 2)) == ["go"] * 3


def test_rank_of_no_cluster(addresses):
    """One that knows the secret and has a rank that the cluster lacks is sent away."""
    chief, far = Process(addresses[:2], 0), Process(addresses, 3, timeout_s=SHORT_S)
    assert "it closed the connection, or did not reply, while rank 3 waited" in said(far)[0]
    assert said(chief, Process(addresses[:2], 1)) == ["go"] * 2


def test_rank_0_goes_away(addresses):
    """One that hangs up without a word until the time is over is named."""
    host, port = addresses[0].split(":")
    with socket.create_server((host, int(port))) as server:
        server.settimeout(0.05)
        process = Process(addresses[:2], 1, timeout_s=SHORT_S)
        while process.is_alive():
            with contextlib.suppress(TimeoutError):
                server.accept()[0].close()
        (text,) = said(process)
    assert text.startswith(f"rank 0 ({addresses[0]}): it closed the connection, or did not reply, while rank 1 waited")
