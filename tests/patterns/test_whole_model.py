"""The rewritten small model against the original: counts, values at every output, tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from k3fuse.patterns.models import KimiK3Config

ROOT = Path(__file__).parents[2]


def run(size: int, form: str, inner: str, tokens: int, folder: Path) -> list[dict[str, Any]]:
    """One process a rank; their findings."""
    script = Path(__file__).with_name("whole_model.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [
                sys.executable, str(script), str(size), str(rank), str(tokens), form, inner,
                str(folder / "store"), str(folder / f"rank{rank}.json"),
            ],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(size)
    ]  # fmt: skip
    logs = [p.communicate(timeout=600)[0] for p in processes]
    for rank, process in enumerate(processes):
        assert process.returncode == 0, f"rank {rank}:\n{logs[rank][-4000:]}"
    return [json.loads((folder / f"rank{r}.json").read_text()) for r in range(size)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "form", "inner", "tokens"),
    [
        (1, "list", "eager", 64),
        (1, "bank", "aot_eager", 24),
        (2, "list", "eager", 24),
        (4, "bank", "eager prefetch", 24),
        # As long as on one rank: a minute of two cores more.
        pytest.param(2, "list", "eager", 64, marks=pytest.mark.nightly),
        pytest.param(4, "bank", "eager", 64, marks=pytest.mark.nightly),
    ],
)
def test_rewritten_model_equals_the_original(
    size: int, form: str, inner: str, tokens: int, tmp_path: Path
) -> None:
    ranks = run(size, form, inner, tokens, tmp_path)
    for rank in ranks:
        assert rank["found"] == KimiK3Config.small().expected_sites()
        assert rank["graphs"] == 1
        assert rank["hand_overs"] == rank["found"]["experts"]
        assert rank["tokens"] == 3 * tokens
        assert rank["distinct"] > 8, "a model that repeats one token proves nothing"
        assert rank["equal_tokens"] == rank["tokens"]
        assert rank["worst"]["logits"] <= 1.0
        assert rank["worst"]["state"] <= 1.0
        assert (rank["prefetched"] > 2) == inner.endswith("prefetch")
    assert len({rank["hash"] for rank in ranks}) == 1


@pytest.mark.slow
def test_a_reference_wrong_by_one_percent_is_noticed(tmp_path: Path) -> None:
    (rank,) = run(1, "list", "spoiled", 24, tmp_path)
    assert rank["found"] == KimiK3Config.small().expected_sites()
    assert rank["equal_tokens"] < rank["tokens"]
    assert rank["worst"]["logits"] > 1.0
