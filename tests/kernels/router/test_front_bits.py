"""Bits of the front kernel: batches, back-ends, forms, -0.0 and NaN, wrong kernels."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from front_runs import (
    SMALL,
    kernel,
    run_one,
    same_bits,
    small,
    tokens,
    words,
    wrong,
)

from k3fuse.kernels.router.front_problem import ARMED, BF16, mailboxes, make, rows
from stored import store

pytest.importorskip("cutlass")


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    variant, whole = small(64)
    run_one(variant, whole)
    assert wrong(whole) == ""
    published = words(whole)
    for m, most in ((1, 8), (2, 8), (3, 8), (5, 8), (8, 8), (9, 16), (16, 16), (33, 64)):
        for first in (0, 64 - m):
            chosen = range(first, first + m)
            part = tokens(whole, chosen, mailboxes(whole.config.box, 2))
            run_one(kernel(most, SMALL), part)
            assert torch.equal(words(part), published[list(chosen)]), (m, first)
            for got, want in zip(part.hidden, whole.hidden, strict=True):
                assert same_bits(got, want[list(chosen)]), (m, first)


@pytest.mark.parametrize("m", [3, pytest.param(20, marks=pytest.mark.nightly)])
def test_forms_and_back_ends_have_the_same_bits(m: int) -> None:
    variant, base = small(m)
    run_one(variant, base)
    assert wrong(base) == ""
    for kind in (
        {"multicast": 0},
        {"replicated": 1},
        {"replicated": 1, "multicast": 0},
        {"shared": 0},
    ):
        other, problem = small(m, **kind, weights=base)
        problem.x = base.x
        run_one(other, problem)
        assert torch.equal(words(problem), words(base)), kind
        for got, want in zip(problem.hidden, base.hidden, strict=False):
            assert same_bits(got, want)
    apart = tokens(base, range(m), mailboxes(base.config.box, 2))
    apart.merged = False
    run_one(variant, apart)
    for got, want in zip(apart.hidden, base.hidden, strict=True):
        assert same_bits(got, want)


@pytest.mark.parametrize("kind", [{"latent": 0}, {"latent": 0, "shared": 0, "replicated": 1}])
def test_parts_may_be_missing(kind: dict[str, int]) -> None:
    variant, problem = small(5, **kind)
    run_one(variant, problem)
    assert wrong(problem) == ""


@pytest.mark.parametrize("m", [3, 17])
def test_neighbours_do_not_matter(m: int) -> None:
    """NaN and infinity in one token stay there; rows of x lie apart, with NaN between them."""
    variant, clean = small(m)
    run_one(variant, clean)
    spoilt = tokens(clean, range(m), mailboxes(clean.config.box, 2))
    wide = torch.full((m, SMALL["k"] + 8), float("nan"), dtype=BF16)
    wide[:, : SMALL["k"]] = clean.x
    wide[1, 7], wide[2, 100] = float("nan"), float("inf")
    spoilt.x = wide
    run_one(variant, spoilt)
    logits, latent = rows(clean.config.box, spoilt.boxes[1], 0, m)
    assert logits[1].isnan().all()
    assert latent[1].isnan().all()
    assert spoilt.hidden[0][1].isnan().all()
    assert not logits[2].isfinite().any()
    kept = [token for token in range(m) if token not in (1, 2)]
    assert torch.equal(words(spoilt)[kept], words(clean)[kept])
    # A NaN is no word that has not arrived yet.
    assert not (words(spoilt) == ARMED).any()


def test_no_minus_zero_is_published() -> None:
    variant, problem = small(4)
    problem.x = torch.zeros(4, SMALL["k"], dtype=BF16)
    problem.x[:, 0] = torch.tensor([-(2.0**-70), 2.0**-70, -0.0, 1.0])
    for weight in (problem.gate, problem.latent):
        weight.zero_()
        weight[:, 0] = 2.0**-80  # the product underflows in FP32, or in BF16
        weight[1::2, 0] = -(2.0**-70)
    run_one(variant, problem)
    logits, latent = problem.published(0)
    exact = problem.x.double() @ problem.gate.double().t()
    assert ((exact < 0) & (exact.float() == 0)).any(), "no -0.0 to publish"
    assert not (logits.view(torch.int32) == ARMED).any()
    assert not (latent.view(torch.int16) == -(2**15)).any()
    assert torch.equal(logits[3], problem.gate[:, 0].float())
    assert problem.unequal() == ""


def test_wrong_kernels_are_refused() -> None:
    variant, base = small(3)
    built = store().get(variant)

    def said(ptx: str, calls: int = 0) -> str:
        boxes = mailboxes(base.config.box, 2, calls)
        problem = make(base.config, 3, boxes=boxes, weights=base)
        run_one(replace(built, ptx=ptx), problem)
        return wrong(problem, calls)

    def edited(pattern: str, new: str) -> str:
        text, count = re.subn(pattern, new, built.ptx)
        assert count
        return text

    assert said(built.ptx) == ""  # the control
    assert said(built.ptx, 5) == ""
    # The sum of one CTA of the cluster is taken twice.
    first, second = re.findall(r"ld\.shared\.f32 %\w+, \[%r\d+\+(\d+)\]", built.ptx)[1:3]
    part = rf"(ld\.shared\.f32 %\w+, \[%r\d+)\+{second}\]"
    assert "logits" in said(edited(part, rf"\1+{first}]"))
    # The products of one step use the weights of another.
    products = re.findall(r"mma\.sync[^{]*\{[^}]*\}, (\{[^}]*\})", built.ptx)
    assert products[1] != products[0]
    assert "logits" in said(built.ptx.replace(products[1], products[0], 1))
    # The second call must not land where the first one did.
    call = r"(ld\.shared\.b32 (%r\d+), \[%r\d+\+120\];[^;]*and\.b32\s+%r\d+, \2, )1;"
    assert said(edited(call, r"\g<1>0;"), 5)
