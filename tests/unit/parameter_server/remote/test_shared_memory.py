"""Arrays between two processes of one machine."""

import multiprocessing
import pickle

import numpy as np
import pytest

from phalanx._src.parameter_server.remote.plans import Push, Pusher
from phalanx._src.parameter_server.remote.shared_memory import Packed, SharedMemoryConnection

_ME = Pusher(0, 0)
_LIMIT_S = 120.0


def _echo(pipe):
    line = SharedMemoryConnection(_ME)
    while (sent := pipe.recv()) is not None:
        pipe.send(line.pack(line.unpack(sent)))


@pytest.fixture(scope="module")
def echo():
    """Sends something through another process and back."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_echo, args=(there,))
    process.start()
    line = SharedMemoryConnection(_ME)

    def sent_and_back(content):
        here.send(line.pack(content))
        assert here.poll(_LIMIT_S)
        return line.unpack(here.recv())

    yield sent_and_back
    here.send(None)
    process.join(_LIMIT_S)
    assert process.exitcode == 0


@pytest.mark.slow
def test_arrays_of_all_kinds_come_back_equal(echo):
    """Large and small, empty, transposed, with rows left out, and of several types; each time the memory may have to grow."""
    rng = np.random.default_rng(0)
    table = rng.random((300, 400))
    contents = [
        [table],
        [table.T, np.empty((0, 3)), np.float32(2.0)],
        [np.concatenate([table] * 9), table[::2], rng.integers(9, size=(3, 70_000)), np.array(True)],
        [np.zeros(3)],
        [table.astype("float16")],
    ]
    for content in contents:
        back = echo(content)
        assert [x.dtype for x in back] == [x.dtype for x in content]
        for sent, got in zip(content, back, strict=True):
            np.testing.assert_array_equal(got, sent)


@pytest.mark.slow
def test_what_was_received_is_read_where_it_is(echo):
    """It is no copy: it stays until the other end sends again, and is then what that has sent."""
    first = echo(np.full(100_000, 1.0))
    np.testing.assert_array_equal(first, np.full(100_000, 1.0))
    second = echo(np.full(100_000, 2.0))
    np.testing.assert_array_equal(first, np.full(100_000, 2.0))
    assert np.shares_memory(first, second)


def test_a_push_is_sent_without_its_arrays():
    """What is left for Ray is small; a small push is left whole."""
    here, there = SharedMemoryConnection(_ME), SharedMemoryConnection(_ME)
    gradients = [np.full((784, 512), 3.0, "float32"), np.ones(10, "float32")]
    sent = here.pack(Push(_ME, 4, pulled=2, updates={0: gradients}, peer_pushes={1: None}))
    assert isinstance(sent, Packed)
    assert len(pickle.dumps(sent)) < 2000
    push = there.unpack(sent)
    assert (push.name, push.pulled, push.peer_pushes) == ((_ME, 4), 2, {1: None})
    np.testing.assert_array_equal(push.updates[0][0], gradients[0])
    small = Push(_ME, 5, pulled=2)
    assert there.unpack(here.pack(small)) is small


def test_arrays_begin_where_xla_takes_them_as_they_are():
    """At multiples of 64 bytes."""
    here, there = SharedMemoryConnection(_ME), SharedMemoryConnection(_ME)
    arrays = there.unpack(here.pack([np.ones(n, "float32") for n in (3, 50_001, 7)]))
    assert [a.ctypes.data % 64 for a in arrays] == [0, 0, 0]


def test_a_line_is_for_one_machine():
    """A greeting of another machine, or of memory that cannot be seen, is not understood."""
    here, there = SharedMemoryConnection(_ME), SharedMemoryConnection(_ME)
    machine, sent = here.greeting()
    assert there.understands((machine, sent))
    assert not SharedMemoryConnection(_ME).understands(("another one", sent))
    assert not SharedMemoryConnection(_ME).understands((machine, Packed(_ME, "/proc/0/fd/0", sent.rest, sent.sizes)))
    assert not SharedMemoryConnection(_ME).understands(None)
