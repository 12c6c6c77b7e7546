"""A rewritten graph is an ordinary graph: exported, saved, read back."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

sys.path.insert(0, str(Path(__file__).parents[1] / "rewriter"))
from build import run

M, K, H = 4, 32, 64


class Block(nn.Module):
    """o-proj, add, RMSNorm."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(H, K) * K**-0.5)
        self.norm = nn.Parameter(torch.rand(H) + 0.5)

    def forward(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        total = F.linear(x, self.w) + residual
        return F.rms_norm(total, [H], self.norm, 1e-5), total


def inputs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=generator).to(torch.bfloat16)
    return x, torch.randn(M, H, generator=generator).to(torch.bfloat16)


def exported() -> tuple[Block, torch.export.ExportedProgram]:
    """The block, and the program of its rewritten graph."""
    torch.manual_seed(0)
    block = Block().to(torch.bfloat16).eval().requires_grad_(False)
    flat = torch.export.export(block, inputs()).run_decompositions({})
    module = fx.GraphModule(flat.graph_module, flat.graph_module.graph)
    assert run(module).counts()["output_projection"].found == 1
    weights = [flat.state_dict[spec.target] for spec in flat.graph_signature.input_specs[:2]]  # type: ignore[index]

    class Rewritten(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(weights)
            self.body = module

        def forward(self, *args: Tensor) -> tuple[Tensor, Tensor]:
            results: tuple[Tensor, Tensor] = self.body(*self.weights, *args)
            return results

    return block, torch.export.export(Rewritten(), inputs())


def check(block: Block, got: tuple[Tensor, ...]) -> None:
    for have, want in zip(got, block(*inputs()), strict=True):
        torch.testing.assert_close(have, want, rtol=0.02, atol=0.02)


def test_a_rewritten_program_runs_is_saved_and_read_back(tmp_path: Path) -> None:
    block, program = exported()
    names = [str(n.target) for n in program.graph.nodes]
    assert "k3fuse.output_projection_add_rms_norm.default" in names
    check(block, program.module()(*inputs()))
    torch.export.save(program, tmp_path / "block.pt2")
    again = torch.export.load(tmp_path / "block.pt2")
    assert [str(n.target) for n in again.graph.nodes] == names
    check(block, again.module()(*inputs()))


def test_export_takes_a_rewritten_module() -> None:
    """A module that calls a fused op is exported again without a change."""
    block, program = exported()
    again = torch.export.export(program.module(), inputs())
    assert any("k3fuse." in str(n.target) for n in again.graph.nodes)
    check(block, again.module()(*inputs()))
