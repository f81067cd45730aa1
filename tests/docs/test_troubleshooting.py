"""The messages on the page about symptoms are those that programs print."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
MESSAGES = dict(re.findall(r"^## ([^\n]*)\n(?:(?!^## ).)*?^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL))
DEADLINE_S = 300  # On a busy machine; alone, each takes a few seconds.

CLUSTER = """
import json, os, socket
import phalanx

taken = socket.create_server(("127.0.0.1", 0))
free = socket.create_server(("127.0.0.1", 0))
chief = "127.0.0.1:%d" % {chief}.getsockname()[1]
free.close()
cluster = {{"worker": [chief, "127.0.0.1:12345"]}}
os.environ["TF_CONFIG"] = json.dumps({{"cluster": cluster, "task": {{"type": "worker", "index": 0}}}})
phalanx.MultiWorkerMirroredStrategy()
"""
TWO_REPLICAS = """
import phalanx
phalanx.set_virtual_cpu_devices(2)
import jax, keras
import jax.numpy as jnp
strategy = phalanx.MirroredStrategy()
"""
PROGRAMS = {
    "No module named 'tensorflow'": "import keras",
    "Only one replica": "import phalanx\nwith phalanx.MirroredStrategy().scope():\n    pass",
    "Out of memory": "import jax\njax.numpy.ones((2**20, 2**20)).block_until_ready()",
    "It hangs at the start": CLUSTER.format(chief="free"),
    "Address already in use": CLUSTER.format(chief="taken"),
    "The loss is twice as large": TWO_REPLICAS
    + """
with strategy.scope():
    weight = keras.Variable(1.0)
    optimizer = keras.optimizers.SGD()

def step(batch):
    with phalanx.GradientTape() as tape:
        loss = jnp.mean(weight * batch)
    optimizer.apply_gradients(zip(tape.gradient(loss, [weight]), [weight]))

(batch,) = strategy.experimental_distribute_dataset([jnp.ones(8)])
strategy.run(step, args=(batch,))
""",
    "The loss is NaN": TWO_REPLICAS
    + """
jax.config.update("jax_debug_nans", True)
strategy.run(lambda: jnp.log(-jnp.ones(3)))
""",
    "It is slow": """import phalanx

strategy = phalanx.MirroredStrategy()

for _ in range(20):
    def step(x):
        return x + 1

    strategy.run(step, args=(1.0,))
""",
}


def test_each_message_has_a_program():
    """No message of the page is unchecked."""
    assert {*PROGRAMS} == {*MESSAGES}


@pytest.mark.cover(["symptom"], {"No module named 'tensorflow'"})
@pytest.mark.parametrize("symptom", PROGRAMS)
def test_program_prints_the_message(symptom, tmp_path):
    """Each line of the message is printed, with other port numbers, perhaps with more words behind it."""
    (tmp_path / "train.py").write_text(PROGRAMS[symptom], encoding="utf-8")
    environment = {
        name: os.environ[name] for name in os.environ if name not in ("KERAS_BACKEND", "PHALANX_CPU_DEVICES")
    }
    settings = {"JAX_PLATFORMS": "cpu", "KERAS_HOME": str(tmp_path), "PHALANX_START_TIMEOUT_S": "3"}
    result = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env={**environment, **settings, "PYTHONIOENCODING": "utf-8"},
        capture_output=True,
        encoding="utf-8",
        timeout=DEADLINE_S,
        check=False,
    )
    printed = (result.stdout + result.stderr).replace(f"{tmp_path}/", "")
    printed = re.sub(r"127\.0\.0\.1:\d+", "127.0.0.1:12345", printed)
    for line in MESSAGES[symptom].splitlines():
        assert line in printed
