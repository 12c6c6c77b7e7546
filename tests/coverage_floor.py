"""Whether measured coverage reaches the floor, by package and file.

python tests/coverage_floor.py DATA_FILE [--all]

DATA_FILE: what coverage.py wrote. Prints each package and the files below the floor (--all: every
file) with the lines that no test reached. Exit code 1 below the floor.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

LINES, BRANCHES = 95.0, 90.0
ROOT = Path(__file__).parent.parent


def measured(data: Path) -> dict[str, Any]:
    """coverage.py's report of every file, as JSON."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "report.json"
        tool = [sys.executable, "-m", "coverage"]
        where = [f"--data-file={data}", f"--rcfile={ROOT / 'pyproject.toml'}"]
        if list(data.parent.glob(f"{data.name}.*")):
            # Processes that ended after the tests: beside what the tests have combined.
            kept = ["--append"] if data.exists() else []
            subprocess.run([*tool, "combine", *kept, *where, "-q"], check=True, cwd=ROOT)
        subprocess.run([*tool, "json", *where, "-q", "-o", str(out)], check=True, cwd=ROOT)
        files: dict[str, Any] = json.loads(out.read_text())["files"]
    return files


def percent(summaries: list[dict[str, int]]) -> tuple[float, float]:
    """Lines and branches reached, of all of them."""

    def share(part: str, whole: str) -> float:
        total = sum(s[whole] for s in summaries)
        return 100.0 * sum(s[part] for s in summaries) / total if total else 100.0

    return share("covered_lines", "num_statements"), share("covered_branches", "num_branches")


def spans(lines: list[int]) -> str:
    """[1, 2, 3, 7] -> "1-3, 7"."""
    found: list[list[int]] = []
    for line in lines:
        if found and line == found[-1][-1] + 1:
            found[-1][1:] = [line]
        else:
            found.append([line])
    return ", ".join("-".join(map(str, span)) for span in found)


def main(data: Path, everything: bool) -> int:
    packages: dict[str, list[dict[str, int]]] = defaultdict(list)
    worst = 0
    rows = []
    for name, file in sorted(measured(data).items()):
        path = Path(name)
        short = path.relative_to(ROOT) if path.is_relative_to(ROOT) else path
        packages[short.parts[0]].append(file["summary"])
        lines, branches = percent([file["summary"]])
        if everything or lines < LINES or branches < BRANCHES:
            missing = spans(file["missing_lines"]) or str(file["missing_branches"][:6])
            rows.append(f"{short!s:44} {lines:6.1f} {branches:6.1f}  {missing}")
    print("\n".join(rows))
    for package, summaries in sorted(packages.items()):
        lines, branches = percent(summaries)
        low = lines < LINES or branches < BRANCHES
        worst |= low
        print(f"{package:44} {lines:6.1f} {branches:6.1f}{'  below the floor' if low else ''}")
    print(f"floor: {LINES:.0f} % of lines, {BRANCHES:.0f} % of branches")
    return worst


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), "--all" in sys.argv[2:]))
