"""Memory spaces, and the accesses that must be refused, each with a correct control."""

from __future__ import annotations

import pytest
import torch

from k3fuse.kernels.simulator import (
    Fresh,
    MemoryAccessError,
    Multicast,
    Owned,
    SimulationError,
    simulate,
)
from ptx_text import kernel, run

COPY = """
  add.s64 %d11, %d0, %d10;
  add.s64 %d12, %d1, %d10;
  ld.global.u32 %r5, [%d11+{shift}];
  st.global.u32 [%d12], %r5;
"""


def floats(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.float32) + 1


def test_copy_and_its_counts() -> None:
    source, target = floats(32), torch.zeros(32)
    report = run(kernel(COPY.format(shift=0)), [source, Fresh(target)], names=["x", "y"])
    assert torch.equal(target, source)
    read, written = report.traffic[0, "x", 0, "read"], report.traffic[0, "y", 0, "write"]
    assert (read.requested, read.distinct) == (128, 128)
    assert (written.requested, written.distinct) == (128, 128)
    assert report.opcodes["ld.global.u32"] == 1
    assert report.warp_instructions == sum(report.opcodes.values()) == 10


def test_bytes_that_many_lanes_ask_for_are_distinct_once() -> None:
    text = kernel("ld.global.v4.u32 {%r5, %r6, %r7, %r8}, [%d0];\n st.global.u32 [%d1], %r7;")
    source, target = floats(4), torch.zeros(1)
    report = run(text, [source, target])
    assert target.item() == 3
    assert (report.bytes("read").requested, report.bytes("read").distinct) == (512, 16)


@pytest.mark.parametrize("rows", [32, 33])
def test_out_of_bounds_by_one_row(rows: int) -> None:
    source, target = floats(rows), torch.zeros(32)
    text = kernel(COPY.format(shift=4))
    if rows == 33:
        run(text, [source, target])
        assert target.tolist() == source[1:].tolist()
        return
    with pytest.raises(MemoryAccessError) as caught:
        run(text, [source, target], names=["rows", "out"])
    message = str(caught.value)
    assert "out-of-bounds read of 4 bytes at byte 128 of buffer 'rows' of rank 0" in message
    assert "4 bytes past the end" in message
    line = 1 + text.split("\n").index("  ld.global.u32 %r5, [%d11+4];")
    assert f"CTA 0, line {line} `ld.global.u32" in message
    assert target.tolist() == [0.0] * 32, "a failed run changes nothing"


def test_before_the_start() -> None:
    with pytest.raises(MemoryAccessError, match="4 bytes before the start"):
        run(kernel(COPY.format(shift=-4)), [floats(32), torch.zeros(32)])


def test_misaligned() -> None:
    with pytest.raises(MemoryAccessError, match="misaligned read of 4 bytes at byte 2 of buffer"):
        run(kernel(COPY.format(shift=2)), [floats(33), torch.zeros(32)])


def test_a_wild_pointer() -> None:
    with pytest.raises(MemoryAccessError, match="which is no buffer"):
        run(kernel("ld.global.u32 %r5, [%d0];", params=1), [4096])


@pytest.mark.parametrize("wrapped", [True, False])
def test_global_bytes_nobody_wrote(wrapped: bool) -> None:
    source, target = floats(32), torch.zeros(32)
    text = kernel(COPY.format(shift=0))
    if wrapped:
        with pytest.raises(MemoryAccessError, match=r"byte 0 of buffer 'x' .* before anyone wrote"):
            run(text, [Fresh(source), target], names=["x", "y"])
    else:
        run(text, [source, target])
        assert torch.equal(target, source)


SHARED = """
  mov.u32 %r6, buffer;
  shl.b32 %r7, %r0, 2;
  add.u32 %r8, %r6, %r7;
  {store}
  xor.b32 %r9, %r8, 4;
  ld.shared.u32 %r10, [%r9];
  add.s64 %d11, %d0, %d10;
  st.global.u32 [%d11], %r10;
"""


def test_shared_memory() -> None:
    target = torch.zeros(32, dtype=torch.int32)
    text = kernel(SHARED.format(store="st.shared.u32 [%r8], %r0;"), params=1, shared=128)
    report = run(text, [target])
    assert target.tolist() == [lane ^ 1 for lane in range(32)]
    assert (report.shared_read, report.shared_written, report.shared_distinct) == (128, 128, 128)


def test_shared_bytes_nobody_wrote() -> None:
    target = torch.zeros(32, dtype=torch.int32)
    text = kernel(SHARED.format(store=""), params=1, shared=128)
    with pytest.raises(MemoryAccessError, match="read of byte 4 of shared memory before anyone"):
        run(text, [target])


def test_shared_memory_out_of_bounds() -> None:
    target = torch.zeros(32, dtype=torch.int32)
    text = kernel(SHARED.format(store="st.shared.u32 [%r8], %r0;"), params=1, shared=124)
    with pytest.raises(
        MemoryAccessError, match=r"write of 4 bytes at byte 124 of shared memory .124 bytes"
    ):
        run(text, [target])


def test_dynamic_shared_memory_has_the_size_of_the_launch() -> None:
    text = kernel(
        "mov.u32 %r6, %r0;\n shl.b32 %r6, %r6, 2;\n add.u32 %r6, %r6, 1024;\n"
        "st.shared.u32 [%r6], %r0;", params=1,
    )  # fmt: skip
    target = torch.zeros(1)
    run(text, [target], dynamic_smem=128)
    with pytest.raises(MemoryAccessError, match="out-of-bounds write"):
        run(text, [target], dynamic_smem=64)


def test_local_memory_and_generic_addresses() -> None:
    body = """
  .local .align 8 .b8 stack[16];
  mov.u64 %d3, stack;
  cvta.local.u64 %d3, %d3;
  st.local.u32 [stack+8], %r0;
  and.b32 %r5, %r0, 1;
  mul.wide.u32 %d4, %r5, 4;
  add.s64 %d5, %d3, %d4;
  st.u32 [%d5+4], 77;
  ld.local.u32 %r6, [stack+8];
  ld.u32 %r7, [%d3+8];
  add.s64 %d11, %d0, %d10;
  st.u32 [%d11], %r6;
  add.s64 %d11, %d1, %d10;
  st.u32 [%d11], %r7;
"""
    first, second = (torch.zeros(32, dtype=torch.int32) for _ in "ab")
    run(kernel(body), [first, second])
    wanted = [77 if lane % 2 else lane for lane in range(32)]
    assert first.tolist() == second.tolist() == wanted


def test_generic_addresses_of_shared_memory() -> None:
    body = """
  mov.u64 %d3, buffer;
  cvta.shared.u64 %d4, %d3;
  add.s64 %d4, %d4, %d10;
  st.u32 [%d4], %r0;
  ld.u32 %r5, [%d4];
  add.s64 %d11, %d0, %d10;
  st.global.u32 [%d11], %r5;
"""
    target = torch.zeros(32, dtype=torch.int32)
    run(kernel(body, params=1, shared=128), [target])
    assert target.tolist() == list(range(32))


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("atom.global.add.u32 %r5, [%d0], 3;", 96),
        ("red.relaxed.gpu.global.add.f32 [%d0], 0f3F800000;", None),
        ("atom.global.max.u32 %r5, [%d0], %r0;", 31),
        ("atom.global.exch.b32 %r5, [%d0], %r0;", 31),
        ("atom.global.cas.b32 %r5, [%d0], 0, 9;", 9),
        ("atom.global.inc.u32 %r5, [%d0], 4;", 32 % 5),
        ("@%p1 red.global.or.b32 [%d0], 6;", 6),
    ],
)
def test_atomics(line: str, wanted: int | None) -> None:
    total = torch.zeros(1, dtype=torch.int32)
    run(kernel(f"setp.eq.u32 %p1, %r0, 7;\n{line}", params=1), [total])
    if wanted is None:
        assert total.view(torch.float32).item() == 32.0
    else:
        assert total.item() == wanted


def test_atomics_return_every_old_value_once() -> None:
    body = """
  atom.global.add.u32 %r5, [%d0], 1;
  mul.wide.u32 %d11, %r5, 4;
  add.s64 %d11, %d1, %d11;
  st.global.u32 [%d11], %r5;
"""
    count, seen = torch.zeros(1, dtype=torch.int32), torch.full((64,), -1, dtype=torch.int32)
    run(kernel(body), [count, seen], grid=(2, 1, 1))
    assert count.item() == 64
    assert seen.tolist() == list(range(64))


def test_scalar_parameters_and_peer_pointers() -> None:
    text = """.version 8.8
.target sm_103a
.address_size 64
.visible .entry peer(.param .u64 target, .param .u32 number, .param .f32 real)
{
  .reg .b32 %r<4>; .reg .b64 %d<2>;
  ld.param.u64 %d0, [target]; ld.param.u32 %r0, [number]; ld.param.b32 %r1, [real];
  st.global.v2.b32 [%d0], {%r0, %r1};
  ret;
}
"""
    both = [torch.zeros(2, dtype=torch.int32) for _ in "ab"]
    report = simulate(
        text, "peer", grid=(1, 1, 1), block=(32, 1, 1), ranks=2,
        params=[[Owned(both[1], 1), -5, 1.5], [Owned(both[0], 0), 6, 2.5]],
    )  # fmt: skip
    assert both[1].tolist()[0] == -5
    assert both[0].tolist()[0] == 6
    assert both[1].view(torch.float32)[1] == 1.5
    assert report.bytes("write", peer=True).distinct == 16
    assert report.bytes("write", peer=False).requested == 0
    assert {pair: part.distinct for pair, part in report.peer_bytes().items()} == {
        (0, 1): 8, (1, 0): 8,
    }  # fmt: skip


@pytest.mark.parametrize("seed", [None, 1, 2])
def test_multimem_store_and_add(seed: int | None) -> None:
    body = """
  setp.ne.u32 %p1, %r0, 0;
  @%p1 bra DONE;
  multimem.st.relaxed.sys.global.v4.f32 [%d0], {0f3F800000, 0f40000000, 0f40400000, 0f40800000};
  multimem.red.relaxed.sys.global.add.u32 [%d1], 5;
DONE:
"""
    rows = [torch.zeros(4) for _ in range(3)]
    totals = [torch.zeros(1, dtype=torch.int32) for _ in range(3)]
    simulate(
        kernel(body), grid=(1, 1, 1), block=(32, 1, 1), ranks=3, seed=seed,
        params=[[Multicast(tuple(rows)), Multicast(tuple(totals))]] * 3,
    )  # fmt: skip
    assert [row.tolist() for row in rows] == [[1.0, 2.0, 3.0, 4.0]] * 3
    assert [total.item() for total in totals] == [15, 15, 15]


def test_a_trap_is_an_error_only_where_it_is_reached() -> None:
    body = "setp.gt.u32 %p1, %r0, {};\n@%p1 trap;\nst.global.u32 [%d0], 3;"
    out = torch.zeros(1, dtype=torch.int32)
    run(kernel(body.format(31), params=1), [out])
    assert out.item() == 3
    with pytest.raises(SimulationError, match=r"trap: rank 0, CTA 0, line \d+ `@%p1 trap`"):
        run(kernel(body.format(30), params=1), [out])


def test_32_byte_accesses() -> None:
    source, target = floats(256), torch.zeros(256)
    body = """
  mul.wide.u32 %d11, %r0, 32;
  add.s64 %d12, %d0, %d11;
  add.s64 %d13, %d1, %d11;
  ld.global.v4.b64 {%d3, %d4, %d5, %d6}, [%d12];
  st.global.v4.b64 [%d13], {%d3, %d4, %d5, %d6};
"""
    report = run(kernel(body), [source, Fresh(target)])
    assert torch.equal(source, target)
    assert report.bytes("write").distinct == 1024
