# SPDX-License-Identifier: Apache-2.0
"""Names of `tf.distribute.experimental`."""

from phalanx.input.distributed import ValueContext as ValueContext
from phalanx.options import CommunicationImplementation as CommunicationImplementation
from phalanx.options import CommunicationOptions as CommunicationOptions

CollectiveCommunication = CommunicationImplementation

__all__ = ["CollectiveCommunication", "CommunicationImplementation", "CommunicationOptions", "ValueContext"]
