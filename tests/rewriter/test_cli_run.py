"""`k3fuse run`: a script whose model compiles with the backend, or does not."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from calls import NOT_REACHED, OK, call, document, forget


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


SCRIPT = """
import sys
import torch
from torch.nn import functional as F

torch.manual_seed(0)
w, norm = torch.randn(64, 32).bfloat16(), torch.randn(64).bfloat16()

def model(x, residual):
    total = F.linear(x, w) + residual
    return F.rms_norm(total, [64], norm, 1e-5), total

if "compile" in sys.argv:
    options = {"target": "reference", "inner": "eager", "log": "off"}
    model = torch.compile(model, backend="k3fuse", options=options)
with torch.no_grad():
    model(torch.randn(4, 32).bfloat16(), torch.randn(4, 64).bfloat16())
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    file = tmp_path / "script.py"
    file.write_text(textwrap.dedent(SCRIPT))
    return file


@pytest.mark.parametrize("dry", [True, False])
def test_run(dry: bool, script: Path) -> None:
    before = list(sys.argv)
    result = call("run", *(["--dry-run"] if dry else []), "--json", script, "compile")
    assert result.exit_code == OK, result.output
    d = document(result)
    assert d["patterns"]["output_projection"]["found"] == 1
    unchanged = d["nodes"]["before"] == d["nodes"]["after"]
    assert unchanged is dry
    assert (d["events"] == {}) is dry
    assert sys.argv == before


def test_run_without_a_compiled_model_is_not_reached(script: Path) -> None:
    result = call("run", "--json", script)
    assert result.exit_code == NOT_REACHED
    assert result.stdout == ""
    assert "COMPILE_NOT_REACHED" in result.stderr
