# SPDX-License-Identifier: Apache-2.0
"""The traces that JAX makes inside the trace of a program, and may use again for another program."""

from typing import Any, Self, final

from phalanx._src.typed_jax import get_opaque_trace_state, make_user_context
from phalanx.errors import NestedWriteError
from phalanx.errors.frames import user_place

# JAX caches traces of inner functions (under `jax.jit`, and bodies of `jax.lax` loops) by their input shapes and by this context.
# Without the context, a function that closes over a variable would run with the tracers of an earlier program.
# https://github.com/jax-ml/jax/pull/38473 describes the same problem for plain closures.
_trace_key = make_user_context()

# Keys that can be used again, because no inner trace under them has read a variable. A new key per program would fill JAX's
# caches with a copy of every jnp function per model.
_free_keys: list[object] = []


@final
class InnerTraces:
    """The inner traces of one program. In its context, JAX uses no trace again that depends on other values of variables."""

    def __init__(self) -> None:
        self._trace_state: Any = None
        self._key: object = None
        self._key_context: Any = None
        self._have_read = False

    def __enter__(self) -> Self:
        self._take_key()
        self._trace_state = get_opaque_trace_state()
        return self

    def __exit__(self, *_: object) -> None:
        self._drop_key()

    @property
    def is_inside(self) -> bool:
        """Whether the current trace is a `jax.lax` body or another inner trace, not the one in which the context was entered."""
        return bool(self._trace_state != get_opaque_trace_state())

    def note_read(self) -> None:
        """Records that the current trace depends on the values of variables."""
        self._have_read = self._have_read or self.is_inside

    def values_change(self) -> None:
        """Invalidates cached inner traces that have read variables. Call it before the value of a variable changes."""
        if self._have_read:
            self._drop_key()
            self._take_key()

    def require_outside(self, call: str, hint: str) -> None:
        """Raises in an inner trace. A value computed there is a tracer of that trace, and would leak if it were stored."""
        if self.is_inside:
            raise NestedWriteError(
                f"{call} at {user_place()}",
                "the call is inside the body of a jax.lax loop or branch, or inside another JAX transformation, and the new "
                "value cannot leave it.",
                hint,
            )

    def _take_key(self) -> None:
        """Enters a key under which JAX has no cached traces that depend on values of variables."""
        # Not `if _free_keys`: another thread may take the last key between the test and `pop`.
        try:
            self._key = _free_keys.pop()
        except IndexError:
            self._key = object()
        self._have_read = False
        self._key_context = _trace_key(self._key)
        self._key_context.__enter__()

    def _drop_key(self) -> None:
        """Leaves the key. It can be used again unless an inner trace under it depends on values of variables."""
        self._key_context.__exit__(None, None, None)
        if not self._have_read:
            _free_keys.append(self._key)
