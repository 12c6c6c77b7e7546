"""The benchmark's kernel against torch, its figures, and the command."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.simulator import Fresh, Multicast, Owned, benchmark, simulate
from k3fuse.kernels.simulator import exchange_kernel as exchange
from k3fuse.rewriter.cli import main
from tolerances import assert_close

SMALL = benchmark.Case("exchange", 2, 8, 60.0, 3.0, 1, n=128, k=128)
KEYS = {
    "case", "ranks", "m", "warp_instructions", "seconds", "gigabytes", "target_seconds",
    "target_gigabytes", "ok",
}  # fmt: skip


@pytest.mark.parametrize(("ranks", "k"), [(2, 256), (4, 128)])
@pytest.mark.parametrize("seed", [None, 1, 2])
def test_the_exchange_kernel(ranks: int, k: int, seed: int | None) -> None:
    n, generator = 128, torch.Generator().manual_seed(k)
    x, w = ([torch.randn(rows, k, generator=generator).bfloat16() for _ in range(ranks)]
            for rows in (exchange.TOKENS, n))  # fmt: skip
    y = [torch.zeros(exchange.TOKENS, n).bfloat16() for _ in range(ranks)]
    shape = (ranks, exchange.TOKENS, n)
    boxes = [torch.full(shape, exchange.EMPTY, dtype=torch.int32) for _ in range(ranks)]
    report = simulate(
        exchange.exchange_ptx(n, k, ranks), grid=exchange.exchange_grid(n),
        block=(exchange.THREADS, 1, 1), ranks=ranks, names=exchange.PARAMETERS, seed=seed,
        params=[
            [x[r], w[r], Multicast(tuple(boxes)), Owned(boxes[r], r), Fresh(y[r]), r]
            for r in range(ranks)
        ],
    )  # fmt: skip
    wanted = sum(a.double() @ b.double().T for a, b in zip(x, w, strict=True))
    for part in y:
        assert torch.equal(part, y[0]), "all ranks add up in the same order"
        assert_close(part, torch.as_tensor(wanted).bfloat16(), k=ranks * k)
    tiles = ranks * (n // 64) * 4 * (k // 16)
    assert sum(v for name, v in report.opcodes.items() if name.startswith("mma")) == tiles
    assert report.bytes("write", peer=True).distinct == ranks * (ranks - 1) * 4 * 8 * n


@pytest.mark.parametrize(("n", "k", "ranks"), [(100, 128, 2), (64, 100, 2), (64, 128, 3)])
def test_sizes_outside_the_exchange_kernel(n: int, k: int, ranks: int) -> None:
    with pytest.raises(ValueError, match=r"(n|k|ranks) is \d+; use a positive multiple of"):
        exchange.exchange_ptx(n, k, ranks)


def test_a_case_is_measured_in_a_process_of_its_own() -> None:
    found = benchmark.measure(SMALL)
    assert (found.case, found.ranks, found.m) == ("exchange", 2, 8)
    assert 0 < found.seconds < 60
    assert 0.05 < found.gigabytes < 3
    assert found.ok
    assert found.warp_instructions > 1000
    with pytest.raises(BuildError, match="ranks is 3; use a positive multiple of 2"):
        benchmark.measure(benchmark.Case("exchange", 3, 8, 1.0, 1.0, 1, n=128, k=128))


@pytest.mark.parametrize("seconds", [60.0, 0.0])
def test_the_command(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    made = benchmark.Result("exchange", 2, 8, 1000, 30.0, 1.0, seconds, 3.0, seconds > 30)
    monkeypatch.setattr(benchmark, "CASES", (SMALL,))
    monkeypatch.setattr(benchmark, "measure", lambda case, cache: made)
    result = CliRunner().invoke(main, ["kernels", "bench", "--json"])
    assert result.exit_code == (0 if seconds else 1)
    document: dict[str, Any] = json.loads(result.stdout)
    assert document["schema"] == "k3fuse.simulator-bench/1"
    assert "cores" in document["machine"]
    assert [set(row) for row in document["rows"]] == [KEYS]
    assert document["rows"][0]["ok"] is bool(seconds)
    if seconds:
        wrong = CliRunner().invoke(main, ["kernels", "bench", "--case", "layer"])
        assert wrong.exit_code == 2
        assert "--case 'layer' is unknown; use exchange" in wrong.output
