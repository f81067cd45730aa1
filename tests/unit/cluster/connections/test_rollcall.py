"""The roll call, with real sockets: who comes, who does not, and what all are told."""

import contextlib
import socket
import threading
import time
from types import SimpleNamespace

import pytest

from phalanx._src.cluster.connections import rollcall
from phalanx._src.cluster.connections.filters import addresses_of_machine
from phalanx._src.cluster.connections.listener import Listener
from phalanx._src.cluster.connections.rollcall import call_roll
from phalanx._src.cluster.connections.secret import Secret
from phalanx._src.launch.plan import free_ports
from phalanx.errors import StartupError

pytestmark = pytest.mark.slow

DEADLINE_S, SHORT_S = 120.0, 0.3
OURS, THEIRS = Secret("a secret of the cluster"), Secret("a secret of another one")


@pytest.fixture
def addresses():
    """Of four ranks."""
    return [f"127.0.0.1:{port}" for port in free_ports(4)]


class Process(threading.Thread):
    """One process, as a thread: it calls the roll, and keeps what it was told."""

    def __init__(self, addresses, rank, about="us", timeout_s=DEADLINE_S, secret=OURS, versions=None):
        super().__init__(daemon=True)
        self._call, self.connections, self.said = (addresses, rank), {}, "nothing"
        self._options = {"about": about, "timeout_s": timeout_s, "secret": secret, "versions": versions}
        self.start()

    def run(self):
        try:
            with call_roll(*self._call, **self._options) as roll:
                self.connections, self.service, self.machines = roll.lines, roll.service, roll.machines
            self.said = "go"
        except StartupError as e:
            self.said = str(e)


def connected(address):
    """A connection to an address, as soon as a process listens there."""
    host, port = address.split(":")
    deadline = time.monotonic() + DEADLINE_S
    while True:
        try:
            return socket.create_connection((host, int(port)), timeout=DEADLINE_S)
        except ConnectionRefusedError:
            assert time.monotonic() < deadline
            time.sleep(0.02)


def listening(address):
    host, port = address.split(":")
    return socket.create_server((host, int(port)))


def said(*processes):
    """What they were told in the end; their connections are closed."""
    for process in processes:
        process.join(timeout=DEADLINE_S)
        assert not process.is_alive()
        for connection in process.connections.values():
            connection.close()
    return [process.said for process in processes]


@pytest.fixture
def came(monkeypatch):
    """Ranks that rank 0 has let in, and None for each that it has refused."""
    came, peers = [], Listener.accepted

    def noted(listener, timeout_s):
        refused = listener.refused
        found = peers(listener, timeout_s)
        came.extend([peer.hello["rank"] for peer in found] + [None] * (listener.refused - refused))
        return found

    monkeypatch.setattr(Listener, "accepted", noted)
    return came


@pytest.fixture
def over(monkeypatch, came):
    """The time of the roll call is over as soon as one has come."""
    clock = SimpleNamespace(monotonic=lambda: time.monotonic() + 1000.0 * bool(came), sleep=time.sleep)
    monkeypatch.setattr(rollcall, "time", clock)


@pytest.mark.parametrize("late", [0, 1, 3])
def test_roll_call_succeeds_in_any_order(addresses, late):
    """In any order. The port is free afterwards, for JAX, while the connections stay open."""
    ranks = {rank: Process(addresses, rank) for rank in [*({0, 1, 2, 3} - {late}), late]}
    for process in ranks.values():
        process.join(timeout=DEADLINE_S)
    with listening(addresses[0]):
        chief = ranks[0].connections
        assert sorted(chief) == [1, 2, 3]
        for rank in chief:
            chief[rank].sendall(b"%d" % rank)
            assert ranks[rank].connections[0].recv(10) == b"%d" % rank
    assert said(*ranks.values()) == ["go"] * 4


def test_processes_that_come_by_two_addresses(addresses, monkeypatch):
    """JAX listens at all of them then. Each process knows it by the address to which it came."""
    monkeypatch.setattr(rollcall, "shares_files", lambda: threading.current_thread().name)
    _, port = addresses[0].split(":")
    by_name = [f"127.1:{port}", *addresses[1:3]]
    ranks = [Process(by_name, 0), Process(by_name, 1), Process([f"127.0.0.2:{port}", *addresses[1:3]], 2)]
    assert said(*ranks) == ["go"] * 3
    assert [rank.service for rank in ranks] == [f"127.1:{port}", f"127.0.0.1:{port}", f"127.0.0.2:{port}"]


def test_missing_ranks_are_named(addresses, over):
    """Rank 0 knows who has not come, and those that have are told."""
    for text in said(*(Process(addresses, rank) for rank in (0, 2))):
        assert text.startswith("a cluster of 4 processes: after 120 s rank 1 ")
        assert f"rank 1 ({addresses[1]}), rank 3 ({addresses[3]}) had not connected to rank 0" in text
        assert "HINT: look at the output of the missing processes" in text


def test_many_missing_ranks_fit_into_one_message(addresses, over):
    """The first ones are named and the others counted, so that the error of a large cluster reaches the ranks that came."""
    many = [addresses[0], *(f"worker-{rank}.training.svc:2222" for rank in range(1, 4096))]
    for text in said(*(Process(many, rank) for rank in (0, 3))):
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
    (text,) = said(Process(addresses, 2, timeout_s=SHORT_S))
    assert text.startswith(
        f"rank 0 ({addresses[0]}): rank 2 could not reach it for 0.3 s ([Errno 111] Connection refused)"
    )


def test_rank_started_twice(addresses, came):
    first, chief = Process(addresses[:3], 1), Process(addresses[:3], 0)
    while not came:
        time.sleep(0.01)
    (text,) = said(Process(addresses[:3], 1))
    assert f"rank 1 ({addresses[1]}): a process with this rank has connected already" in text
    assert said(chief, first, Process(addresses[:3], 2)) == ["go"] * 3


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
    with listening(addresses[0]) as service:
        late = Process(addresses[:2], 1)
        connection, _ = service.accept()
        with connection:
            connection.sendall(answer)
            (text,) = said(late)
    for part in told:
        assert part.format(*addresses) in text


@pytest.mark.parametrize(("changes", "most", "is_known"), [(False, 400, True), (True, 400, False), (False, 0, False)])
def test_addresses_of_all_machines(monkeypatch, addresses, changes, most, is_known):
    """All ranks know them, unless a router changes the addresses of one of them, or they are too many. On one machine nobody needs them."""
    assert said(*(ranks := [Process(addresses[:2], rank) for rank in (0, 1)])) == ["go"] * 2
    assert [rank.machines for rank in ranks] == [(), ()]
    # Each process sees its own files.
    monkeypatch.setattr(rollcall, "shares_files", iter(range(100)).__next__)
    monkeypatch.setattr(rollcall, "MOST_ADDRESSES", most)
    if changes:
        monkeypatch.setattr(rollcall, "addresses_of_machine", lambda: ["192.0.2.7"])
    assert said(*(ranks := [Process(addresses[:3], rank) for rank in (0, 1, 2)])) == ["go"] * 3
    expected = addresses_of_machine() if is_known else []
    assert [list(rank.machines) for rank in ranks] == [expected] * 3


@pytest.mark.parametrize("host", ["localhost", "[::1]"])
def test_roll_call_at_other_names_of_this_machine(host):
    addresses = [f"{host}:{port}" for port in free_ports(2)]
    assert said(Process(addresses, 0), Process(addresses, 1)) == ["go"] * 2


def test_flood_of_connections(addresses):
    """While two threads connect again and again, a rank comes in."""
    chief, is_over, count = Process(addresses[:2], 0), threading.Event(), []
    connected(addresses[0]).close()
    host, port = addresses[0].split(":")

    def flood():
        while not is_over.is_set():
            with contextlib.suppress(OSError):
                socket.create_connection((host, int(port)), timeout=1).close()
                count.append(1)

    threads = [threading.Thread(target=flood) for _ in range(2)]
    for thread in threads:
        thread.start()
    while len(count) < 50:
        time.sleep(0.01)
    other = Process(addresses[:2], 1)
    other.join(timeout=DEADLINE_S)
    is_over.set()
    for thread in threads:
        thread.join(timeout=DEADLINE_S)
    assert said(chief, other) == ["go"] * 2


@pytest.mark.parametrize("hangs_up", [False, True])
def test_rank_0_does_not_answer(addresses, hangs_up):
    """The rank gives up after its time, whether what listens there is silent, or hangs up again and again."""
    with listening(addresses[0]) as server:
        server.settimeout(0.05)
        process = Process(addresses[:2], 1, timeout_s=SHORT_S)
        while hangs_up and process.is_alive():
            with contextlib.suppress(TimeoutError):
                server.accept()[0].close()
        (text,) = said(process)
    assert text.startswith(f"rank 0 ({addresses[0]}): it closed the connection, or did not reply, while rank 1 waited")


def test_rank_0_started_twice(addresses):
    first = Process(addresses[:2], 0)
    connected(addresses[0]).close()
    (text,) = said(Process(addresses[:2], 0))
    assert "another process has the port, perhaps a second rank 0" in text
    assert said(first, Process(addresses[:2], 1)) == ["go"] * 2


def test_address_of_another_machine(addresses):
    (text,) = said(Process(["192.0.2.1:2222", addresses[1]], 0))
    assert text.startswith("rank 0 at 192.0.2.1:2222: it cannot listen there")


def test_member_of_another_cluster_is_told_to_all(addresses):
    """All are told who was started for what."""
    ranks = [Process(addresses[:2], 0), Process(addresses[:2], 1, about="them")]
    for text in said(*ranks):
        assert f"rank 1 ({addresses[1]}): it was started for another cluster, them, than rank 0, us" in text


def test_other_versions_are_named_to_all(addresses):
    """Those that differ, before the cluster is compared; one that says nothing of them is too old."""
    ours = {"JAX": "0.10.2", "Python": "3.13", "Phalanx": "0.2"}
    for theirs, named in (
        ({**ours, "JAX": "0.12.0", "Python": "3.11"}, "JAX 0.12.0, Python 3.11"),
        (None, "JAX None, "),
    ):
        ranks = [Process(addresses[:2], 0, versions=ours), Process(addresses[:2], 1, about="them", versions=theirs)]
        for text in said(*ranks):
            assert text.startswith(f"rank 1 ({addresses[1]}): it has {named}")
            assert "but rank 0 has JAX 0.10.2, Python 3.13" in text
            assert "HINT: install the same versions on all machines" in text
            assert theirs is None or "Phalanx" not in text


def test_name_that_leads_nowhere(addresses):
    (text,) = said(Process(["no.such.host.invalid:2222", addresses[1]], 0))
    assert text.startswith("rank 0 at no.such.host.invalid:2222: this machine does not know the name (")


def test_rank_with_another_secret(addresses, over):
    """It is told so, and rank 0 says how many came with another one."""
    chief, other = said(Process(addresses[:2], 0), Process(addresses[:2], 1, secret=THEIRS))
    assert f"rank 1 ({addresses[1]}) had not connected to rank 0 ({addresses[0]}). Connections with" in chief
    assert "another secret than PHALANX_TOKEN: 1.\nHINT: set the same PHALANX_TOKEN for all processes" in chief
    assert f"PHALANX_TOKEN: the process that it connected to, {addresses[0]}, has another secret." in other
    assert "HINT: set the same PHALANX_TOKEN for all processes of the cluster" in other


def test_pending_do_not_matter(addresses):
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
