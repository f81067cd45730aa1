"""Hooks, and what they see of a step."""

from refusals import refused

import phalanx.estimator as estimator
from phalanx.errors import InvalidArgumentError
from phalanx.estimator.loop.session import checked_hooks


def test_requests_to_stop_are_remembered():
    """A context knows whether a hook wants to stop, and what the loop fetches; there is no `feed_dict`."""
    args = estimator.SessionRunArgs({"a": "loss"})
    assert args.fetches == {"a": "loss"}
    with refused(InvalidArgumentError, ["feed_dict={'x': 3}", "no placeholders"]):
        estimator.SessionRunArgs("loss", feed_dict={"x": 3})
    context = estimator.SessionRunContext(args, session=None)
    assert not context.stop_requested
    context.request_stop()
    assert context.stop_requested
    assert context.original_args is args
    assert estimator.SessionRunValues([1]).results == [1]


def test_hooks_of_another_class():
    """They are refused, and None is no hooks. Every method of a hook may be left out."""
    hook = estimator.SessionRunHook()
    assert hook.begin() is hook.after_create_session(None, None) is hook.before_run(None) is None
    assert hook.after_run(None, None) is hook.end(None) is None
    assert checked_hooks("hooks", None) == ()
    for hooks in (3, [3], [estimator.SessionRunHook(), "a"]):
        with refused(InvalidArgumentError, ["hooks=", "is not a SessionRunHook"]):
            checked_hooks("hooks", hooks)
