"""vLLM 0.33's own Kimi K3 through the regional route; needs its Python unpacked in $K3FUSE_VLLM."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
FOLDER = os.environ.get("K3FUSE_VLLM", "")

pytestmark = pytest.mark.skipif(
    not FOLDER, reason="K3FUSE_VLLM names no unpacked vLLM 0.33 (336 MB, not fetched for CI)"
)


def k3(tp: int, layers: str) -> dict[str, Any]:
    """Run k3_layers.py; its result."""
    done = subprocess.run(
        [sys.executable, str(HERE / "k3_layers.py"), FOLDER, str(tp), layers, "5", "1", "8", "64"],
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    assert lines, done.stderr[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


@pytest.mark.parametrize("tp", [8, 16])
def test_single_layers_and_the_last_attn_res(tp: int) -> None:
    found = k3(tp, "0,1,3,12,92")
    assert found["refused"] == found["refused_sites"] == found["near"] == []
    assert found["totals"] == {
        "attention_projection": 5,
        "output_projection": 5,
        "router": 4,
        "experts": 4,
        "attn_res": 6,
    }
    # Five forms and the last AttnRes, whatever the token count.
    assert set(found["graphs"]) == {6}


@pytest.mark.parametrize("tp", [8, 16])
def test_a_five_layer_model(tp: int) -> None:
    found = k3(tp, "5")
    assert found["refused"] == found["refused_sites"] == found["near"] == []
    assert found["totals"] == {
        "attention_projection": 5,
        "output_projection": 5,
        "router": 4,
        "experts": 4,
        "attn_res": 6,
    }
    # Dense KDA, KDA, MLA (the two other KDA layers share a graph), and the last AttnRes.
    assert set(found["graphs"]) == {4}
