"""Dumps of several ranks and graphs: one folder a rank, read back as one report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from k3fuse.rewriter import backend
from k3fuse.rewriter.cli import main
from k3fuse.rewriter.saved import SavedReport, rank_dumps
from reports import small


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch._dynamo.reset()
    backend.reset_reports()
    yield
    torch._dynamo.reset()
    backend.reset_reports()


def compiled(folder: Path) -> None:
    weight, norm = torch.randn(64, 32).bfloat16(), torch.randn(64).bfloat16()

    def model(x: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        total = torch.nn.functional.linear(x, weight) + residual
        return torch.nn.functional.rms_norm(total, [64], norm, 1e-5)

    options = {"target": "reference", "inner": "eager", "log": "off", "dump_dir": str(folder)}
    with torch.no_grad():
        run = torch.compile(model, backend="k3fuse", options=options)
        run(torch.randn(4, 32).bfloat16(), torch.randn(4, 64).bfloat16())


@pytest.mark.parametrize(("rank", "world", "place"), [(3, 8, "rank_003"), (0, 1, ".")])
def test_every_rank_has_a_folder_of_its_own(
    rank: int, world: int, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backend, "rank_and_world", lambda: (rank, world))
    compiled(tmp_path)
    document = json.loads((tmp_path / place / "graph_001" / "summary.json").read_text())
    assert (document["rank"], document["world"]) == (rank, world)
    assert SavedReport.load(tmp_path / place).document == document
    assert rank_dumps(tmp_path) == [tmp_path / place]


def test_several_graphs_are_one_report(tmp_path: Path) -> None:
    for number in (1, 2):
        folder = tmp_path / f"graph_{number:03d}"
        folder.mkdir()
        (folder / "summary.json").write_text(json.dumps(small()))
    merged = SavedReport.load(tmp_path).document
    assert len(merged["sites"]) == 2 * len(small()["sites"]) == 12
    assert merged["patterns"]["router"] == {"expected": None, "found": 2, "near": 0, "refused": 0}
    assert merged["nodes"]["before"] == 2 * small()["nodes"]["before"]
    assert merged["graphs"] == small()["graphs"]
    out = tmp_path / "report.html"
    assert CliRunner().invoke(main, ["html", str(tmp_path), "-o", str(out)]).exit_code == 0
    assert out.is_file()
    result = CliRunner().invoke(main, ["diff", str(tmp_path)])
    assert result.exit_code == 2
    assert "name one of its graph_001" in result.stderr
