"""From tensors to the launch: which kernel, which parameters; run as it was launched."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from route_runs import E, random_logits
from torch import Tensor

from k3fuse.kernels.build.variant import Variant
from k3fuse.kernels.check import Launch, run_sequence
from k3fuse.kernels.common.operands import float_bits
from k3fuse.kernels.router import route_bits, route_launch
from k3fuse.kernels.router.route_builder import BUILDER, config_of
from k3fuse.kernels.router.route_config import arrivals_offset
from k3fuse.kernels.router.route_launch import TOKENS, Form, Rows, launch, misfit, variant
from k3fuse.kernels.router.route_problem import Problem
from k3fuse.kernels.simulator import Fresh, Inside
from stored import store

TARGET = "gb300:tp8"
LATENT = 3584
K3 = Form(E, LATENT, 16, "sigmoid", True, torch.bfloat16, bias=True, quantize=True, plan=True)


class Recorder:
    """A runtime that keeps what would have been launched."""

    def __init__(self) -> None:
        self.launched: list[tuple[Variant, tuple[int, ...]]] = []

    def kernel(self, chosen: Variant) -> Callable[..., None]:
        return lambda *values: self.launched.append((chosen, values))


def simulate(recorder: Any, known: list[Tensor], written: list[Tensor]) -> None:
    """Run what was launched; every address must be one of these tensors'."""
    ((chosen, values),) = recorder.launched
    named: dict[str, Any] = {}
    for parameter, value in zip(BUILDER.plan(chosen).parameters, values, strict=True):
        named[parameter.name] = value
        if parameter.kind != "pointer":
            continue
        for tensor in (*known, *written):
            offset = value - tensor.data_ptr()
            if 0 <= offset < tensor.nbytes:
                fresh = any(tensor is out for out in written)
                named[parameter.name] = Fresh(tensor) if fresh else Inside(tensor, offset)
    run_sequence([Launch(chosen, [named])], cache=store())


def test_kernels_for_every_count() -> None:
    for m in range(1, 65):
        config = config_of(variant(TARGET, m, K3, logits=False, latent=False))
        assert config.m == min(size for size in TOKENS if size >= m)
        assert config.plan is (m > 8)
        assert config.tp == 8
    softmax = Form(100, 0, 8, "softmax", weights_dtype=torch.float32)
    config = config_of(variant("gb300:tp16", 3, softmax, logits=True, latent=False))
    assert config.softmax
    assert config.wide
    assert not config.bias
    assert config.top_k == 8


def test_what_has_no_kernel_is_said() -> None:
    assert misfit(TARGET, 8, K3) == ""
    assert "k=40" in misfit(TARGET, 8, Form(E, LATENT, 40))
    assert "float16" in misfit(TARGET, 8, Form(E, LATENT, 8, weights_dtype=torch.float16))
    assert "e=900" in misfit(TARGET, 8, Form(900, LATENT, 8))
    assert misfit(TARGET, 8, Form(900, LATENT, 8), logits=True) == ""


def test_behind_the_front_kernel() -> None:
    pytest.importorskip("cutlass")
    m = 33
    logits, bias = random_logits(m, 3)
    chosen = variant(TARGET, m, K3, logits=False, latent=False)
    problem = Problem(config_of(chosen), logits, torch.randn(m, LATENT).bfloat16(), bias)
    problem.deliver()
    (box,) = problem.boxes
    layout = problem.config.box
    recorder: Any = Recorder()
    wide = torch.stack([bias, bias], dim=1)[:, 0]  # not contiguous: copied
    results = launch(
        TARGET, m, K3, Rows(box.data_ptr(), layout), bias, bias=wide, scale=1.0, eps=1e-20,
        runtime=recorder,
    )  # fmt: skip
    ((_, values),) = recorder.launched
    named = dict(zip(problem.config.pointers, values, strict=False))
    assert named["arrivals"] == box.data_ptr() + arrivals_offset(layout)
    assert values[-3:] == (m, float_bits(1.0), float_bits(1e-20))
    place = problem.config.pointers.index("bias")
    patched = (*values[:place], bias.data_ptr(), *values[place + 1 :])
    recorder.launched[0] = (chosen, patched)
    simulate(recorder, [box, bias], results)
    problem.results = [dict(zip(problem.results[0], results, strict=True))]
    assert problem.wrong() == ""
    assert problem.disarmed() == ""


def test_on_plain_rows_the_latent_is_the_one_given() -> None:
    pytest.importorskip("cutlass")
    m = 3
    logits, bias = random_logits(m, 4)
    latent = torch.randn(m, LATENT).bfloat16()
    recorder: Any = Recorder()
    results = launch(
        TARGET, m, K3, Rows(logits=logits, latent=latent), logits, bias=bias, scale=2.0, eps=0.0,
        runtime=recorder,
    )  # fmt: skip
    weights, ids, same, values, scales, _ = results
    assert same is latent
    simulate(recorder, [logits, bias, latent], [weights, ids, values, scales])
    wanted = route_bits.route(logits, bias, 16, scale=2.0, eps=0.0)
    assert torch.equal(weights, wanted[0])
    assert torch.equal(ids, wanted[1])
    assert torch.equal(values, route_bits.quantized(latent)[0])


def test_gather_returns_logits_and_latent() -> None:
    recorder: Any = Recorder()
    form = Form(E, LATENT)
    layout = config_of(variant(TARGET, 2, form, logits=False, latent=False)).box
    logits, latent = launch(
        TARGET, 2, form, Rows(1 << 40, layout), torch.zeros(1), runtime=recorder
    )  # fmt: skip
    assert logits.shape == (2, E)
    assert logits.dtype == torch.float32
    assert latent.shape == (2, LATENT)
    assert latent.dtype == torch.bfloat16


def test_plain_rows_count_their_tokens_in_a_word_of_their_own() -> None:
    """One a device, 0 before the first call; a mailbox has its own."""
    logits, bias = random_logits(9, 4)
    latent = torch.randn(9, LATENT).bfloat16()
    seen = set()
    for _ in range(2):
        recorder: Any = Recorder()
        launch(
            TARGET, 9, K3, Rows(logits=logits, latent=latent), logits, bias=bias, runtime=recorder
        )  # fmt: skip
        ((chosen, values),) = recorder.launched
        names = [p.name for p in BUILDER.plan(chosen).parameters]
        seen.add(values[names.index("arrivals")])
    (word,) = seen
    (counter,) = (c for c in route_launch._COUNTERS.values() if c.data_ptr() == word)
    assert counter.tolist() == [0]
