"""The process that ends what another one has started."""

import os
import signal
import subprocess
import sys
import time
import uuid

import pytest
from tests.waiting import wait_until

from phalanx._src.cluster.processes.guard import end_marked, marked

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="the environments of processes are in /proc"),
]

NAME = "PHALANX_TEST_OF_GUARD"
SLEEP = [sys.executable, "-c", "import signal; print(1, flush=True); signal.pause()"]
DEADLINE_S = 120.0


@pytest.fixture
def mark():
    """No other process has it; what still has it is ended."""
    mark = f"{NAME}={uuid.uuid4().hex}"
    yield mark
    end_marked(mark)


def started(command, mark, **options):
    """A process with the mark, which has begun."""
    process = subprocess.Popen(
        command, env={**os.environ, NAME: mark.partition("=")[2]}, stdout=subprocess.PIPE, text=True, **options
    )
    assert process.stdout.readline()
    return process


def test_children_in_other_sessions_are_found(mark):
    """Also those of a process that has ended since."""
    code = f"import subprocess; subprocess.Popen({SLEEP}, start_new_session=True)"
    with started([sys.executable, "-c", code], mark) as parent:
        parent.wait()
        (child,) = marked(mark)
        assert child != parent.pid
        end_marked(mark)
        assert not marked(mark)


def test_processes_that_have_overwritten_their_environment(mark, tmp_path):
    """Ray's show a title in its place: they are known by the files that they have open."""
    code = (
        "import ctypes, signal\n"
        "begin, end = map(int, open('/proc/self/stat').read().rpartition(')')[2].split()[47:49])\n"
        "ctypes.memset(begin, 0, end - begin)\n"
        f"file = open({str(tmp_path / 'log')!r}, 'w')\nprint(1, flush=True)\nsignal.pause()"
    )
    with started([sys.executable, "-c", code], mark) as process:
        assert marked(mark) == marked(mark, str(tmp_path / "other")) == []
        assert marked(mark, str(tmp_path)) == [process.pid]
        end_marked(mark, str(tmp_path))
        assert process.wait(DEADLINE_S) == -signal.SIGKILL


def test_grace_period_spares_processes_that_end(mark):
    with started([sys.executable, "-c", "import time; print(1, flush=True); time.sleep(0.3)"], mark) as process:
        end_marked(mark, grace_s=DEADLINE_S)
        assert process.wait(DEADLINE_S) == 0


def test_a_killed_process_takes_all_along(mark, tmp_path):
    """The guard kills the marked processes and the group that it was told last, in a whole line, and removes the folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    own = {"stdout": subprocess.PIPE, "start_new_session": True}
    with started(SLEEP, mark), subprocess.Popen(SLEEP, **own) as group, subprocess.Popen(SLEEP, **own) as other:
        code = (
            "import signal\nfrom phalanx._src.cluster.processes.guard import Guard\n"
            f"guard = Guard({mark!r}, {str(folder)!r})\nguard.watch([{other.pid}])\nguard.watch([{group.pid}])\n"
            f"guard._process._process.stdin.raw.write(b'{other.pid}')\nprint(1, flush=True)\nsignal.pause()"
        )
        with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as owner:
            assert owner.stdout.readline()
            assert marked(mark)
            owner.kill()
        wait_until(lambda: not marked(mark))
        assert group.wait(DEADLINE_S) == -signal.SIGKILL
        wait_until(lambda: not folder.exists())
        assert other.poll() is None
        other.kill()


def test_a_released_guard_ends_nothing(mark):
    """It is for a process that is killed, and not for one that has ended what it started."""
    code = f"from phalanx._src.cluster.processes.guard import Guard; guard = Guard({mark!r}); guard.release()"
    with started(SLEEP, mark) as process:
        subprocess.run([sys.executable, "-c", code], check=True)
        time.sleep(0.2)
        assert process.poll() is None
        process.kill()


def test_guard_ends_everything_once_its_input_closes(mark, tmp_path):
    """The process of the guard: groups first, whether they are there or not, then what has the mark, then the folder."""
    folder = tmp_path / "folder"
    folder.mkdir()
    with subprocess.Popen(SLEEP, stdout=subprocess.PIPE, start_new_session=True) as group, started(SLEEP, mark) as left:
        command = [sys.executable, "-m", "phalanx._src.cluster.processes.guard", mark]
        line = f"{group.pid}\n".encode()
        subprocess.run([*command, str(folder)], input=line, timeout=DEADLINE_S, check=True)
        assert (group.wait(DEADLINE_S), left.wait(DEADLINE_S)) == (-signal.SIGKILL, -signal.SIGKILL)
        assert not folder.exists()
        subprocess.run([*command, ""], input=line, timeout=DEADLINE_S, check=True)
