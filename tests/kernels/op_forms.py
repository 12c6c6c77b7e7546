"""Every form of every fused op, small, with random arguments."""

from __future__ import annotations

from collections.abc import Callable

import torch

from op_cases import (
    Case,
    Draw,
    attention_projection,
    attn_res,
    experts,
    experts_partials,
    mixed,
    output_add_rms_norm,
    output_attn_res,
    prefetching,
    router,
    router_front,
    row_sharded,
    tail,
)

Builder = Callable[[Draw, int], Case]
_R = ("", "round_sum", "round_before_weight", "round_sum+round_before_weight")

# name -> (draw, M) -> case
FORMS: dict[str, Builder] = {
    "attention_projection/one": lambda d, m: attention_projection(d, m, d.pick(1, 9), d.pick(1, 9)),
    "attention_projection/three": lambda d, m: attention_projection(
        d, m, d.pick(1, 40), d.pick(1, 20), 1, d.pick(1, 20)
    ),
    "attention_projection/row_sharded": lambda d, m: row_sharded(
        d, m, d.pick(1, 40), d.pick(1, 20), d.pick(1, 9), d.pick(1, 20)
    ),
    "attn_res/bank+delta": lambda d, m: attn_res(
        d, m, d.pick(1, 40), d.pick(0, 8), delta=True, bank=True, norm=True, mix=False
    ),
    "attn_res/list": lambda d, m: attn_res(
        d, m, d.pick(2, 40), d.pick(0, 4), delta=False, bank=False, norm=True, mix=True
    ),
    "attn_res/final": lambda d, m: attn_res(
        d, m, d.pick(2, 40), d.pick(1, 4), delta=True, bank=True, norm=False, mix=True
    ),
    "output_projection_attn_res/delta": lambda d, m: output_attn_res(
        d, m, d.pick(1, 20), d.pick(2, 40), d.pick(0, 8), prefix=True, bank=True, norm=True
    ),
    "output_projection_attn_res/block_write": lambda d, m: output_attn_res(
        d,
        m,
        d.pick(1, 20),
        d.pick(2, 40),
        d.pick(1, 3),
        prefix=False,
        bank=False,
        norm=True,
    ),
    "output_projection_attn_res/no_norm": lambda d, m: output_attn_res(
        d,
        m,
        d.pick(1, 20),
        d.pick(2, 40),
        d.pick(1, 3),
        prefix=True,
        bank=False,
        norm=False,
    ),
    "output_projection_add_rms_norm/all": lambda d, m: output_add_rms_norm(
        d, m, d.pick(1, 20), d.pick(2, 40), _R[d.pick(0, 3)]
    ),
    "output_projection_attn_res/prefetch": lambda d, m: prefetching(
        d, output_attn_res(d, m, d.pick(1, 20), 8, 2, prefix=True, bank=True, norm=True)
    ),
    "output_projection_add_rms_norm/prefetch": lambda d, m: prefetching(
        d, output_add_rms_norm(d, m, d.pick(1, 20), d.pick(2, 40), ""), split=False
    ),
    "router_front/latent": lambda d, m: router_front(
        d, m, d.pick(1, 20), d.pick(1, 20), d.pick(1, 9)
    ),
    "router_front/alone": lambda d, m: router_front(d, m, d.pick(1, 20), d.pick(1, 20), 0),
    "router/k3": lambda d, m: router(
        d, m, d.pick(1, 20), d.pick(4, 40), d.pick(1, 9), d.pick(1, 4)
    ),
    "router/quantized": lambda d, m: router(
        d,
        m,
        d.pick(1, 20),
        d.pick(4, 40),
        32 * d.pick(1, 3),
        d.pick(1, 4),
        quantize=True,
        plan=True,
    ),
    "router/shared": lambda d, m: router(
        d,
        m,
        d.pick(1, 20),
        d.pick(4, 40),
        32 * d.pick(1, 2),
        d.pick(1, 4),
        quantize=True,
        shared=d.pick(1, 9),
        merged=bool(d.pick(0, 1)),
    ),
    "router/plain": lambda d, m: router(
        d,
        m,
        d.pick(1, 20),
        d.pick(4, 40),
        0,
        d.pick(1, 4),
        bias=False,
        scoring="softmax",
        renormalize=False,
        weights_dtype=torch.bfloat16,
    ),
    "experts/mxfp4": lambda d, m: experts(
        d,
        m,
        32 * d.pick(1, 2),
        32,
        d.pick(2, 5),
        2,
        hidden=d.pick(1, 40),
        shared=8,
        mxfp4=True,
    ),
    "experts/made": lambda d, m: experts(
        d,
        m,
        32 * d.pick(1, 2),
        32,
        d.pick(2, 5),
        2,
        hidden=d.pick(1, 40),
        shared=8,
        mxfp4=True,
        made=True,
    ),
    "experts/bf16": lambda d, m: experts(
        d,
        m,
        d.pick(2, 20),
        d.pick(1, 9),
        d.pick(2, 5),
        d.pick(1, 2),
        shared=d.pick(1, 9),
        merged=False,
        activation="silu",
        rounding="round_before_weight",
    ),
    "experts/prefetch": lambda d, m: prefetching(d, experts(d, m, 8, d.pick(1, 9), 3, 1)),
    "experts/routed_only": lambda d, m: experts(d, m, d.pick(2, 20), d.pick(1, 9), 3, 1),
    "experts/mixed": lambda d, m: mixed(
        experts(d, m, d.pick(2, 20), d.pick(1, 9), 3, 1, hidden=d.pick(2, 40), shared=3),
        d,
        d.pick(0, 4),
        bank=False,
        norm=True,
        mix=True,
    ),
    "experts/mixed_row": lambda d, m: mixed(
        experts(d, m, 32, 32, 3, 2, hidden=d.pick(2, 40), shared=8, mxfp4=True, made=True),
        d,
        d.pick(1, 8),
        bank=True,
        norm=bool(d.pick(0, 1)),
        mix=False,
    ),
    "experts_partials/rows": lambda d, m: experts_partials(
        d,
        m,
        32 * d.pick(1, 3),
        32,
        d.pick(3, 6),
        2,
        h=d.pick(1, 40),
        shared=d.pick(1, 9),
        merged=False,
        bias=False,
        weights_dtype=torch.float32,
    ),
    "experts_partials/trtllm": lambda d, m: experts_partials(
        d,
        m,
        128,
        64 * d.pick(1, 4),
        d.pick(3, 4),
        d.pick(1, 3),
        h=d.pick(1, 40),
        shared=8,
        layout="trtllm",
    ),
    "tail/prefetch": lambda d, m: prefetching(d, tail(d, m, d.pick(1, 40), d.pick(1, 40))),
    "tail/all": lambda d, m: tail(d, m, d.pick(1, 40), d.pick(1, 40)),
}
