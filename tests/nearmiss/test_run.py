"""Long runs: in pieces or at once, in one process or two, the ledger holds the same."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import ledger as books
import run


def ran(monkeypatch: pytest.MonkeyPatch, path: Path, *options: str) -> dict[str, Any]:
    """The ledger after one call, without what the clock says."""
    monkeypatch.setattr(sys, "argv", ["run.py", "--seed", "3", "--ledger", str(path), *options])
    assert run.main() == 0
    return {k: v for k, v in json.loads(path.read_text()).items() if k != "seconds"}


def test_a_run_in_pieces_is_the_run_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(run, "CHUNK", 16)
    whole = ran(monkeypatch, tmp_path / "whole.json", "--graphs", "30")
    assert whole["graphs"] == 30
    assert sum(sum(row.values()) for row in whole["by_family"].values()) == 30
    assert whole["next"] == whole["graphs"] + whole["unbuildable"]
    said = run.progress(whole, time.monotonic() - 10, 20, 60)
    assert said == "30 of 60 graphs, 2 a second, 0 failed, 0 minutes to go"
    for number in ("7", "19", "30"):
        pieces = ran(monkeypatch, tmp_path / "pieces.json", "--graphs", number)
    assert pieces == whole
    assert ran(monkeypatch, tmp_path / "whole.json", "--graphs", "30") == whole  # nothing to do


@pytest.mark.nightly
def test_two_processes_count_what_one_does(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    one = ran(monkeypatch, tmp_path / "one.json", "--graphs", "600")
    two = ran(monkeypatch, tmp_path / "two.json", "--graphs", "600", "--processes", "2")
    assert one == two


def test_a_graph_out_of_turn_is_not_counted() -> None:
    ledger = books.new(0)
    row = books.Row(0, "router", "refused", ("axis",), False)
    books.record(ledger, row)
    for number in (0, 2):
        with pytest.raises(ValueError, match="keep their order"):
            books.record(ledger, replace(row, number=number))
    books.record(ledger, replace(row, number=1, outcome="unbuildable"))
    assert (ledger["next"], ledger["graphs"], ledger["unbuildable"]) == (2, 1, 1)


def test_a_ledger_of_other_code_is_not_continued(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = tmp_path / "ledger.json"
    books.write(books.new(0), path)
    assert books.load(path, 0, again=False)["graphs"] == 0
    for part in books.code():
        monkeypatch.setattr(books, "code", lambda p=part, c=books.code: {**c(), p: "other"})
        with pytest.raises(SystemExit, match=part):
            books.load(path, 0, again=False)
        assert len(books.load(path, 0, again=True)["earlier"]) == 1
        monkeypatch.undo()
    with pytest.raises(SystemExit, match="seed 0"):
        books.load(path, 1, again=False)


def test_the_digests_cover_what_makes_and_judges_a_graph(tmp_path: Path) -> None:
    """A file whose name or content changes changes the digest of its part."""
    a = tmp_path / "a.py"
    a.write_text("1")
    digest = books._files([a])
    a.write_text("2")
    assert books._files([a]) != digest
    a.write_text("1")
    assert books._files([a]) == digest
    assert books._files([a.rename(tmp_path / "b.py")]) != digest
    read: set[str] = set()
    original = books._files
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            books, "_files", lambda ps: original(read.update(map(str, ps := [*ps])) or ps)
        )
        books.code()
    names = {Path(p).name for p in read}
    assert names >= {
        "check.py", "draw.py", "edits.py", "families.py", "graphs.py", "parts.py",
        "engine.py", "template.py", "routing.py", "router.py", "reference.py", "op.py",
        "numerics.py", "dispatch.py", "tolerances.py", "build.py",
    }  # fmt: skip
    assert not names & {"run.py", "ledger.py", "conftest.py", "test_nearmiss.py"}
