# SPDX-License-Identifier: Apache-2.0
"""Training runs that continue when processes of their group die, leave or join: `phalanx run --workers 2:4`."""

from phalanx._src.elastic.steps import Steps, steps
from phalanx._src.options import ElasticOptions
from phalanx.errors.names import suggest_names

__all__ = ["ElasticOptions", "Steps", "steps"]

suggest_names(__name__)
