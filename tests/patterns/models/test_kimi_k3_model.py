"""Whole-model properties: spellings agree, decode is deterministic, full size runs on meta."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from k3fuse.patterns.models import (
    KdaState,
    KimiK3,
    KimiK3Config,
    MlaState,
    greedy_decode,
    init_weights,
    mark_dynamic_rows,
    new_state,
)

CONFIG = KimiK3Config.small()
FIRST = torch.tensor([1, 2, 3, 4])


@pytest.fixture(autouse=True)
def _no_grad() -> Iterator[None]:
    with torch.no_grad():
        yield
    torch._dynamo.reset()


def built(seed: int = 0, config: KimiK3Config = CONFIG, **options: Any) -> KimiK3:
    model = KimiK3(config, **options)
    init_weights(model, seed)
    return model


def layer(model: KimiK3, index: int) -> Any:
    """One layer, untyped: attributes of its blocks are looked up by the tests."""
    return model.layers[index]


def three_steps(model: KimiK3) -> tuple[list[Tensor], list[Tensor]]:
    """Outputs of three steps of three rows, and every state tensor after them."""
    state = model.new_state(3, 4)
    generator = torch.Generator().manual_seed(1)
    outputs = []
    for _ in range(3):
        x = torch.randn(3, CONFIG.hidden_size, generator=generator).to(torch.bfloat16)
        outputs.append(model(x, state))
    tensors = [tensor for own in state.layers for tensor in own]
    return outputs, [*tensors, state.positions]


@pytest.mark.parametrize(
    "options",
    [{"attn_res": "bank"}, {"merged_projections": False}, {"selection": "sort"}],
    ids=["bank", "separate", "sort"],
)
def test_spellings_are_bit_equal(options: dict[str, Any]) -> None:
    outputs, state = three_steps(built())
    other_outputs, other_state = three_steps(built(**options))
    for actual, expected in zip(other_outputs + other_state, outputs + state, strict=True):
        assert torch.equal(actual, expected)
    changed, _ = three_steps(built(seed=1, **options))  # control
    assert not torch.equal(changed[0], outputs[0])


def test_separate_projections_are_rows_of_the_merged_one() -> None:
    merged, separate = built(), built(merged_projections=False)
    rows = ("q", "k", "v", "g", "f_a", "b")
    attention = layer(separate, 1).self_attn
    weights = [getattr(attention, f"{row}_proj").weight for row in rows]
    assert torch.equal(torch.cat(weights), layer(merged, 1).self_attn.in_proj.weight[:548])
    attention = layer(separate, 3).self_attn
    weights = [
        getattr(attention, name).weight for name in ("q_a_proj", "kv_a_proj_with_mqa", "g_proj")
    ]
    assert torch.equal(torch.cat(weights), layer(merged, 3).self_attn.in_proj.weight)


def test_greedy_decode_is_deterministic() -> None:
    model = built(embed_and_head=True)
    tokens = greedy_decode(model, FIRST, 8)
    assert tokens.shape == (4, 8)
    assert torch.equal(tokens, greedy_decode(model, FIRST, 8))
    assert torch.equal(tokens, greedy_decode(built(embed_and_head=True), FIRST, 8))
    assert len(set(tokens.flatten().tolist())) > 8
    other = greedy_decode(built(seed=1, embed_and_head=True), FIRST, 8)  # control
    assert not torch.equal(tokens, other)


def test_requests_are_independent() -> None:
    model = built(embed_and_head=True, selection="sort")
    together = greedy_decode(model, FIRST, 6)
    swapped = greedy_decode(model, FIRST.flip(0), 6)
    assert torch.equal(together, swapped.flip(0))


def test_the_state_carries_the_history() -> None:
    model = built()
    x = torch.ones(2, CONFIG.hidden_size, dtype=torch.bfloat16)
    state = model.new_state(2, 4)
    first, second = model(x, state), model(x, state)
    assert state.positions.tolist() == [2, 2]
    assert not torch.equal(first, second)
    assert torch.equal(model(x, model.new_state(2, 4)), first)  # control: a fresh state repeats it


@pytest.mark.parametrize("attn_res", ["list", "bank"])
def test_dynamo_fullgraph_equals_eager(attn_res: str) -> None:
    model = built(embed_and_head=True, attn_res=attn_res)
    calls: list[int] = []

    def counted(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        calls.append(len(inputs))
        return torch._dynamo.lookup_backend("aot_eager")(module, inputs)

    compiled = torch.compile(model, backend=counted, fullgraph=True)
    assert torch.equal(greedy_decode(compiled, FIRST, 8), greedy_decode(model, FIRST, 8))
    assert len(calls) == 1


def test_one_dynamic_graph_serves_every_m() -> None:
    model = built(num_layers=4)
    graphs: list[torch.fx.GraphModule] = []

    def kept(module: torch.fx.GraphModule, inputs: list[Tensor]) -> Any:
        graphs.append(module)
        return module

    compiled = torch.compile(model, backend=kept, fullgraph=True)
    for m in (3, 6, 2):
        x = torch.randn(m, CONFIG.hidden_size, generator=torch.Generator().manual_seed(m))
        rows, state = x.to(torch.bfloat16), model.new_state(m, 4)
        mark_dynamic_rows(rows, state)
        assert torch.equal(compiled(rows, state), model(rows, model.new_state(m, 4)))
    assert len(graphs) == 1
    values = [node.meta.get("example_value") for node in graphs[0].graph.nodes]
    symbols = {str(value) for value in values if isinstance(value, torch.SymInt)}
    assert len(symbols) == 1
    assert not any(isinstance(value, torch.SymFloat) for value in values)


class CountOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts dispatched ops by name."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: dict[str, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops[str(func)] = self.ops.get(str(func), 0) + 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("tp", [8, 16])
def test_full_size_step_on_meta(tp: int) -> None:
    config = KimiK3Config()
    start = time.process_time()
    with torch.device("meta"):
        model = KimiK3(config, tp_size=tp, tp_rank=tp - 1, group="tp:0")
        state = model.new_state(8, 1024)
        x = torch.empty(8, config.hidden_size, dtype=torch.bfloat16)
        with CountOps() as count:
            out = model(x, state)
    assert time.process_time() - start < 60
    assert out.shape == (8, 7168)
    assert out.dtype == torch.bfloat16
    kda = layer(model, 0).self_attn.in_proj.weight
    mla = layer(model, 3).self_attn.in_proj.weight
    assert tuple(kda.shape) == ({8: 6288, 16: 3216}[tp], 7168)
    assert tuple(mla.shape) == ({8: 3648, 16: 2880}[tp], 7168)
    assert tuple(layer(model, 1).mlp.experts.w13.shape) == (896, 6144 // tp, 1792)
    assert tuple(layer(model, 1).mlp.experts.w2_scale.shape) == (896, 3584, 3072 // tp // 32)
    # One all-reduce a layer for attention, one for the dense MLP, two a MoE layer.
    assert count.ops["_c10d_functional.all_reduce.default"] == 93 + 1 + 2 * 92
    assert count.ops["aten.topk.default"] == 92
    assert count.ops["aten._softmax.default"] == 2 * 93 + 1 + 24
    assert sum(count.ops.values()) < 300 * 93


def test_full_size_step_on_fake_tensors() -> None:
    with FakeTensorMode():
        model = KimiK3(KimiK3Config(), tp_size=8, group="tp:0", num_layers=13, attn_res="bank")
        state = model.new_state(8, 1024)
        out = model(torch.empty(8, 7168, dtype=torch.bfloat16), state)
    assert out.shape == (8, 7168)
    kda, mla = state.layers[0], state.layers[3]
    assert isinstance(kda, KdaState)
    assert isinstance(mla, MlaState)
    assert mla.latent.shape == (8, 1024, 576)
    assert kda.recurrent.shape == (8, 12, 128, 128)
    assert kda.conv.shape == (8, 3, 3 * 1536)


def test_parameter_names_carry_the_layer() -> None:
    names = dict(built(embed_and_head=True).named_parameters())
    assert "layers.3.self_attn.in_proj.weight" in names
    outside = {name for name in names if not name.startswith("layers.")}
    assert outside == {
        "embed_tokens.weight",
        "output_attn_res.norm.weight",
        "output_attn_res.proj.weight",
        "norm.weight",
        "lm_head.weight",
    }
    assert not any(parameter.requires_grad for parameter in names.values())
    wide = {name.rsplit(".", 1)[-1] for name, p in names.items() if p.dtype == torch.float32}
    assert wide == {"conv_weight", "A_log", "dt_bias", "e_score_correction_bias"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tp_size": 2}, "^group=None "),
        ({"tp_size": 3, "group": "tp:0"}, "^tp_size=3 "),
        ({"tp_size": 2, "tp_rank": 2, "group": "tp:0"}, "^tp_rank=2 "),
        ({"num_layers": 5}, "^num_layers=5 "),
        ({"attn_res": "tensor"}, "^attn_res='tensor' "),
        ({"selection": "max"}, "^selection='max' "),
    ],
)
def test_bad_options(options: dict[str, Any], message: str) -> None:
    KimiK3(CONFIG, tp_size=2, tp_rank=1, group="tp:0", num_layers=1)  # control
    with pytest.raises(ValueError, match=message):
        KimiK3(CONFIG, **options)


def test_bad_helpers() -> None:
    model = built(num_layers=1)
    with pytest.raises(ValueError, match=r"embed_and_head=True"):
        greedy_decode(model, FIRST, 1)
    with pytest.raises(ValueError, match=r"^steps=0 "):
        greedy_decode(built(num_layers=1, embed_and_head=True), FIRST, 0)
    with pytest.raises(ValueError, match=r"^m=0 "):
        new_state(CONFIG, 0, 4)
    with torch.device("meta"):
        empty = KimiK3(CONFIG, num_layers=1)
    with pytest.raises(ValueError, match=r"self_attention_res\.norm\.weight on the meta device"):
        init_weights(empty, 0)
