"""vLLM 0.33's own Kimi K3 experts with real weights, small, behind our operator.

`k3_moe.py WHEEL` prints one JSON line: what a graph of one MoE layer's opaque op becomes, with the
weights in each order that vLLM has for them, and what its values are. A process of its own, as
k3_layers; target `reference`, tensors on the CPU.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TP = 2
# 16 experts of 256 columns a rank (vLLM's least), rows of 256 and 128.
SIZES = {
    "hidden_size": 256, "moe_intermediate_size": 256 * TP, "num_experts": 16,
    "num_experts_per_token": 4, "num_shared_experts": 1, "routed_expert_hidden_size": 256,
}  # fmt: skip
LAYER = "model.layers.{}.block_sparse_moe"
OPTIONS = {"target": "reference", "inner": "aot_eager", "log": "off"}
NAME = "experts_partials"


def main() -> None:
    """Build two layers, compile and run the op of each in both orders."""
    from k3fuse.patterns.sources.vllm_k3 import environment, layers

    warnings.simplefilter("ignore")
    environment.prepare(Path(sys.argv[1]), TP)
    with layers.engine(TP, 2, "marlin", SIZES) as config:
        layers.init_groups(TP)
        from k3fuse_vllm import blockers  # imports vLLM

        blockers.prepare()
        found = Run(config).all()
    print("RESULT " + json.dumps(found))


class Run:
    """The layers of one engine, and what happens to them."""

    def __init__(self, config: Any) -> None:
        self.config = config
        self.first, self.second = (self._build(i) for i in range(2))
        self.stock: list[Any] = []
        self._library = torch.library.Library("vllm", "IMPL")
        self._library.impl("moe_forward_shared", self._stand_in, "CPU")

    def _stand_in(self, *args: Any) -> tuple[Tensor, Tensor]:
        """vLLM's op has a kernel for CUDA alone here: keep what it is called with."""
        self.stock.append(args)
        return torch.full_like(args[2], 7), torch.full_like(args[0], 7)

    def _build(self, index: int) -> Any:
        """One MoE block on the CPU, its experts in the checkpoint's order."""
        from vllm.models.kimi_k3.nvidia.model import KimiMoE

        from k3fuse.patterns.sources.vllm_k3.environment import CudaToMeta
        from k3fuse_vllm.layer_ref import layer_ref

        text, config = self.config.model_config.hf_text_config, self.config
        with torch.device("cpu"), CudaToMeta():
            moe = KimiMoE(text, config, config.quant_config, LAYER.format(index), index)
        generator = torch.Generator().manual_seed(index)
        for name, parameter in moe.named_parameters():
            if parameter.dtype == torch.uint8:
                low, high = (118, 122) if name.endswith("scale") else (0, 256)
                values = torch.randint(low, high, parameter.shape, generator=generator)
            else:
                values = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
                values *= 0.1 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5
            parameter.data.copy_(values.to(parameter.dtype))
        runner = moe.experts
        runner.k3fuse_ref = layer_ref()(runner.layer_name)
        backend(runner, "B12X_MXFP4_MXFP8")
        return moe

    def inputs(self, m: int) -> tuple[Tensor, Tensor, Tensor]:
        """Latent row, logits and shared row of m tokens."""
        generator = torch.Generator().manual_seed(m)
        rows = torch.randn(2, m, 256, generator=generator).bfloat16()
        logits = 2 * torch.randn(m, 16, generator=generator, dtype=torch.float32)
        return rows[0], logits, rows[1]

    def compiled(self, inner: str = "aot_eager", **options: Any) -> Callable[..., Any]:
        """The opaque op of a runner, as a graph with the layer as an input."""
        from k3fuse.rewriter import backend as k3fuse

        torch._dynamo.reset()
        k3fuse.reset_reports()

        def step(runner: Any, *rows: Tensor) -> Any:
            name = runner._encode_layer_name()
            return runner._forward_entry(*rows, None, name, 0)

        chosen = {**OPTIONS, "inner": inner, **options}
        return torch.compile(step, backend="k3fuse", options=chosen, fullgraph=True)

    def call(self, step: Callable[..., Any], moe: Any, m: int) -> list[Tensor]:
        """Run one step in a forward context."""
        from vllm.forward_context import set_forward_context

        rows = self.inputs(m)
        for tensor in rows:
            torch._dynamo.mark_dynamic(tensor, 0)
        # As the regional route does: one token is no graph of its own.
        shapes: Any = torch.fx.experimental._config
        with (
            torch.no_grad(),
            set_forward_context(None, self.config, num_tokens=m),
            shapes.patch(backed_size_oblivious=True),
        ):
            return list(step(moe.experts, *rows))

    # --- what is looked at --------------------------------------------------------------------

    def all(self) -> dict[str, Any]:
        """Every look, in an order in which each finds the layers as it needs them."""
        found: dict[str, Any] = {"rows": self.accepted("rows"), "inductor": self.inductor()}
        found["refusals"] = self.refusals()
        found["at run time"] = self.at_run_time()
        found["off"] = self.sites(self.compiled(disable=[NAME]))
        found["cache keys"] = self.cache_keys()
        found["contract"] = self.contract()
        for moe in (self.first, self.second):
            reorder(moe.experts)
        found["trtllm"] = self.accepted("trtllm")
        return found

    def accepted(self, layout: str) -> dict[str, Any]:
        """Both layers through one graph, beside the reference on the checkpoint's weights."""
        from k3fuse.rewriter import backend as k3fuse

        self.stock.clear()
        step, worst = self.compiled(), {}
        pointers = [p.data_ptr() for m in (self.first, self.second) for p in m.parameters()]
        for m in (5, 1, 64):
            for name, moe in (("first", self.first), ("second", self.second)):
                got = self.call(step, moe, m)
                worst[f"{name} {m}"] = differences(got, expected(self, moe, m))
        same = [p.data_ptr() for m in (self.first, self.second) for p in m.parameters()]
        report = k3fuse.reports()[0]
        above = [difference(a, torch.full_like(a, 7)) for a in self.call(step, self.first, 65)]
        return {
            "graphs": len(k3fuse.reports()),
            "sites": [[s.form, s.outcome] for s in report.sites if s.pattern == NAME],
            "worst": worst,
            "in place": pointers == same,
            "above 64": above,
            "stock calls": len(self.stock),
            "layout": layout,
        }

    def inductor(self) -> dict[str, Any]:
        """Inductor lowers the op with the layer as an input of the graph."""
        from torch._inductor.codecache import CacheBase

        # It asks the stand-in for CUDA about its chip.
        CacheBase.get_system = staticmethod(lambda: {"hash": "none"})  # type: ignore[method-assign]
        step = self.compiled("inductor")
        got = self.call(step, self.first, 5)
        other = self.call(step, self.second, 5)
        wanted = [expected(self, moe, 5) for moe in (self.first, self.second)]
        return {
            "worst": differences(got + other, wanted[0] + wanted[1]),
            "differ": difference(got[1], other[1]) > 0.1,
        }

    def sites(self, step: Callable[..., Any]) -> list[list[str]]:
        """Outcome and codes of the op's site in a fresh graph."""
        from k3fuse.rewriter import backend as k3fuse

        self.stock.clear()
        got = self.call(step, self.first, 5)
        (report,) = k3fuse.reports()
        stock = len(self.stock) == 1 and bool((got[0] == 7).all())
        sites = [s for s in report.sites if s.pattern == NAME]
        near = [n for n in report.near if n.pattern == NAME]
        found = [[s.outcome, *map(str, s.reasons)] for s in sites]
        found += [["near", str(n.reason)] for n in near]
        return [*found, ["vLLM's op ran" if stock else "ours ran"]]

    def refusals(self) -> dict[str, Any]:
        """One change of the layer at a time; each is undone."""
        held, runner = self.first.experts.routed_experts, self.first.experts
        act = runner._shared_experts._layer.act_fn
        gate = torch.nn.Linear(2, 2)
        changes: list[tuple[str, Any, str, Any]] = [
            ("nothing", runner, "enable_dbo", runner.enable_dbo),
            ("marlin", None, "", "MARLIN"),
            ("bf16 activations", None, "", "B12X_MXFP4_BF16"),
            ("activation", held, "activation", type(held.activation)("silu")),
            ("shared beta", act, "beta", 3.0),
            ("scoring", held, "scoring_func", "softmax"),
            ("groups", held, "num_expert_group", 4),
            ("bias dtype", held, "e_score_correction_bias",
             held.e_score_correction_bias.detach().bfloat16()),
            ("local experts", held, "local_num_experts", 8),
            ("a gate inside", runner, "gate", gate),
            ("capture", runner.router, "capture_fn", print),
            ("no scales", held, "w13_weight_scale", None),
            ("not loaded", held, "w13_weight",
             torch.nn.Parameter(held.w13_weight.to("meta"), requires_grad=False)),
            ("strides", held, "w2_weight", torch.nn.Parameter(
                held.w2_weight.transpose(0, 1).contiguous().transpose(0, 1), requires_grad=False)),
        ]  # fmt: skip
        found = {}
        for name, owner, field, value in changes:
            if owner is None:
                before = backend(runner, value)
                found[name] = self.sites(self.compiled())
                backend(runner, before)
                continue
            old = getattr(owner, field)
            put(owner, field, value)
            found[name] = self.sites(self.compiled())
            put(owner, field, old)
        found["nothing, again"] = self.sites(self.compiled())
        return found

    def at_run_time(self) -> dict[str, Any]:
        """A graph made for one layer meets another one: vLLM's op runs, with the same arguments."""
        step = self.compiled()
        ours = self.call(step, self.second, 5)
        config = self.second.experts.moe_config
        self.stock.clear()
        config.activation_situ_beta = 3.0
        other = self.call(step, self.second, 5)
        config.activation_situ_beta = 4.0
        again = self.call(step, self.second, 5)
        ((hidden, logits, shared_x, ids, ref, unpadded),) = self.stock
        given = self.inputs(5)
        return {
            "stock": [difference(a, torch.full_like(a, 7)) for a in other],
            "again": differences(ours, again),
            "arguments": [
                *map(torch.equal, (hidden, logits, shared_x), given),
                ids is None, unpadded == 0, ref.value == self.second.experts.layer_name,
            ],
        }  # fmt: skip

    def contract(self) -> list[str]:
        """torch's own checks of the operator: schema, fake results; ours and with another layer's
        facts, where vLLM's op runs."""
        from vllm.forward_context import set_forward_context

        from k3fuse_vllm import experts
        from k3fuse_vllm.experts_op import experts_op

        runner, rows = self.first.experts, self.inputs(3)
        facts = experts.read(runner.layer_name, runner).facts()
        checks = ("test_schema", "test_faketensor")
        results = []
        with torch.no_grad(), set_forward_context(None, self.config, num_tokens=3):
            for text in (facts, "another"):
                args = (*rows, None, runner._encode_layer_name(), 0, text, "reference")
                done = torch.library.opcheck(experts_op(), args, test_utils=checks)
                results += sorted(done.values())
        return results

    def cache_keys(self) -> dict[str, bool]:
        """The facts that go into the graph follow the layer, and not its name or addresses."""
        from k3fuse.rewriter.key import factors, key
        from k3fuse.rewriter.options import Options
        from k3fuse.rewriter.pattern import load_patterns
        from k3fuse_vllm import decode_pass, experts
        from k3fuse_vllm.experts_op import experts_op

        def facts(moe: Any) -> str:
            return str(experts.read(moe.experts.layer_name, moe.experts).facts())

        def keys() -> list[str]:
            return [decode_pass.uuid(), key(factors(Options(), load_patterns()))]

        experts.use_engine(self.config)
        one, config, plain = facts(self.first), self.first.experts.moe_config, keys()
        config.activation_situ_beta = 3.0
        beta, other = facts(self.first), keys()
        config.activation_situ_beta = 4.0
        before = backend(self.first.experts, "FLASHINFER_TRTLLM_MXFP4_MXFP8")
        layout = facts(self.first)
        backend(self.first.experts, before)
        seen: list[str] = []

        def keep(graph: Any, _: Any) -> Any:
            nodes = [n for n in graph.graph.nodes if n.target is experts_op()]
            seen.extend(str(n.args[6]) for n in nodes)
            return graph.forward

        from k3fuse.rewriter import backend as k3fuse

        rewrite = k3fuse.rewrite_together

        def kept(module: Any, *args: Any, **kwargs: Any) -> Any:
            report = rewrite(module, *args, **kwargs)
            keep(module, None)
            return report

        k3fuse.rewrite_together = kept
        try:
            self.call(self.compiled(), self.first, 5)
        finally:
            k3fuse.rewrite_together = rewrite
        return {
            "layers alike": one == facts(self.second),
            "beta": one != beta,
            "layout": one != layout,
            "pass and backend": all(a != b for a, b in zip(plain, other, strict=True)),
            "again": plain == keys(),
            "in the graph": seen == [one],
        }


def put(owner: Any, field: str, value: Any) -> None:
    """Set a field of a module, parameters too."""
    if isinstance(owner, torch.nn.Module):
        owner._parameters.pop(field, None)
        owner._modules.pop(field, None)
    setattr(owner, field, value)


def backend(runner: Any, name: str) -> str:
    """Let the layer be one of another backend of vLLM; returns the one that it was."""
    method = runner.routed_experts.quant_method
    before = method.mxfp4_backend.name
    method.mxfp4_backend = type(method.mxfp4_backend)[name]
    return str(before)


def reorder(runner: Any) -> None:
    """The weights as vLLM keeps them for its TRTLLM kernels, scales typed as FP8."""
    from k3fuse.kernels.experts.layouts import shuffled

    held = runner.routed_experts
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    held.plain = [getattr(held, name).detach().clone() for name in names]
    for name, tensor in zip(names, shuffled(*held.plain), strict=True):
        typed = tensor.view(torch.float8_e4m3fn) if name.endswith("scale") else tensor
        put(held, name, torch.nn.Parameter(typed, requires_grad=False))
    backend(runner, "FLASHINFER_TRTLLM_MXFP4_MXFP8")


def expected(run: Run, moe: Any, m: int) -> list[Tensor]:
    """[shared, routed] from the checkpoint's weights, step by step."""
    from k3fuse.kernels.experts.reference import Activation, expert_mxfp4, shared_expert

    hidden, logits, x = run.inputs(m)
    held, situ = moe.experts.routed_experts, Activation("situ", 4.0, 25.0)
    names = ("w13_weight", "w13_weight_scale", "w2_weight", "w2_weight_scale")
    stored = getattr(held, "plain", None)
    w13, s13, w2, s2 = stored or [getattr(held, n).detach() for n in names]
    scores = torch.sigmoid(logits)
    ids = torch.topk(scores + moe.gate.e_score_correction_bias, 4).indices
    weights = scores.gather(1, ids)
    weights = weights / (weights.sum(1, keepdim=True) + 1e-20)
    weights = weights.bfloat16().float() if stored is not None else weights
    routed = torch.zeros(m, 256, dtype=torch.float32)
    for token in range(m):
        for slot, e in enumerate(ids[token].tolist()):
            row = expert_mxfp4(hidden[token, None], w13[e], s13[e], w2[e], s2[e], situ, False)
            routed[token] += weights[token, slot] * row[0].float()
    mlp = moe.shared_experts
    shared = shared_expert(x, [mlp.gate_up_proj.weight], mlp.down_proj.weight, situ)
    return [shared, routed.bfloat16()]


def difference(a: Tensor, b: Tensor) -> float:
    """Norm of the difference over the norm of what is expected."""
    return round(float((a.float() - b.float()).norm() / b.float().norm()), 6)


def differences(got: list[Tensor], wanted: list[Tensor]) -> list[float]:
    """`difference` of each pair."""
    return [difference(a, b) for a, b in zip(got, wanted, strict=True)]


if __name__ == "__main__":
    main()
