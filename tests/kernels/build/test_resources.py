"""What is read from a cubin and from the tools' text, and the occupancy computed from it."""

from __future__ import annotations

import re
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from k3fuse.kernels.build import packed
from k3fuse.kernels.build.compile import read_remarks
from k3fuse.kernels.build.elf import read_cubin
from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.host_code import HostLaunch, launch_of
from k3fuse.kernels.build.resources import (
    Occupancy,
    Resources,
    count_sass,
    find_tool,
    occupancy,
    sass_histogram,
)
from workbench_cases import ARCHS, SMALL, STORED, made

KERNELS = {k.variant.arch: k for k in packed.load(STORED)}
# Of the stored kernels, as cuobjdump -res-usage prints them.
REGISTERS = {"sm_90a": 39, "sm_100a": 32, "sm_103a": 32}


@pytest.mark.parametrize("arch", ARCHS)
def test_a_cubin_tells_its_kernel(arch: str) -> None:
    content = read_cubin(KERNELS[arch].cubin)
    assert content.arch == arch
    (kernel,) = content.kernels
    assert kernel.name == KERNELS[arch].entry
    assert kernel.registers == KERNELS[arch].resources.registers == REGISTERS[arch]
    assert kernel.stack == 0
    assert kernel.parameters == ((0, 8), (8, 8), (16, 8))
    assert kernel.block == (128, 1, 1)
    assert KERNELS[arch].smem_bytes == 4 * 4 * 4 * SMALL["m"]


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.skipif(find_tool("cuobjdump") is None, reason="needs nvidia-cuda-cuobjdump")
def test_the_facts_are_those_of_cuobjdump(arch: str, tmp_path: Path) -> None:
    path = tmp_path / "k.cubin"
    path.write_bytes(KERNELS[arch].cubin)
    done = subprocess.run(
        [str(find_tool("cuobjdump")), "-res-usage", str(path)], capture_output=True, text=True
    )
    found = re.search(r"REG:(\d+) STACK:(\d+) SHARED:(\d+)", done.stdout)
    assert found is not None
    (kernel,) = read_cubin(KERNELS[arch].cubin).kernels
    assert (kernel.registers, kernel.stack, kernel.static_smem) == tuple(map(int, found.groups()))


@pytest.mark.skipif(find_tool("nvdisasm") is None, reason="needs nvidia-cuda-nvdisasm")
@pytest.mark.parametrize("arch", ARCHS)
def test_the_histogram_is_read_again(arch: str) -> None:
    kernel = KERNELS[arch]
    found = sass_histogram(kernel.cubin, kernel.entry)
    assert found == kernel.resources.sass
    assert found is not None
    # Two outputs' products of eight elements, four rows: 64 multiply-adds.
    assert found["FFMA" if arch == "sm_90a" else "FHFMA"] == 64
    with pytest.raises(BuildError, match="shows no kernel 'other'"):
        sass_histogram(kernel.cubin, "other")


def test_every_truncation_is_one_error() -> None:
    whole = KERNELS["sm_103a"].cubin
    for size in range(0, len(whole), 211):
        with pytest.raises(BuildError, match="cubin"):
            read_cubin(whole[:size])
    with pytest.raises(BuildError, match="another machine"):
        read_cubin(whole[:18] + b"\x3e\x00" + whole[20:])


def test_flipped_bytes_are_an_error_or_harmless() -> None:
    whole, refused = KERNELS["sm_90a"].cubin, 0
    for at in range(0, len(whole), 13):
        try:
            read_cubin(whole[:at] + bytes([whole[at] ^ 0xA5]) + whole[at + 1 :])
        except BuildError:
            refused += 1
    assert refused > 10


REMARKS = """\
remark[ptxas info]: ptxas output: ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'first' for 'sm_103a'
ptxas         .     64 bytes stack frame, 60 bytes spill stores, 104 bytes spill loads
ptxas info    : Used 128 registers, used 1 barriers, 64 bytes cumulative stack size
ptxas info    : Compiling entry function 'second' for 'sm_103a'
ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 32 registers
"""


def test_the_assembler_reports_registers_and_spills() -> None:
    assert read_remarks(REMARKS, "first") == (128, 164)
    assert read_remarks(REMARKS, "second") == (32, 0)
    with pytest.raises(BuildError, match="no registers and spills for 'fir'"):
        read_remarks(REMARKS, "fir")


SASS = """\
//--------------------- .text.one
.text.one:
        /*0000*/                   LDC R1, c[0x0][0x37c] ;
        /*0010*/              @!P0 LDG.E.128 R4, desc[UR6][R4.64] ;
        /*0020*/              @UP1 UMOV UR4, 0x400 ;
        /*0030*/                   LDG.E R4, desc[UR6][R4.64] ;
.L_x_0:
        /*0040*/                   BRA `(.L_x_0);
//--------------------- .text.two
.text.two:
        /*0000*/                   EXIT ;
"""


# As the DSL prints it where a kernel spills: indented and wrapped.
WRAPPED = """\
          ptxas info    : Compiling entry function
          'long'
          for 'sm_90a'
          ptxas         .     296 bytes stack frame, 500 bytes spill
          stores, 292 bytes spill loads
          ptxas info    : Used 128
          registers, used 1 barriers, 296 bytes cumulative stack size
"""


def test_wrapped_remarks_are_read() -> None:
    assert read_remarks(WRAPPED, "long") == (128, 792)


def test_opcodes_are_counted_by_kernel() -> None:
    assert count_sass(SASS, "one") == {"LDG": 2, "BRA": 1, "LDC": 1, "UMOV": 1}
    assert count_sass(SASS, "two") == {"EXIT": 1}
    assert next(iter(count_sass(SASS, "one"))) == "LDG"


HOST = """\
  llvm.func @init() -> i32 {
    %0 = llvm.mlir.constant(7 : i32) : i32
    llvm.return %0 : i32
  llvm.func @launch(%arg0: !llvm.ptr) -> i32 {
    %5 = llvm.mlir.constant(0 : i32) : i32
    %6 = llvm.mlir.constant(1792 : i32) : i32
    %7 = llvm.mlir.constant(1 : i32) : i32
    %8 = llvm.mlir.constant(128 : i32) : i32
    %9 = llvm.mlir.constant(512 : i64) : i64
""" + "".join(
    f"    %{20 + i} = llvm.getelementptr %10[0, {place}] : (!llvm.ptr) -> !llvm.ptr, "
    "!llvm.struct<(array<3 x i32>, array<3 x i32>, i64, ptr, ptr, i32)>\n"
    f"    llvm.store %{value}, %{20 + i} : {kind}, !llvm.ptr\n"
    for i, (place, value, kind) in enumerate(
        [("1, 0", 8, "i32"), ("1, 1", 7, "i32"), ("1, 2", 7, "i32"), ("2", 9, "i64"),
         ("0, 0", 6, "i32"), ("0, 1", 7, "i32"), ("0, 2", 7, "i32"), ("5", 5, "i32")]
    )
)  # fmt: skip


ATTRIBUTE = "!llvm.struct<(i32, array<4 x i8>, array<64 x i8>)>"
TRIPLE = "!llvm.struct<(i32, i32, i32)>"


def element(name: str, base: str, index: int, kind: str) -> str:
    return f"    {name} = llvm.getelementptr {base}[0, {index}] : (!llvm.ptr) -> !llvm.ptr, {kind}"


def attribute(number: int, name: int, values: list[str]) -> str:
    """Host code that sets one attribute to one constant, or to a triple of them."""
    base = f"%a{number}"
    lines = [
        f"    %c{number} = llvm.mlir.constant({name} : i32) : i32",
        element(f"%i{number}", base, 0, ATTRIBUTE),
        f"    llvm.store %c{number}, %i{number} : i32, !llvm.ptr",
        element(f"%v{number}", base, 2, ATTRIBUTE),
    ]
    for at, value in enumerate(values):
        place = f"%v{number}"
        if len(values) > 1:
            place += str(at)
            lines.append(element(place, f"%v{number}", at, TRIPLE))
        lines.append(f"    llvm.store {value}, {place} : i32, !llvm.ptr")
    return "\n".join(lines) + "\n"


def test_the_host_code_states_the_launch() -> None:
    assert launch_of(HOST) == HostLaunch((1792, 1, 1), (128, 1, 1), 512)
    assert launch_of(HOST.replace("constant(512 : i64)", "load")) is None
    assert launch_of("") is None


def test_the_host_code_states_cluster_and_pdl() -> None:
    cluster = attribute(1, 4, ["%8", "%7", "%7"])
    on, off = (attribute(2, 6, [value]) for value in ("%7", "%5"))
    plain = HostLaunch((1792, 1, 1), (128, 1, 1), 512)
    assert launch_of(HOST + cluster + off) == replace(plain, cluster=(128, 1, 1))
    assert launch_of(HOST + on) == replace(plain, pdl=True)
    assert launch_of(HOST + off) == plain


def at(sms: int, registers: int, smem: int, threads: int, cluster: int = 1) -> Occupancy:
    kernel = made(
        grid=(1600, 1, 1), block=(threads, 1, 1), cluster=(cluster, 1, 1), dynamic_smem=smem
    )
    return occupancy(kernel.plan, replace(kernel.resources, registers=registers), sms)


@pytest.mark.parametrize(
    ("registers", "smem", "threads", "ctas", "limit"),
    [
        (32, 0, 128, 16, "registers"),  # 1024 registers a warp: 64 warps
        (33, 0, 128, 12, "registers"),  # 1280 a warp: 51 warps, 48 in whole fours
        (255, 0, 1024, 0, "registers"),  # 8192 a warp: 8 warps, 32 wanted
        (16, 0, 32, 32, "CTAs"),
        (16, 0, 64, 32, "warps"),
        (16, 0, 1024, 2, "warps"),
        (32, 227 * 1024, 128, 1, "shared memory"),
        (32, 113 * 1024, 128, 2, "shared memory"),  # 2 * (113 + 1) KiB = 228 KiB
        (32, 113 * 1024 + 1, 128, 1, "shared memory"),
        (64, 0, 96, 10, "registers"),  # 2048 a warp: 32 warps, 10 times 3
        (168, 0, 384, 1, "registers"),  # 5376 a warp: 12 warps, 3 in each part
        (168, 0, 416, 0, "registers"),  # 13 warps count as 16
    ],
)
def test_occupancy_of_one_sm(
    registers: int, smem: int, threads: int, ctas: int, limit: str
) -> None:
    found = at(152, registers, smem, threads)
    assert found.ctas_per_sm == ctas
    assert found.warps_per_sm == ctas * threads // 32
    if (registers, threads) != (16, 64):  # 32 CTAs of 2 warps: both limits at once
        assert found.limit == limit
    assert found.resident == ctas * 152


def test_occupancy_of_a_chip() -> None:
    assert [at(n, 32, 113 * 1024, 128).resident for n in (152, 148, 132)] == [304, 296, 264]
    assert at(132, 32, 113 * 1024, 128).waves == pytest.approx(1600 / 264)
    assert not at(132, 32, 113 * 1024, 128).co_resident
    assert at(132, 32, 0, 128).co_resident  # 16 * 132 = 2112
    assert at(99, 32, 0, 128).resident == 1584
    assert not at(99, 32, 0, 128).co_resident
    # Whole clusters only: 132 single CTAs make 16 clusters of 8.
    assert at(132, 32, 227 * 1024, 128, cluster=8).resident == 128
    assert at(152, 255, 0, 1024).waves == float("inf")


def test_resources_survive_json() -> None:
    for sass in (None, {"FFMA": 3}):
        found = Resources(1, 2, 3, 4, sass)
        assert Resources.from_json(found.to_json()) == found
    with pytest.raises(BuildError, match="no resources"):
        Resources.from_json({"registers": 1})
