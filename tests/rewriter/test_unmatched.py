"""Graphs that hold no Kimi K3 decode come out as they went in: text, nodes and metadata.

Two targets: a plan for GB300 must not touch anything. The reference target accepts every geometry,
so the one thing it may take from another model is a real o-proj + add + RMSNorm (Llama's), and then
its values must not change.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

from build import LEVELS, compiled_graphs, decompositions, identity, rows, run
from tolerances import assert_close

Made = tuple[nn.Module, tuple[Any, ...]]


# --- a hundred small modules --------------------------------------------------------------------


def _mlp(i: int) -> Made:
    acts: list[Callable[[], nn.Module]] = [nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh]
    widths = [8 + 4 * (i % 3), 16, 8]
    layers: list[nn.Module] = []
    for j in range(1 + i % 3):
        layers += [nn.Linear(widths[j % 3], widths[(j + 1) % 3], bias=i % 2 == 0), acts[i % 4]()]
    return nn.Sequential(*layers), (torch.randn(4, widths[0]),)


class _Cnn(nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4 + i % 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4 + i % 4) if i % 2 else nn.GroupNorm(1, 4 + i % 4)
        self.second = nn.Conv2d(4 + i % 4, 4 + i % 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm(self.first(x)))
        return F.max_pool2d(y + self.second(y), 2)


class _Attention(nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.heads = 1 + i % 2
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.mode = i % 3

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (p.view(b, t, self.heads, -1).transpose(1, 2) for p in self.qkv(x).chunk(3, -1))
        if self.mode == 0:
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            mixed = torch.softmax(q @ k.transpose(-1, -2) / 2.0, -1) @ v
        y = self.out(mixed.transpose(1, 2).reshape(b, t, -1))
        return self.norm(x + y) if self.mode != 1 else x + y


class _Router(nn.Module):
    """Softmax top-k over dense experts: no Kimi K3 router, BF16 logits or other scores."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.gate = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.k = 1 + i % 3

    def forward(self, x: Tensor) -> Tensor:
        weights, _ = torch.topk(self.gate(x).softmax(-1).cumsum(-1), self.k)
        return sum(e(x) * weights[:, :1] for e in self.experts)  # type: ignore[return-value]


class _Cell(nn.Module):
    def __init__(self, i: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 8) if i % 2 else nn.GRUCell(8, 8)

    def forward(self, x: Tensor) -> Any:
        return self.cell(x)


def modules() -> dict[str, Callable[[], Made]]:
    made: dict[str, Callable[[], Made]] = {}
    for i in range(24):
        made[f"mlp {i}"] = functools.partial(_mlp, i)
    for i in range(12):
        made[f"cnn {i}"] = lambda i=i: (_Cnn(i), (torch.randn(1, 3, 8, 8),))  # type: ignore[misc]
        made[f"attention {i}"] = lambda i=i: (_Attention(i), (torch.randn(2, 3, 8),))  # type: ignore[misc]
    for i in range(6):
        made[f"router {i}"] = lambda i=i: (_Router(i), (torch.randn(4, 8),))  # type: ignore[misc]
    for i in range(4):
        made[f"cell {i}"] = lambda i=i: (_Cell(i), (torch.randn(3, 8),))  # type: ignore[misc]
    return made


# --- seeded random graphs -----------------------------------------------------------------------

_UNARY = (torch.relu, torch.sigmoid, torch.tanh, torch.exp, torch.neg, torch.square, torch.abs)
_BINARY = (torch.add, torch.mul, torch.sub, torch.maximum)


class _Random(nn.Module):
    """A seeded chain of the operations that Kimi K3 is made of, in other orders."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        self.seed = seed
        self.weight = nn.Parameter(torch.randn(8, 8))
        self.row = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Tensor:
        import random

        choose = random.Random(self.seed)
        values = [x, x * self.row]
        for _ in range(12):
            a, b = choose.choice(values), choose.choice(values)
            kind = choose.randrange(8)
            if kind < 2:
                made = choose.choice(_UNARY)(a)
            elif kind < 4:
                made = choose.choice(_BINARY)(a, b)
            elif kind == 4:
                made = F.linear(a, self.weight)
            elif kind == 5:
                made = a * torch.rsqrt(b.pow(2).mean(choose.choice((0, -1)), keepdim=True) + 1e-5)
            elif kind == 6:
                made = torch.softmax(a, choose.choice((0, -1)))
            else:
                made = torch.stack([a, b], 1).sum(1)
            values.append(made)
        return values[-1] + values[-2]


def random_modules() -> dict[str, Callable[[], Made]]:
    return {
        f"random {s}": lambda s=s: (_Random(s), (torch.randn(4, 8),))  # type: ignore[misc]
        for s in range(142)
    }


ALL = {**modules(), **random_modules()}


def test_there_are_two_hundred() -> None:
    assert len(ALL) == 200


@functools.cache
def captured(group: int, level: str) -> list[tuple[str, fx.GraphModule]]:
    """One in eight of the modules, so that a failure names a small group."""
    from torch.fx.experimental.proxy_tensor import make_fx

    found = []
    for name in list(ALL)[group::8]:
        torch.manual_seed(0)
        module, args = ALL[name]()
        module = module.eval()
        weights = dict(module.named_parameters()) | dict(module.named_buffers())

        def step(w: dict[str, Tensor], *a: Any, m: nn.Module = module) -> Any:
            return torch.func.functional_call(m, w, a)

        with torch.no_grad():
            graph = make_fx(
                torch.func.functionalize(step),
                tracing_mode="fake",
                decomposition_table=decompositions(level),
            )(weights, *args)
        found.append((name, graph))
    return found


# Every module as the first of them leaves it, and half of the modules otherwise.
@pytest.mark.parametrize(
    ("group", "level"),
    [
        pytest.param(group, level, marks=[pytest.mark.nightly] * (level != LEVELS[0] and group > 3))
        for level in LEVELS
        for group in range(8)
    ],
)
def test_two_hundred_modules_stay_as_they_are(group: int, level: str) -> None:
    for name, graph in captured(group, level):
        before = identity(graph)
        for target in ("reference", "gb300:tp8"):
            report = run(graph, target, plan=True)
            assert not report.found, (name, target, report.reason_lines())
            assert identity(graph) == before, (name, target)
            assert report.nodes_before == report.nodes_after


# --- transformers -------------------------------------------------------------------------------


def _config(kind: str) -> Any:
    import transformers as t

    size = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 64}
    if kind == "gpt2":
        return t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
    if kind == "bert":
        return t.BertConfig(**size, intermediate_size=64, max_position_embeddings=32)
    if kind == "t5":
        return t.T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64)
    return t.LlamaConfig(
        **size, intermediate_size=64, num_key_value_heads=4, max_position_embeddings=32
    )


@functools.cache
def layers_of(kind: str, level: str) -> list[fx.GraphModule]:
    import transformers as t

    torch.manual_seed(0)
    classes = {
        "gpt2": t.GPT2Model,
        "bert": t.BertModel,
        "t5": t.T5EncoderModel,
        "llama": t.LlamaModel,
    }
    model = classes[kind](_config(kind)).to(torch.bfloat16).eval()
    ids = torch.arange(5).unsqueeze(0)
    extra = {"use_cache": False} if kind in ("gpt2", "llama") else {}

    class Hidden(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor) -> Tensor:
            out: Tensor = self.model(input_ids=tokens, **extra)[0]
            return out

    return compiled_graphs(Hidden(), ids, level=level, fullgraph=False)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5", "llama"])
def test_other_transformers_stay_as_they_are(kind: str, level: str) -> None:
    graphs = layers_of(kind, level)
    assert sum(len(g.graph.nodes) for g in graphs) > 40
    for graph in graphs:
        before = identity(graph)
        report = run(graph, "gb300:tp8", plan=True)
        assert not report.found
        assert identity(graph) == before


@pytest.mark.parametrize("level", LEVELS)
def test_llamas_output_projection_is_one_and_keeps_its_values(level: str) -> None:
    """o_proj -> add -> RMSNorm is the family's second form: the reference target takes it."""
    taken = 0
    for graph in layers_of("llama", level):
        module = copy.deepcopy(graph)
        report = run(module, "reference")
        assert {s.pattern for s in report.found} <= {"output_projection", "attention_projection"}
        taken += sum(s.pattern == "output_projection" for s in report.found)
        values = [n.meta["val"] for n in graph.graph.nodes if n.op == "placeholder"]
        inputs = [
            torch.arange(v.numel()).view(tuple(v.shape)) % 64
            if v.dtype == torch.int64
            else rows(*v.shape, seed=i).to(v.dtype) * (v.shape[-1] ** -0.5 if v.dim() == 2 else 1.0)
            for i, v in enumerate(values)
        ]
        with torch.no_grad():
            for got, wanted in zip(module(*inputs), graph(*inputs), strict=True):
                # Two layers of BF16 roundings.
                assert_close(got, wanted, k=64, roundings=16, what="llama")
    assert taken == 2
