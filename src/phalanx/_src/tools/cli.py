# SPDX-License-Identifier: Apache-2.0
"""The command line: each tool in this package is a command of it."""

import click

from phalanx._src.tools.bench.command import bench
from phalanx._src.tools.checkpoint.command import checkpoint
from phalanx._src.tools.cluster import cluster
from phalanx._src.tools.doctor.command import doctor
from phalanx._src.tools.env.command import env
from phalanx._src.tools.estimate.command import estimate
from phalanx._src.tools.migrate.command import migrate
from phalanx._src.tools.run import run


@click.group(commands=[run, cluster, doctor, env, estimate, bench, migrate, checkpoint])
@click.version_option(package_name="phalanx")
def main() -> None:
    """Phalanx: distributed training with Keras 3 on JAX."""
