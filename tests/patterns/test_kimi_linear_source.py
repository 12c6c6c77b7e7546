"""The `kimi-linear` source: one graph a step, every layer form, the values of the eager model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from k3fuse.patterns.sources import kimi_linear


@pytest.mark.parametrize(("m", "experts"), [(1, "batched_mm"), (4, "grouped_mm")])
def test_a_step_is_one_graph_for_all_steps(m: int, experts: str) -> None:
    step, args, kwargs = kimi_linear.module(m, 3, experts_implementation=experts)
    eager = copy.deepcopy(step)
    graphs: list[fx.GraphModule] = []

    def count(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    torch._dynamo.reset()
    compiled = torch.compile(step, backend=count, fullgraph=True)
    seen = []
    with torch.no_grad():
        for _ in range(3):
            logits = compiled(*args, **kwargs)
            assert tuple(logits.shape) == (m, 1, 512)
            assert torch.equal(logits, eager(*args, **kwargs))
            seen.append(logits)
            args = (logits[:, -1:].argmax(-1),)
    assert len(graphs) == 1
    # The caches advance: a later step of the same graph gives other logits.
    assert not torch.equal(seen[0], seen[1])


def test_all_site_forms_are_there() -> None:
    forms = kimi_linear.config(3)
    assert forms.layer_types == ["linear_attention", "linear_attention", "full_attention"]
    assert forms.mlp_layer_types == ["dense", "sparse", "sparse"]
    assert kimi_linear.config(9).layer_types.count("full_attention") == 3


def test_weights_do_not_depend_on_the_callers_generator() -> None:
    first, _, _ = kimi_linear.module(1, 2)
    torch.manual_seed(123)
    second, ids, _ = kimi_linear.module(1, 2)
    for a, b in zip(first.parameters(), second.parameters(), strict=True):
        assert torch.equal(a, b)
    assert ids[0].dtype == torch.int64


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"m": 0}, "m=0"),
        ({"layers": 1}, "layers=1: give at least 2"),
        ({"experts_implementation": "eager"}, "choose one of batched_mm, grouped_mm"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        kimi_linear.module(**arguments)
    assert isinstance(kimi_linear.module()[0], kimi_linear.DecodeStep)  # the control
