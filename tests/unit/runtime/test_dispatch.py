"""The loss of a process that code of the user catches. With real processes: tests/cluster/test_elastic.py."""

import pytest

from phalanx._src.cluster.watch.verdict import Verdict
from phalanx._src.cluster.watch.watch import Watch
from phalanx._src.runtime.dispatch import Turn, raise_again
from phalanx.errors import PeerLostError


@pytest.mark.parametrize("is_loss", [True, False])
def test_loss_that_was_caught_is_raised_again(is_loss):
    """Each time, once a step has raised it. A verdict that is no loss ends the process by itself."""
    watchdog = Watch(["127.0.0.1:4000"], 0, {}, stall_s=60)
    watchdog._departure.verdict = Verdict("rank 1 has ended without a word", is_loss=is_loss)
    raise_again(watchdog)
    if not is_loss:
        with Turn(watchdog, is_step=True):
            raise_again(watchdog)
        return
    for call in (Turn(watchdog, is_step=True).__enter__, lambda: raise_again(watchdog), lambda: raise_again(watchdog)):
        with pytest.raises(PeerLostError, match="rank 1 has ended without a word: no step can run without it"):
            call()
