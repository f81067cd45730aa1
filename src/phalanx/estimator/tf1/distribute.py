# SPDX-License-Identifier: Apache-2.0
"""Names of `tf.compat.v1.distribute` for `RunConfig`."""

from phalanx import cluster_resolver, experimental
from phalanx._src.input.sources.functions import InputContext
from phalanx._src.strategies.current import get_strategy
from phalanx._src.strategies.mirrored import MirroredStrategy
from phalanx._src.strategies.multi_worker import MultiWorkerMirroredStrategy
from phalanx._src.strategies.parameter_server import ParameterServerStrategy
from phalanx._src.strategies.single import OneDeviceStrategy
from phalanx._src.strategies.tpu import TPUStrategy
