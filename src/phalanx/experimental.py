# SPDX-License-Identifier: Apache-2.0
"""Names of `tf.distribute.experimental`."""

from phalanx.input.distributed import ValueContext
from phalanx.options import CommunicationImplementation, CommunicationOptions

CollectiveCommunication = CommunicationImplementation

__all__ = ["CollectiveCommunication", "CommunicationImplementation", "CommunicationOptions", "ValueContext"]
