"""Groups of real processes: how they end, what is passed on, and that nothing is left."""

import os
import re
import signal
import subprocess
import sys
import threading
import time

import pytest

from phalanx._src.cluster.spec import Task
from phalanx._src.launch.output import Sink
from phalanx._src.launch.plan import ProcessSpec
from phalanx._src.launch.supervise import run_group
from phalanx.errors import PhalanxError, StartupError

pytestmark = pytest.mark.slow

SLEEP = "pause()\n"
CLEANS_UP = """
def clean_up(*_):
    time.sleep(0.2)
    print("cleaned up")
    sys.exit(5)
signal.signal(signal.SIGTERM, clean_up)
"""
IGNORES_SIGTERM = "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
GRANDCHILDREN = """
code = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); signal.pause()"
for new_session in (False, True):
    child = subprocess.Popen([sys.executable, "-c", code], start_new_session=new_session, stdout=subprocess.PIPE)
    child.stdout.readline()
"""


@pytest.mark.parametrize(
    ("ending", "code", "words"),
    [
        ("sys.exit(3)", 3, "it exited with code 3"),
        ("raise KeyError('weights')", 1, "KeyError: 'weights'"),
        ("sys.exit('no data')", 1, "no data"),
        ("os._exit(75)", 75, "code 75 (it saw no progress)"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "it was killed by SIGKILL (probably out of memory"),
        ("os.kill(os.getpid(), signal.SIGSEGV)", 139, "it was killed by SIGSEGV"),
        ("os.abort()", 134, "it was killed by SIGABRT (abort"),
        ("os.kill(os.getpid(), signal.SIGTERM)", 143, "it was killed by SIGTERM"),
        ("os.kill(os.getpid(), 40)", 168, "it was killed by signal 40"),
    ],
)
def test_failure_of_one(launch, ending, code, words):
    """The one that fails is named with its code or signal, and the others are ended; the launcher has its code."""
    launched = launch(f"print('step 7')\nif rank == 1:\n    {ending}\n{SLEEP}", workers=3)
    assert launched.outcome.exit_code == code
    (report,) = launched.reports
    assert report.startswith("worker 1 failed first: it ")
    assert words in report
    assert "  | step 7\n" in report
    assert report.endswith(
        "\n  worker 0 was ended by the launcher (SIGTERM)\n  worker 2 was ended by the launcher (SIGTERM)"
    )


def test_report_has_the_whole_stack(launch):
    """The stack of an exception is reported with its cause and all lines of its message, apart from the last lines."""
    source = (
        "print('epoch 3')\ntry:\n    {}['a']\nexcept KeyError as e:\n    raise ValueError('bad\\nHINT: good') from e\n"
    )
    (report,) = launch(source, workers=1).reports
    last, _, stack = report.partition("Its stack:\n")
    assert re.search(r"Its last lines before its stack:\n  \| epoch 3\n$", last)
    assert stack.startswith("  | Traceback (most recent call last):\n")
    assert "  | KeyError: 'a'\n" in stack
    assert stack.endswith("  | ValueError: bad\n  | HINT: good")


def test_report_has_the_stack_of_a_crash(launch):
    """A crash in native code shows the Python stack too."""
    (report,) = launch("def inner():\n    os.kill(os.getpid(), signal.SIGSEGV)\ninner()", workers=1).reports
    assert re.search(r"Its stack:\n  \| Fatal Python error: Segmentation fault\n(.*\n)*.* in inner\n", report)


def test_first_failure_is_named(launch):
    """Those that fail because they are told to end are not the culprits, whatever their codes and ranks."""
    launched = launch(f"{CLEANS_UP}if rank == 1:\n    wait_for('ready')\n    sys.exit(4)\nnote('ready')\n{SLEEP}")
    assert launched.outcome.exit_code == 4
    assert launched.outcome.culprit.name == "worker 1"
    assert launched.lines_of(0) == ["cleaned up"]
    assert "worker 0 exited with code 5 after it was asked to exit" in launched.reports[0]


def test_others_report_whom_they_miss(launch):
    """They have time to end by themselves before they are told. One that ended well before is reported as that."""
    launched = launch(
        "note(f'pid{rank}', os.getpid())\n"
        "if rank == 0:\n    sys.exit(0)\n"
        "wait_for_end_of(f'pid{rank - 1}')\nsys.exit(5 + rank)",
        workers=3,
        word_s=600.0,
        grace_s=600.0,
    )
    assert launched.outcome.exit_code == 6
    (report,) = launched.reports
    assert report.startswith("worker 1 failed first: it exited with code 6")
    assert report.endswith("\n  worker 0 exited with code 0\n  worker 2 exited with code 7")


def test_stopped_worker_is_named(launch, needs_proc):
    """One that stands still by SIGSTOP is ended, and the report says that it stood still."""
    launched = launch(
        "if rank == 0:\n    note('pid', os.getpid())\n    os.kill(os.getpid(), signal.SIGSTOP)\n    pause()\n"
        "state = Path('/proc', wait_for('pid'), 'stat')\n"
        "while state.read_text().split()[2] != 'T':\n    time.sleep(0.01)\n"
        "sys.exit(75)"
    )
    assert launched.outcome.exit_code == 75
    assert "worker 0 was stopped (SIGSTOP) and was ended by the launcher (SIGTERM)" in launched.reports[0]


def test_worker_that_ignores_sigterm_is_killed(launch):
    launched = launch(
        f"if rank == 0:\n    {IGNORES_SIGTERM}    note('ready')\n    {SLEEP}wait_for('ready')\nsys.exit(3)", grace_s=0.3
    )
    assert launched.outcome.exit_code == 3
    assert "worker 0 was ended by the launcher (SIGKILL)" in launched.reports[0]


@pytest.mark.parametrize(
    ("ending", "code"), [("sys.exit(0)", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 137)]
)
def test_no_grandchild_is_left(launch, needs_proc, ending, code):
    """What a worker has started ends with the group, in whatever session, though it ignores SIGTERM; a fixture looks."""
    launched = launch(f"{GRANDCHILDREN}if rank == 1:\n    {ending}", grace_s=0.2)
    assert launched.outcome.exit_code == code


def test_grandchildren_are_told_once(launch):
    """What a worker has started can clean up too, and is not told again while it does."""
    launched = launch(
        "if sys.argv[1:]:\n"
        "    told = []\n"
        "    signal.signal(signal.SIGTERM, lambda *_: told.append(os.write(1, b'told\\n')))\n"
        "    note(sys.argv[1])\n"
        "    while not told:\n"
        "        time.sleep(0.01)\n"
        "    time.sleep(0.2)\n"
        "    sys.exit(0)\n"
        "names = [f'child{i}' for i in range(4)]\n"
        "if rank == 0:\n"
        "    for child in [subprocess.Popen([sys.executable, __file__, name]) for name in names]:\n"
        "        child.wait()\n"
        "for name in names:\n"
        "    wait_for(name)\n"
        "sys.exit(3)"
    )
    assert (launched.outcome.exit_code, launched.lines_of(0)) == (3, ["told"] * 4)


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)])
def test_signal_to_the_launcher(launch, number, code):
    """A signal that ends the launcher ends all workers first, gives them time to clean up, and starts nothing again."""
    launched = launch(
        f"{CLEANS_UP}if rank == 1:\n    wait_for('ready')\n    os.kill(launcher, {int(number)})\nnote('ready')\n{SLEEP}",
        max_restarts=3,
    )
    assert launched.outcome.exit_code == code
    assert launched.lines_of(0) == launched.lines_of(1) == ["cleaned up"]
    assert launched.reports == [
        f"The launcher was ended by {number.name}.\n"
        "  worker 0 exited with code 5 after it was asked to exit\n"
        "  worker 1 exited with code 5 after it was asked to exit"
    ]


def test_second_signal_kills(launch):
    """A second Ctrl-C does not wait for the end of the grace period."""
    launched = launch(
        f"{IGNORES_SIGTERM}while True:\n    os.kill(launcher, signal.SIGINT)\n    time.sleep(0.1)",
        workers=1,
        grace_s=600,
    )
    assert launched.outcome.exit_code == 130
    assert "worker 0 was ended by the launcher (SIGKILL)" in launched.reports[0]


def test_signals_at_once(launch):
    """Two signals at once, as the end of a terminal or `timeout` sends them, still leave time to clean up."""
    both = "".join(f"os.kill(launcher, signal.{name})\n" for name in ("SIGTERM", "SIGHUP"))
    assert launch(f"{CLEANS_UP}{both}{SLEEP}", workers=1).lines_of(0) == ["cleaned up"]


def test_signal_while_the_others_end(launch):
    """Ctrl-C after a failure starts nothing again, and does not hide who failed."""
    launched = launch(
        "def interrupt(*_):\n    os.kill(launcher, signal.SIGINT)\n    pause()\n"
        "if rank == 0:\n    signal.signal(signal.SIGTERM, interrupt)\n    note('ready')\n    pause()\n"
        "wait_for('ready')\nsys.exit(3)",
        max_restarts=3,
        grace_s=0.5,
    )
    assert launched.outcome.exit_code == 130
    (report,) = launched.reports
    assert report.startswith("worker 1 failed first: it exited with code 3")
    assert "The launcher was ended by SIGINT.\n  worker 0 was ended by the launcher (SIGKILL)" in report


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGINT])
def test_ignored_signal_stays_ignored(launch, number):
    """The launcher continues at SIGHUP under `nohup`, and at SIGINT in the background of a shell. SIGTERM ends it."""
    before = signal.signal(number, signal.SIG_IGN)
    try:
        launched = launch(f"os.kill(launcher, {int(number)})\nprint('went on')", workers=1)
        ended = launch(f"os.kill(launcher, {int(number)})\nos.kill(launcher, signal.SIGTERM)\n{SLEEP}", workers=1)
        assert signal.getsignal(number) == signal.SIG_IGN
    finally:
        signal.signal(number, before)
    assert (launched.outcome.exit_code, launched.lines_of(0)) == (0, ["went on"])
    assert (ended.outcome.exit_code, ended.outcome.signal) == (143, signal.SIGTERM)


def test_restarts_until_it_succeeds(launch):
    """The whole group starts again, and knows how often it did."""
    launched = launch(
        "print(f'start {restart}')\nif restart == 2:\n    sys.exit(0)\nif rank == 1:\n    sys.exit(3)\n" + SLEEP,
        max_restarts=5,
    )
    assert launched.outcome.exit_code == 0
    assert launched.lines_of(1) == ["start 0", "start 1", "start 2"]
    assert [text for text in launched.reports if "again" in text] == [
        "The group starts again: 1 of 5.",
        "The group starts again: 2 of 5.",
    ]


def test_processes_that_outlive_a_start(launch, environment, needs_proc):
    """A script that trains alone may leave processes and files to its next start. They end with the last one."""
    source = """
folder = Path(os.environ["PHALANX_SERVERS_FOLDER"])
if restart == 0:
    kept = {k: v for k, v in os.environ.items() if k != "PHALANX_LAUNCH"} | {"PHALANX_RAY": str(folder)}
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], env=kept, start_new_session=True)
    (folder / "pid").write_text(str(child.pid))
pid = (folder / "pid").read_text()
print(folder, oct(folder.stat().st_mode), Path("/proc", pid).exists())
sys.exit(1)
"""
    launched = launch(source, workers=1, max_restarts=1)
    first, second = launched.lines_of(0)
    assert first == second
    folder, mode, is_there = first.split()
    assert (mode, is_there) == ("0o40700", "True")
    assert not os.path.exists(folder)


@pytest.mark.parametrize("options", [{"workers": 1}, {"max_restarts": 1}])
def test_no_process_outlives_the_only_start(launch, options):
    """Nor that of one of several workers."""
    launched = launch("print(os.environ.get('PHALANX_SERVERS_FOLDER'))", **options)
    assert launched.lines_of(0) == ["None"]


def test_port_that_is_taken(launch):
    """A worker that finds its port taken is reported; the next start has other ports."""
    launched = launch(
        "listener = socket.socket()\n"
        "host, port = addresses[1].split(':')\n"
        "if restart == 0:\n"
        "    if rank == 0:\n"
        "        listener.bind((host, int(port)))\n"
        "        note('taken')\n"
        "        pause()\n"
        "    wait_for('taken')\n"
        "if rank == 1:\n"
        "    listener.bind((host, int(port)))\n"
        "print(*addresses)",
        max_restarts=1,
    )
    assert launched.outcome.exit_code == 0
    assert re.search(r"worker 1 failed first(.*\n)*.*OSError: .*Address already in use", launched.reports[0])


def test_many_lines_come_whole_in_order(launch):
    """20,000 lines on each stream of two workers come whole, and in the order of their stream."""
    launched = launch(
        "lines = [f'{{}} {i} ' + 'x' * (i % 97) for i in range(20_000)]\n"
        "for i in range(0, 20_000, 1000):\n"
        "    for name, stream in (('out', sys.stdout), ('err', sys.stderr)):\n"
        "        stream.write('\\n'.join(lines[i : i + 1000]).format(*[name] * 1000) + '\\n')\n"
    )
    for rank in range(2):
        lines = launched.lines_of(rank)
        for name in ("out", "err"):
            wanted = [f"{name} {i} " + "x" * (i % 97) for i in range(20_000)]
            assert [line for line in lines if line.startswith(name)] == wanted
        assert len(lines) == 40_000


def test_lines_of_the_streams_do_not_mix(launch):
    """A line in parts is whole, though the other stream prints between them. A carriage return ends one; nothing may, too."""
    launched = launch(
        "for i in range(200):\n"
        "    sys.stdout.write('a'); sys.stdout.flush()\n"
        "    print('error', file=sys.stderr)\n"
        "    print('b')\n"
        "print('10%', end='\\r')\nprint('20%', end='\\r')\nprint('one')\nprint('two', end='')",
        workers=1,
    )
    assert [line for line in launched.lines_of(0) if line != "error"] == ["ab"] * 200 + ["10%", "20%", "one", "two"]
    assert launched.lines_of(0).count("error") == 200
    assert launched.output.endswith(b"[worker 0] two\n")


def test_bytes_without_encoding_are_passed_on(launch):
    """Bytes that are no text are passed on as they are, and reported readably."""
    source = "data = bytes(range(256)) * 50\nsys.stdout.buffer.write(data)\nsys.exit(3)"
    launched = launch(source, workers=1)
    pieces = re.split(rb"\r\n|\n|\r", bytes(range(256)) * 50)
    assert launched.output == b"".join(b"[worker 0] " + piece + b"\n" for piece in pieces)
    assert "\ufffd" in launched.reports[0]


@pytest.mark.parametrize("code", [0, 3])
def test_worker_with_closed_streams_is_awaited(launch, code):
    launched = launch(f"os.close(1)\nos.close(2)\ntime.sleep(0.2)\nnote('end')\nos._exit({code})", workers=1)
    assert launched.outcome.exit_code == code
    assert (launch.folder / "end").exists()


def test_pipe_that_a_stranger_holds(launch, needs_proc):
    """A process that hides from the launcher and keeps the pipe open does not keep it from ending."""
    launched = launch(
        "path = {'PATH': os.environ['PATH']}\n"
        "print(subprocess.Popen(['sleep', '300'], env=path, start_new_session=True).pid)",
        workers=1,
    )
    os.kill(int(launched.lines_of(0)[0]), signal.SIGKILL)
    assert launched.outcome.exit_code == 0


def test_slow_reader_loses_no_line(launch):
    """Where the reader is slow the workers wait, and nothing is lost."""
    reader, writer = os.pipe()
    arrived = bytearray()

    def read():
        while data := os.read(reader, 20_000):
            arrived.extend(data)
            threading.Event().wait(0.0005)

    thread = threading.Thread(target=read)
    thread.start()
    launched = launch("for i in range(25_000):\n    print(f'{i:060d}')", workers=1, sink=Sink(writer))
    os.close(writer)
    thread.join(30)
    os.close(reader)
    assert launched.outcome.exit_code == 0
    assert bytes(arrived).splitlines() == [b"[worker 0] %060d" % i for i in range(25_000)]


def test_reader_is_gone(launch):
    reader, writer = os.pipe()
    os.close(reader)
    launched = launch(f"print('hello')\n{SLEEP}", sink=Sink(writer))
    os.close(writer)
    assert launched.outcome.exit_code == 128 + signal.SIGPIPE


def test_reader_that_stands_still(launch):
    """A full pipe that nobody reads does not keep a signal from ending the group."""
    reader, writer = os.pipe()
    sink = Sink(writer)

    def tell():
        while not sink.is_full:
            time.sleep(0.01)
        (launch.folder / "full").touch()

    thread = threading.Thread(target=tell, daemon=True)
    thread.start()
    prints = "for _ in range(10_000):\n        print('x' * 1000)\n    note('printed')"
    asks = "wait_for('full')\nos.kill(launcher, signal.SIGTERM)"
    launched = launch(f"if rank == 0:\n    {prints}\n{asks}\n{SLEEP}", sink=sink, grace_s=0.5)
    thread.join()
    os.close(writer)
    os.close(reader)
    assert launched.outcome.exit_code == 143
    assert not (launch.folder / "printed").exists(), "what nobody reads was taken all the same"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_full_disk_ends_workers_with_error(launch):
    """Output that cannot be written is an error that says why; the workers have been ended."""
    message = r"output of the workers: cannot be written: .*No space left"
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(PhalanxError, match=message):
        launch(f"print('hello')\n{SLEEP}", sink=Sink(full.fileno()))


@pytest.mark.parametrize("mode", [None, 0o644])
def test_command_that_cannot_be_started(environment, tmp_path, mode):
    """A command that is not there, or may not be executed, is named; the process started before it is ended."""
    command = tmp_path / "command"
    if mode:
        command.write_text("")
        command.chmod(mode)
    specs = [
        ProcessSpec(Task("worker", 0), (sys.executable, "-c", "import signal; signal.pause()"), environment),
        ProcessSpec(Task("worker", 1), (str(command), "--lr"), environment),
    ]
    with pytest.raises(StartupError, match=rf"the command of worker 1: {command} --lr: cannot be started: .*{command}"):
        run_group(lambda _: specs, word_s=0.0)


LAUNCHER = """
import os, sys
from phalanx._src.launch.plan import Machine, Request, free_ports, plan
from phalanx._src.launch.supervise import run_group
request = Request(sys.argv[1], workers=2, evaluator=True)
run_group(lambda _: plan(request, Machine(2), os.environ, free_ports(2)))
"""


def test_launcher_is_killed(launch, environment, processes_left, needs_proc):
    """If the launcher is killed itself, workers and evaluator end too, and all that they have started, in any session."""
    script = launch.script(f"{GRANDCHILDREN}{IGNORES_SIGTERM}print('up')\n{SLEEP}")
    command = [sys.executable, "-c", LAUNCHER, script]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE) as launcher:
        names = {b"worker 0", b"worker 1", b"evaluator 0"}
        assert {launcher.stdout.readline() for _ in names} == {b"[%b] up\n" % name for name in names}
        assert len(processes_left()) == 1 + 3 * len(names)
        launcher.kill()
    while processes_left():
        time.sleep(0.01)
