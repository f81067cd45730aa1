"""Python processes that begin with JAX, Keras and Phalanx imported: forks of one process instead of new interpreters.

The imports are two thirds of what a process of a test costs. `Popen` and `run` are used like those of `subprocess`. A command that
is not this Python with a script, a module or a text, perhaps in a network namespace, runs as it does there, and so does every command if
PHALANX_TEST_ALL is set, as `make test-all` does. `/proc` shows the command line and the first environment of the process that was forked.

This process imports, starts no thread and no device, and forks twice: the parent of the second fork ends, so that the nearest
subreaper, which is the process that asked, becomes the parent of the fork and gets its exit code. A fork that is a launcher has a
template of its own, made before it does anything else, because only its children can be forked for it.
"""

import atexit
import ctypes
import gc
import importlib
import os
import pickle
import random
import runpy
import signal
import socket
import subprocess
import sys
import time
import types
import warnings
from contextlib import suppress

_SUBREAPER = 36  # PR_SET_CHILD_SUBREAPER of Linux's prctl
_FDS = 64
_MESSAGE = 1 << 20
_NewInterpreter = subprocess.Popen


class Template:
    """A process that forks on request.

    Args:
      connection: the socket on which it takes requests.
      process: the process, if somebody must hold it.
    """

    def __init__(self, connection, process=None):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1, 0, 0, 0)
        self._connection, self._process = connection, process
        atexit.register(self.close)

    def close(self):
        """Ends the process, which ends by itself once nobody can ask any more."""
        self._connection.close()
        if self._process is not None:
            self._process.wait()

    def fork(self, request, fds):
        """Returns the id of a new child of this process, which has the file descriptors and does what the request says."""
        socket.send_fds(self._connection, [pickle.dumps(request)], fds)
        answer = self._connection.recv(64)
        if not answer:
            raise RuntimeError("the process that forks has ended")
        return int(answer)


_template = None


def template():
    """Returns the template of this process, which is started when it is first needed."""
    global _template  # noqa: PLW0603
    if _template is None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "PHALANX_", "TF_", "XLA_"))}
        process = _NewInterpreter(
            # As PYTHONUNBUFFERED makes it, which `phalanx run` sets: a fork cannot change it.
            [sys.executable, "-u", __file__, str(theirs.fileno())],
            env={**environment, "KERAS_BACKEND": "jax", "NPROC": "2", "JAX_PLATFORMS": "cpu"},
            pass_fds=[theirs.fileno()],
            stdin=subprocess.DEVNULL,
        )
        theirs.close()
        _template = Template(ours, process)
    return _template


class Popen(_NewInterpreter):
    """A process that is forked if it is one of Python's.

    `subprocess.Popen` does everything but the start, for which it calls `_execute_child`. test_forks.py fails if it does not.
    """

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        *_, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite = rest[:9]
        start_new_session, process_group = rest[-2:]
        command = [os.fspath(a) for a in args] if isinstance(args, (list, tuple)) else []
        network, command = (command[3], command[4:]) if command[:3] == ["ip", "netns", "exec"] else ("", command)
        if not _is_program(command) or preexec_fn or os.environ.get("PHALANX_TEST_ALL"):
            return super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest)
        places = {0: p2cread, 1: c2pwrite, 2: errwrite}
        fds = {place: place if fd == -1 else fd for place, fd in places.items()} | {fd: fd for fd in pass_fds}
        request = {
            "command": command[1:],
            "network": network,
            "environment": dict(os.environ if env is None else env),
            "folder": os.fspath(cwd or os.getcwd()),
            "session": start_new_session,
            "group": process_group,
            "places": list(fds),
        }
        self.pid = template().fork(request, list(fds.values()))
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)
        return None


def run(command, **options):
    """`subprocess.run`, by a fork."""
    before, subprocess.Popen = subprocess.Popen, Popen
    try:
        return subprocess.run(command, **options)
    finally:
        subprocess.Popen = before


def _is_program(command):
    """Whether a command is this Python with a script, a module, or a text, and no further option than -P."""
    python, *words = command or [""]
    words = words[words[:1] == ["-P"] :]
    return python == sys.executable and bool(words) and (words[0] in ("-c", "-m") or not words[0].startswith("-"))


def serve(connection):
    """Forks for each request. Returns the request in the child, and ends when nobody can ask any more."""
    while True:
        message, fds, *_ = socket.recv_fds(connection, _MESSAGE, _FDS)
        if not message:
            os._exit(0)
        reader, writer = os.pipe()
        if (pid := os.fork()) == 0:
            between = os.getpid()
            if os.fork():
                os._exit(0)
            while os.getppid() == between:  # The program may ask for its parent at once.
                time.sleep(0.001)
            connection.detach()  # Its number may belong to another file when the object is collected.
            request = pickle.loads(message)
            if request["session"]:
                os.setsid()
            os.write(writer, b"%d" % os.getpid())
            return request, fds
        os.close(writer)
        os.waitpid(pid, 0)
        # The child of that process belongs to the process that asked now, and can be killed by its group.
        connection.send(os.read(reader, 64))
        for fd in (reader, *fds):
            os.close(fd)


def become(request, fds):
    """Makes this fork the process that was requested, and runs its program."""
    _take(dict(zip(request["places"], fds, strict=True)))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if request["group"] not in (None, -1):
        os.setpgid(0, request["group"])
    if request["network"]:
        with open(f"/run/netns/{request['network']}") as network:
            ctypes.CDLL(None).setns(network.fileno(), 0)
    os.chdir(request["folder"])
    _take_environment(request["environment"])
    random.seed()
    importlib.import_module("numpy").random.seed()
    importlib.reload(importlib.import_module("phalanx"))  # It reads the environment.
    _execute(request["command"])


def _take(wanted):
    """Puts each file descriptor into its place, and closes all others."""
    copies = {place: os.dup(fd) for place, fd in wanted.items()}
    while clash := [place for place, copy in copies.items() if copy in wanted]:
        copies[clash[0]] = os.dup(copies[clash[0]])
    for place, copy in copies.items():
        os.dup2(copy, place, inheritable=True)
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in wanted:
            with suppress(OSError):
                os.close(int(name))


def _take_environment(environment):
    """Sets the environment, and what libraries have read of it when they were imported."""
    jax = importlib.import_module("jax")
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(environment)
    for name in environment:
        if name.startswith("JAX_") and environment[name] != before.get(name):
            with suppress(AttributeError):  # Not every variable is an option.
                jax.config.update(name.lower(), _parsed(environment[name], getattr(jax.config, name.lower())))
    for name in ("matplotlib", "sklearn"):  # tests/startup has hidden them from Keras. The program may use them.
        if sys.modules.get(name, name) is None:
            del sys.modules[name]
    path = [entry for entry in environment.get("PYTHONPATH", "").split(os.pathsep) if entry and entry not in sys.path]
    sys.path[1:1] = path


def _parsed(text, value):
    """Returns the value of an option of JAX, whose present value shows its type."""
    if isinstance(value, bool):
        return text.lower() in ("1", "true", "yes", "on")
    return type(value)(text) if isinstance(value, (int, float)) else text


def _execute(command):
    """Runs a text, a module or a script under the name `__main__`. With -P, the folder of none of them is in the path."""
    is_apart = command[0] == "-P"
    kind, *arguments = command[is_apart:]
    main = types.ModuleType("__main__")
    if kind == "-m":
        target, *arguments = arguments
        sys.argv, sys.path[:1] = [target, *arguments], [] if is_apart else [os.getcwd()]
        if target == "phalanx":
            _prepare_launcher()
        if "." in target:
            sys.modules.pop(target, None)  # runpy warns if a module that it runs is there.
        runpy.run_module(target, run_name="__main__", alter_sys=True)
        return
    if kind == "-c":
        source, *arguments = arguments
        sys.argv, folder, file = ["-c", *arguments], "", "<string>"
    else:
        sys.argv, folder, file = [kind, *arguments], os.path.dirname(os.path.abspath(kind)), kind
        main.__file__ = kind
        with open(kind, encoding="utf-8") as script:
            source = script.read()
    sys.path[:1] = [] if is_apart else [folder]
    # Not by runpy, which clears the module of a script before threads and `atexit` use it for the last time.
    sys.modules["__main__"] = main
    exec(compile(source, file, "exec"), main.__dict__)


def _prepare_launcher():
    """Gives a launcher its own template, a fork of this process as it is now, and lets it start its workers by it."""
    global _template  # noqa: PLW0603
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    if os.fork() == 0:
        os.setsid()
        ours.close()
        for fd in (0, 1, 2):
            os.dup2(os.open(os.devnull, os.O_RDWR), fd)
        become(*serve(theirs))
        sys.exit()
    theirs.close()
    _template = Template(ours)
    subprocess.Popen = Popen


if __name__ == "__main__":
    # They may be ignored here: under nohup, or in the background of a shell.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_DFL)
    warnings.filterwarnings("ignore", message=".*fork.*")
    for name in ("phalanx", "keras", "jax", "numpy", "phalanx.api", "phalanx._src.tools.cli"):
        importlib.import_module(name)
    gc.freeze()
    request = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.modules["forks"] = sys.modules["__main__"]
    become(*request)
