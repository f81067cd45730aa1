# SPDX-License-Identifier: Apache-2.0
"""`phalanx estimate`, on the command line. It starts the process in which the script and the compilers run."""

import os
import sys
from collections.abc import Sequence

import click

from phalanx._src.launch.plan import Request
from phalanx._src.tools import child
from phalanx._src.tools.command_line import ARGUMENTS, IS_MODULE, OUTPUT, errors_without_stack


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--topology",
    "topologies",
    multiple=True,
    required=True,
    help="For example v5e:16x16, 2*v5e:16x16, v5p:1,16,4096, h100:8, h100:512x8 or cpu:2. May be repeated.",
)
@click.option(
    "--devices",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Number of CPU devices that SCRIPT sees: those of one replica, or the most of any cpu:N.",
)
@OUTPUT
@IS_MODULE
@click.argument("target", metavar="SCRIPT")
@ARGUMENTS
def estimate(  # noqa: PLR0917
    topologies: Sequence[str],
    devices: int,
    output: Sequence[str],
    is_module: bool,
    target: str,
    arguments: Sequence[str],
) -> None:
    """Predicts a step of SCRIPT on hardware that you don't have.

    Runs SCRIPT on CPUs until its first training step, which the real compiler then compiles for each topology. Nothing runs
    there. A replica gets as many rows as a replica of SCRIPT has with --devices. The exit code is 0 if the step fits everywhere, and 3 if
    it does not.
    """
    with errors_without_stack():
        Request(target, tuple(arguments), is_module=is_module).check_script()
    environment = {
        **os.environ,
        # If the CUDA plugin looks for GPUs and finds none, JAX has no compiler for them afterwards.
        "JAX_PLATFORMS": "cpu",
        "PHALANX_CPU_DEVICES": str(devices),
        # The compilers must neither look for hardware nor measure on it.
        "CUDA_VISIBLE_DEVICES": "-1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip(),
    }
    kind = "module" if is_module else "script"
    sys.exit(
        child.run(
            "phalanx._src.tools.estimate",
            # Names of topologies have no spaces, but paths may.
            [" ".join(topologies), "\n".join(output), kind, target, *arguments],
            environment,
        )
    )
