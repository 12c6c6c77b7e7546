"""The rewritten small model against the original: counts, values at every output, tokens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.patterns.whole_model import rank
from tests.processes import run_ranks

from k3fuse.patterns.models import KimiK3Config


def run(size: int, form: str, inner: str, tokens: int, folder: Path) -> list[dict[str, Any]]:
    """One process a rank; their findings."""
    run_ranks(rank, size, size, tokens, form, inner, str(folder))
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "form", "inner", "tokens"),
    [
        (1, "bank", "aot_eager", 24),
        (2, "list", "eager", 24),
        (4, "bank", "eager prefetch", 24),
        # Longer: the tokens go on from what the states have become.
        pytest.param(1, "list", "eager", 64, marks=pytest.mark.nightly),
        pytest.param(2, "list", "eager", 64, marks=pytest.mark.nightly),
        pytest.param(4, "bank", "eager", 64, marks=pytest.mark.nightly),
    ],
)
def test_rewritten_model_equals_the_original(
    size: int, form: str, inner: str, tokens: int, tmp_path: Path
) -> None:
    ranks = run(size, form, inner, tokens, tmp_path)
    for found in ranks:
        assert found["found"] == KimiK3Config.small().expected_sites()
        assert found["graphs"] == 1
        assert found["hand_overs"] == found["found"]["experts"]
        assert found["absorbed"] == found["found"]["experts"]
        assert found["tokens"] == 3 * tokens
        assert found["distinct"] > 8, "a model that repeats one token proves nothing"
        assert found["equal_tokens"] == found["tokens"]
        assert found["worst"]["logits"] <= 1.0
        assert found["worst"]["state"] <= 1.0
        assert (found["prefetched"] > 2) == inner.endswith("prefetch")
    assert len({found["hash"] for found in ranks}) == 1


@pytest.mark.slow
def test_a_reference_wrong_by_one_percent_is_noticed(tmp_path: Path) -> None:
    (found,) = run(1, "list", "spoiled", 24, tmp_path)
    assert found["found"] == KimiK3Config.small().expected_sites()
    assert found["equal_tokens"] < found["tokens"]
    assert found["worst"]["logits"] > 1.0
