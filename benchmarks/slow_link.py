# SPDX-License-Identifier: Apache-2.0
"""Two processes train over a link of 100 Mbit/s: the steps per second by what they send, compared with torch and its hooks.

The processes are in network namespaces whose interfaces have token buckets, so this needs root on Linux (`phalanx.testing.VirtualNetwork`).
All train the same MLP on the same batches.
"""

import json
import os
import secrets
import statistics
import subprocess
import sys
from collections.abc import Callable, Sequence

from benchmarks import peers
from benchmarks.parent import ROOT
from benchmarks.report import Report, verdict
from phalanx.testing import VirtualNetwork

RATE = 100
"""Of the link in each direction, in Mbit/s."""
_PORT = 12345
_DEADLINE_S = 300
_OF_THE_PARENT = ("NPROC", "PHALANX_CPU_DEVICES", "PYTHONPATH", "XLA_FLAGS", "TF_CONFIG")
# Steps that take some seconds.
_PHALANX = {
    "none": 20,
    "bfloat16": 40,
    "int8": 60,
    "TopK(0.01)": 150,
    "TopK(0.05)": 80,
    "PowerSGD(2)": 150,
    "PowerSGD(4)": 150,
    "LocalSGD(8)": 80,
    "DiLoCo(50)": 400,
    "DiLoCo(100)": 400,
}
_TORCH = {"none": 20, "fp16": 40, "PowerSGD(2)": 150}
_TARGETS = {"phalanx, int8": 3.0, "phalanx, PowerSGD(2)": 3.0, "phalanx, DiLoCo(100)": 20.0}


def _phalanx(network: VirtualNetwork, name: str, steps: int) -> float:
    """Returns the steps per second of a training with Phalanx."""
    addresses = [f"{address}:{_PORT}" for address in network.addresses]
    token = secrets.token_hex(16)

    def environment(rank: int) -> dict[str, str]:
        cluster = {"cluster": {"worker": addresses}, "task": {"type": "worker", "index": rank}}
        return {"TF_CONFIG": json.dumps(cluster), "PHALANX_TOKEN": token, "PYTHONPATH": str(ROOT / "src"), "NPROC": "1"}

    command = [sys.executable, "-m", "benchmarks.slow_link_script", name, f"{steps}"]
    return steps / _seconds(network, lambda rank: command, environment)


def _torch(network: VirtualNetwork, name: str, steps: int) -> float:
    """Returns the steps per second of a training with torch."""
    python = str(peers.interpreter("torch", peers.TORCH))
    address = f"{network.addresses[0]}:{_PORT}"
    command = [python, "-m", "benchmarks.slow_link_torch", name, f"{steps}"]

    def environment(rank: int) -> dict[str, str]:
        # gloo looks up the name of this machine otherwise, which may be an address of loopback. A machine and its end of the cable
        # have one name.
        *_, end_of_cable, _ = network.command(rank, ["true"])
        return {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": end_of_cable}

    return steps / _seconds(network, lambda rank: [*command, f"{rank}", address], environment)


def _seconds(
    network: VirtualNetwork, command: Callable[[int], Sequence[str]], environment: Callable[[int], dict[str, str]]
) -> float:
    inherited = {k: v for k, v in os.environ.items() if k not in _OF_THE_PARENT} | {"JAX_PLATFORMS": "cpu"}
    started = [
        subprocess.Popen(
            network.command(rank, command(rank)),
            cwd=ROOT,
            env=inherited | environment(rank),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=_DEADLINE_S)[0] for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()
    found = [line.split()[1] for line in outputs[0].splitlines() if line.startswith("seconds ")]
    if not found:
        raise RuntimeError("\n".join(output[-2000:] for output in outputs))
    return float(found[0])


def run(*, quick: bool, rounds: int = 5, seed: int = 0) -> Report:
    """Trains with each library and compression in turn, and compares the steps per second with full gradients."""
    del seed  # Nothing is drawn.
    report = Report(
        "slow_link",
        f"Two processes on a link of {RATE} Mbit/s train an MLP: steps per second (ratio: to full gradients with the same library)",
        ("library, what is sent", "steps/s", "ratio", "target", "all rounds"),
    )
    speeds: dict[str, list[float]] = {}
    with VirtualNetwork(RATE) as network:

        def play(library: str, of: Callable[[VirtualNetwork, str, int], float], name: str, steps: int) -> None:
            speed = of(network, name, 3 if quick else steps)
            speeds.setdefault(f"{library}, {name}", []).append(speed)
            print(f"{library}, {name}: {speed:.2f} steps/s", file=sys.stderr, flush=True)

        trainings = [("phalanx", _phalanx, n, s) for n, s in _PHALANX.items()]
        trainings += [("torch DDP", _torch, n, s) for n, s in _TORCH.items()]
        report.measure(lambda t=training: play(*t) for _ in range(1 if quick else rounds) for training in trainings)
    for name, found in speeds.items():
        whole = speeds[f"{name.partition(',')[0]}, none"]
        ratio = statistics.median(x / y for x, y in zip(found, whole, strict=False))
        target = verdict(ratio, at_least=_TARGETS[name]) if name in _TARGETS else ""
        shown = " ".join(f"{x:.2f}" for x in found)
        report.add([name, statistics.median(found), ratio, target, shown], name=name, speeds=found)
    return report
