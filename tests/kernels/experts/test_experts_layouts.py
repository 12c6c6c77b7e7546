"""Weights as vLLM keeps them for its TRTLLM kernels: the same bits, the padding never counts."""

from __future__ import annotations

import pytest
import torch
from expert_runs import SMALL, check, launch

from k3fuse.kernels.experts.builder import k3
from k3fuse.kernels.experts.cases import kernel, most, problem
from k3fuse.kernels.experts.layouts import pieces, shuffle, shuffled

# Where FlashInfer's map puts the first rows of 32: a fact of its layout, stated apart.
PLACES = [0, 8, 16, 24, 1, 9, 17, 25, 2, 10]


def test_rows_and_scales_go_where_the_kernels_look() -> None:
    rows = torch.arange(64).reshape(1, 64, 1)
    found = shuffle(rows)[0, :, 0].tolist()
    assert [found.index(i) for i in range(10)] == PLACES
    assert [found.index(32 + i) for i in range(10)] == [32 + place for place in PLACES]
    scales = torch.arange(256 * 8).reshape(1, 256, 8)
    flat = pieces(scales).flatten()
    for row, block in ((0, 0), (5, 3), (37, 6), (100, 2), (128, 0), (255, 7)):
        place = (row // 128 * 2 + block // 4) * 512 + row % 32 * 16 + row % 128 // 32 * 4
        assert flat[place + block % 4] == row * 8 + block


def test_up_and_gate_are_neighbours_before_the_shuffle() -> None:
    inter, latent = 192, 128
    rows = torch.arange(2 * inter, dtype=torch.int64).reshape(1, -1, 1)
    w13 = rows.expand(-1, -1, latent // 2).remainder(251).to(torch.uint8)
    scale = torch.zeros(1, 2 * inter, latent // 32, dtype=torch.uint8)
    w2 = torch.zeros(1, latent, inter // 2, dtype=torch.uint8)
    w2_scale = torch.full((1, latent, inter // 32), 7, dtype=torch.uint8)
    found = shuffled(w13, scale, w2, w2_scale)
    assert [tuple(t.shape) for t in found] == [
        (1, 512, 64), (1, 512, 4), (1, 128, 128), (1, 128, 8),
    ]  # fmt: skip
    # Rows of eight: up of the even columns, gate of them, up of the odd ones, gate of them.
    first = [[(inter + 2 * i) % 251, 2 * i, (inter + 2 * i + 1) % 251, 2 * i + 1] for i in range(8)]
    assert found[0][0, :32, 0].reshape(4, 8).t().tolist() == first
    assert (found[0][0, 384:] == 0).all()  # the padding
    assert int((found[3] == 7).sum()) == 128 * 6


@pytest.mark.parametrize("m", [3, 14])
def test_the_bits_are_those_of_the_plain_layout(m: int) -> None:
    """Three tiles a CTA and a padded width, as on 16 ranks; one unit and two."""
    pytest.importorskip("cutlass")
    shape = {**SMALL, "m": 16, "inter": 192, "hidden": 0, "shared": 0, "top_k": 2}
    plain, other = (kernel("sm_103a", shape, clusters=1, shuffled=flag) for flag in (0, 1))
    one, two = (problem(variant, m, 3, experts=3, kind="same") for variant in (plain, other))
    launch(plain, one)
    values = two.values()
    # What lies in the padding may be anything.
    names = ("w13", "w13_scale", "w2", "w2_scale")
    w13, w13_scale, w2, w2_scale = (values[name] for name in names)
    for tensor in (w13, w13_scale, w2, w2_scale):
        assert isinstance(tensor, torch.Tensor)
    w13[:, 384:] = 0xFF  # type: ignore[index]
    w2[:, :, 96:] = 0x77  # type: ignore[index]
    live = pieces(torch.arange(8).expand(3, 896, 8) < 6)
    w2_scale[~live] = 255  # type: ignore[index]
    object.__setattr__(two, "values", lambda: values)
    report = launch(other, two)
    check(two)
    assert torch.equal(one.routed, two.routed)
    for name in ("w13", "w2"):
        read = report.traffic[0, name, 0, "read"]
        assert read.requested == read.distinct == one.needed()[name]


@pytest.mark.nightly
@pytest.mark.parametrize("tp", [8, 16])
@pytest.mark.parametrize("m", [1, 9])
def test_real_size(tp: int, m: int) -> None:
    pytest.importorskip("cutlass")
    variant = kernel("sm_103a", k3(tp, most(m)), shuffled=1)
    made = problem(variant, m, seed=m, experts=17)
    report = launch(variant, made)
    check(made)
    for name in ("w13", "w2"):
        read = report.traffic[0, name, 0, "read"]
        assert read.requested == made.needed()[name]
