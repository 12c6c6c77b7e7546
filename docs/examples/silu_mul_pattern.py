"""A complete pattern: silu(gate) * up as one op. Explained in docs/writing_a_pattern.md."""

import sympy
import torch
from torch import fx

from k3fuse.rewriter.engine import rewrite
from k3fuse.rewriter.guards import Guard, to_value
from k3fuse.rewriter.options import Options
from k3fuse.rewriter.pattern import Pattern
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.site import Kernel, NearMiss, Output, Replacement, Site
from k3fuse.rewriter.sources import capture
from k3fuse.rewriter.view import shape_of


# 1. The fused op: functional, with a fake implementation.
@torch.library.custom_op("example::silu_mul", mutates_args=())
def silu_mul(gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    return [torch.nn.functional.silu(gate) * up]


@silu_mul.register_fake
def _(gate: torch.Tensor, up: torch.Tensor) -> list[torch.Tensor]:
    return [torch.empty_like(gate)]


# 2. The pattern.
M, N = sympy.symbols("M N", integer=True, nonnegative=True)


class SiluMul(Pattern):
    name = "silu_mul"
    summary = "silu(gate) * up"
    guards = (
        Guard(sympy.Le(M, 64), Code.M_OUT_OF_RANGE, "a decode step", proof="reachable"),
        Guard(sympy.Eq(sympy.Mod(N, 8), 0), Code.SHAPE_MISMATCH, "16-byte loads of BF16"),
    )

    def find(self, view):
        for silu in view.by_op.get("aten.silu", ()):
            readers = view.users(silu)
            product = next((n for n in readers if view.canon(n).op == "aten.mul"), None)
            if product is None:
                reason = Reason(Code.OP_MISMATCH, f"{silu.name}: no product", (silu.name,))
                yield NearMiss(self.name, silu, reason)
                continue
            up = next(a for a in view.canon(product).inputs if not view.same(a, silu))
            rows, width = shape_of(product)
            yield Site(
                self.name,
                "plain",
                anchor=silu,
                nodes=(silu, product),
                operands={"gate": silu.args[0], "up": up},
                outputs=(product,),
                values={M: to_value(rows), N: to_value(width)},
            )

    def replacement(self, site, view, target):
        args = (site.operands["gate"], site.operands["up"])
        op = torch.ops.example.silu_mul.default
        return Replacement(op, args, {}, (Output(site.outputs[0], 0),))

    def kernel(self, site, target):
        return Kernel("silu_mul", available=True, launches=1)


# 3. Try it.
def mlp(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.silu(gate) * up + 1


def run(rows: int) -> tuple[fx.GraphModule, dict]:
    inputs = (torch.randn(rows, 32), torch.randn(rows, 32))
    graph = capture(mlp, inputs, {}, name="example")[0].module
    options = Options.make({"target": "reference", "log": "off"})
    report = rewrite(graph, options, patterns=(SiluMul(),))
    torch.testing.assert_close(graph(*inputs)[0], mlp(*inputs))
    return graph, report.to_json()


graph, report = run(rows=4)
assert report["patterns"]["silu_mul"]["found"] == 1
assert [n.target for n in graph.graph.nodes].count(torch.ops.example.silu_mul.default) == 1

graph, report = run(rows=65)
assert report["sites"][0]["reason"] == "M_OUT_OF_RANGE"
assert torch.ops.example.silu_mul.default not in [n.target for n in graph.graph.nodes]
