"""TP2 and TP4 over gloo against one rank, and rank slices against the full weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.processes import run_ranks
from tests.tolerances import assert_close
from torch import Tensor, nn

from k3fuse.patterns.models import KimiK3, KimiK3Config, init_weights

CONFIG = KimiK3Config.small()
STEPS = 3


def prepared(seed: int = 0, **options: Any) -> KimiK3:
    """A seeded model whose routing does not hang on the last bit of a logit.

    The correction bias is spread far beyond the sigmoid, so that a partial sum rounded the other
    way cannot choose another expert, which would be right and yet far outside any tolerance.
    """
    model = KimiK3(CONFIG, **options)
    init_weights(model, seed)
    for index in range(CONFIG.num_hidden_layers):
        if CONFIG.is_moe(index):
            order = torch.randperm(16, generator=torch.Generator().manual_seed(index))
            bias = model.get_parameter(f"layers.{index}.mlp.gate.e_score_correction_bias")
            bias.copy_(2.0 * order)
    return model


def decode(model: KimiK3) -> list[Tensor]:
    """Outputs of a few steps of four rows."""
    state = model.new_state(4, STEPS)
    generator = torch.Generator().manual_seed(7)
    outputs = []
    with torch.no_grad():
        for _ in range(STEPS):
            x = torch.randn(4, CONFIG.hidden_size, generator=generator).to(torch.bfloat16)
            outputs.append(model(x, state))
    return outputs


def record(model: KimiK3) -> tuple[list[Tensor], list[tuple[str, Tensor, Tensor]]]:
    """`decode`, and (block path, input, output) of its attention and MLP calls in order."""
    calls: list[tuple[str, Tensor, Tensor]] = []

    def hook(path: str) -> Any:
        def keep(module: nn.Module, args: tuple[Any, ...], out: Tensor) -> None:
            calls.append((path, args[0].clone(), out.clone()))

        return keep

    for index, layer in enumerate(model.layers):
        for name in ("self_attn", "mlp"):
            layer.get_submodule(name).register_forward_hook(hook(f"layers.{index}.{name}"))
    return decode(model), calls


def replay(model: KimiK3, calls: list[tuple[str, Tensor, Tensor]]) -> list[Tensor]:
    """The blocks of `model` on recorded inputs, with their own state."""
    state = model.new_state(4, STEPS)
    outputs = []
    for number, (path, x, _) in enumerate(calls):
        block = model.get_submodule(path)
        if path.endswith("mlp"):
            outputs.append(block(x) + 0)
        else:
            step = number // (2 * len(model.layers))
            layer_state = state.layers[int(path.split(".")[1])]
            outputs.append(block(x, layer_state, state.positions + step) + 0)
    return outputs


def _rank(rank: int, size: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size
    )
    try:
        model = prepared(tp_size=size, tp_rank=rank, group=dist.group.WORLD)
        blocks = replay(model, torch.load(f"{folder}/calls.pt"))
        torch.save((blocks, decode(model)), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("size", [2, 4])
def test_ranks_agree_with_one_rank(size: int, tmp_path: Path) -> None:
    one = prepared()
    expected, calls = record(one)
    torch.save(calls, tmp_path / "calls.pt")
    run_ranks(_rank, size, size, str(tmp_path))
    ranks = [torch.load(tmp_path / f"{rank}.pt") for rank in range(size)]
    for other in ranks[1:]:
        for a, b in zip(ranks[0][0] + ranks[0][1], other[0] + other[1], strict=True):
            assert torch.equal(a, b)
    blocks, outputs = ranks[0]
    assert len(blocks) == STEPS * 2 * CONFIG.num_hidden_layers
    # Rank partials and their sum are rounded once each, where one rank rounds once.
    for out, (path, _, want) in zip(blocks, calls, strict=True):
        assert_close(out, want, k=CONFIG.kda_width, roundings=3, what=f"TP{size} {path}")
    # Every layer multiplies the noise of the residual by about three (published figure).
    k, noise = CONFIG.kda_width, 3**CONFIG.num_hidden_layers
    for step, (out, want) in enumerate(zip(outputs, expected, strict=True)):
        assert_close(out, want, k=k, roundings=noise, what=f"TP{size} step {step}")
    with pytest.raises(AssertionError):  # control: other weights are outside the band
        assert_close(outputs[0], decode(prepared(seed=1))[0], k=k, roundings=noise)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("merged", [True, False])
def test_ranks_hold_slices_of_the_full_weights(size: int, merged: bool) -> None:
    full = KimiK3(CONFIG, merged_projections=merged)
    init_weights(full, 3)
    ranks = [
        KimiK3(CONFIG, tp_size=size, tp_rank=rank, group="tp:0", merged_projections=merged)
        for rank in range(size)
    ]
    for rank in ranks:
        init_weights(rank, 3)
    halves = ("layers.1.mlp.experts.w13", "layers.1.mlp.experts.w13_scale")
    for name in halves:
        parts = [rank.get_parameter(name).chunk(2, dim=1) for rank in ranks]
        gate = torch.cat([part[0] for part in parts], dim=1)
        up = torch.cat([part[1] for part in parts], dim=1)
        assert torch.equal(torch.cat([gate, up], dim=1), full.get_parameter(name))
    attention = "layers.1.self_attn"
    for name, dim in (
        (f"{attention}.o_proj.weight", 1),
        (f"{attention}.f_b_proj.weight", 0),
        (f"{attention}.A_log", 0),
        ("layers.3.self_attn.w_uk", 0),
        ("layers.3.self_attn.q_b_proj.weight", 0),
        ("layers.1.mlp.experts.w2", 2),
        ("layers.0.mlp.down_proj.weight", 1),
    ):
        joined = torch.cat([rank.get_parameter(name) for rank in ranks], dim)
        assert torch.equal(joined, full.get_parameter(name)), name
    for name in ("layers.1.mlp.gate.weight", "layers.1.mlp.latent_up_proj.weight", "norm.weight"):
        for rank in ranks:
            assert torch.equal(rank.get_parameter(name), full.get_parameter(name)), name
    if merged:
        width, local = CONFIG.kda_width, CONFIG.kda_width // size
        joined = full.get_parameter(f"{attention}.in_proj.weight")
        for index, rank in enumerate(ranks):
            own = rank.get_parameter(f"{attention}.in_proj.weight")
            assert own.shape[0] == CONFIG.kda_projection_rows(size)
            for part in range(4):
                start = part * width + index * local
                assert torch.equal(
                    own[part * local : (part + 1) * local], joined[start : start + local]
                )
