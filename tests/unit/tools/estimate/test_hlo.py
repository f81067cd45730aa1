"""What is read from the text of compiled programs."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from phalanx._src.tools.estimate.hlo import Collective, HloProgram

# Written by hand in XLA's text format, with the shapes that each statement below is about.
GPU = """
HloModule jit_step

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %s = f32[] add(%a, %b)
}

%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %r = f32[8]{0} all-reduce(%x), replica_groups={{0,1},{2,3}}, to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %r)
}

%condition (p: (s32[], f32[8])) -> pred[] {
  %p = (s32[], f32[8]{0}) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x: f32[8], y: bf16[4,4]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %y = bf16[4,4]{1,0} parameter(1)
  %start = (bf16[4,4]{1,0}, bf16[16,4]{1,0}) all-gather-start(%y), replica_groups=[1,4]<=[4], dimensions={0}
  %done = bf16[16,4]{1,0} all-gather-done(%start)
  %begun = (bf16[4,4]{1,0}, bf16[8,4]{1,0}) all-gather-start(%y), replica_groups=[2,2]<=[4], backend_config={"collective_backend_config":{"is_sync":true}}
  %ended = bf16[8,4]{1,0} all-gather-done(%begun)
  %sent = ((f32[8]{0}, f32[4]{0}), (f32[4]{0}, f32[2]{0})) reduce-scatter-start(%x, %w), replica_groups=[2,2]<=[4], dimensions={0}, to_apply=%add
  %received = (f32[4]{0}, f32[2]{0}) reduce-scatter-done(%sent)
  %scatter = f32[2]{0} reduce-scatter(%x), replica_groups=[2,2]<=[2,2]T(1,0), dimensions={0}, to_apply=%add
  %t = (s32[], f32[8]{0}) tuple(%zero, %x)
  %loop = (s32[], f32[8]{0}) while(%t), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"5"}}
  %back = f32[] custom-call(%x), custom_call_target="xla_ffi_python_cpu_callback"
  ROOT %r = f32[8]{0} get-tuple-element(%loop), index=1
}
"""
SLICES = """
ENTRY %main (x: f32[1024]) -> f32[1024] {
  %x = f32[1024]{0} parameter(0)
  %token = token[] after-all()
  %send = (f32[1024]{0}, u32[], token[]) send(%x, %token), is_host_transfer=true, frontend_attributes={_xla_megascale_transfer_type="ALL_REDUCE"}
  %out = token[] outfeed(%x, %token)
  ROOT %y = f32[1024]{0} copy(%x)
}
"""


def test_collectives_are_read():
    """An all-gather counts its whole array, a reduce-scatter what is divided, and a loop each of its passes.

    One that the program waits for at once is not asynchronous, although the compiler for GPUs writes a start and a done.
    """
    assert HloProgram(GPU).collectives == [
        Collective("all-gather", "bf16", 16 * 4 * 2, (0, 1, 2, 3), is_async=True),
        Collective("all-gather", "bf16", 8 * 4 * 2, (0, 1)),
        Collective("reduce-scatter", "f32", (8 + 4) * 4, (0, 1), is_async=True),
        Collective("reduce-scatter", "f32", 2 * 4 * 2, (0, 2)),
        Collective("all-reduce", "f32", 5 * 8 * 4, (0, 1)),
    ]


def test_transfers_to_the_host_are_counted():
    """A callback and an outfeed are transfers. What slices exchange through their hosts is a collective.

    XLA counts the operations of loops' bodies once, so loops are counted too.
    """
    program, slices = HloProgram(GPU), HloProgram(SLICES)
    assert (program.num_transfers, program.num_loops) == (1, 1)
    assert (slices.num_transfers, slices.num_loops) == (1, 0)
    assert slices.collectives == [Collective("all-reduce", "f32", 4096, (), is_async=True, is_between_slices=True)]


def test_bytes_are_those_of_operands_and_results():
    """The copy reads and writes 4,096 bytes. The outfeed reads them, and the send reads and writes them."""
    assert HloProgram(SLICES).num_bytes == 2 * 4096 + 4096 + (2 * 4096 + 4)


@pytest.mark.parametrize("count", [2, 8])
def test_program_of_xla_is_read(count):
    """A real program: a mean over rows, which are divided over devices."""
    mesh = jax.make_mesh((count,), ("replica",))
    rows = NamedSharding(mesh, P("replica"))
    x = jax.ShapeDtypeStruct((count * 4, 6), jnp.float32, sharding=rows)
    compiled = jax.jit(lambda x: x.sum(0), out_shardings=NamedSharding(mesh, P())).lower(x).compile()
    assert HloProgram(compiled.as_text()).collectives == [Collective("all-reduce", "f32", 24, tuple(range(count)))]


GROUPS = [
    ("{{0,4},{1,5}}", (0, 4)),
    ("[2,4]<=[8]", (0, 1, 2, 3)),
    ("[4,2]<=[2,4]T(1,0)", (0, 4)),
    ("mesh['a'=8] {'a'}", tuple(range(8))),
    ("mesh['a'=2,'b'=4] {'a'}", (0, 4)),
    ("mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
    ("mesh['a'=2,'b'=4] {'b','a'}", (0, 4, 1, 5, 2, 6, 3, 7)),
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'a'}", (0, 1, 2, 3)),
    ("mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}", (0, 4)),
    ("mesh['a'=8] {'a':(1)2}", (0, 4)),
    ("mesh['a'=8] {'a':(2)2}", (0, 2)),
    ("mesh['a'=8] {'a':(4)2}", (0, 1)),
]


@pytest.mark.parametrize(("text", "group"), GROUPS)
def test_groups_of_devices_are_read(text, group):
    """XLA writes groups as lists, as a reshaped range, and as axes of a mesh or parts of axes."""
    line = f"  ROOT %r = f32[4]{{0}} all-reduce(%x), channel_id=1, replica_groups={text}, to_apply=%add"
    program = HloProgram(f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  %x = f32[4]{{0}} parameter(0)\n{line}\n}}\n")
    assert program.collectives == [Collective("all-reduce", "f32", 16, group)]


def test_group_of_devices_that_send_to_each_other():
    """A real program, whose devices pass their parts on in rings of four."""
    mesh = jax.make_mesh((2, 4), ("replica", "model"))
    ring = [(i, (i + 1) % 4) for i in range(4)]
    spec = P(("replica", "model"))
    passed = jax.shard_map(lambda x: jax.lax.ppermute(x, "model", ring), mesh=mesh, in_specs=spec, out_specs=spec)
    x = jax.ShapeDtypeStruct((8,), jnp.float32, sharding=NamedSharding(mesh, spec))
    compiled = jax.jit(passed).lower(x).compile()
    assert HloProgram(compiled.as_text()).collectives == [Collective("collective-permute", "f32", 4, (0, 1, 2, 3))]


@pytest.mark.parametrize("counts", ["num_partitions=4", "replica_count=2, num_partitions=2"])
def test_collective_of_all_devices(counts):
    """XLA may leave out the groups if there is one."""
    line = "  ROOT %r = f32[4]{0} all-reduce(%x), replica_groups={}, to_apply=%add"
    text = (
        f"HloModule m, {counts}\n\nENTRY %main (x: f32[4]) -> f32[4] {{\n  %x = f32[4]{{0}} parameter(0)\n{line}\n}}\n"
    )
    assert HloProgram(text).collectives == [Collective("all-reduce", "f32", 16, (0, 1, 2, 3))]


@pytest.mark.parametrize(("dim", "group"), [(0, (0, 4)), (1, (0, 1, 2, 3))])
def test_groups_of_a_program_of_xla_are_read(dim, group):
    """A real program over two axes, of which it reduces one."""
    mesh = jax.make_mesh((2, 4), ("replica", "model"))
    x = jax.ShapeDtypeStruct((32, 8), jnp.float32, sharding=NamedSharding(mesh, P("replica", "model")))
    compiled = jax.jit(lambda x: x.sum(dim), out_shardings=NamedSharding(mesh, P())).lower(x).compile()
    reduced = [c for c in HloProgram(compiled.as_text()).collectives if c.kind == "all-reduce"]
    assert [c.group for c in reduced] == [group]
