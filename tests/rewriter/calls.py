"""Calls of the `k3fuse` command in this process, and what they print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from click.testing import CliRunner, Result

from k3fuse.rewriter import backend
from k3fuse.rewriter.cli import main

OK, MISSING, WRONG_USE, NOT_REACHED = 0, 1, 2, 3


def forget() -> None:
    """What was compiled and reported before."""
    torch._dynamo.reset()
    backend.reset_reports()


def call(*arguments: str | int | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def document(result: Result) -> dict[str, Any]:
    """The one JSON document of standard output; nothing may stand beside it."""
    parsed: dict[str, Any] = json.loads(result.stdout)
    return parsed


def one_line(result: Result) -> str:
    """The error line; nothing on standard output, no traceback."""
    assert result.exit_code == WRONG_USE, (result.exit_code, result.output, result.exception)
    assert result.stdout == ""
    lines = [x for x in result.stderr.splitlines() if x and not x.endswith(" ...")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.output
    return lines[0]
