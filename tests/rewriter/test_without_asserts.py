"""python -O drops asserts: refusals and values stay as they are."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
# Refused arguments of every op; what a rewrite refuses and keeps. tests/compat.sh runs far more.
TESTS = (
    "tests/kernels/test_op_refusals.py::test_refused_arguments",
    "tests/rewriter/test_safety.py",
)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-O", "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600
    )


def test_refusals_and_values_stay_without_asserts() -> None:
    done = run(*TESTS)
    assert done.returncode == 0, done.stdout[-3000:]
    assert " passed" in done.stdout


def test_a_failing_test_fails_without_asserts(tmp_path: Path) -> None:
    """The control: pytest's own rewriting keeps the asserts of test files."""
    file = tmp_path / "test_it_fails.py"
    file.write_text("def test_it():\n    assert __debug__ is False\n    assert 1 == 2\n")
    done = run(str(file))
    assert done.returncode == 1
    assert "1 failed" in done.stdout
