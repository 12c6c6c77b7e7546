"""Compiles a small block with a symbolic M through Inductor and prints what happened, as JSON."""

from __future__ import annotations

import json
import sys

import torch
from torch import nn
from torch._dynamo.utils import counters

from k3fuse.rewriter import backend


class Block(nn.Module):
    """RMSNorm -> q, k, v -> a stand-in for attention -> o_proj -> add + RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.RMSNorm(64), nn.RMSNorm(64)
        self.qkv = nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(3))
        self.o_proj = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """x [M, 64] -> normalised row and residual, [M, 64] each."""
        row = self.first(x)
        q, k, v = (linear(row) for linear in self.qkv)
        residual = x + self.o_proj(torch.tanh(q * k) * v)
        return self.second(residual), residual


def main() -> None:
    """M = 3 and 64 are inside the policy; 65 and 200 run the composition."""
    torch.manual_seed(0)
    block = Block().to(torch.bfloat16).eval()
    options = {"target": "reference", "log": "off"}
    compiled = torch.compile(block, backend="k3fuse", options=options, dynamic=True)
    worst = {}
    with torch.no_grad():
        for m in (3, 64, 65, 200):
            x = torch.randn(m, 64).to(torch.bfloat16)
            errors = [
                float((a.double() - b.double()).abs().max() / b.double().abs().max())
                for a, b in zip(compiled(x), block(x), strict=True)
            ]
            worst[str(m)] = max(errors)
    counts = {
        name: (count.found, count.near, count.refused)
        for name, count in backend.reports()[0].counts().items()
    }
    json.dump(
        {
            "graphs": len(backend.reports()),
            "m": backend.reports()[0].m,
            "counts": counts,
            "hits": counters["inductor"]["fxgraph_cache_hit"],
            "misses": counters["inductor"]["fxgraph_cache_miss"],
            "worst": worst,
        },
        sys.stdout,
    )


if __name__ == "__main__":
    main()
