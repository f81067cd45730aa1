"""Programs and profiles that are collected and written."""

import threading

import jax
import jax.numpy as jnp
import pytest
from event_files import events, written

import phalanx
from phalanx import summary
from phalanx.errors import ContextError, InvalidArgumentError


@pytest.fixture
def writer(tmp_path):
    """A writer into `tmp_path`, which is the default writer."""
    writer = summary.create_file_writer(tmp_path)
    with writer.as_default():
        yield writer
    writer.close()


@pytest.fixture(autouse=True)
def ended():
    """No trace outlives its test."""
    yield
    summary.trace_off()


def doubled(x):
    """A step."""
    return phalanx.get_strategy().run(lambda y: y * 2, args=(x,))


def texts(folder, tag):
    """Returns the texts of a tag, with their steps."""
    return [(step, text.decode()) for step, (text,) in written(folder)[tag]]


@pytest.mark.parametrize("form", ["phalanx", "jit", "compiled", "str"])
def test_graph_writes_the_text_of_a_program(writer, tmp_path, form):
    """Of what `lower` returns here and in JAX, of what `compile` returns, and of a text."""
    lowered = phalanx.function(doubled).lower(1.0) if form == "phalanx" else jax.jit(lambda x: x * 2).lower(1.0)
    program = {"compiled": lowered.compile, "str": lambda: "text"}.get(form, lambda: lowered)()
    assert summary.graph(program, "step") is True
    writer.close()
    ((step, value),) = events(tmp_path)
    assert (step, value.tag, value.metadata.plugin_data.plugin_name) == (0, "step", "text")
    expected = program if form == "str" else program.as_text()
    assert texts(tmp_path, "step") == [(0, f"```\n{expected}\n```")]


def test_trace_collects_the_programs_that_are_called(writer, tmp_path):
    """Each once, whether it was called before or not, on all threads; not those before and after."""
    before, known, new = (phalanx.function(fn) for fn in (lambda x: x - 7.0, doubled, lambda x: x + 5.0))
    before(1.0)
    known(1.0)
    summary.trace_on()
    known(1.0)
    known(1.0)
    thread = threading.Thread(target=new, args=(1.0,))
    thread.start()
    thread.join(60)
    summary.trace_export("step", step=3)
    before(1.0)
    writer.close()
    ((step, text),) = texts(tmp_path, "step")
    assert step == 3
    assert text.count("### ") == text.count("module @") == 2
    assert text.startswith("### doubled\n\n```\n" + phalanx.function(doubled).lower(1.0).as_text())


def test_trace_collects_steps_of_a_strategy(writer, tmp_path):
    """The program is the one that runs, with its replicas, and it gives the same results. Eager steps are no programs."""
    strategy = phalanx.MirroredStrategy(["cpu:0", "cpu:1"])
    x = strategy.experimental_distribute_values_from_function(lambda c: jnp.ones(3))
    summary.trace_on()
    total = strategy.reduce("SUM", strategy.run(lambda x: x * 2, args=(x,)), axis=0)
    summary.trace_export("step", step=0)
    summary.trace_on()
    strategy.run(lambda: jnp.ones(2), options=phalanx.RunOptions(eager=True))
    summary.trace_export("eager", step=0)
    writer.close()
    assert float(total) == 12.0
    assert "module @" in texts(tmp_path, "step")[0][1]
    assert texts(tmp_path, "eager") == [(0, "")]


@pytest.mark.parametrize("where", ["trace_on", "trace_export", "both"])
def test_profile_is_written_to_the_folder(tmp_path, where):
    """Which either function names; the later one counts."""
    named = {name: tmp_path / name for name in ("trace_on", "trace_export") if where in (name, "both")}
    summary.trace_on(graph=False, profiler=True, profiler_outdir=named.get("trace_on"))
    phalanx.function(doubled)(1.0)
    summary.trace_export("step", profiler_outdir=named.get("trace_export"))
    folder = tmp_path / ("trace_export" if where != "trace_on" else "trace_on")
    assert [p for p in tmp_path.iterdir()] == [folder]
    assert len(list((folder / "plugins" / "profile").glob("*/*.xplane.pb"))) == 1


def test_trace_off_writes_nothing(writer, tmp_path):
    """And another trace may start."""
    for _ in range(2):
        summary.trace_on(profiler=True, profiler_outdir=tmp_path / "profile")
        phalanx.function(doubled)(1.0)
        summary.trace_off()
    summary.trace_off()
    assert not list(tmp_path.iterdir())


def test_export_that_fails_can_be_called_again(writer, tmp_path):
    """Without a step, or without a folder for the profile."""
    summary.trace_on(profiler=True)
    phalanx.function(doubled)(1.0)
    with pytest.raises(InvalidArgumentError, match="needs a folder.\nHINT: profiler_outdir="):
        summary.trace_export("step", step=1)
    with pytest.raises(InvalidArgumentError, match="without a step"):
        summary.trace_export("step", profiler_outdir=tmp_path)
    summary.trace_export("step", step=1, profiler_outdir=tmp_path)
    writer.close()
    assert [s for s, _ in texts(tmp_path, "step")] == [1]


def test_one_trace_at_a_time():
    """Without one there is nothing to write; there is no other within it."""
    with pytest.raises(ContextError, match="no trace is on.\nHINT: trace_on"):
        summary.trace_export("step", step=1)
    summary.trace_on()
    with pytest.raises(ContextError, match="a trace is on.\nHINT: trace_export"):
        summary.trace_on()
    assert summary.graph("text") is False  # There is no writer.


def test_profile_beside_that_of_jax(tmp_path):
    """JAX has one profiler."""
    jax.profiler.start_trace(str(tmp_path))
    with pytest.raises(ContextError, match="JAX cannot profile.*\nHINT: jax.profiler.stop_trace"):
        summary.trace_on(profiler=True)
    jax.profiler.stop_trace()
    summary.trace_on()


@pytest.mark.parametrize(
    "call",
    [lambda: summary.graph("text"), summary.trace_on, lambda: summary.trace_export("step", 1)],
    ids=["graph", "trace_on", "trace_export"],
)
def test_functions_that_are_traced_cannot_trace(call):
    """They would act once, when they are traced."""
    with pytest.raises(ContextError, match=r"in a function that is being traced.*\nHINT: summary\."):
        phalanx.function(call)()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: summary.graph(3), r"summary.graph\(3\)"),
        (lambda: summary.graph(jax.stages.Lowered), r"summary.graph\(<class"),
        (lambda: summary.graph("text", ""), "name=''"),
        (lambda: summary.trace_on(graph=1), "graph=1"),
        (lambda: summary.trace_on(profiler="yes"), "profiler='yes'"),
        (lambda: summary.trace_on(profiler_outdir=3), "profiler_outdir=3"),
        (lambda: (summary.trace_on(), summary.trace_export(3, step=1)), "name=3"),
        (lambda: (summary.trace_on(), summary.trace_export("step", 1, profiler_outdir=3)), "profiler_outdir=3"),
    ],
)
def test_arguments_that_are_wrong(writer, call, message):
    with pytest.raises(InvalidArgumentError, match=f"(?s){message}.*HINT"):
        call()
