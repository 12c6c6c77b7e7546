"""The prefetch between a predecessor and the tail: who waits for whom; order of launches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from tail_runs import check, kernel, problem_of

from host_ranks import HostRanks, Recorder
from k3fuse.kernels.attn_res.builder import BUILDER as ATTN_RES
from k3fuse.kernels.attn_res.cases import step
from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.prefetch.builder import BUILDER
from k3fuse.kernels.prefetch.launch import Ahead
from k3fuse.kernels.simulator import SimulationError
from k3fuse.kernels.tail.launch import launch, launch_mixed
from k3fuse.kernels.tail.mailbox import LATENT, TailMailbox
from k3fuse.kernels.tail.mix import Mix
from k3fuse.kernels.tail.policy import MIXED_TABLE, TABLE
from left_out import sites
from stored import store

M, HIDDEN, SIZE = 2, 7168, 40_000
WAIT = "griddepcontrol.wait;"


def found(tail: Built, asked: Built, seed: int | None = None) -> str:
    """What two ranks have against AttnRes, prefetch and tail in sequence; "" for nothing.

    AttnRes makes the rows whose first columns are the shared partial, so that an early read is one.
    """
    problem = problem_of(tail.variant, M)
    before = [step(ATTN_RES.variant("sm_103a", {"m": M, "blocks": 0}, {}), r) for r in range(2)]
    width = problem.config.hidden
    problem.shared = [
        (rows := made.outputs[0].tensor).as_strided((M, width), (HIDDEN, 1)) for made in before
    ]
    for made, rows in zip(before, problem.shared, strict=True):
        rows.copy_(made.outputs[0].expected[:, :width])
    expected = problem.expected()
    made = [dict(b.launches[0].ranks[0]) for b in before]
    ranks = problem.launch(tail.variant).ranks
    given = [{**r, "shared": b.outputs[0].tensor} for r, b in zip(ranks, before, strict=True)]
    empty: dict[str, Any] = {f"range{i}": 0 for i in range(4)} | {f"bytes{i}": 0 for i in range(4)}
    ranges = [
        {**empty, "range0": torch.zeros(SIZE, dtype=torch.uint8), "bytes0": SIZE} for _ in range(2)
    ]
    launches = [
        Launch(before[0].launches[0].kernel, made), Launch(asked, ranges), Launch(tail, given)
    ]  # fmt: skip
    try:
        report = run_sequence(launches, races=seed is None, seed=seed, cache=store())
    except SimulationError as error:
        return f"{type(error).__name__}: {error}"
    problem.expected = lambda: expected  # type: ignore[method-assign]
    check(problem)
    return "; ".join(str(race) for race in report.races or ())


def test_the_tail_finds_what_came_before_the_prefetch() -> None:
    pytest.importorskip("cutlass")
    asked = store().get(BUILDER.variant("sm_103a", {"ranges": 4}, {"ctas": 2}))
    tail = store().get(kernel(2, 16))
    assert found(tail, asked) == ""
    assert found(tail, asked, seed=1) == ""
    # Without the wait at the prefetch's end, and without the tail's own.
    assert "OverlapError" in found(tail, replace(asked, ptx=asked.ptx.replace(WAIT, "")))
    assert "OverlapError" in found(dict(sites(tail))[WAIT], asked)


@pytest.mark.parametrize("m", [1, 8, 9])
@pytest.mark.parametrize("mixes", [False, True])
def test_it_is_launched_before_the_tail(m: int, mixes: bool) -> None:
    ranks = HostRanks(8, multicast=True, layout=TailMailbox(8))
    recorder: Any = Recorder()
    row = (MIXED_TABLE if mixes else TABLE).lookup("gb300:tp8", m)
    assert row is not None
    rows = torch.zeros(m, HIDDEN, dtype=torch.bfloat16)
    latent = rows[:, :LATENT].contiguous()
    up = torch.empty(HIDDEN, LATENT, dtype=torch.bfloat16)
    weight = torch.zeros(3648, 64, dtype=torch.bfloat16)
    given: Any = ("gb300:tp8", "tp", latent, rows, latent[0], up, 1e-5, True)
    how: Any = {
        "ahead": Ahead([weight], (2112,)), "runtime": recorder, "space": lambda *_: ranks.spaces[5]
    }  # fmt: skip
    if mixes:
        mix = Mix(rows, [], 0, rows[0], rows[0], rows[0], 1e-5, 1e-5, False)
        launch_mixed(row, *given, mix, **how)
    else:
        launch(row, *given, **how)
    ops = [variant.op for variant, _ in recorder.launched]
    own = ["tail", "attn_res"] if mixes and m > 8 else ["tail"]
    assert ops == (["l2_prefetch", *own] if m <= 8 else own)
    if m <= 8:
        _, (share, rest, *_) = recorder.launched[0]
        assert (share, rest) == (weight[5 * 264].data_ptr(), weight[2112].data_ptr())
