"""The fused ops by family, for listings: no torch operator is registered by reading it."""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.kernels.attention_projection.policy import TABLE as ATTENTION_PROJECTION
from k3fuse.kernels.attn_res.policy import TABLE as ATTN_RES
from k3fuse.kernels.common.policy import Table
from k3fuse.kernels.experts.policy import TABLE as EXPERTS
from k3fuse.kernels.experts_partials.policy import TABLE as EXPERTS_PARTIALS
from k3fuse.kernels.output_projection.policy import TABLE as OUTPUT_PROJECTION
from k3fuse.kernels.router.policy import TABLE as ROUTER
from k3fuse.kernels.tail.policy import TABLE as TAIL


@dataclass(frozen=True)
class OpInfo:
    """One family: name, torch operators ("k3fuse.tail.default"), policy, a line of docs."""

    name: str
    torch_ops: tuple[str, ...]
    table: Table
    docs: str


def _info(table: Table, docs: str, *ops: str) -> OpInfo:
    names = tuple(f"k3fuse.{op}.default" for op in ops or (table.op,))
    return OpInfo(table.op, names, table, docs)


OPS: dict[str, OpInfo] = {
    info.name: info
    for info in (
        _info(ATTENTION_PROJECTION, "all linears of one normalised row, one launch"),
        _info(
            OUTPUT_PROJECTION,
            "o-proj, all-reduce, then AttnRes or add + RMSNorm",
            "output_projection_attn_res",
            "output_projection_add_rms_norm",
        ),
        _info(ATTN_RES, "AttnRes where it stands alone: score, mix, norm"),
        _info(
            ROUTER,
            "gate logits, latent down-projection, top-k weights and ids",
            "router_front",
            "router",
        ),
        _info(EXPERTS, "routed and shared experts, all-reduce, norm, up-projection, shared add"),
        _info(EXPERTS_PARTIALS, "experts from logits to partials, weights in vLLM's order too"),
        _info(TAIL, "latent all-reduce, norm, up-projection, shared add after an experts op"),
    )
}
