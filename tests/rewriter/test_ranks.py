"""Ranks that decide alike rewrite; one that differs, or never comes, stops all of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.processes import run_ranks
from tests.rewriter.ranks_child import rank


def run(case: str, folder: Path) -> list[dict[str, Any]]:
    """Findings of rank 0 and rank 1."""
    run_ranks(rank, 2, case, str(folder))
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(2)]


def test_equal_ranks_rewrite(tmp_path: Path) -> None:
    for found in run("same", tmp_path):
        assert found["found"] == 2
        assert found["codes"] == []
        assert found["nodes"][1] < found["nodes"][0]
        assert found["equal"]


def test_one_rank_with_other_sites_stops_all(tmp_path: Path) -> None:
    for number, found in enumerate(run("other options", tmp_path)):
        assert found["found"] == 0
        assert "RANK_DISAGREES" in found["codes"]
        assert ("DISABLED_BY_USER" in found["codes"]) == (number == 1)
        assert found["nodes"][1] == found["nodes"][0]
        assert found["equal"]


@pytest.mark.parametrize("case", ["other dtype", "other version"])
def test_one_rank_that_differs_stops_all_once(case: str, tmp_path: Path) -> None:
    for found in run(case, tmp_path):
        assert found["found"] == 0
        assert found["codes"] == ["RANK_DISAGREES"]
        assert found["nodes"][1] == found["nodes"][0]
        assert found["equal"]


@pytest.mark.parametrize("case", ["absent"])
def test_a_rank_that_never_compiles_is_an_error_not_a_hang(case: str, tmp_path: Path) -> None:
    present, _ = run(case, tmp_path)
    assert "not every one of 2 ranks reported its sites within 0:00:03" in present["error"]
