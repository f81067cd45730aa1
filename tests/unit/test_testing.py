"""What `phalanx.testing` offers, put to work.

`assert_in_sync` and the callback that calls it: on replicas that are made to differ.
The virtual network: its machines reach each other, the cable has its rate and can be pulled; what cannot be made is refused.
"""

import itertools
import os
import subprocess
import sys
from contextlib import ExitStack

import jax
import jax.numpy as jnp
import keras
import numpy as np
import pytest

import phalanx
import phalanx.testing
from phalanx._src.compat import set_raw_values
from phalanx.errors import DivergenceError, InvalidArgumentError, StartupError
from phalanx.testing import VirtualNetwork

LISTENS = """
import socket, sys
with socket.create_server((sys.argv[1], 5000)) as server:
    print("listens", flush=True)
    for _ in range(2):
        server.accept()[0].close()
"""
CONNECTS = """
import socket, sys, time
end_s, found = time.monotonic() + float(sys.argv[2]), "silence"
# An address that did not answer counts as unreachable for a while.
while found == "silence" and (left_s := end_s - time.monotonic()) > 0:
    try:
        socket.create_connection((sys.argv[1], 5000), timeout=left_s).close()
        found = "connected"
    except ConnectionRefusedError:
        found = "refused"
    except OSError:
        time.sleep(0.1)
print(found)
"""


@pytest.fixture
def strategy():
    return phalanx.MirroredStrategy(["cpu:0", "cpu:1", "cpu:2"])


def model_of(strategy, *layers):
    with strategy.scope():
        return keras.Sequential([keras.layers.Input((2,)), keras.layers.Dense(3, name="d"), *layers])


def give_other_copies(variable, *values):
    """Gives each device a value of its own, in one array that JAX treats as replicated."""
    array = variable.value
    copies = [jax.device_put(np.float32(v), s.device) for v, s in zip(values, array.addressable_shards, strict=True)]
    set_raw_values([variable], [jax.make_array_from_single_device_arrays(array.shape, array.sharding, copies)])


@pytest.mark.slow
def test_replicas_are_found_in_sync(strategy):
    """Weights, slots, seeds and metrics after training; variables that no program has used; a value assigned from outside.

    Afterwards the variable is named, and the replicas that differ from most, or from replica 0 without a majority. One bit is enough.
    """
    model = model_of(strategy, keras.layers.Dropout(0.5))
    with strategy.scope():
        model.compile("adam", "mse", metrics=["mae"])
    model.fit(np.ones((6, 2)), np.ones((6, 3)), batch_size=3, verbose=0)
    phalanx.testing.assert_in_sync(model, model.optimizer, [model.weights[0], model.layers[0]])
    model.weights[0].assign(np.ones((2, 3)))
    phalanx.testing.assert_in_sync(model)
    alone = keras.Variable(1.0)
    phalanx.testing.assert_in_sync(alone)
    phalanx.function(lambda: alone.assign_add(1.0))()
    phalanx.testing.assert_in_sync(alone)
    for values, where in (
        (([1, 1, 1], [1, 2, 1], [1, 1, 1]), "(replica 1 of 3) differs from most replicas"),
        (([0, 0, 0], [1, 1, 1], [1, 1, 1]), "(replica 0 of 3) differs from most replicas"),
        (([0, 0, 0], [-0.0, 0, 0], [np.nan, 0, 0]), "(replicas 1, 2 of 3) differs from replica 0"),
    ):
        give_other_copies(model.layers[0].bias, *values)
        with pytest.raises(DivergenceError) as e:
            phalanx.testing.assert_in_sync(model)
        assert f"/d/bias' on rank 0 {where}; 1 variable differs in total." in str(e.value)
        assert (
            e.value.hint == "assign only values that all processes compute identically, or assign inside strategy.run"
        )


def test_a_model_of_a_custom_loop(strategy):
    """It is not compiled, and has no optimizer of its own."""
    model = model_of(strategy)
    strategy.run(lambda: model(np.ones((1, 2))))
    phalanx.testing.assert_in_sync(model)
    give_other_copies(model.layers[0].bias, [1, 1, 1], [1, 1, 1], [2, 1, 1])
    for subject, count in ((model, "2 variables"), (model.layers[0].bias, "1 variable")):
        with pytest.raises(DivergenceError, match=rf"assert_in_sync of {count}: .*replica 2 of 3"):
            phalanx.testing.assert_in_sync(subject)
    give_other_copies(model.layers[0].kernel, *np.arange(18.0).reshape(3, 2, 3))
    with pytest.raises(DivergenceError, match=r"/kernel' .*replicas 1, 2 of 3.*; 2 variables differ in total"):
        phalanx.testing.assert_in_sync(model)


def test_arrays_of_a_step_that_forgets_a_sum(strategy):
    """Replicated arrays are equal; those that `Mirrored` declares to be, and are not, are named. Arrays of one device are skipped."""
    params = strategy.replicate({"w": np.ones((2, 3), np.float32), "b": np.zeros(3, np.float32)})
    phalanx.testing.assert_in_sync(params, params.value, jnp.ones(2))

    def step(is_summed):
        context = phalanx.get_replica_context()
        gradient = jnp.float32(context.replica_id_in_sync_group)
        return phalanx.Mirrored(
            {"b": jnp.zeros(3), "w": context.all_reduce("SUM", gradient) if is_summed else gradient}
        )

    phalanx.testing.assert_in_sync(strategy.run(step, args=(True,)))
    new = strategy.run(step, args=(False,))
    for subject, name in ((new, "objects[1].value['w']"), ([new.value], "objects[1][0]['w']")):
        with pytest.raises(DivergenceError) as e:
            phalanx.testing.assert_in_sync(params, subject)
        assert f"assert_in_sync of 4 arrays: {name!r} on rank 0 (replicas 1, 2 of 3) differs from replica 0" in str(
            e.value
        )
        assert "all_reduce the gradients" in e.value.hint


@pytest.mark.parametrize(
    ("subject", "match"),
    [
        (3, "is not a variable and has no variables"),
        (phalanx.PerReplica((1, 2, 3)), "is not a variable and has no variables"),
        ({1: jnp.ones(2), "a": jnp.ones(2)}, "JAX cannot flatten it: .*\nHINT: dicts whose keys have one type"),
    ],
    ids=["number", "components", "unsorted keys"],
)
def test_neither_variable_nor_owner(strategy, subject, match):
    with pytest.raises(InvalidArgumentError, match=match):
        phalanx.testing.assert_in_sync(subject)


@pytest.mark.parametrize(("breaks", "every", "noticed"), [(2, 2, 3), (3, 2, 3), (0, 5, 4), (6, 5, 7)])
def test_callback_checks_every_few_batches(strategy, breaks, every, noticed):
    """It checks after every so many batches, over the ends of epochs, and at the end of the training."""
    model, seen = model_of(strategy), []
    with strategy.scope():
        # Nothing is trained, so that what differs stays so.
        model.trainable = False
        model.compile("sgd", "mse")

    def break_bias(batch, logs):
        seen.append(batch)
        if len(seen) - 1 == breaks:
            give_other_copies(model.layers[0].bias, [1, 1, 1], [1, 2, 1], [1, 1, 1])

    callbacks = [keras.callbacks.LambdaCallback(on_train_batch_end=break_bias), phalanx.keras.SyncCheck(every)]
    with pytest.raises(DivergenceError):
        model.fit(np.ones((12, 2)), np.ones((12, 3)), batch_size=3, epochs=2, verbose=0, callbacks=callbacks)
    assert len(seen) - 1 == noticed


@pytest.mark.parametrize("every", [0, -1])
def test_callback_that_never_checks(every):
    with pytest.raises(InvalidArgumentError, match=f"every={every}: must be 1 or more batches"):
        phalanx.keras.SyncCheck(every)


FIRST = """
import os, sys, traceback
import jax, keras
for module in sys.argv[1:]:
    if os.fork():
        os.wait()
        continue
    try:
        exec(f"import phalanx.{module}; print(phalanx.{module}.__name__, phalanx.function.__name__)")
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    os._exit(0)
"""


@pytest.mark.slow
def test_modules_come_first():
    """Any module may be what a program imports first; `phalanx.function` stays what it is."""
    modules = ["testing", "keras", "_src.tracing.context"]
    command, environment = [sys.executable, "-c", FIRST, *modules], os.environ | {"KERAS_BACKEND": "jax"}
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert process.stdout.splitlines() == [f"phalanx.{module} function" for module in modules], process.stderr


@pytest.fixture
def network():
    try:
        made = VirtualNetwork(megabits_per_second=100).__enter__()
    except StartupError as e:
        pytest.skip(f"{e}")
    yield made
    made.__exit__()


def test_machines_are_joined_by_a_cable(network):
    """Each has its address as its name. A connection is refused while the cable is pulled."""
    python, address = sys.executable, network.addresses[0]
    with subprocess.Popen(
        network.command(0, [python, "-c", LISTENS, address]), stdout=subprocess.PIPE, text=True
    ) as server:
        assert server.stdout.readline() == "listens\n"

        def connect(limit_s):
            command = network.command(1, [python, "-c", CONNECTS, address, str(limit_s)])
            return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False).stdout.strip()

        assert connect(100) == "connected"
        network.pull_cable()
        assert connect(1) == "silence"
        network.plug_cable()
        assert connect(100) == "connected"
        assert server.wait(300) == 0


def test_one_of_three_machines_is_disconnected():
    """The other two reach each other, and not the first one, until its cable is plugged in again."""
    with ExitStack() as stack:
        try:
            network = stack.enter_context(VirtualNetwork(machines=3))
        except StartupError as e:
            pytest.skip(f"{e}")

        def connect(sender, receiver, limit_s=100):
            words = [sys.executable, "-c", CONNECTS, network.addresses[receiver], str(limit_s)]
            return subprocess.check_output(network.command(sender, words), text=True, timeout=300).strip()

        assert network.addresses == ("192.0.2.1", "192.0.2.2", "192.0.2.3")
        network.pull_cable(0)
        assert connect(2, 1) == "refused"
        assert connect(1, 0, limit_s=1) == connect(0, 2, limit_s=1) == "silence"
        network.plug_cable(0)
        assert connect(1, 0) == "refused"


def test_both_ends_of_the_cable_have_a_token_bucket(network):
    for end, name in itertools.product((network._switch, None), network._names):
        command = ["tc", "-n", end or name, "qdisc", "show", "dev", name]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "tbf" in found
        assert "rate 100Mbit" in found


def test_nothing_is_left(network):
    """Of the namespaces, after the block. Two networks can exist at the same time."""

    def namespaces():
        return subprocess.run(["ip", "netns"], capture_output=True, text=True, check=True).stdout

    with VirtualNetwork() as second:
        assert all(name in namespaces() for name in (*network._names, *second._names))
    assert not any(name in namespaces() for name in second._names)


def test_machine_without_the_tools(monkeypatch):
    """The error says what is missing, and nothing is left."""
    monkeypatch.setenv("PATH", os.devnull)
    with pytest.raises(StartupError, match=r"a VirtualNetwork: this machine cannot make it: .*'ip'"):
        VirtualNetwork().__enter__()


@pytest.mark.parametrize("machines", [1, 100, 2.0, "two"])
def test_numbers_of_machines_that_are_none(machines):
    with pytest.raises(InvalidArgumentError, match="machines=.*: must be an integer from 2 to 99"):
        VirtualNetwork(machines=machines)


@pytest.mark.parametrize("rate", [0, -1, "fast", True, float("inf"), float("nan")])
def test_rates_that_are_none(rate):
    with pytest.raises(InvalidArgumentError, match="megabits_per_second=.*: must be a number above 0, or None"):
        VirtualNetwork(rate)
