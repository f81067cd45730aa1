"""Parameter servers that outlive their coordinator, under `phalanx run --max-restarts`."""

import json
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import end, is_there, listening, process, wait_until

from phalanx.cluster.guard import marked


@contextmanager
def launched(way, restarts):
    """The launcher of `restarting.py`, and a function that tells what is left of its servers: processes and files."""
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        command = ("-m", "phalanx", "run", "--max-restarts", restarts, "restarting.py", way)
        with process(*command, RAY_TMPDIR=root) as launcher:
            folders = []

            def left():
                folders[:] = folders or list(Path(root).iterdir())
                return [x for folder in folders for x in marked(f"PHALANX_RAY={folder}", str(folder))], [
                    *Path(root).iterdir()
                ]

            yield launcher, left


def ended(way, restarts):
    """Runs `restarting.py` to its end. Returns the exit code, what it has said by start, and what it has logged."""
    with launched(way, restarts) as (launcher, left):
        wait_until(lambda: left()[1])
        output, _ = launcher.communicate(timeout=300)
        assert left() == ([], [])
    starts, log = [[] for _ in range(restarts + 1)], []
    for line in output.splitlines():
        text = line.removeprefix("[worker 0] ")
        if text.startswith("{"):
            said = json.loads(text)
            starts[said.pop("start")].append(said)
        else:
            log.append(text)
    return launcher.returncode, starts, "\n".join(log)


def after(updates):
    """What `Training.say` must say: SGD with momentum, step by step."""
    weight = velocity = 0.0
    for _ in range(updates):
        velocity = 0.5 * velocity - 0.125
        weight += velocity
    values = pytest.approx([weight], rel=1e-5)
    return {"updates": updates, "count": updates, "weights": values, "rows": values}


@pytest.mark.parametrize("options", ["sharded", "synchronous", "snapshots"])
def test_no_update_is_lost(options):
    """The coordinator is killed twice: the next one goes on with the values, the slots and the number of updates."""
    code, starts, log = ended(options, 2)
    assert code == 0
    assert len(starts) == 3
    for n, said in enumerate(starts):
        if options == "synchronous":  # Two steps can be one update.
            for line in said[:3]:
                assert line["updates"] <= line["count"] <= 2 * line["updates"]
                line["count"] = line["updates"]
        first, second = said[:2]
        assert first == after(first["updates"])
        assert first["updates"] >= 20 * n
        # What the script assigns before the first step is older.
        assert second == first
    final, last = starts[-1][-2:]
    assert final == after(final["updates"])
    assert final["updates"] >= 60
    assert last == {"assigned": [7.0]}
    servers = 1 if options == "synchronous" else 2
    # The counter, the weight, the table, the learning rate, the number of updates, and two slots.
    assert log.count(f"{servers} parameter servers were found again, with 7 variables.") == 2


def test_a_script_that_fails_for_good():
    """An exit code keeps the servers too, and an exception ends them after the last start."""
    code, starts, log = ended("raises", 1)
    assert code == 1
    assert starts == [[after(0)], [after(20)]]
    assert "1 parameter servers were found again" in log
    assert "ValueError: no more clicks" in log


def test_a_server_that_is_lost():
    """All begin with their first values, as without a launcher, and the log tells why."""
    code, starts, log = ended("loses_a_server", 1)
    assert code == 0
    assert starts == [[after(0)], [after(0), after(12)]]
    assert "ServerLostError" in log
    assert re.search(
        r"last start are there: server 0 of 2[^:]*\. This start needs: .*server 1 of 2.*without their", log
    )


def test_a_server_that_is_stopped():
    """It is not ended, because it has the only copy of its variables: the error names it, and a later start uses it."""
    code, starts, log = ended("stops_a_server", 2)
    assert code == 0
    assert starts == [[after(0)], [], [after(8), after(8)]]
    lost = r"ServerLostError: parameter server 0: it has sent no heartbeat for \d+ s, and it holds the only copy"
    assert re.search(lost + r"[\s\S]*HINT: resume the process and start the script again", log)


def test_a_start_that_is_cut_off():
    """Servers that do not know each other end, and others start under their names."""
    code, starts, log = ended("starts_half", 1)
    assert code == 0
    assert starts == [[], [after(0)]]
    assert "new ones start without their values: the start of one of them was cut off." in log


def test_strategies_of_one_script():
    """The next start finds the servers of the strategy that was not closed."""
    code, starts, log = ended("closes", 1)
    assert code == 0
    assert starts == [[after(0), after(0)], [after(0), after(24), after(24)]]
    assert log.count("were found again") == 1


def test_fit_goes_on():
    """The weights are those of the last start, and the metrics begin again."""
    code, ((before, last), (found,)), _ = ended("fits", 1)
    assert code == 0
    assert before["updates"] == 0
    assert found["updates"] == last["updates"] >= 3
    assert found["evaluated"] == pytest.approx(last["evaluated"], rel=1e-5)
    assert found["evaluated"] != pytest.approx(before["evaluated"], rel=1e-3)


def test_all_processes_end_with_a_killed_launcher():
    """The coordinator, the servers, and those of Ray, with their files."""
    with launched("waits", 3) as (launcher, left):
        line = launcher.stdout.readline()
        pids = json.loads(line.partition("] ")[2])["pids"]
        assert len(left()[0]) > 6
        assert listening(left()[0]) == {"127.0.0.1"}
        end(launcher.pid)
        wait_until(lambda: left() == ([], []), deadline_s=30.0)
        wait_until(lambda: not any(map(is_there, pids)))
