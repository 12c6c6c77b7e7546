"""One rank of the whole-model check; test_whole_model.py runs one in each process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.tolerances import tolerance

from k3fuse.patterns.models import KimiK3, KimiK3Config, greedy_decode, init_weights
from k3fuse.rewriter import backend

CONFIG = KimiK3Config.small(max_position_embeddings=128)
REQUESTS = 3


def build(size: int, rank: int, form: str) -> KimiK3:
    """The small model: KDA and MLA, dense and MoE, block writes at layers 0 and 2."""
    group = dist.group.WORLD if size > 1 else None
    model = KimiK3(
        CONFIG, tp_size=size, tp_rank=rank, group=group, attn_res=form, embed_and_head=True
    )  # type: ignore[arg-type]
    init_weights(model, 0)
    return model


def compare(model: KimiK3, compiled: Any) -> dict[str, float]:
    """Largest excess over the tolerance table of logits and every state tensor, per step.

    Both models read the original's tokens and states, so that one step's difference is measured.
    """
    ids = torch.tensor([3, 5, 7])
    state = model.new_state(REQUESTS, 8)
    worst = {"logits": 0.0, "state": 0.0}
    # A row passes about 3 roundings a block; the facts sheet gives a noise factor of 3 a layer.
    band = tolerance(torch.bfloat16, CONFIG.hidden_size, roundings=3 * CONFIG.num_hidden_layers)
    with torch.no_grad():
        for _ in range(4):
            twin = torch.utils._pytree.tree_map(torch.clone, state)
            expected = model(ids, state)
            actual = compiled(ids, twin)
            for name, pairs in (
                ("logits", [(actual, expected)]),
                ("state", list(zip(leaves(twin), leaves(state), strict=True))),
            ):
                for got, want in pairs:
                    scale = float(want.double().abs().max())
                    error = float((got.double() - want.double()).abs().max())
                    allowed = band.atol * scale + band.rtol * scale
                    worst[name] = max(worst[name], error / allowed if allowed else error)
            ids = expected.argmax(-1)
    return worst


def leaves(state: Any) -> list[torch.Tensor]:
    """State tensors."""
    return [t for t in torch.utils._pytree.tree_leaves(state) if t.is_floating_point()]


def spoil() -> None:
    """Make one reference wrong by one percent: the check must notice."""
    from k3fuse.kernels.router import op, reference

    right = reference.router

    def wrong(*args: Any, **kwargs: Any) -> list[torch.Tensor]:
        weights, *rest = right(*args, **kwargs)
        return [(weights.float() * 1.01).to(weights.dtype), *rest]

    op.reference.router = wrong  # type: ignore[attr-defined]


def rank(number: int, size: int, tokens: int, form: str, inner: str, folder: str) -> None:
    """Write the findings of one rank to `rankNUMBER.json`."""
    torch.set_num_threads(1)
    if inner == "spoiled":
        spoil()
        inner = "eager"
    # "eager prefetch": with that option.
    inner, *more = inner.split()
    if size > 1:
        store = f"file://{folder}/store"
        dist.init_process_group("gloo", init_method=store, world_size=size, rank=number)
    model = build(size, number, form)
    ids = torch.tensor([3, 5, 7])
    expected = greedy_decode(model, ids, tokens)
    options = {
        "target": "reference",
        "inner": inner,
        "log": "off",
        "strict": True,
        "expect": CONFIG.expected_sites(),
        **dict.fromkeys(more, True),
    }
    compiled = torch.compile(model, backend="k3fuse", options=options, fullgraph=True)
    actual = greedy_decode(compiled, ids, tokens)
    report = backend.reports()[0]
    found = {name: count.found for name, count in report.counts().items()}
    result = {
        "equal_tokens": int((actual == expected).sum()),
        "tokens": expected.numel(),
        "distinct": int(expected.unique().numel()),
        "found": found,
        "graphs": len(backend.reports()),
        "hand_overs": sum(k.giver is s and not k.absorbs for s in report.sites for k in s.links),
        "absorbed": sum(s.within is not None for s in report.sites),
        "hash": report.site_hash(),
        "prefetched": sum(bool(s.prefetched) for s in report.found),
        "worst": compare(model, compiled),
    }
    Path(folder, f"rank{number}.json").write_text(json.dumps(result))
    if size > 1:
        dist.barrier()
        dist.destroy_process_group()
