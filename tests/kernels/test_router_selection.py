"""Which experts the router picks: 100,000 random tokens, and every awkward key."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from k3fuse.kernels.router.reference import select
from op_cases import Case, Draw, router

TOP_K = 16
EXPERTS = 896
TOKENS = 100_000
CHUNK = 5_000


def _oracle_keys(logits: Tensor, bias: Tensor) -> Any:
    """Keys in FP32, as a kernel would hold them, from NumPy."""
    x = logits.numpy()
    return (1 / (1 + np.exp(-x)) + bias.numpy()).astype(np.float32)


def test_random_tokens_against_fp32() -> None:
    """The set of ids is the oracle's wherever the 16th and 17th key are distinct in FP32."""
    rng = torch.Generator().manual_seed(11)
    bias = 0.05 * torch.randn(EXPERTS, generator=rng)
    compared = 0
    for _ in range(TOKENS // CHUNK):
        logits = 3 * torch.randn(CHUNK, EXPERTS, generator=rng)
        ids, scores = select(logits, bias, "sigmoid", TOP_K)
        keys = _oracle_keys(logits, bias)
        best = np.argpartition(-keys, (TOP_K - 1, TOP_K), axis=1)[:, : TOP_K + 1]
        ranked = -np.sort(-np.take_along_axis(keys, best, 1), axis=1)
        # Two sigmoids of one input may differ by an ULP or two: 4 ULP of a key near 1 are 5e-7.
        distinct = ranked[:, TOP_K - 1] - ranked[:, TOP_K] > 5e-7
        expected = np.sort(best[:, :TOP_K], axis=1)
        got = np.sort(ids.numpy(), axis=1)
        assert (got[distinct] == expected[distinct]).all()
        assert (np.diff(got, axis=1) > 0).all(), "an expert was picked twice"
        unbiased = 1 / (1 + np.exp(-np.take_along_axis(logits.numpy(), ids.numpy(), 1)))
        np.testing.assert_allclose(scores.numpy(), unbiased, rtol=1e-6)
        compared += int(distinct.sum())
    assert compared > 0.99 * TOKENS


def _brute(keys: list[float], k: int) -> list[int]:
    """Descending, ties to the lower id, NaN last: the rule as one Python sort key."""

    def rank(i: int) -> tuple[bool, float, int]:
        nan = keys[i] != keys[i]
        return nan, 0.0 if nan else -keys[i], i

    return sorted(range(len(keys)), key=rank)[:k]


INF, NAN = float("inf"), float("nan")
AWKWARD: dict[str, tuple[list[float], list[float] | None, int]] = {
    "all equal": ([0.5] * 40, None, 16),
    "all negative": ([-5.0, -1.0, -30.0, -2.0, -1.5], None, 3),
    "ties at the edge": ([1.0, 0.0, 1.0, 0.0, 1.0, 0.0, 0.0], None, 5),
    "saturated to one": ([40.0, 18.0, 90.0, 17.0, 1.0], None, 4),
    "saturated to zero": ([-200.0, -150.0, -120.0, -300.0], None, 3),
    "NaN logits": ([NAN, 1.0, NAN, -50.0, 2.0], None, 5),
    "NaN only": ([NAN] * 5, None, 3),
    "NaN behind a masked expert": ([NAN, 0.0, 1.0], [0.0, -INF, 0.0], 3),
    "NaN bias": ([1.0, 2.0, 3.0], [0.0, NAN, 0.0], 3),
    "infinite logits": ([INF, -INF, 0.0, INF], None, 4),
    "bias decides": ([3.0, 0.0, -3.0], [0.0, 0.0, 5.0], 2),
    "negative keys": ([1.0, 2.0, 0.0], [-9.0, -9.0, -9.0], 2),
    "signed zero": ([-1000.0, -1000.0, -1000.0, -1000.0], [-0.0, 0.0, -0.0, 0.0], 4),
}


@pytest.mark.parametrize("name", AWKWARD)
def test_awkward_keys(name: str) -> None:
    logits, bias, k = AWKWARD[name]
    b = None if bias is None else torch.tensor(bias)
    ids, scores = select(torch.tensor([logits]), b, "sigmoid", k)
    sigma = torch.sigmoid(torch.tensor(logits))
    keys = (sigma if b is None else sigma + b).tolist()
    assert ids[0].tolist() == _brute(keys, k)
    assert len(set(ids[0].tolist())) == k
    expected = [0.0 if s != s else s for s in sigma[ids[0]].tolist()]
    assert scores[0].tolist() == expected  # unbiased, and a NaN score is 0


def test_many_tied_tokens_against_brute_force() -> None:
    """Keys from a handful of values, so that nearly every cut goes through a tie."""
    rng = torch.Generator().manual_seed(5)
    values = torch.tensor([-2.0, -0.5, 0.0, -0.0, 0.5, 2.0, NAN, -INF])
    logits = values[torch.randint(0, len(values), (500, 48), generator=rng)]
    ids, _ = select(logits, None, "sigmoid", TOP_K)
    keys = torch.sigmoid(logits).tolist()
    assert ids.tolist() == [_brute(row, TOP_K) for row in keys]


def test_brute_force_tells_other_rules_apart() -> None:
    """Control: the highest id at a tie, or NaN first (as torch.topk has it), is not this rule."""
    keys = [1.0, 1.0, NAN, 0.0]
    assert _brute(keys, 2) == [0, 1]
    assert torch.topk(torch.tensor(keys), 2).indices.tolist() != _brute(keys, 2)


def _weights(case: Case) -> tuple[Tensor, Tensor]:
    weights, ids, *_ = case()
    return weights, ids


def test_weights_ignore_the_bias() -> None:
    case = router(Draw(2, torch.float32), 32, 64, 40, 0, 4)
    weights, ids = _weights(case)
    x, gate, bias = case.args[:3]
    scores = torch.sigmoid(x @ gate.t()).gather(1, ids)
    torch.testing.assert_close(weights, 1.5 * scores / scores.sum(1, keepdim=True))
    biased = (torch.sigmoid(x @ gate.t()) + bias).gather(1, ids)
    assert not torch.allclose(weights, 1.5 * biased / biased.sum(1, keepdim=True), rtol=1e-3)


def test_renormalised_weights_of_zero_scores_are_zero() -> None:
    """All chosen scores 0: the epsilon keeps 0/0 away."""
    case = router(Draw(2, torch.float32), 1, 4, 8, 0, 2, bias=False)
    x, gate = torch.full((1, 4), -100.0), torch.ones(8, 4)
    weights, ids = _weights(Case(case.op, (x, gate, *case.args[2:]), case.kwargs))
    assert weights.tolist() == [[0.0, 0.0]]
    assert ids.tolist() == [[0, 1]]
