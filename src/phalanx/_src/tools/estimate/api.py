# SPDX-License-Identifier: Apache-2.0
"""`phalanx.estimate`: predicts the first step of a training run on other devices."""

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from phalanx._src.mesh.layout import AbstractLayout, fully_sharded
from phalanx._src.tools.estimate import report, roofline, targets
from phalanx._src.tools.estimate.prediction import Estimate
from phalanx._src.tools.estimate.step import Compiled, FirstStep, Lowered, at_first_step, compiled
from phalanx._src.tools.estimate.targets import Target
from phalanx._src.tools.results import save
from phalanx.errors import arguments

SAVE = 'estimates.save("estimate.json")'
_CALL = 'phalanx.estimate(lambda: model.fit(x, y), ["v5e:16x16"])'


@final
class Estimates(Sequence[Estimate]):
    """The predictions of `phalanx.estimate`, in the order of the topologies. Predicted, not run.

    Args:
      name: the name of the step.
      estimates: the predictions.
    """

    def __init__(self, name: str, estimates: Sequence[Estimate]) -> None:
        self.name, self._estimates = name, tuple(estimates)

    def __getitem__(self, index: Any) -> Any:
        return self._estimates[index]

    def __len__(self) -> int:
        return len(self._estimates)

    def print(self) -> None:
        """Prints a table. May be called in any context."""
        report.print_table(self.name, self)

    def save(self, path: str | Path) -> None:
        """Writes the predictions into a file. May be called in any context.

        Args:
          path: the file. Its name ends with `.json`, or with `.png`, `.svg` or `.pdf` for a picture.

        Raises:
          InvalidArgumentError: the name has another ending, its folder does not exist, or it cannot be written.
          MissingDependencyError: a picture is asked for, and matplotlib is not installed.
        """
        path = arguments.json_or_picture("path", path, SAVE)
        if path.suffix in arguments.PICTURES:
            save(path, report.picture(self.name, self))
            return
        text = json.dumps(
            {"step": self.name, "predicted": True, "run": False, "estimates": [e.as_dict() for e in self]}, indent=2
        )
        save(path, f"{text}\n")


def estimate(train: Callable[[], Any], topologies: Sequence[str]) -> Estimates:
    """Predicts the first training step of `train` on other devices. Call it outside all scopes.

    `train` is called and stops before its first step that applies an optimizer, which is then compiled for each topology by the
    real compiler. Nothing runs. Each replica gets as many rows as a replica of `train` on this machine: a program of one
    replica with batches of 64 rows is predicted with 64 rows per chip. Variables of at least 1 MiB that `train` creates get
    no values, so the model may be larger than the memory of this machine.

    Args:
      train: a function without arguments that creates a synchronous strategy, a model and a batch, and trains with `fit`,
        `strategy.run` or a `phalanx.function`.
      topologies: names of topologies. TPUs: `"v5e:16x16"`, `"2*v5e:16x16"` for two slices, or `"v5p:1,16,4096"` for three
        sizes; they need the package libtpu. GPUs: `"h100:8"`, `"h100:512x8"`; they need JAX's CUDA plugin. CPU devices
        of this process: `"cpu:2"`.

    Returns:
      The predictions, in order.

    Raises:
      InvalidArgumentError: an argument has the wrong type, a topology is unknown, or the strategy is not synchronous.
      MissingDependencyError: the compiler for a topology is not installed.
      DeviceError: the compiler refuses a topology, or replicas do not fit into its hosts.
      TraceError: `train` runs no step.

    Source: the compiler interface of `jax.experimental.topologies`.

    Example:
      >>> import keras, numpy as np, phalanx
      >>> def train():
      ...     with phalanx.MirroredStrategy(1).scope():
      ...         model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(4)])
      ...         model.compile("sgd", "mse")
      ...     model.fit(np.ones((64, 8)), np.ones((64, 4)), batch_size=64)
      >>> found = phalanx.estimate(train, ["cpu:1", "cpu:2"])
      >>> [(e.num_replicas, e.rows_per_replica, len(e.collectives)) for e in found]
      [(1, 64, 0), (2, 64, 1)]
    """
    arguments.function("train", train, _CALL)
    parsed_targets = targets.parse(topologies)
    for target in parsed_targets:
        if target.chip is not None:
            target.devices()  # Fails before the script runs. The script may still declare CPU devices.
    return at_first_step(train, lambda step: predicted(step, parsed_targets))


def predicted(step: FirstStep, selected_targets: Sequence[Target]) -> Estimates:
    """Compiles a step for several targets, and predicts it for each."""
    places = [(target, target.devices()) for target in selected_targets]
    # XLA compiles without the GIL, so that two compilers keep two cores busy.
    with ThreadPoolExecutor(2) as pool:
        # One after the other, because tracing changes settings of the process.
        lowered = [step.lower(devices, step.layout) for _, devices in places]
        programs = list(pool.map(compiled, lowered))
    pairs = zip(places, lowered, programs, strict=True)
    rows = [_estimate(step, target, low, result) for (target, _), low, result in pairs]
    return Estimates(step.name, [_advised(step, target, e) for e, (target, _) in zip(rows, places, strict=True)])


def _estimate(
    step: FirstStep, target: Target, lowered: Lowered, result: Compiled, num_rows: int | None = None
) -> Estimate:
    collectives = () if result.program is None else tuple(result.program.collectives)
    chip, devices = target.chip, lowered.devices
    return Estimate(
        topology=target.name,
        num_devices=len(devices),
        num_replicas=lowered.num_replicas,
        num_processes=len({d.process_index for d in devices}),
        rows_per_replica=num_rows or step.num_rows,
        steps_per_program=step.num_steps,
        memory=result.memory,
        available=None if chip is None else int(chip.memory),
        flops=result.flops,
        num_bytes=result.num_bytes,
        collectives=collectives,
        transfers=0 if result.program is None else result.program.num_transfers,
        time=None
        if chip is None or result.program is None
        else roofline.predict(target, devices, result.flops, result.num_bytes, collectives),
        compile_seconds=result.seconds,
    )


def _advised(step: FirstStep, target: Target, found: Estimate) -> Estimate:
    """Returns an estimate with advice if the step does not fit. What it advises has been compiled, and fits."""
    if found.fits:
        return found
    devices = target.devices()
    for words, layout, num_rows in _remedies(step, found):
        lowered = step.lower(devices, layout, num_rows)
        tried = _estimate(step, target, lowered, compiled(lowered), num_rows)
        if tried.fits:
            return replace(found, advice=f"{words}: {tried.memory.peak / 1e9:.1f} GB per device")
    return found


def _remedies(step: FirstStep, found: Estimate) -> Iterator[tuple[str, AbstractLayout | None, int | None]]:
    """Yields what may make a step fit: words, layout and rows per replica."""
    layouts: list[tuple[str, AbstractLayout | None]] = [("", step.layout)]
    # A layout first: it keeps the rows, and fewer rows change what the script trains.
    if step.layout is None and found.num_replicas > 1:
        layouts.append(("layout=phalanx.fully_sharded()", fully_sharded()))
        yield (*layouts[1], None)
    rows = found.rows_per_replica or 1
    halves = [rows >> i for i in range(1, rows.bit_length())]
    for words, layout in layouts:
        for half in halves:
            smaller = f"{half} rows per replica instead of {rows}"
            yield f"{words}, and {smaller}" if words else smaller, layout, half
