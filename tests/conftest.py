"""Eight virtual CPU devices, or those of PHALANX_TEST_DEVICES; strict JAX, and police against what tests leave behind.

With PHALANX_TEST_ALL=1, as `make test-all` sets it, tables run all their cells, programs are optimized and compiled again, and every
process is a new interpreter.
"""

import gc
import importlib.metadata
import importlib.util
import os
import sys
from pathlib import Path

ALL = bool(os.environ.get("PHALANX_TEST_ALL"))

# How long XLA waits for a replica that does not come, before it ends the process. One thread compiles a program: the tests
# run in as many processes as there are cores.
_FLAGS = "--xla_cpu_collective_call_terminate_timeout_seconds=12 --xla_cpu_parallel_codegen_split_count=1"
if importlib.metadata.version("jax").startswith("0.10."):
    # XLA's older emitters of kernels compile small programs faster. Later versions have no others.
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
_DEVICES = os.environ.get("PHALANX_TEST_DEVICES") or "cpu:" * 8
if "cpu:" not in _DEVICES:
    # GPUs multiply float32 as TF32 by default, and add in an order that varies. The laws compare with tolerances of float32,
    # and bit by bit.
    _FLAGS = f"{os.environ.pop('XLA_FLAGS', '')} {_FLAGS} --xla_gpu_deterministic_ops=true"
    os.environ.setdefault("JAX_DEFAULT_MATMUL_PRECISION", "highest")
os.environ.setdefault("XLA_FLAGS", _FLAGS)

if not ALL:
    # Compiling is most of the work of the tests, and optimizing is most of compiling.
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

# All processes of a run share what Python compiles, too. A fifth of what one needs to start is compiling Phalanx.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A failing test shows all frames.
os.environ.setdefault("PHALANX_TRACEBACK", "full")

import secrets
import shutil
import tempfile
import threading
import time

_TESTS = Path(__file__).parent

# Processes that tests start run tests/startup/sitecustomize.py, which says why.
_STARTUP = str(_TESTS / "startup")
if _STARTUP not in os.environ.get("PYTHONPATH", "").split(os.pathsep):
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [_STARTUP, os.environ.get("PYTHONPATH")]))

# Processes that tests start form clusters without writing a secret into the home of the user.
os.environ.setdefault("PHALANX_TOKEN", secrets.token_hex(32))

# Many tests compile the same program. All processes of a run share what they have compiled, and the next run has it too: a key
# contains the program, the flags and the versions. The folder may be deleted at any time.
_PROGRAMS = Path(__file__).parents[1] / ".pytest_cache" / "programs"
_IS_TEMPORARY = ALL or not os.access(_PROGRAMS.parents[1], os.W_OK)
_IS_FIRST = "JAX_COMPILATION_CACHE_DIR" not in os.environ
if _IS_FIRST:
    os.environ["JAX_COMPILATION_CACHE_DIR"] = (
        tempfile.mkdtemp(prefix="phalanx-programs-") if _IS_TEMPORARY else str(_PROGRAMS)
    )
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"

# Keras imports them if it finds them, which takes half of the time that a process of pytest needs to start.
_HIDDEN = ("matplotlib", "sklearn")
for name in _HIDDEN:
    sys.modules.setdefault(name, None)

import phalanx

phalanx.set_virtual_cpu_devices(_DEVICES.count("cpu:") or 8)

import jax
import keras
import psutil
import pytest
from tests.waiting import DEADLINE_S

from phalanx import errors

if not ALL:
    # To find the frames that an error shows takes longer than to raise it. Processes that tests start show what users see.
    jax.config.update("jax_traceback_filtering", "off")

# The collector of garbage runs seldom: it takes a tenth of the time otherwise. While pytest collects the tests, it does not run.
gc.set_threshold(50_000, 50, 20)
gc.disable()

if importlib.util.find_spec("tensorboardX"):
    import tensorboardX.event_file_writer  # noqa: F401  (sets an environment variable, which no test may do)

# Tests may use both.
for name in _HIDDEN:
    if sys.modules[name] is None:
        del sys.modules[name]

from phalanx._src.tracing import context

# `make gpu` needs no hypothesis.
if importlib.util.find_spec("hypothesis"):
    import hypothesis
    from tests.draws import MANY

    # How long an example takes says nothing: the machine may be busy. `make draws` draws other cases every time.
    hypothesis.settings.register_profile(
        "phalanx", deadline=None, max_examples=500 if MANY else 25, derandomize=not MANY, database=None
    )
    hypothesis.settings.load_profile("phalanx")

# JAX starts its devices with a thread that may outlive the first test on a busy machine.
jax.devices()


SHARED = {
    "tests/cluster/parameter_server/": "tests/cluster/, one Ray",
    "tests/cluster/test_multi_worker.py": "tests/cluster/, two workers",
    "tests/cluster/test_input_of_workers.py": "tests/cluster/, two workers",
    "tests/cluster/test_different_programs.py": "tests/cluster/, two workers",
    "tests/cluster/test_sharded_variables.py": "tests/cluster/, two workers",
    "tests/cluster/test_random_trainings.py": "tests/cluster/, two workers",
    "tests/contract/test_law_bad_values.py": "tests/contract/, bad values",
    "tests/contract/test_law_hints.py": "tests/contract/, bad values",
}
"""The files whose tests share processes for the whole session, or calls, and so run in one process of pytest."""

ALONE = (
    "tests/cluster/parameter_server/test_ray_clusters.py",
    "tests/cluster/parameter_server/test_restarts.py",
    "tests/cluster/parameter_server/test_separate_processes.py",
)
"""Those of the same folders that do not: together, the files of parameter servers would end last."""

WAITING = (
    "tests/cluster/",
    "tests/guide/",
    "tests/examples/",
    "tests/docs/",
    "src/phalanx/_src/parameter_server/",
    "src/phalanx/_src/strategies/parameter_server.py",
)
"""Files whose tests wait for processes."""

_WAITING_SHARE = 0.7
"""They are spread over this share of the files that keep a core busy, so that neither kind is left alone until the many short examples of
the sources end the run."""


EXAMPLES = ("ClusterCoordinator", "ParameterServerStrategy", "ShardedVariable")
"""Classes whose docstrings start a Ray each. Tests in tests/cluster/parameter_server make the same calls with one Ray."""


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(file_path):
    """Sources have examples in docstrings. Those of tests are not looked for: it takes a tenth of the time of the collection."""
    collectors = yield
    return [each for each in collectors if type(each) is pytest.Module or _TESTS not in file_path.parents]


def pytest_collection_modifyitems(config, items):
    """Leaves out what others stand for, and sorts."""
    for item in items:
        if item.nodeid.startswith("src/") and item.name.rpartition(".")[2] in EXAMPLES:
            item.add_marker(pytest.mark.exhaustive("tests/cluster/parameter_server"))
    if not ALL:
        config.hook.pytest_deselected(items=[item for item in items if not _is_covering(item)])
        items[:] = filter(_is_covering, items)
    scopes = dict.fromkeys(
        _scope_of(item.nodeid) for item in sorted(items, key=lambda item: item.nodeid.startswith("src/"))
    )
    waiting = [scope for scope in scopes if scope.startswith(WAITING)]
    turns = {scope: turn for turn, scope in enumerate(scope for scope in scopes if not scope.startswith(WAITING))}
    distance = _WAITING_SHARE * len(turns) / max(1, len(waiting))
    turns |= {scope: turn * distance for turn, scope in enumerate(waiting)}
    items.sort(key=lambda item: turns[_scope_of(item.nodeid)])


def _scope_of(nodeid):
    """What runs in one process, in the order of the collection: a file, files that share processes, or an elastic group."""
    file = nodeid.partition("::")[0]
    if file == "tests/cluster/test_elastic.py":
        return nodeid
    if file in ALONE:
        return file
    return next((name for start, name in SHARED.items() if file.startswith(start)), file)


if importlib.util.find_spec("xdist"):
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        """Distributes the scopes of `_scope_of`."""

        def _split_scope(self, nodeid):
            return _scope_of(nodeid)

    @pytest.hookimpl(optionalhook=True)  # xdist may be installed and switched off.
    def pytest_xdist_make_scheduler(config, log):
        """Replaces `--dist loadscope`."""
        config.option.loadscopereorder = False
        return Scheduling(config, log)


def _sign(config):
    """The file by which the first of several processes of pytest says that it has compiled the tests, and whether this is the first."""
    given = config.workerinput
    return Path(tempfile.gettempdir()) / f"phalanx-tests-{given['testrunuid']}", given["workerid"] == "gw0"


def pytest_collection(session):
    """One process compiles the test files for all. Compiling them takes as long as everything else that the collection does."""
    if hasattr(session.config, "workerinput"):
        sign, is_first = _sign(session.config)
        deadline = time.monotonic() + DEADLINE_S
        while not (is_first or sign.exists() or time.monotonic() > deadline):
            time.sleep(0.05)


def pytest_collection_finish(session):
    """The collector does not run over the objects of JAX and Keras."""
    gc.enable()
    gc.freeze()
    if hasattr(session.config, "workerinput"):
        sign, is_first = _sign(session.config)
        if is_first:
            sign.touch()


def _is_covering(item):
    if item.get_closest_marker("exhaustive"):
        return False
    marker = item.get_closest_marker("cover")
    if marker is None:
        return True
    names, cells = marker.args
    values = tuple(item.callspec.params[name] for name in names)
    return (values if len(names) > 1 else values[0]) in cells


def pytest_unconfigure(config):
    """Removes what was made for this run alone."""
    if hasattr(config, "workerinput") and _sign(config)[1]:
        _sign(config)[0].unlink(missing_ok=True)
    if _IS_FIRST and _IS_TEMPORARY:
        shutil.rmtree(os.environ["JAX_COMPILATION_CACHE_DIR"], ignore_errors=True)


_CROWDED_BYTES = 2 << 30
"""From this size of the process on, JAX forgets its programs, which the next module may use too: a twentieth of the time of the tests."""


def _environment():
    return {k: v for k, v in os.environ.items() if k != "PYTEST_CURRENT_TEST"}


@pytest.fixture(autouse=True)
def clean_slate():
    """Every test starts from the same seed and leaves no scope, thread or environment variable behind."""
    keras.utils.set_random_seed(0)
    errors._warn_once.cache_clear()
    environment, threads = _environment(), set(threading.enumerate())
    yield
    assert context.depth() == 0, "the test left a scope open"
    assert _environment() == environment, "the test changed the environment"
    left = [t for t in threading.enumerate() if t not in threads and not t.daemon]
    for thread in left:
        thread.join(10.0)  # It may be at its end.
    left = [t for t in left if t.is_alive()]
    assert not left, f"the test left threads running: {left}"


@pytest.fixture(scope="module", autouse=True)
def forget_programs():
    """Compiled programs of many modules do not crowd the memory, and no module finds the virtual TPU of another."""
    yield
    phalanx.tpu.experimental.shutdown_tpu_system()
    if psutil.Process().memory_info().rss > _CROWDED_BYTES:
        jax.clear_caches()
