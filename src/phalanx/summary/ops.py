# SPDX-License-Identifier: Apache-2.0
"""Records scalars, histograms, images, sounds and texts.

Outside compiled functions the default writer gets a value at once. Inside, the value becomes an output of the program, and the
writer gets it after the run. If recording is off, the program contains nothing of it.
"""

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import keras
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from phalanx._src import compat
from phalanx._src.collectives import primitives
from phalanx._src.mesh.arrays import require_fits
from phalanx._src.options import ReduceOp
from phalanx._src.tracing import context
from phalanx._src.tracing.context import ReplicaContext
from phalanx._src.tracing.control_flow import BodyScope
from phalanx._src.tracing.records import Record, defaults, deliver
from phalanx._src.tracing.scope import LiftScope
from phalanx.errors import InvalidArgumentError, NestedWriteError, ReduceOpError, arguments, shown
from phalanx.summary.buckets import bucket_counts
from phalanx.summary.steps import Step, checked_step
from phalanx.typing import PyTree

Recorded: TypeAlias = bool | jax.Array
"""Whether a value is recorded: a bool, or a traced one."""

# 30 is TensorBoard's default. More buckets than 10,000 would make an event larger than most arrays.
_LARGE = 2.0**31
"""Numbers below it become a float32 as JAX converts them."""
_BUCKETS, _MOST_BUCKETS = 30, 10_000
_KIND_OF_BUCKETS = f"an integer from 1 to {_MOST_BUCKETS}"


def scalar(
    name: str,
    data: ArrayLike,
    step: Step = None,
    description: str | None = None,
    reduce_op: ReduceOp | str = ReduceOp.MEAN,
) -> Recorded:
    """Records a number. May be called in any context.

    Args:
      name: the tag in TensorBoard.
      data: real scalar. In replica context, the values of all replicas are reduced to one.
      step: integer. None for the default step.
      description: text for TensorBoard, in Markdown.
      reduce_op: MEAN or SUM over the replicas.

    Returns:
      Whether the value is recorded. A traced bool if the condition is traced.

    Raises:
      InvalidArgumentError: there is no step, or an argument has the wrong type or shape.
      NestedWriteError: called in the body of a loop or branch inside a compiled function.

    Source: tf.summary.scalar.

    Example:
      >>> import phalanx
      >>> phalanx.summary.scalar("loss", 0.5, step=1)  # There is no default writer.
      False
    """
    # Checked before it is known whether anything is recorded: a wrong argument must not fail at step 100 first.
    op = ReduceOp.parse(reduce_op)
    if (is_on := _starts("scalar", name, description)) is False:
        return False
    # A loop in Python may record numbers a hundred thousand times. A JAX array takes half of the time of a call.
    is_number = isinstance(data, (int, float)) and -_LARGE < data < _LARGE and not compat.is_lifting()
    value: jax.Array = np.asarray(data) if is_number else _array("scalar", data, ranks=(0,))  # type: ignore[assignment]
    return _record("scalar", name, lambda: _reduced(op, value.astype(np.float32)), step, (description,), is_on)


def histogram(
    name: str, data: ArrayLike, step: Step = None, buckets: int | None = None, description: str | None = None
) -> Recorded:
    """Records the distribution of values. May be called in any context.

    The program counts the values, so only the counts leave it. In replica context, the values of all replicas are counted.
    Non-finite values are ignored.

    Args:
      name: the tag in TensorBoard.
      data: array of real numbers, of any shape.
      step: integer. None for the default step.
      buckets: number of buckets of equal width. None for 30.
      description: text for TensorBoard, in Markdown.

    Returns:
      Whether the values are recorded. A traced bool if the condition is traced.

    Raises:
      InvalidArgumentError: there is no step, or an argument has the wrong type.
      NestedWriteError: called in the body of a loop or branch inside a compiled function.

    Source: tf.summary.histogram.

    Example:
      >>> import jax.numpy as jnp, phalanx
      >>> phalanx.summary.histogram("weights", jnp.arange(10.0), step=1)  # There is no default writer.
      False
    """
    count = (
        _BUCKETS
        if buckets is None
        else arguments.integer("buckets", buckets, most=_MOST_BUCKETS, kind=_KIND_OF_BUCKETS, hint="buckets=30")
    )
    if (is_on := _starts("histogram", name, description)) is False:
        return False
    value = _array("histogram", data)
    return _record("histogram", name, lambda: bucket_counts(value, count, _num_replicas()), step, (description,), is_on)


def image(
    name: str, data: ArrayLike, step: Step = None, max_outputs: int = 3, description: str | None = None
) -> Recorded:
    """Records images. May be called in any context.

    In replica context, the images of replica 0 are recorded.

    Args:
      name: the tag in TensorBoard.
      data: array (images, height, width, channels) with 1 to 4 channels: floats from 0 to 1, or uint8.
      step: integer. None for the default step.
      max_outputs: maximum number of images to record.
      description: text for TensorBoard, in Markdown.

    Returns:
      Whether the images are recorded. A traced bool if the condition is traced.

    Raises:
      InvalidArgumentError: there is no step, or an argument has the wrong type or shape.
      NestedWriteError: called in the body of a loop or branch inside a compiled function.

    Source: tf.summary.image.

    Example:
      >>> import jax.numpy as jnp, phalanx
      >>> phalanx.summary.image("input", jnp.zeros((1, 28, 28, 1)), step=1)  # There is no default writer.
      False
    """
    count = arguments.integer("max_outputs", max_outputs, hint="max_outputs=3")
    if (is_on := _starts("image", name, description)) is False:
        return False
    value = _array("image", data, ranks=(4,))
    if not 1 <= value.shape[3] <= 4:
        raise InvalidArgumentError(
            f"summary.image of an array of shape {tuple(value.shape)}",
            "the last dim, of channels, must have the size 1, 2, 3 or 4.",
            "x[..., None] for images without channels",
        )
    # uint8 leaves the device as it is, which is a quarter of the bytes; the writer converts floats.
    value = value if value.dtype == jnp.uint8 else value.astype(jnp.float32)
    return _record("image", name, lambda: _first_replica(value[:count]), step, (description,), is_on)


def audio(
    name: str,
    data: ArrayLike,
    sample_rate: int,
    step: Step = None,
    max_outputs: int = 3,
    description: str | None = None,
) -> Recorded:
    """Records sounds, as WAV with 16 bits. May be called in any context.

    In replica context, the sounds of replica 0 are recorded.

    Args:
      name: the tag in TensorBoard.
      data: array (sounds, samples, channels) of floats from -1 to 1, with 1 or 2 channels.
      sample_rate: samples per second.
      step: integer. None for the default step.
      max_outputs: maximum number of sounds to record.
      description: text for TensorBoard, in Markdown.

    Returns:
      Whether the sounds are recorded. A traced bool if the condition is traced.

    Raises:
      InvalidArgumentError: there is no step, or an argument has the wrong type or shape.
      NestedWriteError: called in the body of a loop or branch inside a compiled function.

    Source: tf.summary.audio.

    Example:
      >>> import jax.numpy as jnp, phalanx
      >>> phalanx.summary.audio("tone", jnp.zeros((1, 800, 1)), 8000, step=1)  # There is no default writer.
      False
    """
    rate = arguments.integer("sample_rate", sample_rate, hint="sample_rate=44100")
    count = arguments.integer("max_outputs", max_outputs, hint="max_outputs=3")
    if (is_on := _starts("audio", name, description)) is False:
        return False
    value = _array("audio", data, ranks=(3,))
    if not 1 <= value.shape[2] <= 2:
        raise InvalidArgumentError(
            f"summary.audio of an array of shape {tuple(value.shape)}",
            "the last dim, of channels, must have the size 1 or 2.",
            "x[..., None] for sounds with one channel",
        )
    value = value.astype(jnp.float32)
    return _record("audio", name, lambda: _first_replica(value[:count]), step, (description, rate), is_on)


def text(name: str, data: PyTree, step: Step = None, description: str | None = None) -> Recorded:
    """Records a text. May be called in any context.

    Args:
      name: the tag in TensorBoard.
      data: a str in Markdown, or a list of strs, which TensorBoard shows as a table. A compiled function records the text
        that it was traced with.
      step: integer. None for the default step.
      description: text for TensorBoard, in Markdown.

    Returns:
      Whether the text is recorded. A traced bool if the condition is traced.

    Raises:
      InvalidArgumentError: there is no step, or an argument has the wrong type.
      NestedWriteError: called in the body of a loop or branch inside a compiled function.

    Source: tf.summary.text.

    Example:
      >>> import phalanx
      >>> phalanx.summary.text("notes", "*started*", step=1)  # There is no default writer.
      False
    """
    texts = _texts(data)
    if texts is None:
        raise InvalidArgumentError(
            f"summary.text(data={shown(data)})",
            "must be a str, or a list of strs or of lists of the same length.",
            'data="a text"',
        )
    if (is_on := _starts("text", name, description)) is False:
        return False
    return _record("text", name, lambda: None, step, (description, *texts), is_on)


def write(tag: str, tensor: PyTree, step: Step = None, metadata: object = None) -> Recorded:
    """Records an array for a plugin of TensorBoard. May be called in any context.

    In replica context, the array of replica 0 is recorded.

    Args:
      tag: the tag in TensorBoard.
      tensor: array of numbers, or texts as `text` takes them.
      step: integer. None for the default step.
      metadata: a protocol buffer `SummaryMetadata` that names the plugin, or None.

    Returns:
      Whether the array is recorded. A traced bool if the condition is traced.

    Raises:
      InvalidArgumentError: there is no step, or an argument has the wrong type.
      NestedWriteError: called in the body of a loop or branch inside a compiled function.

    Source: tf.summary.write.

    Example:
      >>> import jax.numpy as jnp, phalanx
      >>> phalanx.summary.write("values", jnp.arange(3), step=1)  # There is no default writer.
      False
    """
    if metadata is not None and not hasattr(metadata, "SerializeToString"):
        raise InvalidArgumentError(
            f"metadata={shown(metadata)}", "must be a protocol buffer SummaryMetadata.", "metadata=None"
        )
    if (is_on := _starts("write", tag, None)) is False:
        return False
    # Bytes are hashable, as the notes of a record must be: they are a static part of its program.
    serialized = b"" if metadata is None else metadata.SerializeToString()
    if (texts := _texts(tensor)) is not None:
        return _record("write", tag, lambda: None, step, (serialized, *texts), is_on)
    value = _array("write", tensor)
    return _record("write", tag, lambda: _first_replica(value), step, (serialized,), is_on)


@contextmanager
def record_if(condition: Recorded | Callable[[], Recorded]) -> Iterator[None]:
    """Records only if a condition holds, inside the `with` block. May be called in any context.

    Outside a compiled function, the condition is decided before each run: the program of the other runs contains no summaries.
    Inside one, it may be a traced bool; the program then computes the summaries only if it holds. If replicas
    disagree, the condition of replica 0 counts.

    Args:
      condition: bool, scalar bool array, or a function without arguments that returns one.

    Raises:
      InvalidArgumentError: `condition` is something else.

    Source: tf.summary.record_if.

    Example:
      >>> import phalanx
      >>> for step in range(200):
      ...     with phalanx.summary.record_if(step % 100 == 0):
      ...         _ = phalanx.summary.scalar("loss", 0.5, step=step)
    """
    if not callable(condition):
        condition = _checked_condition(condition)
    before = defaults.condition, defaults.is_traced
    # A condition set in a compiled function belongs to the trace; one set outside is asked once per run.
    defaults.condition, defaults.is_traced = condition, compat.is_lifting()
    try:
        yield
    finally:
        defaults.condition, defaults.is_traced = before


def should_record_summaries() -> Recorded:
    """Returns whether a summary would be recorded here. May be called in any context.

    Returns:
      A bool, or a traced bool inside `record_if` of one.

    Source: tf.summary.should_record_summaries.

    Example:
      >>> import phalanx
      >>> phalanx.summary.should_record_summaries()  # There is no default writer.
      False
    """
    # Tells the program's cache that its trace depends on the answer.
    defaults.is_asked = True
    if defaults.writer is None:
        return False
    condition = defaults.condition
    if callable(condition):
        # A program asks once per run. Another answer while it is traced would not fit the program that was chosen.
        is_decided = not defaults.is_traced and _in_program()
        condition = defaults.is_on if is_decided else _checked_condition(condition())
    return condition if isinstance(condition, jax.core.Tracer) else bool(condition)


def _checked_condition(condition: Any) -> Recorded:
    is_bool = isinstance(condition, (bool, np.bool_))
    if not is_bool and not (getattr(condition, "dtype", None) == jnp.bool_ and not np.shape(condition)):
        raise InvalidArgumentError(
            f"record_if(condition={shown(condition)})",
            "must be a bool, or a function that returns one.",
            "record_if(step % 100 == 0)",
        )
    checked: Recorded = condition
    return checked


def _starts(kind: str, name: object, description: object) -> Recorded:
    """Checks the arguments that all summaries have. Returns whether to record, a bool or a traced bool."""
    if not isinstance(name, str) or not name:
        raise InvalidArgumentError(f"summary.{kind}(name={shown(name)})", "must be a str, not empty.", 'name="loss"')
    if description is not None and not isinstance(description, str):
        raise InvalidArgumentError(f"description={shown(description)}", "must be a str or None.", "description=None")
    # Keras calls layers with symbols to learn shapes. A summary there would record no values.
    return not _is_symbolic() and _agreed(should_record_summaries())


def _in_program() -> bool:
    """Returns whether a whole program is being traced, not only a function in eager code."""
    scope = outermost = compat.active_scope()
    while scope is not None:
        outermost = scope if isinstance(scope, LiftScope) else outermost
        scope = scope.original_scope
    return isinstance(outermost, LiftScope) and not isinstance(outermost, BodyScope)


def _texts(data: object) -> tuple[tuple[str, ...], tuple[int, ...]] | None:
    """Returns texts, flattened, and their shape. None if `data` is something else."""
    # A list of numbers is no text, and np.asarray of a mixed list would make texts of numbers.
    texts = np.asarray(data) if isinstance(data, (str, np.ndarray)) or _is_list_of_texts(data) else None
    return None if texts is None or texts.dtype.kind != "U" else (tuple(map(str, texts.flat)), texts.shape)


def _is_list_of_texts(data: object) -> bool:
    rows = data if isinstance(data, (list, tuple)) else ()
    sizes = {len(row) if isinstance(row, (list, tuple)) else -1 for row in rows}
    cells = [x for row in rows for x in (row if isinstance(row, (list, tuple)) else [row])]
    return len(sizes) == 1 and bool(cells) and all(isinstance(x, str) for x in cells)


def _is_symbolic() -> bool:
    """Returns whether Keras runs this code only to learn the shapes of a layer's outputs."""
    active, scope = compat.active_scope(), compat.surrounding_scope()
    return active is not scope and not (isinstance(scope, LiftScope) and not scope.inner_traces.is_inside)


def _agreed(condition: Recorded) -> Recorded:
    """Returns a condition that is equal on all replicas, because a summary communicates inside its branch."""
    if not isinstance(condition, jax.core.Tracer):
        return condition
    replica = context.get_replica_context()
    if replica is None or replica.num_replicas_in_sync == 1:
        return condition
    return primitives.broadcast(condition, replica.num_replicas_in_sync)


def _array(kind: str, data: ArrayLike | keras.Variable, ranks: tuple[int, ...] | None = None) -> jax.Array:
    """Returns the data of a summary as an array.

    Raises:
      InvalidArgumentError: it is not an array of real numbers, or has another number of dims.
      TraceError: it was kept from another step.
    """
    compat.require_live_outside_steps(data)
    try:
        value = primitives.as_array(data.value if isinstance(data, keras.Variable) else data)
    except ReduceOpError as e:
        raise InvalidArgumentError(
            f"summary.{kind} of {shown(data)}", "it is not an array of numbers.", "pass an array"
        ) from e
    if jnp.issubdtype(value.dtype, jnp.complexfloating):
        raise InvalidArgumentError(f"summary.{kind} of complex numbers", "TensorBoard cannot show them.", "jnp.abs(x)")
    if ranks is not None and value.ndim not in ranks:
        raise InvalidArgumentError(
            f"summary.{kind} of an array of shape {tuple(value.shape)}",
            f"it must have {ranks[0]} dims.",
            {0: "jnp.mean(x)", 3: "x[None]", 4: "x[None] for one image (height, width, channels)"}[ranks[0]],
        )
    return value


def _record(
    kind: str, tag: str, make: Callable[[], jax.Array | None], step: Step, notes: Hashable, is_on: Recorded
) -> Recorded:
    """Records the result of `make()`, if `is_on`."""
    scope = compat.surrounding_scope()
    step = checked_step(step)
    if step is None:
        default = defaults.step
        if default is None:
            raise InvalidArgumentError(
                f"summary.{kind}({tag!r}, ...) without a step",
                "there is no default step either.",
                f"summary.{kind}({tag!r}, ..., step=step), or summary.experimental.set_step(step)",
            )
        # Other default steps are read after each run, so that a new step does not recompile the program.
        step = default if isinstance(default, (keras.Variable, jax.core.Tracer)) else None
    if isinstance(step, keras.Variable):
        step = step.value
    writer = defaults.writer
    if not isinstance(scope, LiftScope):
        value = make()
        if any(isinstance(x, jax.core.Tracer) for x in (value, step, is_on)):
            raise NestedWriteError(
                f"phalanx.summary.{kind}({tag!r}, ...) in a function that JAX traces",
                "the value cannot leave jax.jit or another JAX transformation.",
                "phalanx.function instead of jax.jit",
            )
        deliver([Record(kind=kind, tag=tag, value=value, step=step, notes=notes, writer=writer)])
        return True
    condition = None
    if isinstance(is_on, jax.core.Tracer):
        # A condition that is known only in the program: the branch that is not taken must give the same shapes.
        condition, shapes = is_on, jax.eval_shape(make)
        value = lax.cond(is_on, make, lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes))
    else:
        value = make()
    # A constant step would become a part of the program, and each step would compile another one.
    if isinstance(step, int):
        require_fits(step, "step")  # Outside programs, it may have 64 bits.
    step = None if step is None else jnp.asarray(step)
    local_writer = writer if defaults.is_own else None
    scope.record(
        Record(kind=kind, tag=tag, value=value, step=step, condition=condition, notes=notes, writer=local_writer)
    )
    return is_on


def _traced_replica() -> ReplicaContext | None:
    """Returns the replica context of the function that is being traced, or None."""
    return context.get_replica_context() if compat.is_lifting() else None


def _num_replicas() -> int:
    replica = _traced_replica()
    return 1 if replica is None else replica.num_replicas_in_sync


def _reduced(op: ReduceOp, value: jax.Array) -> jax.Array:
    replica = _traced_replica()
    if replica is None:
        return value
    reduced: jax.Array = replica.all_reduce(op, value)
    return reduced


def _first_replica(value: jax.Array) -> jax.Array:
    replica = _traced_replica()
    if replica is None:
        return value
    return primitives.broadcast(value, replica.num_replicas_in_sync)
