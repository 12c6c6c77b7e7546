"""From the op's tensors to one kernel launch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from torch import Tensor

from k3fuse.kernels.attn_res.builder import BUILDER
from k3fuse.kernels.build.variant import Variant, parameter_names
from k3fuse.kernels.common.operands import address, block_rows, float_bits, pitch, readable
from k3fuse.kernels.common.placement import placed
from k3fuse.kernels.common.policy import Row, chip_of
from k3fuse.kernels.common.runtime import RUNTIME, Runtime


@lru_cache(maxsize=256)
def variant(
    row: Row, target: str, blocks: int, delta: bool, norm: bool, round_mix: bool
) -> Variant:
    """The kernel that a policy row launches for one form."""
    arch, _ = chip_of(target)
    config = {"delta": int(delta), "norm": int(norm), "round_mix": int(round_mix)}
    return BUILDER.variant(arch, {"m": row.m_max, "blocks": blocks}, config)


def launch(
    row: Row,
    target: str,
    prefix: Tensor,
    delta: Tensor | None,
    blocks: Sequence[Tensor],
    num_blocks: int,
    score_norm: Tensor,
    score_proj: Tensor,
    out_norm: Tensor | None,
    eps: float,
    out_eps: float,
    round_mix: bool,
    *,
    runtime: Runtime = RUNTIME,
) -> list[Tensor]:
    """Run a policy row's kernel; returns [out] or, with a delta, [out, new_prefix].

    Rows are [M, H] BF16 of any stride, weights [H]; what cannot be read in place is copied. Raises
    LaunchError.
    """
    named = {"score_norm": score_norm, "score_proj": score_proj, "out_norm": out_norm}
    weights = placed("attn_res", {n: w for n, w in named.items() if w is not None})
    old = readable(prefix)
    added = None if delta is None else readable(delta)
    sources = block_rows(blocks, num_blocks)
    out = prefix.new_empty(prefix.shape)
    new_prefix = None if delta is None else prefix.new_empty(prefix.shape)
    values = {
        "prefix": address(old),
        "delta": address(added),
        **{name: address(weights.get(name)) for name in named},
        "out": address(out),
        "new_prefix": address(new_prefix),
        **{f"block{i}": address(block) for i, block in enumerate(sources)},
        "m": prefix.shape[0],
        "prefix_pitch": pitch(old),
        "delta_pitch": 0 if added is None else pitch(added),
        "block_pitch": pitch(sources[0]) if sources else 0,
        "eps": float_bits(eps),
        "out_eps": float_bits(out_eps),
    }
    chosen = variant(row, target, num_blocks, delta is not None, out_norm is not None, round_mix)
    runtime.kernel(chosen)(*(values[name] for name in parameter_names(chosen)))
    return [out] if new_prefix is None else [out, new_prefix]
