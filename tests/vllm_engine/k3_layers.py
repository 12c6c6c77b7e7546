"""vLLM 0.33's own Kimi K3 through the regional route, on meta weights and a fake group.

`k3_layers.py WHEEL TP JOB...` prints one JSON line: what each job found. A job is LAYERS:REGION:
a whole model of LAYERS layers, or single layers and the last AttnRes (0,1,3,12,92), compiled by
REGION (layers or model) and run for decode steps of 5, 1, 8 and 64 tokens. A process of its own:
the stand-ins for CUDA stay.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

SIZES = (5, 1, 8, 64)


def main() -> None:
    """Build, compile, run, count."""
    from k3fuse.patterns.sources.vllm_k3 import environment, layers

    wheel, tp = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    environment.prepare(wheel, tp)
    found = {}
    for n, job in enumerate(sys.argv[3:]):
        wanted, region = job.split(":")
        single = [int(i) for i in wanted.split(",")] if "," in wanted else None
        with layers.engine(tp, layers.LAYERS if single else int(wanted)) as config:
            if n == 0:
                layers.init_groups(tp)
            found[job] = _run(config, tp, region, single)
    print("RESULT " + json.dumps(found))


def _run(config: Any, tp: int, region: str, single: list[int] | None) -> dict[str, Any]:
    from k3fuse.patterns.sources.vllm_k3 import layers
    from k3fuse.rewriter import backend
    from k3fuse_vllm.facts import Facts
    from k3fuse_vllm.processes import group_sizes
    from k3fuse_vllm.regional import Regions
    from k3fuse_vllm.routes import decide
    from k3fuse_vllm.settings import Settings

    options = {"target": f"gb300:tp{tp}", "plan": True, "inner": "aot_eager", "log": "off"}
    config.additional_config = {"k3fuse": {**options, "region": region}}
    facts = Facts.of(config)
    settings = Settings.of(facts)
    assert settings is not None
    settings = settings.with_groups(group_sizes())
    torch._dynamo.reset()
    backend.reset_reports()
    regions = Regions(facts, settings)
    regions.prepare()
    built = layers.build_layers(config, single) if single else layers.build_model(config)
    tail = layers.build_tail(config) if single else None
    owner: Any = importlib.import_module("vllm.models.kimi_k3.nvidia.model")
    last_mix, start, graphs = owner.attn_res, time.perf_counter(), []
    try:
        regions.compile(torch.nn.ModuleList(built.layers.values()) if single else built.model)
        for m in SIZES:
            with torch.no_grad(), built.decode_context(list(built.layers), m):
                _step(built, tail, m)
            graphs.append(len(backend.reports()))
    finally:
        owner.attn_res = last_mix  # an engine has one set of regions, this process several
    return {
        "refused": [str(r) for r in regions.refused],
        "route": decide(facts, settings).route.value,
        "modules": regions.modules,
        "layers": regions.layers,
        "graphs": graphs,
        "totals": regions.totals(),
        "refused_sites": sorted(_codes(backend.reports())),
        "tokens": sorted({str(r.m) for r in backend.reports()}),
        "near": sorted(
            {(m.pattern, m.reason.code.value) for r in backend.reports() for m in r.near}
        ),
        "seconds": round(time.perf_counter() - start, 1),
    }


def _step(built: Any, tail: Any, m: int) -> None:
    """One decode step: the whole model, or each layer and the tail on inputs of their own."""
    from k3fuse.patterns.sources.vllm_k3 import layers

    def rows(*shape: int) -> torch.Tensor:
        return torch.empty(m, *shape, dtype=torch.bfloat16, device="meta")

    positions = torch.empty(m, dtype=torch.int64, device="meta")
    if built.model is not None:
        ids = torch.zeros(m, dtype=torch.int32, device="meta")
        out = built.model(ids, positions, None, None)
        assert tuple(out.shape) == (m, layers.HIDDEN)
        return
    for index, layer in built.layers.items():
        out, _, _ = layer(
            positions=positions,
            hidden_states=rows(layers.HIDDEN) if index else None,
            prefix_sum=rows(layers.HIDDEN),
            residual=rows(layers.BLOCK_SLOTS, layers.HIDDEN),
        )
        assert tuple(out.shape) == (m, layers.HIDDEN)
    tail.state = (rows(layers.HIDDEN), rows(layers.HIDDEN), rows(layers.BLOCK_SLOTS, layers.HIDDEN))
    tail.forward(None, positions, None, inputs_embeds=rows(layers.HIDDEN))


def _codes(reports: list[Any]) -> set[str]:
    return {str(reason) for r in reports for site in r.sites for reason in site.reasons}


if __name__ == "__main__":
    main()
