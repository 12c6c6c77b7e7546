"""One gloo rank that compiles a small block; what the ranks decided, as JSON."""

from __future__ import annotations

import datetime
import json
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from tests.rewriter.warm_backend_child import Block

from k3fuse.rewriter import backend, key, ranks


def main(rank: int, case: str, store: str, out: str) -> None:
    """case: "same"; rank 1 disables a pattern ("other options"), has other weights ("other dtype"),
    another version ("other version"), or never compiles ("absent").
    """
    dist.init_process_group("gloo", init_method=f"file://{store}", world_size=2, rank=rank)
    torch.manual_seed(0)
    block = Block().to(torch.bfloat16).eval()
    options: dict[str, object] = {"target": "reference", "inner": "eager", "log": "off"}
    if case == "other options" and rank == 1:
        options["disable"] = ["output_projection"]
    if case == "other dtype" and rank == 1:
        block = block.to(torch.float16)
    if case == "other version" and rank == 1:
        key._version = lambda name: "0.0.0"
    if case == "absent":
        defaults = list(ranks.agree.__defaults__ or ())
        ranks.agree.__defaults__ = (datetime.timedelta(seconds=3), *defaults[1:])
    x = torch.randn(3, 64).to(next(block.parameters()).dtype)
    result: dict[str, object] = {}
    with torch.no_grad():
        if case != "absent" or rank == 0:
            try:
                got = torch.compile(block, backend="k3fuse", options=options)(x)
                result["equal"] = all(
                    torch.allclose(a, b, rtol=0.02, atol=0.02)
                    for a, b in zip(got, block(x), strict=True)
                )
                report = backend.reports()[0]
                result["found"] = len(report.found)
                result["nodes"] = [report.nodes_before, report.nodes_after]
                result["codes"] = sorted({r.code.value for s in report.sites for r in s.reasons})
            except Exception as error:
                result["error"] = str(error)
    Path(out).write_text(json.dumps(result))
    dist.barrier()


if __name__ == "__main__":
    main(int(sys.argv[1]), *sys.argv[2:5])
