"""Parameter servers that outlive their coordinator, under `phalanx run --max-restarts`."""

import json
import re
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from processes import is_there, kill, listening, process, wait_until

from phalanx._src.cluster.processes.guard import marked


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


def said_in(line):
    """What a start has said, or None in a line of the log."""
    text = line.removeprefix("[worker 0] ")
    return json.loads(text) if text.startswith("{") else None


def ended(way, restarts):
    """Runs `restarting.py` to its end. Returns the exit code, what it has said by start, and what it has logged."""
    with launched(way, restarts) as (launcher, left):
        wait_until(lambda: left()[1])
        output, _ = launcher.communicate(timeout=900)
        assert left() == ([], [])
    starts, log = [[] for _ in range(restarts + 1)], []
    for line in output.splitlines():
        if said := said_in(line):
            starts[said.pop("start")].append(said)
        else:
            log.append(line.removeprefix("[worker 0] "))
    return launcher.returncode, starts, "\n".join(log)


def after(updates):
    """What `Training.say` must say: SGD with momentum, step by step."""
    weight = velocity = 0.0
    for _ in range(updates):
        velocity = 0.5 * velocity - 0.125
        weight += velocity
    values = pytest.approx([weight], rel=1e-5)
    return {"updates": updates, "count": updates, "weights": values, "rows": values}


@pytest.mark.cover(["options"], {"rounds_of_one"})
@pytest.mark.parametrize(
    ("options", "restarts", "servers"), [("sharded", 2, 2), ("synchronous", 1, 1), ("rounds_of_one", 1, 1)]
)
def test_no_update_is_lost(options, restarts, servers):
    """The coordinator is killed, once after the loss of a server: the next one goes on with values, slots and number of updates."""
    code, starts, log = ended(options, restarts)
    assert code == 0
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
    assert final["updates"] >= 20 * (restarts + 1)
    assert last == {"assigned": [7.0]}
    # The counter, the weight, the table, the learning rate, the number of updates, and two slots.
    assert log.count(f"{servers} parameter servers were found again, with 7 variables.") == restarts


@pytest.mark.exhaustive("test_no_update_is_lost")
def test_starts_with_one_server():
    """An exit code keeps the server, and an exception in the last start ends it."""
    code, starts, log = ended("one_server", 4)
    assert code == 1
    exits, after_exit, with_stopped, closes_the_first, raises = starts
    assert (exits, after_exit) == ([after(0)], [after(20)])
    # A stopped one is not ended, because it has the only copy of its variables: the error names it, and a later start uses it.
    assert with_stopped == []
    lost = r"ServerLostError: parameter server 0: it has sent no heartbeat for \d+ s, and it holds the only copy"
    assert re.search(lost + r"[\s\S]*HINT: resume the process and start the script again", log)
    # Of two strategies, the next start finds the server of that which was not closed.
    assert closes_the_first == [after(20), after(0)]
    assert raises == [after(0), after(12)]
    assert log.count("1 parameter servers were found again") == 3
    assert "ValueError: no more clicks" in log


@pytest.mark.exhaustive("test_no_update_is_lost")
def test_starts_with_two_servers():
    """If one is lost, all begin with their first values, as without a launcher, and the log tells why."""
    code, starts, log = ended("two_servers", 2)
    assert code == 0
    cut_off, loses_a_server, begins_anew = starts
    # Servers that do not know each other end, and others start under their names.
    assert cut_off == []
    assert "new ones start without their values: the start of one of them was cut off." in log
    assert loses_a_server == [after(0)]
    assert "ServerLostError" in log
    assert begins_anew == [after(0), after(12)]
    assert re.search(
        r"last start are there: server 0 of 2[^:]*\. This start needs: .*server 1 of 2.*without their", log
    )


@pytest.mark.exhaustive("test_no_update_is_lost")
def test_fit_goes_on():
    """The weights are those of the last start, and metrics begin again. All processes end with a killed launcher, and their files."""
    with launched("fits", 3) as (launcher, left):
        said = []
        while not said or "pids" not in said[-1]:
            line = launcher.stdout.readline()
            assert line, f"the launcher has ended after {said}"
            said += filter(None, [said_in(line)])
        before, last, found, waiting = said
        assert before["updates"] == 0
        assert found["updates"] == last["updates"] >= 3
        assert found["evaluated"] == pytest.approx(last["evaluated"], rel=1e-5)
        assert found["evaluated"] != pytest.approx(before["evaluated"], rel=1e-3)
        # The coordinator, the servers, and those of Ray, with their files.
        assert len(left()[0]) > 6
        assert listening(left()[0]) == {"127.0.0.1"}
        kill(launcher.pid)
        wait_until(lambda: left() == ([], []))
        wait_until(lambda: not any(map(is_there, waiting["pids"])))
