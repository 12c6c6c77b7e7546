"""The table of known faults names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = [
    line for line in (ROOT / "docs" / "known_faults.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| reports", "| ---"))
]  # fmt: skip


def test_there_are_rows_with_three_cells() -> None:
    assert len(ROWS) >= 55
    assert all(len([c for c in row.split("|") if c.strip()]) == 3 for row in ROWS)


@pytest.mark.parametrize("row", ROWS)
def test_a_row_names_tests_that_exist_or_says_why_not(row: str) -> None:
    here = row.split("|")[3]
    links = re.findall(r"\[(\w+)\]\(\.\./([^)]+)\)", here)
    assert links or len(here.split()) >= 3, "name a test or a reason"
    for name, file in links:
        text = (ROOT / file).read_text()
        assert name == "tests" or f"def {name}(" in text, f"{file} has no {name}"
