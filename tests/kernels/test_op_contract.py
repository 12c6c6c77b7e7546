"""Every op against its own schema: opcheck, fake against real, no aliases, inputs untouched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from compare import digest
from k3fuse.kernels.common.registry import OPS
from op_cases import (
    Case,
    Draw,
    attention_projection,
    attn_res,
    experts,
    mixed,
    output_add_rms_norm,
    router,
    tail,
)
from op_forms import FORMS

SHAPES_PER_OP = 200


def test_every_torch_op_has_a_form() -> None:
    registered = {name.split(".")[1] for info in OPS.values() for name in info.torch_ops}
    assert registered == {form.split("/")[0] for form in FORMS}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [1, 3])
def test_opcheck(form: str, m: int) -> None:
    case = FORMS[form](Draw(seed=7 * m), m)
    torch.library.opcheck(case.op, case.args, case.kwargs)


def _faked(case: Case) -> Case:
    """The same call on fake tensors of one mode."""
    mode = FakeTensorMode()

    def fake(value: Any) -> Any:
        if isinstance(value, list):
            return [fake(v) for v in value]
        return mode.from_tensor(value) if isinstance(value, Tensor) else value

    def op(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return case.op(*args, **kwargs)

    kwargs = {name: fake(value) for name, value in case.kwargs.items()}
    return Case(op, tuple(fake(a) for a in case.args), kwargs)


def _fake_outputs(case: Case) -> list[Tensor]:
    return _faked(case)()


def _sharing(case: Case, results: list[Tensor]) -> list[int]:
    """For each input, then each result: the first of them that has its storage."""
    storages = [t.untyped_storage()._cdata for t in (*case.tensors(), *results)]
    return [storages.index(s) for s in storages]


def _layout(t: Tensor) -> tuple[Any, ...]:
    return (t.shape, t.stride(), t.storage_offset(), t.dtype, t.device)


def _written(case: Case) -> list[bool]:
    """For each tensor of the call: whether the schema says that the op writes it."""
    flags: list[bool] = []
    schema = getattr(case.op, "_schema", None)
    by_name = {a.name: a.alias_info for a in schema.arguments} if schema is not None else {}
    infos = [*by_name.values()][: len(case.args)] + [by_name.get(name) for name in case.kwargs]
    for i, arg in enumerate((*case.args, *case.kwargs.values())):
        info = infos[i] if infos else None
        count = len(Case(None, (arg,)).tensors())
        flags += [info is not None and info.is_write] * count
    return flags


def _check(case: Case, what: str) -> None:
    """Run once for real and once on fakes: what is written, the layout and what shares memory."""
    before = [digest(t) for t in case.tensors()]
    versions = [t._version for t in case.tensors()]
    real = case()
    changed = [digest(t) != b for t, b in zip(case.tensors(), before, strict=True)]
    assert changed == _written(case), f"{what}: an input was written, or was said to be"
    touched = [t._version != v for t, v in zip(case.tensors(), versions, strict=True)]
    assert touched == changed, f"{what}: an input was touched"
    on_fakes = _faked(case)
    fake = on_fakes()
    assert len(real) == len(fake), what
    for r, f in zip(real, fake, strict=True):
        assert _layout(r) == _layout(f), f"{what}: the fake has another layout"
    shared = _sharing(case, real)
    assert shared == _sharing(on_fakes, fake), f"{what}: the fake shares other memory"
    own = range(len(case.tensors()), len(shared))
    assert shared[own.start :] == list(own), f"{what}: output is an input, or another output"


def _generated(op: str, count: int) -> Iterator[tuple[str, Case]]:
    """Calls of so many different shapes, dtypes and forms, a half of them with strided rows."""
    forms = [form for form in FORMS if form.split("/")[0] == op]
    seen: set[object] = set()
    seed = 0
    while len(seen) < count:
        form = forms[seed % len(forms)]
        dtype = (torch.bfloat16, torch.float32, torch.float16)[seed // len(forms) % 3]
        draw = Draw(seed, dtype, strided=bool(seed // 2 % 2))
        m = (0, 1, 2, draw.pick(3, 12), 64)[seed % 5]
        case = FORMS[form](draw, m)
        shape = (form, dtype, tuple(t.shape for t in case.tensors()))
        if shape not in seen:
            yield f"{form} seed {seed} M={m}", case
        seen.add(shape)
        seed += 1
        assert seed < 4 * count, "the generator repeats itself"


TORCH_OPS = sorted({form.split("/")[0] for form in FORMS})


@pytest.mark.parametrize("op", TORCH_OPS)
def test_fake_agrees_with_real(op: str) -> None:
    for what, case in _generated(op, SHAPES_PER_OP):
        _check(case, what)


@pytest.mark.nightly
@pytest.mark.parametrize("op", TORCH_OPS)
def test_opcheck_over_generated_shapes(op: str) -> None:
    """torch's own checks of schema, fakes, autograd and AOTAutograd, static and dynamic."""
    for what, case in _generated(op, SHAPES_PER_OP):
        failed = torch.library.opcheck(case.op, case.args, case.kwargs, raise_exception=False)
        assert set(failed.values()) == {"SUCCESS"}, f"{what}: {failed}"


@pytest.mark.parametrize("target", ["reference", "gb300:tp8"])
def test_the_plan_of_no_tokens_has_no_units(target: str) -> None:
    case = router(Draw(1), 0, 8, 16, 32, 2, quantize=True, plan=True)
    case.kwargs["target"] = target
    *rows, plan = case()
    assert not any(row.numel() for row in rows)
    assert plan[0] == 0
    assert (plan[1:] == -1).all()


def test_the_contract_check_can_fail() -> None:
    """Control: an op that returns a view of its input and one that writes into it are caught."""
    x = torch.ones(2, 3)
    with pytest.raises(AssertionError, match="input was written"):
        _check(Case(lambda t: t.add_(1), (x,)), "writes")
    with pytest.raises(AssertionError, match="output is an input"):
        _check(Case(lambda t: t.view(2, 3), (x,)), "aliases")

    def fakes_do(fake: Any, real: Any) -> Case:
        is_fake = torch._subclasses.fake_tensor.FakeTensor
        return Case(lambda t: fake(t) if isinstance(t, is_fake) else real(t), (x,))

    with pytest.raises(AssertionError, match="the fake shares other memory"):
        _check(fakes_do(lambda t: t.view(2, 3), lambda t: t.clone()), "fake aliases")
    with pytest.raises(AssertionError, match="the fake has another layout"):
        _check(fakes_do(lambda t: t.t().contiguous().t(), lambda t: t.clone()), "fake strides")
    with pytest.raises(AssertionError, match="or was said to be"):
        _check(Case(torch.ops.aten.zero_.default, (torch.zeros(2),)), "writes what it says")


def _replace(case: Case, index: int, value: Any) -> Case:
    args = list(case.args)
    args[index] = value
    return Case(case.op, tuple(args), case.kwargs)


def _prefetching(weights: list[Tensor], split: list[int]) -> Case:
    case = output_add_rms_norm(Draw(1), 2, 4, 8, "")
    return Case(case.op, case.args, {**case.kwargs, "prefetch": weights, "prefetch_split": split})


def _projection() -> Case:
    return attention_projection(Draw(1), 2, 8, 4)


def _mixed() -> Case:
    case = experts(Draw(1), 2, 4, 4, 2, 1, hidden=8, shared=4)
    return mixed(case, Draw(2), 3, bank=False, norm=True, mix=False)


REFUSALS: dict[str, tuple[Case, type[Exception], str]] = {
    "columns not dense": (
        _replace(_projection(), 0, torch.zeros(8, 2, dtype=torch.bfloat16).t()),
        ValueError,
        r"x has strides \(1, 2\).*contiguous\(\)",
    ),
    "weight not dense": (
        _replace(_projection(), 1, [torch.zeros(8, 4, dtype=torch.bfloat16).t()]),
        ValueError,
        r"weights\[0\] has strides",
    ),
    "three dimensions": (
        _replace(_projection(), 0, torch.zeros(1, 2, 8, dtype=torch.bfloat16)),
        ValueError,
        r"x has shape \(1, 2, 8\); expected 2 dimensions",
    ),
    "other K": (
        _replace(_projection(), 1, [torch.zeros(4, 9, dtype=torch.bfloat16)]),
        ValueError,
        r"weights\[0\] has shape \(4, 9\); dim 1 must be 8",
    ),
    "other dtype": (
        _replace(_projection(), 1, [torch.zeros(4, 8)]),
        TypeError,
        r"weights\[0\] is torch.float32; expected torch.bfloat16",
    ),
    "integer x": (
        _replace(_projection(), 0, torch.zeros(2, 8, dtype=torch.int32)),
        TypeError,
        r"x is torch.int32",
    ),
    "no weights": (_replace(_projection(), 1, []), ValueError, r"weights is empty"),
    "missing blocks": (
        _replace(attn_res(Draw(1), 2, 8, 3, delta=True, bank=False, norm=True, mix=False), 3, 4),
        ValueError,
        r"blocks holds 3 tensors for num_blocks=4",
    ),
    "short bank": (
        _replace(attn_res(Draw(1), 2, 8, 1, delta=True, bank=True, norm=True, mix=False), 3, 9),
        ValueError,
        r"blocks\[0\] has \d slots; num_blocks=9",
    ),
    "bank with too few rows": (
        _replace(
            attn_res(Draw(1), 2, 8, 1, delta=False, bank=True, norm=True, mix=False),
            2,
            [torch.zeros(1, 1, 8, dtype=torch.bfloat16)],
        ),
        ValueError,
        r"blocks\[0\] has 1 rows for M=2 tokens; pass at least 2",
    ),
    "top_k": (
        _replace(router(Draw(1), 2, 8, 4, 0, 2), 4, 5),
        ValueError,
        r"top_k=5; it must be within 1..4",
    ),
    "scoring": (
        _replace(router(Draw(1), 2, 8, 4, 0, 2), 5, "tanh"),
        ValueError,
        r"scoring='tanh'; known: sigmoid, softmax",
    ),
    "one scale": (
        _replace(experts(Draw(1), 2, 32, 32, 2, 1, mxfp4=True), 6, None),
        ValueError,
        r"pass both of w13_scale and w2_scale",
    ),
    "scale shape": (
        _replace(
            experts(Draw(1), 2, 32, 32, 2, 1, mxfp4=True),
            4,
            torch.zeros(2, 64, 2, dtype=torch.uint8),
        ),
        ValueError,
        r"w13_scale has shape \(2, 64, 2\); expected \(2, 64, 1\)",
    ),
    "expert id": (
        _replace(experts(Draw(1), 2, 4, 4, 2, 1), 2, torch.tensor([[0], [2]])),
        ValueError,
        r"topk_ids spans 0..2; ids must be within 0..1",
    ),
    "rounding": (
        _replace(experts(Draw(1), 2, 4, 4, 2, 1), 16, "floor"),
        ValueError,
        r"rounding='floor' holds \['floor'\]; known.*hidden_floor",
    ),
    "activation": (
        _replace(experts(Draw(1), 2, 4, 4, 2, 1), 12, "gelu"),
        ValueError,
        r"activation='gelu'; known: situ, silu",
    ),
    "shared down without gate": (
        _replace(experts(Draw(1), 2, 4, 4, 2, 1, shared=4), 8, []),
        ValueError,
        r"shared_gate_up holds 0 weights, shared_row is absent and shared_down is given",
    ),
    "row and gate and up": (
        _replace(
            experts(Draw(1), 2, 32, 32, 2, 1, hidden=8, shared=4, mxfp4=True, made=True),
            8,
            [torch.zeros(8, 8, dtype=torch.bfloat16)],
        ),
        ValueError,
        r"shared_row is given with shared_hidden or shared_gate_up",
    ),
    "values without scales": (
        _replace(
            experts(Draw(1), 2, 32, 32, 2, 1, hidden=8, shared=4, mxfp4=True, made=True), 19, None
        ),
        ValueError,
        r"pass both of latent_q and latent_scale",
    ),
    "scales of other columns": (
        _replace(
            experts(Draw(1), 2, 64, 32, 2, 1, hidden=8, shared=4, mxfp4=True, made=True),
            19,
            torch.zeros(2, 1, dtype=torch.uint8),
        ),
        ValueError,
        r"latent_scale has shape \(2, 1\); dim 1 must be 2",
    ),
    "row of other columns": (
        _replace(
            experts(Draw(1), 2, 32, 32, 2, 1, hidden=8, shared=4, mxfp4=True, made=True),
            17,
            torch.zeros(2, 5, dtype=torch.bfloat16),
        ),
        ValueError,
        r"shared_down has shape \(8, 4\); dim 1 must be 5",
    ),
    "mix without a prefix": (
        _replace(_mixed(), 20, None),
        ValueError,
        r"prefix not given, but score_norm_weight",
    ),
    "mix without a projection": (
        _replace(_mixed(), 24, None),
        ValueError,
        r"score_proj_weight not given, but prefix",
    ),
    "blocks alone": (
        Case(_mixed().op, (*_mixed().args[:20], None, _mixed().args[21]), _mixed().kwargs),
        ValueError,
        r"not given, but blocks",
    ),
    "mix of other blocks": (
        _replace(_mixed(), 22, 4),
        ValueError,
        r"blocks holds 3 tensors for num_blocks=4",
    ),
    "prefix of other columns": (
        _replace(_mixed(), 20, torch.zeros(2, 4, dtype=torch.bfloat16)),
        ValueError,
        r"prefix has shape \(2, 4\); dim 1 must be 8",
    ),
    "prefix of other tokens": (
        _replace(_mixed(), 20, torch.zeros(3, 8, dtype=torch.bfloat16)),
        ValueError,
        r"prefix has 3 rows for M=2",
    ),
    "prefix of another type": (
        _replace(_mixed(), 20, torch.zeros(2, 8)),
        TypeError,
        r"prefix is torch.float32",
    ),
    "three gate and up": (
        _replace(
            router(Draw(1), 2, 4, 4, 4, 2, shared=3),
            10,
            3 * [torch.zeros(6, 4, dtype=torch.bfloat16)],
        ),
        ValueError,
        r"shared_gate_up holds 3 weights",
    ),
    "odd gate and up": (
        _replace(
            router(Draw(1), 2, 4, 4, 4, 2, shared=3), 10, [torch.zeros(5, 4, dtype=torch.bfloat16)]
        ),
        ValueError,
        r"shared_gate_up\[0\] has 5 rows; merged gate and up have even",
    ),
    "activation of the router": (
        _replace(router(Draw(1), 2, 4, 4, 4, 2, shared=3), 11, "gelu"),
        ValueError,
        r"activation='gelu' for shared_gate_up; known: situ, silu",
    ),
    "prefetch not dense": (
        _prefetching([torch.zeros(8, 4).t()], []),
        ValueError,
        r"prefetch\[0\] has strides \(1, 4\)",
    ),
    "rows that a prefetched weight has not": (
        _prefetching([torch.zeros(8, 4)], [9]),
        ValueError,
        r"prefetch_split\[0\]=9; prefetch\[0\] has 8 rows",
    ),
    "other M": (
        _replace(tail(Draw(1), 2, 4, 4), 1, torch.zeros(3, 4, dtype=torch.bfloat16)),
        ValueError,
        r"shared has 3 rows for M=2 tokens",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_refused_arguments(name: str) -> None:
    case, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        case()


@pytest.mark.parametrize(
    "name", ["columns not dense", "other K", "top_k", "one scale", "prefetch not dense"]
)
def test_shape_errors_appear_while_tracing(name: str) -> None:
    case, error, message = REFUSALS[name]
    with pytest.raises(error, match=message):
        _fake_outputs(case)


@pytest.mark.parametrize("form", ["experts/mixed", "experts/mixed_row"])
@pytest.mark.parametrize("m", [1, 3, 9])
def test_experts_with_the_mix_are_experts_then_attn_res(form: str, m: int) -> None:
    case = FORMS[form](Draw(m), m)
    alone = Case(case.op, case.args[:20], case.kwargs)
    (delta,) = alone()
    prefix, *rest = case.args[20:]
    mixing = torch.ops.k3fuse.attn_res.default
    wanted = mixing(prefix, delta, *rest, target="reference", composition="")
    for have, want in zip(case(), [delta, *wanted], strict=True):
        assert torch.equal(have, want)
    other = _replace(case, 20, prefix + 1)  # the control
    assert not torch.equal(case()[2], other()[2])


def test_controls_of_the_refusals_run() -> None:
    for case in (
        _projection(),
        attn_res(Draw(1), 2, 8, 3, delta=True, bank=False, norm=True, mix=False),
        attn_res(Draw(1), 2, 8, 1, delta=True, bank=True, norm=True, mix=False),
        router(Draw(1), 2, 8, 4, 0, 2),
        experts(Draw(1), 2, 32, 32, 2, 1, mxfp4=True),
        experts(Draw(1), 2, 4, 4, 2, 1, shared=4),
        _mixed(),
        tail(Draw(1), 2, 4, 4),
        _prefetching([torch.zeros(8, 4)], [8]),
        _prefetching([], []),
    ):
        assert all(t.isfinite().all() for t in case())
