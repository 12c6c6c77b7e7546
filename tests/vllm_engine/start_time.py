"""What k3fuse adds to the start of a vLLM engine: paired runs on this machine, one line a case.

    .venv-vllm/bin/python tests/vllm_engine/start_time.py [--pairs 5] [--case off] [--case mode3]

Each run is a process of its own with empty caches; the two sides of a pair follow each other, and
every second pair starts with the other side. Printed: the medians of both sides, and the median of
the differences of the pairs. Processor time says more than wall time where the machine is busy.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from conftest import HERE, environment
from model import write_model

EAGER: dict[str, Any] = {"enforce_eager": True}
MODE3: dict[str, Any] = {"mode": 3, "compile_sizes": [], "compile_ranges_endpoints": [64]}
PASS = {"post_grad_custom_post_pass": "k3fuse_vllm.decode_pass"}
ASKED = {"k3fuse": {"target": "reference"}}
LAYERS = {"region": ["DeepseekV2DecoderLayer"], "inner": "aot_eager"}
CUDA_LIKE = "cuda_ops,fallback"

# Case -> what it shows, the two sides: engine arguments, adaptations of the platform, environment.
Side = tuple[dict[str, Any], str, Mapping[str, str]]
# vLLM comes with plugins of its own, which neither side loads.
NO_PLUGIN = {"VLLM_PLUGINS": "k3fuse_cuda_like"}
PLUGIN = {"VLLM_PLUGINS": "k3fuse_cuda_like,k3fuse"}
CASES: dict[str, tuple[str, Side, Side]] = {
    "off": (
        "installed, not asked for",
        (EAGER, CUDA_LIKE, NO_PLUGIN),
        (EAGER, CUDA_LIKE, PLUGIN),
    ),
    "refused": (
        "asked for, no kernel for this target: the run is stock",
        (EAGER, CUDA_LIKE, {}),
        ({**EAGER, "additional_config": {"k3fuse": {"route": "regional"}}}, CUDA_LIKE, {}),
    ),
    "regional": (
        "layers compiled in an engine that compiles nothing",
        (EAGER, CUDA_LIKE, {}),
        ({**EAGER, "additional_config": {"k3fuse": {**ASKED["k3fuse"], **LAYERS}}}, CUDA_LIKE, {}),
    ),
    "mode3": (
        "the pass in vLLM's own compile",
        ({"compilation_config": MODE3}, f"mode3,{CUDA_LIKE}", {}),
        (
            {
                "compilation_config": {**MODE3, "inductor_passes": PASS},
                "additional_config": ASKED,
            },
            f"mode3,{CUDA_LIKE}",
            {},
        ),
    ),
}


def start(model: Path, side: Side, infos: Path) -> tuple[float, float]:
    """Wall and processor seconds of one engine's start. Raises RuntimeError where it fails."""
    arguments, adapt, extra = side
    with tempfile.TemporaryDirectory(dir=infos) as folder:
        env = environment(Path(folder), adapt, {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", **extra})
        command = [sys.executable, str(HERE / "offline.py"), str(model), json.dumps(arguments)]
        done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise RuntimeError(done.stderr[-3000:])
    found = json.loads(lines[0].removeprefix("RESULT "))
    return found["start_seconds"], found["cpu_seconds"]


def main() -> None:
    """Run the pairs and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--case", choices=CASES, action="append")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="k3fuse-start-") as scratch:
        folder = Path(scratch)
        model = write_model(folder / "model")
        start(model, CASES["off"][2], folder)  # fills the caches of the file system
        print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, {given.pairs} pairs a case")
        print(f"{'case':<10}{'seconds':<12}{'without':>9}{'with':>9}{'more':>9}{'':>9}")
        for name in given.case or CASES:
            text, without, with_it = CASES[name]
            pairs = []
            for n in range(given.pairs):
                sides = (without, with_it) if n % 2 == 0 else (with_it, without)
                found = [start(model, side, folder) for side in sides]
                pairs.append(found if n % 2 == 0 else found[::-1])
            for i, kind in enumerate(("wall", "processor")):
                low, high = (statistics.median(p[s][i] for p in pairs) for s in (0, 1))
                more = statistics.median(p[1][i] - p[0][i] for p in pairs)
                print(
                    f"{name if i == 0 else '':<10}{kind:<12}{low:>9.2f}{high:>9.2f}"
                    f"{more:>+9.2f}{100 * more / low:>+8.1f}%" + (f"  {text}" if i == 0 else ""),
                    flush=True,
                )


if __name__ == "__main__":
    main()
