"""Summaries with good arguments; bad values replace them one by one."""

import contextlib
import tempfile

import jax.numpy as jnp
from bad_values import COUNT, INTEGER, NONE, NUMERIC, TEXTS, Case

import phalanx
from phalanx import summary


def recording(call):
    """Returns the call, made while a writer that writes nothing is the default."""

    def run(**kwargs):
        with summary.create_noop_writer().as_default():
            return call(**kwargs)

    return run


def restoring(call):
    """Returns the call, after which this thread has no default step and no default writer again."""

    def run(**kwargs):
        thread_defaults = phalanx.tracing.records.defaults
        try:
            return call(**kwargs)
        finally:
            thread_defaults.writer = thread_defaults.step = None

    return run


def file_writer(**kwargs):
    """A writer in a folder that is removed. It creates its file with the first summary only."""
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        summary.create_file_writer(**kwargs).close()


def tracing(call):
    """Returns the call, after which no trace is on."""

    def run(**kwargs):
        try:
            return call(**kwargs)
        finally:
            summary.trace_off()

    return run


def export(**kwargs):
    """A trace that is exported at once."""
    summary.trace_on()
    recording(summary.trace_export)(**kwargs)


def tracker_writer(**kwargs):
    """A writer of a tracker. It starts it with the first summary only."""
    summary.create_tracker_writer(summary.trackers.CSVTracker("unused.csv"), **kwargs).close()


def condition(**kwargs):
    """A block with a condition."""
    with recording(lambda: summary.record_if(**kwargs))():
        pass


def default(**kwargs):
    """A block with a default writer."""
    with summary.create_noop_writer().as_default(**kwargs):
        pass


def of_summaries():
    """What `phalanx.summary` has."""
    named, noop = {"name": "x", "step": 1, "description": None}, summary.create_noop_writer()
    takes = {"name": TEXTS - {"no text"}, "step": INTEGER, "description": TEXTS | NONE}
    limited, count = {"max_outputs": 3}, {"max_outputs": COUNT}
    numbers = {*NUMERIC}
    images, sounds = jnp.zeros((1, 4, 4, 3)), jnp.zeros((1, 8, 1))
    return {
        "scalar": Case(
            recording(summary.scalar),
            {**named, "data": 1.0, "reduce_op": "MEAN"},
            takes={**takes, "data": numbers, "reduce_op": set()},
        ),
        "histogram": Case(
            recording(summary.histogram),
            {**named, "data": jnp.ones(3), "buckets": 3},
            takes={**takes, "data": numbers, "buckets": NONE},
        ),
        "image": Case(recording(summary.image), {**named, **limited, "data": images}, takes={**takes, **count}),
        "audio": Case(
            recording(summary.audio),
            {**named, **limited, "data": sounds, "sample_rate": 8000},
            takes={**takes, **count, "sample_rate": COUNT},
        ),
        "text": Case(
            recording(summary.text), {**named, "data": "text"}, takes={**takes, "data": TEXTS | {"text array"}}
        ),
        "write": Case(
            recording(summary.write),
            {"tag": "x", "tensor": 1.0, "step": 1, "metadata": None},
            takes={
                "tag": TEXTS - {"no text"},
                "tensor": numbers | TEXTS | {"text array"},
                "step": INTEGER,
                "metadata": NONE,
            },
        ),
        "record_if": Case(condition, {"condition": True}, takes={"condition": {"True"}}, functions=("condition",)),
        "flush": Case(summary.flush, {"writer": noop}, takes={"writer": NONE}),
        "create_file_writer": Case(
            file_writer,
            {"logdir": "logs", "max_queue": 1, "flush_millis": 1, "filename_suffix": ""},
            takes={"logdir": TEXTS, "max_queue": COUNT, "flush_millis": COUNT, "filename_suffix": TEXTS},
        ),
        "create_tracker_writer": Case(
            tracker_writer,
            {"config": None, "max_queue": 1},
            takes={"config": NONE | {"empty dict"}, "max_queue": COUNT},
        ),
        "CSVTracker": Case(summary.trackers.CSVTracker, {"path": "scalars.csv"}, takes={"path": TEXTS}),
        "graph": Case(
            recording(summary.graph),
            {"graph_data": "text", "name": "x"},
            takes={"graph_data": TEXTS, "name": TEXTS - {"no text"}},
        ),
        "trace_on": Case(
            tracing(summary.trace_on),
            {"graph": True, "profiler": False, "profiler_outdir": None},
            takes={"graph": {"True"}, "profiler": {"True"}, "profiler_outdir": TEXTS | NONE},
        ),
        "trace_export": Case(
            tracing(export),
            {"name": "x", "step": 1, "profiler_outdir": None},
            takes={"name": TEXTS - {"no text"}, "step": INTEGER, "profiler_outdir": TEXTS | NONE},
        ),
        "set_step": Case(restoring(summary.experimental.set_step), {"step": 1}, takes={"step": INTEGER | NONE}),
        "SummaryWriter.as_default": Case(default, {"step": 1}, takes={"step": INTEGER | NONE}),
        "SummaryWriter.set_as_default": Case(
            restoring(noop.set_as_default), {"step": 1}, takes={"step": INTEGER | NONE}
        ),
    }


GROUPS = {"summaries": of_summaries}
