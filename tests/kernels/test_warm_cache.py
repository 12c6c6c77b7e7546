"""A second process with a warm Inductor cache never sees the graph, and runs any token count."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from traced import compose, define_mutable_op, trace

CHILD = Path(__file__).with_name("warm_cache_child.py")


def stock(x: Tensor, w: Tensor) -> tuple[Tensor]:
    """A stock spelling with a mutable op, so that the text holds auto_functionalized."""
    y = torch.nn.functional.linear(x, w)
    out = torch.empty_like(y)
    bank = y.new_zeros(x.shape[0], 2, y.shape[1])
    torch.ops.k3fuse_test.accumulate_(out, bank, y, 1, 0.0)
    return (out,)


def _child(folder: Path, name: str) -> dict[str, Any]:
    report = folder / f"{name}.json"
    done = subprocess.run(
        [sys.executable, str(CHILD), str(folder / "text.json"), str(report)],
        env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache")},
        capture_output=True,
        text=True,
        timeout=500,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    loaded: dict[str, Any] = json.loads(report.read_text())
    return loaded


@pytest.mark.slow
def test_second_process_hits_the_cache(tmp_path: Path) -> None:
    define_mutable_op()
    x, w = torch.zeros(6, 16).bfloat16(), torch.zeros(8, 16).bfloat16()
    torch._dynamo.maybe_mark_dynamic(x, 0)
    text = compose(trace(stock, (x, w), dynamic=None)).text
    assert "auto_functionalized_v2" in text
    (tmp_path / "text.json").write_text(text)
    cold, warm = _child(tmp_path, "cold"), _child(tmp_path, "warm")
    assert (cold["hit"], cold["miss"], cold["bypass"]) == (0, 2, 0)
    assert (warm["hit"], warm["miss"], warm["bypass"]) == (2, 0, 0)
    values = {k: v for k, v in cold.items() if " " in k}
    assert len(values) == 6  # five token counts dynamic, one static; 65 and 100 leave the policy
    assert values == {k: v for k, v in warm.items() if " " in k}
