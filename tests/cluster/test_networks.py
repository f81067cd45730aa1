"""Two machines whose names, interfaces and proxies are those of real clusters, as network namespaces. Needs root: `make test-all`."""

import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack

import pytest
from tests import forks

from phalanx._src.cluster.connections.secret import TOKEN, new_token
from phalanx.errors import StartupError
from phalanx.testing import VirtualNetwork

DEADLINE_S = 300
NAMES = "192.0.2.1 host0\n192.0.2.2 host1\n"
NETWORKS = {
    "names": (NAMES, "host{}", "host{}"),
    # The installer of Debian writes this line.
    "name that leads back": (NAMES + "127.0.1.1 debian0 debian1\n", "debian{}", "host{}"),
    "own name of the cluster leads back": ("127.0.1.1 host{0}\n" + NAMES, "host{}", "192.0.2.{}"),
    "name that leads nowhere": (NAMES, "nameless{}", "host{}"),
    "name on another network": (NAMES + "198.51.100.1 store0\n198.51.100.2 store1\n", "store{}", "host{}"),
    "IPv6 only": ("fd78::1 six0\nfd78::2 six1\n", "six{}", "six{}"),
}
"""The /etc/hosts of both machines, their host names, and their names in the cluster."""
PROXIES = {name: "http://192.0.2.9:3128" for name in ("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY")}
# Another network, which joins nothing, and addresses of IPv6 on the one that does.
INTERFACES = """
ip addr add fd78::{0}/64 dev $(ls /sys/class/net | grep -v lo) nodad
ip link add store type veth peer name unused
ip addr add 198.51.100.{0}/24 dev store
ip link set store up
ip link set unused up
"""
AS_HOST = 'mount --bind "$0" /etc/hosts && hostname "$1" && shift && exec "$@"'


@pytest.fixture
def network():
    with ExitStack() as stack:
        try:
            network = stack.enter_context(VirtualNetwork())
        except StartupError as e:
            pytest.skip(f"{e}")
        for machine in (0, 1):
            script = INTERFACES.format(machine + 1)
            subprocess.run(network.command(machine, ["sh", "-e", "-c", script]), check=True, timeout=DEADLINE_S)
        yield network


@pytest.fixture
def check(network, tmp_path):
    """Runs `phalanx doctor` on both machines. Returns the exit codes and outputs."""

    def check(hosts, host_names, cluster_names, timeout_s=60, **variables):
        workers = [f"{cluster_names[machine]}:12345" for machine in (0, 1)]
        token, processes = new_token(), []
        for machine in (0, 1):
            file = tmp_path / f"hosts{machine}"
            file.write_text("127.0.0.1 localhost\n::1 localhost\n" + hosts[machine])
            config = {"cluster": {"worker": workers}, "task": {"type": "worker", "index": machine}}
            variables |= {"TF_CONFIG": json.dumps(config), TOKEN: token, "PYTHONPATH": os.pathsep.join(sys.path)}
            doctor = [sys.executable, "-m", "phalanx", "doctor", "--timeout-seconds", f"{timeout_s}"]
            as_host = ["unshare", "--mount", "--uts", "sh", "-c", AS_HOST, str(file), host_names[machine], *doctor]
            processes.append(
                forks.Popen(
                    network.command(machine, as_host),
                    env={**os.environ, "JAX_PLATFORMS": "cpu", **variables},
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                    text=True,
                )
            )
        outputs = [process.communicate(timeout=DEADLINE_S)[0] for process in processes]
        return [process.returncode for process in processes], outputs

    return check


def of_machines(text, first=0):
    return [text.format(first + machine) for machine in (0, 1)]


@pytest.mark.exhaustive("tests/unit/cluster/connections/test_hosts.py, tests/unit/tools/test_network.py")
@pytest.mark.parametrize(("kind", "proxies"), [*((kind, {}) for kind in NETWORKS), ("names", PROXIES)])
def test_group_starts_on_this_network(check, kind, proxies):
    """The processes meet and exchange arrays, whatever the machines call themselves."""
    hosts, host_name, cluster_name = NETWORKS[kind]
    addresses = of_machines(cluster_name, first=cluster_name.startswith("192"))
    codes, outputs = check(of_machines(hosts), of_machines(host_name), addresses, **proxies)
    assert codes == [0, 0], outputs
    passed = re.findall("^PASS (.*?):", outputs[0], re.M)
    assert passed[-5:] == ["handshake", "all-reduce", "addresses", "versions", "clocks"]
    assert ("proxies" in passed) == bool(proxies)
    assert "FAIL" not in outputs[1]


@pytest.mark.exhaustive("tests/unit/tools/test_network.py")
def test_name_of_the_first_machine_leads_back_on_the_second(check):
    """The second machine says so, and what to write. It does not wait for itself."""
    hosts = [NAMES, "127.0.1.1 host0 host1\n"]
    codes, outputs = check(hosts, of_machines("host{}"), of_machines("host{}"), timeout_s=5)
    assert codes == [1, 1], outputs
    assert "FAIL names: on the machine of rank 1, host0 is 127.0.1.1, which is that machine" in outputs[1]
    assert "FAIL handshake: " in outputs[0]
