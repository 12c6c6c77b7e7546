"""The spelling of arguments and of size expressions."""

from __future__ import annotations

import json

import pytest
import torch

from k3fuse.kernels.common.encoding import EncodingError, decode, encode
from k3fuse.kernels.common.expressions import ExpressionError, compile_expression


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("12*m0", 84),
        ("((m0//2))", 3),
        ("m0**2 - 3*m1 + 1", 17),
        ("Mod(m0, 4)", 3),
        ("Max(1, m0 - 10, m1)", 11),
        ("Min(m0, m1)", 7),
        ("-m0 + m1", 4),
        ("ModularIndexing(m1, 2, 3)", 2),
        ("CeilDiv(m1, 2)", 6),
        ("64", 64),
    ],
)
def test_size_expressions(text: str, value: int) -> None:
    assert compile_expression(text)({"m0": 7, "m1": 11}) == value


@pytest.mark.parametrize(
    "text", ["__import__('os')", "m0.real", "m0 if m1 else 2", "m0 /", "[1]", "1.5", "True"]
)
def test_other_expressions_are_refused(text: str) -> None:
    with pytest.raises(ExpressionError, match="size expression"):
        compile_expression(text)


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        3,
        -0.0,
        1e-20,
        float("inf"),
        float("-inf"),
        "tp:0",
        [1, [2.5, None]],
        (1, (2,)),
        slice(0, None, 2),
        {"a": [1], "b": torch.float8_e4m3fn},
        torch.bfloat16,
        torch.device("cpu"),
        torch.contiguous_format,
        torch.strided,
        torch.ops.aten.mm.default,
    ],
    ids=str,
)
def test_arguments_survive(value: object) -> None:
    text = json.dumps(encode(value, lambda _: "none"), allow_nan=False)
    back = decode(json.loads(text), lambda _: None)
    assert type(back) is type(value)
    assert repr(back) == repr(value)


def test_nan_survives() -> None:
    back = decode(encode(float("nan"), lambda _: "none"), lambda _: None)
    assert back != back


def test_unknown_argument_is_refused() -> None:
    with pytest.raises(EncodingError, match="argument of type Tensor has no JSON spelling"):
        encode(torch.ones(1), lambda _: "none")
