"""Every op against its own schema: opcheck, fake against real, no aliases, inputs untouched."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from compare import digest
from k3fuse.kernels.common.registry import OPS
from op_cases import Case, Draw, faked, replaced, router
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
    on_fakes = faked(case)
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
    other = replaced(case, 20, prefix + 1)  # the control
    assert not torch.equal(case()[2], other()[2])
