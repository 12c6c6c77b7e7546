"""`k3fuse kernels gpu`: comparisons, replays and times on a stand-in device; no GPU is one line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

from k3fuse.kernels.build.compile import Built
from k3fuse.kernels.build.errors import LaunchError
from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import gpu_device, registry
from k3fuse.kernels.check.gpu import REPEATS, ROUNDS, Timed, run_case
from k3fuse.rewriter.cli import main

OK, FAILED, WRONG_USE = 0, 1, 2


class Clock:
    """A device on which an addition takes 3 us and putting back 1 us."""

    name, arch, sms, l2_bytes = "stand-in", "sm_90a", 132, 0

    def __init__(self, cache: Path | None = None) -> None:
        self.spent = 0.0
        self.replayed = 0

    def put(self, tensor: Tensor) -> Tensor:
        return tensor.clone()

    def built(self, variant: Variant) -> Built:
        raise NotImplementedError

    def launch(self, variant: Variant, values: Sequence[int]) -> None:
        raise NotImplementedError

    def together(self, calls: Sequence[tuple[Variant, Sequence[int]]]) -> None:
        raise NotImplementedError

    def graph(self, work: Callable[[], None]) -> Callable[[], None]:
        def replay() -> None:
            self.replayed += 1
            work()

        return replay

    def wait(self) -> None:
        pass

    def seconds(self, work: Callable[[], None]) -> float:
        before = self.spent
        work()
        return self.spent - before


class Doubling:
    """y = x + x by two ways. wrong: what is wrong with it."""

    op, name, tokens, timed, notes = "doubling", "one", (1, 4), (4,), ("on a stand-in",)

    def __init__(self, device: Clock, wrong: str = "") -> None:
        self.device, self.fault = device, wrong
        self.x = torch.arange(8.0).view(4, 2) + 1
        self.made = {(m, way): torch.empty(m, 2) for m in self.tokens for way in self.ways(m)}

    def ways(self, m: int) -> Sequence[str]:
        return ("add", "double") if m == 1 else ("add",)

    def step(self, m: int, way: str) -> None:
        y = self.x[:m] + self.x[:m]
        if self.fault == "way" and way == "double":
            y = y * (1 + 2**-23)
        if self.fault == "batch" and m == 1:
            y = y + 1
        if self.fault == "replay" and self.device.replayed == 7:
            y = y - 1
        self.made[m, way].copy_(y)

    def outputs(self, m: int, way: str) -> Mapping[str, Tensor]:
        return {"y": self.made[m, way]}

    def wrong(self, m: int, way: str) -> str:
        return "y is wrong" if self.fault == "value" else ""

    def compared(self) -> Mapping[str, int]:
        return {"elements": 8}

    def after(self) -> str:
        return "not armed" if self.fault == "after" else ""

    def time(self, m: int) -> Timed:
        def spend(microseconds: float) -> Callable[..., None]:
            def work(*_: int) -> None:
                self.device.spent += microseconds * 1e-6

            return work

        return Timed(spend(1), {"kernel": spend(3), "unfused": spend(5)})


def test_a_right_case() -> None:
    device = Clock()
    done = run_case(Doubling(device), device, replays=20)
    assert done.passed, done.faults
    assert done.replays == 20
    assert done.microseconds == {4: {"kernel": pytest.approx(3), "unfused": pytest.approx(5)}}
    # Each timed way: one more replay to warm up, with and without the call.
    assert device.replayed == 20 + 4 * (REPEATS + 1)
    assert ROUNDS > 1


@pytest.mark.parametrize(
    ("wrong", "fault"),
    [
        ("value", "M = 4, add: y is wrong"),
        ("way", "M = 1, double: 2 of 2 elements of y have other bits"),
        ("batch", "M = 1, add: 2 of 2 elements of y have other bits"),
        ("after", "not armed"),
        ("replay", "elements of y have other bits"),
    ],
)
def test_what_is_wrong_is_said_and_not_timed(wrong: str, fault: str) -> None:
    device = Clock()
    done = run_case(Doubling(device, wrong), device, replays=20)
    assert not done.passed
    assert fault in done.faults[0]
    assert done.microseconds == {}
    if wrong == "replay":
        assert done.faults[0].startswith("replay 6, ")


def call(*arguments: str | Path) -> Any:
    return CliRunner().invoke(main, ["kernels", "gpu", *(str(a) for a in arguments)])


def test_without_a_gpu_one_line_and_code_2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = call("output_projection")
    assert result.exit_code == WRONG_USE
    assert result.stdout == ""
    assert result.stderr == (
        "k3fuse: no CUDA device here, so nothing ran and nothing was measured; use a machine with "
        "a GPU of sm_90a, sm_100a, sm_103a\n"
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("attn_res",), "op 'attn_res' has no GPU case; use one of attention_projection"),
        (("output_projection", "--case", "tp4"), "output_projection has no GPU case 'tp4'"),
    ],
)
def test_what_has_no_case(arguments: tuple[str, ...], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == WRONG_USE
    assert message in result.stderr


def test_an_older_gpu_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Ampere:
        name, major, minor = "A100", 8, 0
        multi_processor_count, L2_cache_size = 108, 40 << 20

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "8")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: Ampere)
    with pytest.raises(LaunchError, match="A100 is sm_80a; kernels are built for sm_90a"):
        gpu_device.CudaDevice()


@pytest.mark.parametrize(("wrong", "code"), [("", OK), ("after", FAILED)])
def test_the_command(
    wrong: str, code: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(gpu_device, "CudaDevice", Clock)
    makers = {"one": lambda device: Doubling(device, wrong)}
    monkeypatch.setattr(registry, "gpu_cases_of", lambda op, names: makers)
    result = call("doubling", "--replays", "5", "--json")
    assert result.exit_code == code, result.output
    found = json.loads(result.stdout)
    assert (found["schema"], found["passed"]) == ("k3fuse.kernels-gpu/1", not wrong)
    assert found["device"] == {"name": "stand-in", "arch": "sm_90a", "sms": 132}
    (case,) = found["cases"]
    assert (case["replays"], case["tokens"]) == (5, {"1": ["add", "double"], "4": ["add"]})
    page = tmp_path / "measured.md"
    assert call("doubling", "--replays", "5", "-o", page).exit_code == code
    text = page.read_text()
    assert text.startswith("# doubling on stand-in\n")
    assert ("| 4 | 3.0 | 5.0 |" in text) == (not wrong)
    assert ("- FAULT: not armed" in text) == bool(wrong)
