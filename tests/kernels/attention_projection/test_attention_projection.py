"""Values at the real sizes, bits that do not depend on the batch, odd rows, wrong kernels."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from attention_runs import (
    BF16,
    HIDDEN,
    band,
    core,
    exact,
    kernel,
    operands,
    project,
    requested,
)

from k3fuse.kernels.attention_projection.builder import KDA, MLA
from k3fuse.kernels.attention_projection.cases import values
from k3fuse.kernels.check import run
from k3fuse.kernels.common.tolerances import compare
from stored import store

pytest.importorskip("cutlass")

# (rows, m, most bytes requested over needed, most warp instructions without moves). The latter are
# half of upstream's at M = 1, upstream's at M = 8, and at M = 64, where upstream has tcgen05, what
# was counted. Source: docs/kernels/attention_projection.md.
FULL = [
    (KDA[16][0], 1, 1.05, 1_085_400 // 2),
    (KDA[16][0], 8, 1.06, 571_851),
    (MLA[16][1], 8, 1.06, 504_585),
    (MLA[16][0], 64, 1.40, 1_110_000),
]


@pytest.mark.parametrize(("rows", "m", "most", "instructions"), FULL)
def test_full_size(rows: tuple[int, ...], m: int, most: float, instructions: int) -> None:
    x, weights = operands(m, rows)
    outs, report = project(kernel(max(8, m), rows), x, weights)
    for out, weight in zip(outs, weights, strict=True):
        found = compare(out, exact(x, weight), band(HIDDEN))
        assert found.ok, found
        assert not compare((out.double() * 1.01).to(BF16), exact(x, weight), band(HIDDEN)).ok
    assert requested(report) <= most
    assert core(report) <= instructions
    for i, weight in enumerate(weights):
        read = report.traffic[0, f"weight{i}", 0, "read"]
        assert read.distinct == weight.nbytes
        # Lanes beyond the last row of a tile repeat an address of the same instruction.
        tiles = -(-weight.shape[0] // 32) * 32
        assert read.requested == tiles * HIDDEN * 2


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    # Eight tiles on eight clusters, then 17 on 16: as full rows of the real ones.
    rows = (256, 6)
    x, weights = operands(64, rows)
    whole, report = project(kernel(64, rows), x, weights)
    assert requested(report) < 5
    for out, weight in zip(whole, weights, strict=True):
        assert compare(out, exact(x, weight), band(HIDDEN)).ok
    for m, most in ((1, 8), (2, 8), (7, 8), (8, 8), (16, 16), (33, 64)):
        for first in {0, 64 - m}:
            part, _ = project(kernel(most, rows), x[first : first + m].contiguous(), weights)
            for got, want in zip(part, whole, strict=True):
                same = got.view(torch.int16) == want[first : first + m].view(torch.int16)
                assert same.all(), (m, first)


def test_merged_and_separate_weights_have_the_same_bits() -> None:
    rows = (64, 40, 6, 12)
    x, weights = operands(5, rows, 1024)
    apart, _ = project(kernel(8, rows, 1024), x, weights)
    (merged,), _ = project(kernel(8, (sum(rows),), 1024), x, [torch.cat(weights)])
    assert torch.equal(torch.cat(apart, dim=1), merged)


@pytest.mark.parametrize("rows", [(1,), (31, 33, 2), (32,) * 8, (544, 30)])
@pytest.mark.parametrize("m", [1, 9])
def test_any_number_of_rows(rows: tuple[int, ...], m: int) -> None:
    x, weights = operands(m, rows, 512, seed=sum(rows))
    outs, _ = project(kernel(16, rows, 512), x, weights, seed=m)
    for out, weight in zip(outs, weights, strict=True):
        assert compare(out, exact(x, weight), band(512)).ok


@pytest.mark.parametrize("m", [3, 17, 64])
def test_neighbours_do_not_matter(m: int) -> None:
    """NaN and infinity in one token stay there; rows of x lie apart, with NaN between them."""
    rows = (70,)
    x, weights = operands(m, rows, 512)
    clean, _ = project(kernel(64, rows, 512), x, weights)
    wide = torch.full((m, 520), float("nan"), dtype=BF16)
    wide[:, :512] = x
    wide[1, 7], wide[2, 100] = float("nan"), float("inf")
    out = torch.empty(m, 70, dtype=BF16)
    given = {**values(kernel(64, rows, 512), wide, weights, [out]), "m": m}
    assert given["x_pitch"] == 520
    run(kernel(64, rows, 512), [given], cache=store())
    assert out[1].isnan().all()
    assert not out[2].isfinite().any()
    kept = [i for i in range(m) if i not in (1, 2)]
    assert torch.equal(out[kept], clean[0][kept])


def test_wrong_kernels_are_refused() -> None:
    rows = (40, 6)
    x, weights = operands(4, rows, 512)
    built = store().get(kernel(8, rows, 512))

    def wrong(ptx: str) -> bool:
        outs, _ = project(replace(built, ptx=ptx), x, weights)
        pairs = zip(outs, weights, strict=True)
        return not all(compare(out, exact(x, w), band(512)).ok for out, w in pairs)

    assert not wrong(built.ptx)  # the control
    lines = built.ptx.splitlines()
    products = [i for i, line in enumerate(lines) if "mma.sync" in line]
    reads = [i for i, line in enumerate(lines) if "ld.shared.v4.f32" in line]
    assert len(products) >= 8
    assert len(reads) >= 8
    # The weights of one step twice (operand 1 of `mma`); the sums of one CTA twice.
    for place, other, operand in ((products[4], products[0], 1), (reads[3], reads[2], -1)):
        edited = [*lines]
        if operand < 0:
            edited[place] = lines[place].split("[")[0] + "[" + lines[other].split("[")[1]
        else:
            old, new = (re.findall(r"\{[^}]*\}", lines[i])[operand] for i in (place, other))
            edited[place] = lines[place].replace(old, new)
        assert edited[place] != lines[place]
        assert wrong("\n".join(edited)), place


def test_a_missing_wait_is_a_race() -> None:
    rows = (40,)
    x, weights = operands(3, rows, 512)
    built = store().get(kernel(8, rows, 512))
    _, report = project(built, x, weights, races=True)
    assert report.races == ()
    waits = "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done"
    assert built.ptx.count(waits) == 1
    # Without the cluster's acquire nothing orders what the other CTAs have sent.
    weak = built.ptx.replace(waits, waits.replace("acquire.cluster", "relaxed.cluster"))
    _, report = project(replace(built, ptx=weak), x, weights, races=True)
    assert report.races
