# SPDX-License-Identifier: Apache-2.0
"""Names of `tf.compat.v1.distribute` for `RunConfig`."""

from phalanx import cluster_resolver, experimental
from phalanx.input.sources.functions import InputContext
from phalanx.strategies.current import get_strategy
from phalanx.strategies.mirrored import MirroredStrategy
from phalanx.strategies.multi_worker import MultiWorkerMirroredStrategy
from phalanx.strategies.parameter_server import ParameterServerStrategy
from phalanx.strategies.single import OneDeviceStrategy
from phalanx.strategies.tpu import TPUStrategy
