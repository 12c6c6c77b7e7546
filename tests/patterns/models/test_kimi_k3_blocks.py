"""Attention, AttnRes and experts against independent float64 loops."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.tolerances import assert_close
from torch import Tensor

from k3fuse.patterns.models import KdaState, KimiK3, KimiK3Config, MlaState, init_weights
from k3fuse.patterns.models.attn_res import AttnRes, Blocks, attn_res_mix
from k3fuse.patterns.models.kda import KimiDeltaAttention, kda_step
from k3fuse.patterns.models.mla import GatedLatentAttention
from k3fuse.patterns.models.moe import GatedMlp, LatentMoe, MxExperts, Router
from k3fuse.patterns.models.mx import E2M1_VALUES, mxfp8_round
from k3fuse.patterns.models.parallel import TensorParallel

CONFIG = KimiK3Config.small()
ONE = TensorParallel()
HIDDEN = CONFIG.hidden_size


def rows(m: int, width: int, seed: int) -> Tensor:
    return torch.randn(m, width, generator=torch.Generator().manual_seed(seed)).to(torch.bfloat16)


def bf16(x: Tensor) -> Tensor:
    """Round float64 values to BF16, kept as float64."""
    return x.float().to(torch.bfloat16).double()


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def test_kda_step_one_head_by_loops() -> None:
    generator = torch.Generator().manual_seed(0)
    size = 6
    state = torch.randn(1, 1, size, size, generator=generator)
    expected = [[float(v) for v in row] for row in state[0, 0]]
    for _ in range(3):
        q, k, v = (torch.randn(1, 1, size, generator=generator) for _ in range(3))
        decay = torch.rand(1, 1, size, generator=generator)
        beta = torch.rand(1, 1, generator=generator)
        out, state = kda_step(state, q, k, v, decay, beta)
        outputs = []
        for i in range(size):
            for j in range(size):
                expected[i][j] *= float(decay[0, 0, j])
            dot = sum(expected[i][j] * float(k[0, 0, j]) for j in range(size))
            update = float(beta) * (float(v[0, 0, i]) - dot)
            for j in range(size):
                expected[i][j] += update * float(k[0, 0, j])
            outputs.append(sum(expected[i][j] * float(q[0, 0, j]) for j in range(size)))
        assert_close(out[0, 0], torch.tensor(outputs), k=size, roundings=8)
    assert_close(state[0, 0], torch.tensor(expected), k=size, roundings=8)


def kda_by_loops(block: KimiDeltaAttention, steps: list[Tensor]) -> tuple[list[Tensor], Tensor]:
    """Outputs [M, H] of every step and the last state, in float64 with BF16 at z, r and y."""
    heads, dim, width = block.heads, block.dim, block.width
    m = steps[0].shape[0]
    raw = [torch.zeros(m, 3 * width, dtype=torch.float64) for _ in range(3)]
    state = torch.zeros(m, heads, dim, dim, dtype=torch.float64)
    outputs = []
    for x in steps:
        z = bf16(x.double() @ block.in_proj.weight.double().t())
        raw.append(z[:, : 3 * width])
        conv = sum(block.conv_weight[:, i].double() * raw[i - 4] for i in range(4))
        assert isinstance(conv, Tensor)
        conv = conv * torch.sigmoid(conv)
        gate = z[:, 3 * width : 4 * width]
        r = bf16(z[:, 4 * width : 4 * width + dim] @ block.f_b_proj.weight.double().t())
        y = torch.zeros(m, width, dtype=torch.float64)
        for t in range(m):
            for h in range(heads):
                part = slice(h * dim, (h + 1) * dim)
                q, k, v = conv[t].view(3, width)[:, part]
                q = q / math.sqrt(float(q @ q) + 1e-6) / math.sqrt(dim)
                k = k / math.sqrt(float(k @ k) + 1e-6)
                speed = math.exp(float(block.A_log[h]))
                arg = speed * (r[t, part] + block.dt_bias[part].double())
                state[t, h] *= torch.exp(-5 * torch.sigmoid(arg))
                beta = sigmoid(float(z[t, 4 * width + dim + h]))
                state[t, h] += torch.outer(beta * (v - state[t, h] @ k), k)
                out = state[t, h] @ q
                out = out / math.sqrt(float(out @ out) / dim + 1e-5)
                y[t, part] = out * block.o_norm.weight.double() * torch.sigmoid(gate[t, part])
        outputs.append(bf16(y) @ block.o_proj.weight.double().t())
    return outputs, state


def test_kda_block_by_loops() -> None:
    block = KimiDeltaAttention(CONFIG, ONE, "kda", True)
    init_weights(block, 11)
    steps = [rows(2, HIDDEN, seed) for seed in range(5)]
    state = KdaState(
        torch.zeros(2, 3, 3 * block.width, dtype=torch.bfloat16),
        torch.zeros(2, block.heads, block.dim, block.dim),
    )
    positions = torch.zeros(2, dtype=torch.int64)
    actual = [block(x, state, positions) for x in steps]
    expected, last = kda_by_loops(block, steps)
    for out, want in zip(actual, expected, strict=True):
        assert out.dtype == torch.bfloat16
        assert_close(out, want.float().to(torch.bfloat16), k=block.width, roundings=2)
    # BF16 rows entered the state, so a tie of z that falls the other way is one BF16 rounding.
    assert_close(state.recurrent.to(torch.bfloat16), last.float().to(torch.bfloat16), k=HIDDEN)
    raw = steps[-1].double() @ block.in_proj.weight[: 3 * block.width].double().t()
    assert_close(state.conv[:, 2], raw.float().to(torch.bfloat16), k=HIDDEN)


def test_kda_pad_rows_are_zero() -> None:
    block = KimiDeltaAttention(CONFIG, ONE, "kda", True)
    init_weights(block, 11)
    used = 4 * block.width + block.dim + block.heads
    assert block.in_proj.weight.shape[0] == CONFIG.kda_projection_rows(1) == 560
    assert used == 548
    assert not block.in_proj.weight[used:].any()
    assert block.in_proj.weight[:used].any(dim=1).all()


def test_mla_block_by_expanded_keys() -> None:
    """The absorbed form against keys and values expanded per head, in float64."""
    block = GatedLatentAttention(CONFIG, ONE, "mla", True)
    init_weights(block, 12)
    latent, rope, nope = block.latent, block.rope, block.nope
    steps = [rows(3, HIDDEN, seed) for seed in range(4)]
    state = MlaState(torch.zeros(3, 8, latent + rope, dtype=torch.bfloat16))
    positions = torch.tensor([0, 1, 4])
    # Two requests already hold rows; what lies behind a position must not be read.
    generator = torch.Generator().manual_seed(9)
    state.latent.copy_(torch.randn(state.latent.shape, generator=generator))
    cache = state.latent.double()

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return bf16(x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())

    for step, x in enumerate(steps):
        out = block(x, state, positions + step)
        z = bf16(x.double() @ block.in_proj.weight.double().t())
        widths = [CONFIG.q_lora_rank, latent, rope, block.heads * block.value]
        q_a, kv, pe, gate = torch.split_with_sizes(z, widths, 1)
        q = bf16(norm(q_a, block.q_a_layernorm.weight) @ block.q_b_proj.weight.double().t())
        q = q.view(3, block.heads, nope + rope)
        kv = norm(kv, block.kv_a_layernorm.weight)
        y = torch.zeros(3, block.heads, block.value, dtype=torch.float64)
        for t in range(3):
            length = int(positions[t]) + step + 1
            cache[t, length - 1] = torch.cat([kv[t], pe[t]])
            seen = cache[t, :length]
            for h in range(block.heads):
                keys = torch.cat(
                    [seen[:, :latent] @ block.w_uk[h].double().t(), seen[:, latent:]], 1
                )
                score = keys @ q[t, h] / math.sqrt(nope + rope)
                y[t, h] = torch.softmax(score, 0) @ (seen[:, :latent] @ block.w_uv[h].double())
        y = y.view(3, -1) * torch.sigmoid(gate)
        expected = (bf16(y) @ block.o_proj.weight.double().t()).float().to(torch.bfloat16)
        # Roundings apart from the expanded form: absorbed query, latent mix, value, y, output.
        assert_close(out, expected, k=block.latent, roundings=5, what=f"step {step}")
    assert torch.equal(state.latent.double()[0, 4:], cache[0, 4:])  # nothing written past position


@pytest.mark.parametrize("count", [0, 1, 3])
def test_attn_res_by_loops(count: int) -> None:
    width = 24
    sources = torch.stack([rows(2, width, seed) * (seed + 1) for seed in range(count + 1)], 1)
    norm, proj = rows(1, width, 20)[0], rows(1, width, 21)[0]
    mix = attn_res_mix(sources, norm, proj, 1e-5)
    assert mix.dtype == torch.float32
    for t in range(2):
        score = []
        for j in range(count + 1):
            v = [float(value) for value in sources[t, j]]
            dot = sum(v[d] * float(norm[d]) * float(proj[d]) for d in range(width))
            score.append(dot / math.sqrt(sum(value * value for value in v) / width + 1e-5))
        total = sum(math.exp(s) for s in score)
        weights = [math.exp(s) / total for s in score]
        expected = [
            sum(w * float(sources[t, j, d]) for j, w in enumerate(weights)) for d in range(width)
        ]
        assert_close(mix[t], torch.tensor(expected), k=width, roundings=8)
    if count == 0:
        assert torch.equal(mix, sources[:, 0].float())


@pytest.mark.parametrize("round_mix", [False, True])
def test_attn_res_rounds_the_mix_only_when_told(round_mix: bool) -> None:
    block = AttnRes(ONE, "res", 64, 1e-5)
    init_weights(block, 2)
    blocks = Blocks("list", rows(1, 64, 0), 4)
    for seed in range(3):
        blocks.write(rows(8, 64, seed))
    prefix, weight = rows(8, 64, 7), (1 + rows(1, 64, 8)[0] / 8)
    mix = attn_res_mix(blocks.sources(prefix), block.norm.weight, block.proj.weight, 1e-5)
    used = mix.to(torch.bfloat16).float() if round_mix else mix
    expected = used * torch.rsqrt(used.pow(2).mean(-1, keepdim=True) + 1e-5) * weight.float()
    out = block(blocks, prefix, weight, round_mix=round_mix)
    other = block(blocks, prefix, weight, round_mix=not round_mix)
    assert torch.equal(out, expected.to(torch.bfloat16))
    assert not torch.equal(out, other)  # control: the rounding shows in these values


def test_router_logits_are_fp32_products_of_bf16() -> None:
    router = Router(CONFIG, ONE, "gate", "topk")
    init_weights(router, 4)
    x = rows(3, HIDDEN, 1)
    logits = router.logits(x)
    assert logits.dtype == torch.float32
    expected = (x.double() @ router.weight.double().t()).float()
    assert_close(logits, expected, k=HIDDEN)
    rounded = torch.nn.functional.linear(x, router.weight).float()
    with pytest.raises(AssertionError):  # control: a BF16 result is outside the band
        assert_close(rounded, expected, k=HIDDEN)


def dequantised(packed: Tensor, scale: Tensor) -> Tensor:
    """One expert's MXFP4 matrix [N, K / 2] by loops, float64 [N, K]."""
    out = torch.zeros(packed.shape[0], 2 * packed.shape[1], dtype=torch.float64)
    codes, exponents = packed.tolist(), scale.tolist()
    for n, line in enumerate(codes):
        for i, byte in enumerate(line):
            for j, code in enumerate((byte & 15, byte >> 4)):
                exponent = exponents[n][(2 * i + j) // 32] - 127
                out[n, 2 * i + j] = E2M1_VALUES[code] * 2.0**exponent
    return out


def test_experts_by_loops() -> None:
    block = MxExperts(CONFIG, ONE, "experts")
    init_weights(block, 6)
    latent, width = rows(2, CONFIG.routed_expert_hidden_size, 1), block.width
    ids = torch.tensor([[3, 0, 15, 7], [7, 2, 3, 11]])
    weights = torch.tensor([[0.5, 0.25, 0.125, 0.125], [0.4, 0.3, 0.2, 0.1]]).to(torch.bfloat16)
    out = block(latent, weights, ids)
    x = mxfp8_round(latent).double()
    for t in range(2):
        total = torch.zeros(CONFIG.routed_expert_hidden_size, dtype=torch.float64)
        for slot in range(4):
            expert = int(ids[t, slot])
            both = dequantised(block.w13[expert], block.w13_scale[expert]) @ x[t]
            gate, up = both[:width], both[width:]
            hidden = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
            hidden = mxfp8_round(hidden.float()).double()
            row = bf16(dequantised(block.w2[expert], block.w2_scale[expert]) @ hidden)
            total += float(weights[t, slot]) * row
        assert_close(out[t], total.float().to(torch.bfloat16), k=width, roundings=2)


def test_gated_mlp_rounds_gate_up_and_hidden() -> None:
    block = GatedMlp(CONFIG, ONE, "mlp", 96, True)
    init_weights(block, 8)
    x = rows(3, HIDDEN, 2)
    z = bf16(x.double() @ block.gate_up_proj.weight.double().t())
    gate, up = z[:, :96], z[:, 96:]
    hidden = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
    expected = bf16(hidden) @ block.down_proj.weight.double().t()
    assert_close(block(x), expected.float().to(torch.bfloat16), k=96, roundings=2)


def test_latent_moe_is_routed_plus_shared() -> None:
    block = LatentMoe(CONFIG, ONE, "moe", True)
    init_weights(block, 5)
    x = rows(3, HIDDEN, 3)
    weights, ids = block.gate.route(x)
    latent = block.experts(block.latent_down_proj(x), weights, ids).double()
    scale = (latent.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
    normed = bf16(latent * scale * block.latent_norm.weight.double())
    routed = bf16(normed @ block.latent_up_proj.weight.double().t())
    expected = (routed + block.shared_experts(x).double()).float().to(torch.bfloat16)
    assert_close(block(x), expected, k=HIDDEN, roundings=2)
    assert float(routed.abs().mean()) > 0.1
    assert float(block.shared_experts(x).abs().mean()) > 0.1


def test_order_of_the_attn_res_steps() -> None:
    """The whole model against the published order of steps, spelled out over its own blocks."""
    config = KimiK3Config.small(6)
    model = KimiK3(config)
    init_weights(model, 1)
    x = rows(2, HIDDEN, 4)
    out = model(x, model.new_state(2, 4))

    state = model.new_state(2, 4)
    bank: list[Tensor] = []
    p, delta = x, torch.zeros_like(x)
    for index in range(6):
        layer: Any = model.layers[index]
        p = p + delta

        def mix(res: AttnRes, prefix: Tensor) -> Tensor:
            sources = torch.stack([*bank, prefix], 1)
            return attn_res_mix(sources, res.norm.weight, res.proj.weight, 1e-5)

        def norm(row: Tensor, weight: Tensor) -> Tensor:
            scale = torch.rsqrt(row.pow(2).mean(-1, keepdim=True) + 1e-5)
            return (row * scale * weight.float()).to(torch.bfloat16)

        assert len(bank) == math.ceil(index / 2)
        h = norm(mix(layer.self_attention_res, p), layer.input_layernorm.weight)
        if index % 2 == 0:
            bank.append(p)
        a = layer.self_attn(h, state.layers[index], state.positions)
        p = a if index % 2 == 0 else p + a
        delta = layer.mlp(norm(mix(layer.mlp_res, p), layer.post_attention_layernorm.weight))
    p = p + delta
    final = mix(model.output_attn_res, p).to(torch.bfloat16).float()
    assert torch.equal(out, norm(final, model.norm.weight))
