"""The choice: which experts, in which order, with which weights; for any logits."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from route_runs import E, built, choose, kernel, random_logits, run
from torch import Tensor

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.router import reference, route_bits
from k3fuse.kernels.router.route_builder import config_of
from k3fuse.kernels.router.route_problem import Problem

pytest.importorskip("cutlass")

TOP_K = 16
INF, NAN = float("inf"), float("nan")
# Ours and torch's sigmoid are each up to 2.4 ULP from the exact one, and the sum with the bias
# rounds; a key is below 2, where an ULP is 2**-23.
APART = 8 * 2.0**-23


def oracle_agrees(problem: Problem) -> int:
    """Compare the sets with torch's FP32 keys; returns how many tokens were told apart there."""
    ids, _ = reference.select(problem.logits, problem.bias, "sigmoid", TOP_K + 1)
    keys = torch.sigmoid(problem.logits)
    keys = keys if problem.bias is None else keys + problem.bias
    ranked = keys.gather(1, ids)
    apart = ranked[:, TOP_K - 1] - ranked[:, TOP_K] > APART
    wanted = ids[:, :TOP_K].sort(dim=1).values
    got = problem.results[0]["ids"].sort(dim=1).values
    assert torch.equal(got[apart], wanted[apart])
    return int(apart.sum())


def distinct(problem: Problem) -> None:
    """Every token has k experts, each of them once and in range."""
    ids = problem.results[0]["ids"].sort(dim=1).values
    assert int(ids.min()) >= 0
    assert int(ids.max()) < problem.config.experts
    assert bool((ids.diff(dim=1) > 0).all())


def weights_agree(problem: Problem) -> None:
    """Weights of the reference for these ids, within one ULP of BF16."""
    scores = torch.sigmoid(problem.logits).gather(1, problem.results[0]["ids"])
    scores = torch.where(scores.isnan(), torch.zeros_like(scores), scores)
    wanted = (scores * problem.scale / (scores.sum(1, keepdim=True) + 1e-20)).bfloat16()
    got = problem.results[0]["weights"]
    steps = got.view(torch.int16).int() - wanted.view(torch.int16).int()
    assert int(steps.abs().max()) <= 1


def test_two_thousand_random_tokens() -> None:
    told = 0
    for seed in range(32):
        problem = choose(*random_logits(64, seed))
        told += oracle_agrees(problem)
        distinct(problem)
        weights_agree(problem)
    assert told > 0.99 * 2048


@pytest.mark.nightly
def test_a_hundred_thousand_random_tokens() -> None:
    told = 0
    for seed in range(1600):
        problem = choose(*random_logits(64, 100 + seed))
        told += oracle_agrees(problem)
    assert told > 0.99 * 102_400


@pytest.mark.parametrize(
    "tokens", [4_000, pytest.param(100_000, marks=pytest.mark.nightly)], ids=str
)
def test_the_kernels_arithmetic_has_the_experts_of_torchs(tokens: int) -> None:
    """The kernel's scores in NumPy, without the kernel: the same sets by torch's FP32 keys."""
    told = 0
    for seed in range(tokens // 2_000):
        logits, bias = random_logits(2_000, 1000 + seed)
        ours = torch.from_numpy(route_bits.sigmoid(logits.numpy())) + bias
        ids = ours.topk(TOP_K).indices.sort(dim=1).values
        ranked, wanted = (torch.sigmoid(logits) + bias).topk(TOP_K + 1)
        apart = ranked[:, TOP_K - 1] - ranked[:, TOP_K] > APART
        wanted = wanted[:, :TOP_K].sort(dim=1).values
        assert torch.equal(ids[apart], wanted[apart])
        told += int(apart.sum())
    assert told > 0.999 * tokens


def awkward() -> dict[str, Tensor]:
    """Rows of logits that go wrong elsewhere; bias is random but where the name says so."""
    some, _ = random_logits(1, 7)
    some = some[0]
    return {
        "all equal": torch.full((E,), 0.5),
        "all negative": -1 - 8 * torch.rand(E, generator=torch.Generator().manual_seed(1)),
        "NaN only": torch.full((E,), NAN),
        "NaN but ten": torch.where(torch.arange(E) % 90 == 3, some, NAN),
        "a few NaN": torch.where(torch.arange(E) % 7 == 0, NAN, some),
        "infinities": torch.where(torch.arange(E) % 50 == 0, INF, -INF),
        "minus infinity": torch.full((E,), -INF),
        "infinity and NaN": torch.where(torch.arange(E) % 2 == 0, INF, NAN),
        "signed zeros": torch.where(torch.arange(E) % 2 == 0, 0.0, -0.0),
        "saturated": torch.full((E,), 40.0) + some,
        "underflow": torch.full((E,), -95.0) + 8 * some,
        "duplicates": (some * 2).round() / 2,
        "subnormal logits": some * 1e-39,
        "largest": torch.where(torch.arange(E) % 3 == 0, 3.4e38, -3.4e38),
        "ascending": torch.arange(E) / 100.0 - 4,
        "descending": 4 - torch.arange(E) / 100.0,
        # The best experts are all of one lane: every warp's lane 5 has four neighbours each.
        "more than 64 candidates": some - 20.0 * (torch.arange(E) // 4 % 32 != 5),
        "two lanes": some - 20.0 * (torch.arange(E) // 4 % 32 > 1),
    }


@pytest.mark.parametrize("biased", [True, False])
def test_awkward_rows(biased: bool) -> None:
    rows = awkward()
    logits = torch.stack(list(rows.values()))
    bias = random_logits(1, 3)[1] if biased else torch.zeros(E)
    problem = choose(logits, bias)
    distinct(problem)
    weights_agree(problem)
    got = dict(zip(rows, problem.results[0]["ids"].tolist(), strict=True))
    if not biased:
        first = list(range(TOP_K))
        for name in ("all equal", "NaN only", "signed zeros", "minus infinity", "saturated"):
            assert got[name] == first, name
        assert got["infinities"] == list(range(0, 800, 50))
        assert got["infinity and NaN"] == list(range(0, 32, 2))
        ten = [i for i in range(E) if i % 90 == 3]
        assert sorted(got["NaN but ten"][:10]) == ten
        assert got["NaN but ten"][10:] == [0, 1, 2, 4, 5, 6]
    assert not set(got["a few NaN"]) & set(range(0, E, 7))


def test_awkward_biases() -> None:
    logits, bias = random_logits(4, 5)
    for change in (
        torch.full((E,), 1e30), torch.full((E,), -1e30), torch.full((E,), -INF),
        torch.where(torch.arange(E) % 2 == 0, NAN, bias),
        torch.where(torch.arange(E) % 100 == 0, INF, bias),
        torch.full((E,), -0.0), -torch.sigmoid(logits[0]),
    ):  # fmt: skip
        distinct(choose(logits, change))
    # A huge bias decides alone, and does not show in the weights.
    forced = torch.zeros(E)
    forced[100:116] = 1e6
    problem = choose(logits, forced)
    assert problem.results[0]["ids"].sort(dim=1).values.tolist() == [list(range(100, 116))] * 4
    weights_agree(problem)


def test_padding_rows_of_nan_change_nothing() -> None:
    logits, bias = random_logits(8, 11)
    alone = choose(logits, bias).results[0]
    padded = choose(torch.cat([logits, torch.full((56, E), NAN)]), bias).results[0]
    for name in ("ids", "weights"):
        assert torch.equal(padded[name][:8], alone[name])


def test_a_token_has_the_same_bits_in_every_batch() -> None:
    logits, bias = random_logits(64, 13)
    whole = choose(logits, bias).results[0]
    for m in (1, 2, 3, 5, 9, 33):
        part = choose(logits[:m], bias).results[0]
        assert torch.equal(part["weights"], whole["weights"][:m])
        assert torch.equal(part["ids"], whole["ids"][:m])


KEYS = st.one_of(
    st.sampled_from([0.0, -0.0, 1.0, -1.0, 17.5, -200.0, INF, -INF, NAN]),
    st.floats(width=32),
    st.floats(-4, 4, width=32),
)
ODD = 39
ROW = st.lists(KEYS, min_size=ODD, max_size=ODD)


@settings(max_examples=25, deadline=None)
@given(rows=st.lists(ROW, min_size=1, max_size=4), bias=ROW, scale=st.sampled_from([1.0, 2.5]))
def test_any_logits_and_biases(rows: list[list[float]], bias: list[float], scale: float) -> None:
    problem = choose(torch.tensor(rows), torch.tensor(bias), size=8, scale=scale)
    distinct(problem)


def test_the_most_experts_by_softmax() -> None:
    """No bias, not renormalised, FP32 weights, and experts that are no multiple of four."""
    logits, _ = random_logits(6, 17, 1021)
    logits[3, 5], logits[4, 9], logits[5] = NAN, INF, -INF
    problem = choose(logits, top_k=32, size=8, softmax=1, renormalize=0, wide=1)
    distinct(problem)
    wanted = torch.softmax(logits[:3], 1).gather(1, problem.results[0]["ids"][:3])
    torch.testing.assert_close(problem.results[0]["weights"][:3], wanted, rtol=2e-6, atol=0)
    assert not problem.results[0]["weights"][3:].any()
    ids, _ = reference.select(logits[3:], None, "softmax", 32)
    assert torch.equal(problem.results[0]["ids"][3:], ids)


def test_the_sigmoid_is_within_its_bound() -> None:
    rng = np.random.default_rng(0)
    x = np.concatenate([rng.uniform(-87, 70, 400_000), 3 * rng.standard_normal(400_000)])
    x = x.astype(np.float32)
    got = route_bits.sigmoid(x)
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    unit = np.spacing(exact.astype(np.float32)).astype(np.float64)
    assert float((np.abs(got - exact) / unit).max()) < 2.5
    theirs = torch.sigmoid(torch.from_numpy(x)).numpy()
    apart = np.abs(got.view(np.int32) - theirs.view(np.int32))
    assert int(apart.max()) <= 4
    far = np.array([-88, -89, -1e4, -np.inf, np.nan, 17, 88, 1e30, np.inf], np.float32)
    assert route_bits.sigmoid(far)[1:].tolist() == [0, 0, 0, 0, *[1] * 4]


# Mutants: the kernel with one step made wrong. ----------------------------------------------------


def _bfloat16(ptx: str, mask: int = 0xFFFF0000) -> str:
    """Logits rounded before the sigmoid, half up."""
    half = (~mask & 0xFFFFFFFF) // 2 + 1
    more = f"add.s32 c, \\1, {half}; and.b32 c, c, {mask}; max.f32 c, c, "
    return re.sub(r"max\.f32 c, (%\w+), ", more, ptx)


def _bias_in_weights(ptx: str) -> str:
    pairs = re.findall(r"add\.rn\.f32 b, (%\w+), (%\w+);", ptx)
    scores = ",".join(score for score, _ in pairs)
    sums = " ".join(f"add.rn.f32 t{i}, {s}, {b};" for i, (s, b) in enumerate(pairs))
    there = re.search(r"st\.shared\.v4\.b32 \[[^]]+\], \{" + scores + r"\};", ptx)
    assert there is not None
    store = there.group().replace(scores, "t0,t1,t2,t3")
    return ptx.replace(there.group(), "{ .reg .b32 t<4>; " + sums + store + " }")


def _higher_id(ptx: str) -> str:
    flip = "xor.b64 \\1, \\1, 4294967295; xor.b64 o, \\2, 4294967295; setp.gt.s64 p, \\1, o;"
    ptx = ptx.replace(".reg .b64 a<4>;", ".reg .b64 a<4>, o;")
    return re.sub(r"setp\.gt\.s64 p, (a\d), (%\w+);", flip, ptx)


def _renormalised_first(ptx: str) -> str:
    """Scores are divided by 16, which is about their sum, before the bias is added."""
    wrong = r"mul.rn.f32 b, \1, 0f3D800000; add.rn.f32 b, b, \2;"
    return re.sub(r"add\.rn\.f32 b, (%\w+), (%\w+);", wrong, ptx)


MUTANTS = {
    "logits rounded to BF16": _bfloat16,
    "logits rounded to TF32": lambda ptx: _bfloat16(ptx, 0xFFFFE000),
    "bias in the weights": _bias_in_weights,
    "ties to the higher id": _higher_id,
    "renormalised before the choice": _renormalised_first,
    "nothing": lambda ptx: ptx,
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_found(name: str) -> None:
    logits, bias = random_logits(64, 19)
    logits[32:] = logits[32:].round()  # duplicates
    bias = torch.where(torch.arange(E) % 2 == 0, bias, 0.1)
    variant = kernel(64, {"e": E, "l": 0}, local_logits=1)
    made: Built = built(variant)
    mutated = replace(made, ptx=MUTANTS[name](made.ptx))
    assert (mutated.ptx == made.ptx) is (name == "nothing")
    problem = Problem(config_of(variant), logits, None, bias)
    run(problem, mutated)
    assert bool(problem.wrong()) is (name != "nothing")
