"""One process of test_warm_cache.py: compile a fused op with Inductor, run it, report as JSON.

Arguments: the file of the composition text, the file for the report.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import torch
from torch import Tensor
from torch._dynamo.utils import counters

from k3fuse.kernels import register_all
from traced import define_mutable_op

COUNTS = (8, 64, 65, 100, 2)


def main(text_file: str, report_file: str) -> None:
    register_all()
    define_mutable_op()
    text = Path(text_file).read_text()

    def layer(x: Tensor, w: Tensor, g: Tensor) -> tuple[Tensor, ...]:
        kwargs = {"target": "reference", "group": "", "composition": text}
        (y,) = torch.ops.k3fuse.attention_projection(x * 2, [w], **kwargs)
        kwargs["composition"] = ""
        logits, latent = torch.ops.k3fuse.router_front(g + 1, g, g, **kwargs)
        return y + 1, logits, latent

    rng = torch.Generator().manual_seed(0)
    x = torch.randn(max(COUNTS), 16, generator=rng).bfloat16()
    w = torch.randn(8, 16, generator=rng).bfloat16()
    g = torch.randn(4, 8, generator=rng).bfloat16()
    report: dict[str, object] = {}
    for name, counts in {"dynamic": COUNTS, "static": COUNTS[:1]}.items():
        torch._dynamo.reset()
        compiled = torch.compile(layer, fullgraph=True, dynamic=name == "dynamic" or False)
        for m in counts:
            row = x[:m].clone()
            if name == "dynamic":
                torch._dynamo.mark_dynamic(row, 0)
            for got, expected in zip(compiled(row, w, g), layer(row, w, g), strict=True):
                assert torch.equal(got, expected), (name, m)
            report[f"{name} {m}"] = [t.double().sum().item() for t in compiled(row, w, g)]
    report["hit"] = counters["inductor"]["fxgraph_cache_hit"]
    report["miss"] = counters["inductor"]["fxgraph_cache_miss"]
    report["bypass"] = counters["inductor"]["fxgraph_cache_bypass"]
    report["aot_hit"] = counters["aot_autograd"]["autograd_cache_hit"]
    Path(report_file).write_text(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
