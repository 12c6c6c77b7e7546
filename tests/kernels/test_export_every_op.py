"""Every fused op inside an exported program: saved and read back, and compiled ahead of time."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from k3fuse.kernels.common.registry import OPS
from op_cases import Case, Draw
from op_forms import FORMS
from test_export import check, exported, inputs

M = 3


class Everything(nn.Module):
    """One call of every form of every op; its tensors are the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cases = [FORMS[form](Draw(seed), M) for seed, form in enumerate(FORMS)]

    def given(self) -> list[Tensor]:
        return [t for case in self.cases for t in case.tensors()]

    def forward(self, *tensors: Tensor) -> list[Tensor]:
        rest = iter(tensors)

        def replaced(value: Any) -> Any:
            if isinstance(value, list):
                return [replaced(v) for v in value]
            return next(rest) if isinstance(value, Tensor) else value

        results: list[Tensor] = []
        for case in self.cases:
            args = tuple(map(replaced, case.args))
            kwargs = {name: replaced(value) for name, value in case.kwargs.items()}
            results += Case(case.op, args, kwargs)()
        return results


def fused(program: torch.export.ExportedProgram) -> set[str]:
    targets = (str(n.target) for n in program.graph.nodes)
    return {t.split(".")[1] for t in targets if t.startswith("k3fuse.")}


def equal(got: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    for have, want in zip(got, wanted, strict=True):
        torch.testing.assert_close(have, want, rtol=0, atol=0)


def test_every_op_is_exported_saved_and_read_back(tmp_path: Path) -> None:
    module = Everything()
    program = torch.export.export(module, tuple(module.given()))
    assert fused(program) == {n.split(".")[1] for info in OPS.values() for n in info.torch_ops}
    torch.export.save(program, tmp_path / "all.pt2")
    again = torch.export.load(tmp_path / "all.pt2")
    assert fused(again) == fused(program)
    equal(again.module()(*module.given()), module(*module.given()))


@pytest.mark.skipif(shutil.which("g++") is None, reason="AOTInductor needs a C++ compiler")
def test_ahead_of_time_compilation_keeps_every_value(tmp_path: Path) -> None:
    """The package calls the ops through torch's dispatcher, so its process imports k3fuse."""
    module, (block, rewritten) = Everything(), exported()
    body = rewritten.module()

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = body

        def forward(self, *tensors: Tensor) -> list[Tensor]:
            return [*module(*tensors[:-2]), *self.body(*tensors[-2:])]

    given = (*module.given(), *inputs())
    options = {"aot_inductor.compile_wrapper_opt_level": "O0"}  # half of the compiler's time
    package = torch._inductor.aoti_compile_and_package(
        torch.export.export(Both(), given),
        package_path=str(tmp_path / "both.pt2"),
        inductor_configs=options,
    )
    got = torch._inductor.aoti_load_package(package)(*given)
    equal(got, Both()(*given))
    check(block, got[-2:])
