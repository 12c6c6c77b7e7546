"""What reaches the driver through the real cuda-python, in bytes: a stub stands in for libcuda."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from k3fuse.kernels.build import packed
from workbench_cases import STORED

HERE = Path(__file__).parent
ENTRY = packed.select(packed.load(STORED), "sm_90a", "workbench_gemv").entry

EXPECTED = f"""\
context 0x55
load ELF 0 0
kernel 0x11 {ENTRY}
function 0x22
launch 0x33 grid 2 1 1 block 128 1 1 shared 128 stream 0xabc0 extra 0
parameter 0000000000000001
parameter 0000000000000002
parameter ffffffffffffffff
launch 0x33 grid 2 1 1 block 128 1 1 shared 128 stream 0xdef0 extra 0
parameter 0000000000000003
parameter 0000000000000004
parameter 0000000000000005
context 0x55
load ELF 0 0
kernel 0x11 k
function 0x22
set 0x33 8 100000
set 0x33 14 1
launch 0x33 grid 32 2 1 block 128 1 1 shared 100000 stream 0x70 extra 0
attribute 4 16 1 1
attribute 6 1 0 0
attribute 8 -3 0 0
attribute 14 100 0 0
parameter 0000000000000005
parameter 0000000000000006
parameter 0000000000000007
context 0x55
load ELF 0 0
kernel 0x11 k
function 0x22
map type 9 rank 2 address 0x7f0000001000 aligned 1 modes 0 3 2 0
dimension 64 0 64 1
dimension 32 128 16 1
launch 0x33 grid 2 1 1 block 128 1 1 shared 128 stream 0x80 extra 0
parameter 00000000000000a0
parameter 0000000000000008
parameter 0000000000000009
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the stub is a Linux library")
def test_the_driver_is_told_exactly_this(tmp_path: Path) -> None:
    pytest.importorskip("cuda.bindings.driver")
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-o", str(library), str(HERE / "stub_driver.c")],
        check=True,
        timeout=300,
    )
    done = subprocess.run(
        [sys.executable, str(HERE / "stub_driver_child.py")],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout == EXPECTED
    # The host's part of a launch; generous, for a busy machine.
    microseconds = float(done.stderr.split("microseconds ")[1])
    assert microseconds < 200
