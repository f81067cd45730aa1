"""Summaries with good arguments; bad values replace them one by one."""

import contextlib
import functools
import tempfile

import jax.numpy as jnp
from bad_values import COUNT, INTEGER, NONE, NUMERIC, TEXTS, Case, named

import phalanx
from phalanx import summary


def recording(call):
    """Returns the call, made while a writer that writes nothing is the default."""

    @functools.wraps(call)
    def run(**kwargs):
        with summary.create_noop_writer().as_default():
            return call(**kwargs)

    return run


def restoring(call):
    """Returns the call, after which this thread has no default step and no default writer again."""

    @functools.wraps(call)
    def run(**kwargs):
        thread_defaults = phalanx._src.tracing.records.defaults
        try:
            return call(**kwargs)
        finally:
            thread_defaults.writer = thread_defaults.step = None

    return run


@functools.wraps(summary.create_file_writer)
def file_writer(**kwargs):
    """A writer in a folder that is removed. It creates its file with the first summary only."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        summary.create_file_writer(**kwargs).close()


def tracing(call):
    """Returns the call, after which no trace is on."""

    @functools.wraps(call)
    def run(**kwargs):
        try:
            return call(**kwargs)
        finally:
            summary.trace_off()

    return run


@functools.wraps(summary.trace_export)
def export(**kwargs):
    summary.trace_on()
    recording(summary.trace_export)(**kwargs)


@functools.wraps(summary.create_tracker_writer)
def tracker_writer(**kwargs):
    """A writer of a tracker. It starts it with the first summary only."""
    summary.create_tracker_writer(summary.trackers.CSVTracker("unused.csv"), **kwargs).close()


def condition(**kwargs):
    with recording(lambda: summary.record_if(**kwargs))():
        pass


def default(**kwargs):
    with summary.create_noop_writer().as_default(**kwargs):
        pass


def of_summaries():
    common, noop = {"name": "x", "step": 1, "description": None}, summary.create_noop_writer()
    takes = {"name": TEXTS - {"no text"}, "step": INTEGER, "description": TEXTS | NONE}
    limited, count = {"max_outputs": 3}, {"max_outputs": COUNT}
    numbers = {*NUMERIC}
    images, sounds = jnp.zeros((1, 4, 4, 3)), jnp.zeros((1, 8, 1))
    return named(
        Case(
            recording(summary.scalar),
            {**common, "data": 1.0, "reduce_op": "MEAN"},
            takes={**takes, "data": numbers, "reduce_op": set()},
        ),
        Case(
            recording(summary.histogram),
            {**common, "data": jnp.ones(3), "buckets": 3},
            takes={**takes, "data": numbers, "buckets": NONE | {"integer of NumPy"}},
        ),
        Case(recording(summary.image), {**common, **limited, "data": images}, takes={**takes, **count}),
        Case(
            recording(summary.audio),
            {**common, **limited, "data": sounds, "sample_rate": 8000},
            takes={**takes, **count, "sample_rate": COUNT},
        ),
        Case(recording(summary.text), {**common, "data": "text"}, takes={**takes, "data": TEXTS | {"text array"}}),
        Case(
            recording(summary.write),
            {"tag": "x", "tensor": 1.0, "step": 1},
            takes={"tag": TEXTS - {"no text"}, "tensor": numbers | TEXTS | {"text array"}, "step": INTEGER},
        ),
        Case(summary.flush, {"writer": noop}),
        Case(
            file_writer,
            {"logdir": "logs", "max_queue": 1, "flush_millis": 1},
            takes={"logdir": TEXTS, "max_queue": COUNT, "flush_millis": COUNT, "filename_suffix": TEXTS},
        ),
        Case(tracker_writer, {"max_queue": 1}, takes={"config": NONE | {"empty dict"}, "max_queue": COUNT}),
        Case(summary.trackers.CSVTracker, {"path": "scalars.csv"}, takes={"path": TEXTS}),
        Case(
            recording(summary.graph),
            {"graph_data": "text", "name": "x"},
            takes={"graph_data": TEXTS, "name": TEXTS - {"no text"}},
        ),
        Case(tracing(summary.trace_on), takes={"profiler_outdir": TEXTS | NONE}),
        Case(
            tracing(export),
            {"name": "x", "step": 1},
            takes={"name": TEXTS - {"no text"}, "step": INTEGER, "profiler_outdir": TEXTS | NONE},
        ),
        Case(restoring(summary.experimental.set_step), {"step": 1}, takes={"step": INTEGER | NONE}),
        Case(restoring(noop.set_as_default), {"step": 1}, takes={"step": INTEGER | NONE}),
    ) | {
        "record_if": Case(condition, {"condition": True}, takes={"condition": {"True"}}, functions=("condition",)),
        "SummaryWriter.as_default": Case(default, {"step": 1}, takes={"step": INTEGER | NONE}),
    }


GROUPS = {"summaries": of_summaries}
