"""What vLLM 0.33 makes of Kimi K3's engine arguments, and what k3fuse decides from that.

`k3_configs.py WHEEL` prints one JSON line: case -> mode, route, reasons. The platform stands in for
CUDA, vLLM's own configuration code runs. A process of its own, as k3_layers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

ASKED = {"k3fuse": {"target": "gb300:tp8"}}
BACKEND = {"mode": 1, "backend": "k3fuse"}
PASS = {"mode": 3, "inductor_passes": {"post_grad_custom_post_pass": "k3fuse_vllm.decode_pass"}}
# Case -> engine arguments, value of VLLM_USE_BREAKABLE_CUDAGRAPH ("": unset).
CASES: dict[str, tuple[dict[str, Any], str]] = {
    "asked": ({"additional_config": ASKED}, ""),
    "not asked": ({}, ""),
    "eager": ({"additional_config": ASKED, "enforce_eager": True}, ""),
    "backend alone": ({"compilation_config": BACKEND}, ""),
    "backend and asked": ({"compilation_config": BACKEND, "additional_config": ASKED}, ""),
    "backend, breakable off": ({"compilation_config": BACKEND, "additional_config": ASKED}, "0"),
    "pass alone": ({"compilation_config": PASS}, ""),
    "pass alone, breakable off": ({"compilation_config": PASS}, "0"),
    "asked, breakable off": ({"additional_config": ASKED}, "0"),
}


def main() -> None:
    """Make each configuration and decide."""
    from k3fuse.patterns.sources.vllm_k3 import environment, layers

    warnings.simplefilter("ignore")
    environment.prepare(Path(sys.argv[1]), 8)
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        text = layers.text_config()
        Path(folder, "config.json").write_text(json.dumps(text), encoding="utf-8")
        for name, (arguments, breakable) in CASES.items():
            os.environ.pop("VLLM_USE_BREAKABLE_CUDAGRAPH", None)
            if breakable:
                os.environ["VLLM_USE_BREAKABLE_CUDAGRAPH"] = breakable
            found[name] = _decided(folder, arguments)
    print("RESULT " + json.dumps(found))


def _decided(folder: str, arguments: dict[str, Any]) -> dict[str, Any]:
    from vllm.engine.arg_utils import EngineArgs

    from k3fuse_vllm.facts import Facts
    from k3fuse_vllm.routes import decide
    from k3fuse_vllm.settings import Settings

    config = EngineArgs(
        model=folder, load_format="dummy", skip_tokenizer_init=True, tensor_parallel_size=8,
        max_model_len=4096, max_num_seqs=16, dtype="bfloat16", enable_prefix_caching=False,
        attention_backend="CUTLASS_MLA", **arguments,
    ).create_engine_config()  # fmt: skip
    facts = Facts.of(config)
    settings = Settings.of(facts)
    seen = {"mode": facts.mode, "full_graphs": facts.full_graphs, "breakable": _breakable()}
    if settings is None:
        return {**seen, "route": "not asked", "reasons": []}
    decision = decide(facts, settings)
    return {**seen, "route": decision.route.value, "reasons": [str(r) for r in decision.reasons]}


def _breakable() -> str:
    return os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "")


if __name__ == "__main__":
    main()
