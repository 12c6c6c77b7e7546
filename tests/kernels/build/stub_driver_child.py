"""Launch through the real cuda-python and the stub driver; started by test_stub_driver.py."""

from __future__ import annotations

import sys
import time

from k3fuse.kernels.build import packed
from k3fuse.kernels.build.launch import Launcher
from k3fuse.kernels.build.variant import Parameter
from k3fuse.kernels.common.tensor_map import TileMap
from workbench_cases import STORED, gemv, made


def main() -> None:
    kernel = packed.select(packed.load(STORED), "sm_90a", "workbench_gemv")
    plain = Launcher(kernel, stream=lambda: 0xABC0)
    plain(1, 2, 2**64 - 1)
    plain(3, 4, 5, stream=0xDEF0)
    shaped = made(
        gemv("sm_90a", pdl=1), cubin=kernel.cubin,
        grid=(32, 2, 1), cluster=(16, 1, 1), dynamic_smem=100_000,
    )  # fmt: skip
    Launcher(shaped, stream=lambda: 0x70, priority=-3, carveout=100)(5, 6, 7)
    tiles = TileMap("bf16", (64, 32), (128,), (64, 16), 128)
    kinds = (Parameter("a", "tensor_map", tiles), Parameter("n", "i64"), Parameter("b", "pointer"))
    mapped = made(gemv("sm_90a"), cubin=kernel.cubin, parameters=kinds)
    Launcher(mapped, stream=lambda: 0x80)(0x7F0000001000, 8, 9)
    count = 20_000
    start = time.perf_counter()
    for _ in range(count):
        plain(1, 2, 3)
    print(f"microseconds {(time.perf_counter() - start) / count * 1e6:.2f}", file=sys.stderr)


if __name__ == "__main__":
    main()
