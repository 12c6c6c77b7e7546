"""Ranks that decide alike rewrite; one that differs, or never comes, stops all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def run(case: str, folder: Path) -> list[dict[str, Any]]:
    """Findings of rank 0 and rank 1."""
    child = Path(__file__).with_name("ranks_child.py")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    processes = [
        subprocess.Popen(
            [
                sys.executable, str(child), str(rank), case, str(folder / "store"),
                str(folder / f"{rank}.json"),
            ],
            env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    logs = [p.communicate(timeout=300)[0] for p in processes]
    assert [p.returncode for p in processes] == [0, 0], "\n".join(logs)[-3000:]
    return [json.loads((folder / f"{r}.json").read_text()) for r in range(2)]


def test_equal_ranks_rewrite(tmp_path: Path) -> None:
    for rank in run("same", tmp_path):
        assert rank["found"] == 2
        assert rank["codes"] == []
        assert rank["nodes"][1] < rank["nodes"][0]
        assert rank["equal"]


def test_one_rank_with_other_sites_stops_all(tmp_path: Path) -> None:
    for number, rank in enumerate(run("other options", tmp_path)):
        assert rank["found"] == 0
        assert "RANK_DISAGREES" in rank["codes"]
        assert ("DISABLED_BY_USER" in rank["codes"]) == (number == 1)
        assert rank["nodes"][1] == rank["nodes"][0]
        assert rank["equal"]


@pytest.mark.parametrize("case", ["other dtype", "other version"])
def test_one_rank_that_differs_stops_all_once(case: str, tmp_path: Path) -> None:
    for rank in run(case, tmp_path):
        assert rank["found"] == 0
        assert rank["codes"] == ["RANK_DISAGREES"]
        assert rank["nodes"][1] == rank["nodes"][0]
        assert rank["equal"]


@pytest.mark.parametrize("case", ["absent"])
def test_a_rank_that_never_compiles_is_an_error_not_a_hang(case: str, tmp_path: Path) -> None:
    present, _ = run(case, tmp_path)
    assert "not every one of 2 ranks reported its sites within 0:00:03" in present["error"]
