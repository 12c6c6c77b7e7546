"""One gloo rank that compiles a small block; what the ranks decided, as JSON."""

from __future__ import annotations

import datetime
import json
from pathlib import Path

import torch
import torch.distributed as dist
from tests.rewriter.warm_backend_child import Block

from k3fuse.rewriter import backend, key, ranks


def rank(number: int, case: str, folder: str) -> None:
    """case: "same"; rank 1 disables a pattern ("other options"), has other weights ("other dtype"),
    another version ("other version"), or never compiles ("absent").
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", world_size=2, rank=number)
    torch.manual_seed(0)
    block = Block().to(torch.bfloat16).eval()
    options: dict[str, object] = {"target": "reference", "inner": "eager", "log": "off"}
    if case == "other options" and number == 1:
        options["disable"] = ["output_projection"]
    if case == "other dtype" and number == 1:
        block = block.to(torch.float16)
    if case == "other version" and number == 1:
        key._version = lambda name: "0.0.0"
    if case == "absent":
        defaults = list(ranks.agree.__defaults__ or ())
        ranks.agree.__defaults__ = (datetime.timedelta(seconds=3), *defaults[1:])
    x = torch.randn(3, 64).to(next(block.parameters()).dtype)
    result: dict[str, object] = {}
    with torch.no_grad():
        if case != "absent" or number == 0:
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
    Path(folder, f"{number}.json").write_text(json.dumps(result))
    dist.barrier()
