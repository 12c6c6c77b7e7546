"""From the op's tensors to the launches: operands in place, kernels per count, what is refused."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from expert_runs import BF16
from torch import Tensor

from k3fuse.kernels.build.launch import Rows
from k3fuse.kernels.build.variant import parameter_names
from k3fuse.kernels.common.microscaling import quantize_mxfp8
from k3fuse.kernels.common.numerics import gated_row
from k3fuse.kernels.common.policy import Row
from k3fuse.kernels.common.tolerances import compare, tolerance
from k3fuse.kernels.experts import launch as launching
from k3fuse.kernels.experts import reference
from k3fuse.kernels.experts.builder import config_of, k3
from k3fuse.kernels.experts.cases import SITU, kernel, problem
from k3fuse.kernels.experts.launch import Operands, launch, misfit, partials, variants
from k3fuse.kernels.experts.layouts import TRTLLM
from k3fuse.kernels.experts.policy import (
    BLOCK,
    ENVIRONMENT,
    EXPERTS,
    MIXED,
    MIXING,
    TABLE,
    TAKING,
    TAKING_MIXING,
    TWIN,
    mixes,
)
from k3fuse.kernels.experts.reference import Activation
from k3fuse.kernels.prefetch.launch import Ahead
from k3fuse.kernels.simulator import Inside, Launch, TensorMap, simulate_sequence
from k3fuse.kernels.tail.builder import config_of as tail_config
from k3fuse.kernels.tail.mix import Mix
from stored import store

TARGET = "gb300:tp16"
ROW = Row(1, 8, "mx_experts", 3, "for these tests")
HIDDEN, LATENT, SHARED = 7168, 3584, 192


def operands(m: int, merged: bool = True) -> Operands:
    """A narrow expert of the kernel's 16 clusters, and a shared expert of 1024 input columns."""
    shape = {"m": 8, "latent": 896, "inter": 64, "top_k": 2, "hidden": 0, "shared": 0}
    made = problem(kernel("sm_103a", shape), m, seed=m, experts=4)
    generator = torch.Generator().manual_seed(m)

    def normal(*size: int) -> Tensor:
        return (torch.randn(*size, generator=generator) * size[-1] ** -0.5).to(BF16)

    gate_up = normal(2 * SHARED, 1024)
    halves = [gate_up] if merged else [half.clone() for half in gate_up.chunk(2)]
    return Operands(
        made.x, made.weights, made.ids, made.w13, made.w13_scale, made.w2, made.w2_scale,
        normal(m, 1024) * 32, halves, normal(HIDDEN, SHARED), normal(LATENT),
        normal(HIDDEN, LATENT),
    )  # fmt: skip


class Recorder:
    """A runtime that keeps what would have been launched."""

    def __init__(self) -> None:
        self.launched: list[tuple[Any, tuple[Any, ...]]] = []

    def kernel(self, chosen: Any) -> Any:
        return lambda *values: self.launched.append((chosen, values))


def simulate(recorder: Recorder, tensors: list[Tensor]) -> None:
    """Run all launches; every address must lie in one of the tensors."""
    made = []
    for chosen, numbers in recorder.launched:
        built = store().get(chosen)
        params: list[Any] = []
        for parameter, number in zip(built.plan.parameters, numbers, strict=True):
            if parameter.kind not in ("pointer", "tensor_map"):
                params.append(number)
                continue
            place = number.address if isinstance(number, Rows) else number
            inside = [t for t in tensors if 0 <= place - t.data_ptr() < t.nbytes]
            assert len(inside) == 1, parameter.name
            if parameter.tiles is None:
                params.append(Inside(inside[0], place - inside[0].data_ptr()))
                continue
            tiles = parameter.tiles
            assert place == inside[0].data_ptr()
            if isinstance(number, Rows):
                tiles = tiles.with_rows(number.number, number.pitch)
            params.append(TensorMap.of(inside[0], tiles))
        plan = built.plan
        made.append(
            Launch(
                built.ptx, plan.grid, plan.block, [params], cluster=plan.cluster,
                dynamic_smem=plan.dynamic_smem, pdl=plan.pdl,
                names=[p.name for p in plan.parameters],
            )
        )  # fmt: skip
    simulate_sequence(made, ranks=1)


def handed_over(given: Operands) -> Operands:
    """The same call with what a router makes of its rows."""
    values, scales = quantize_mxfp8(given.hidden)
    row = gated_row(given.shared_x, given.shared_gate_up, SITU.name, SITU.beta, SITU.linear_beta)
    return replace(
        given, shared_hidden=None, shared_gate_up=[], shared_row=row,
        latent_q=values.view(torch.uint8), latent_scale=scales,
    )  # fmt: skip


@pytest.mark.parametrize("handed", [False, True])
@pytest.mark.parametrize("engine", [BLOCK, pytest.param(TWIN, marks=pytest.mark.nightly)])
def test_the_launches_compute_the_partials(
    engine: str, handed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gate and up, then the experts; the latter may start early, and waits. Or these alone."""
    monkeypatch.setenv(ENVIRONMENT, engine)
    before = operands(3)
    given = handed_over(before) if handed else before
    kept: list[Tensor] = []
    empty = Tensor.new_empty

    def keep(self: Tensor, *size: Any, **how: Any) -> Tensor:
        kept.append(empty(self, *size, **how))
        return kept[-1]

    monkeypatch.setattr(Tensor, "new_empty", keep)
    recorder = Recorder()
    runtime: Any = recorder
    assert misfit(ROW, TARGET, given, SITU) == ""
    routed, shared = partials(ROW, TARGET, given, SITU, False, runtime=runtime)
    ops = [variant.op for variant, _ in recorder.launched]
    assert ops == (["experts"] if handed else ["shared_gate_up", "experts"])
    assert recorder.launched[-1][0].tuning("block") == (engine == BLOCK)
    assert recorder.launched[-1][0].tuning("mxfp8") == handed
    counts = launching.arrivals(given.hidden.device)
    tensors = [*given.weights.values(), given.hidden, given.shared_x, given.topk_ids]
    tensors += [t for t in (given.latent_q, given.latent_scale) if t is not None]
    simulate(recorder, [*tensors, given.topk_weights, counts, *kept])
    assert given.w13_scale is not None
    assert given.w2_scale is not None
    assert given.shared_down is not None
    rows = reference.routed_rows(
        given.hidden, given.topk_ids, given.w13, given.w13_scale, given.w2, given.w2_scale, SITU,
        False,
    )  # fmt: skip
    expected = reference.weighted_sum(rows, given.topk_weights)
    assert compare(routed, expected, tolerance(BF16, 896, 2)).ok
    expected = reference.shared_expert(
        before.shared_x, before.shared_gate_up, given.shared_down, SITU
    )
    assert compare(shared, expected, tolerance(BF16, 1024, 2)).ok
    assert int(counts.abs().max()) == 0


def test_a_kernel_for_every_form(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(2, merged=False)
    first, second = variants(ROW, TARGET, given, True)
    assert first is not None
    assert (first.size("m"), first.size("width")) == (8, SHARED)
    assert [second.tuning(n) for n in ("floor", "float_weights", "wide_ids")] == [1, 0, 1]
    other = replace(given, topk_ids=given.topk_ids.int(), topk_weights=given.topk_weights.float())
    _, second = variants(replace(ROW, m_max=64), TARGET, other, False)
    assert [second.tuning(n) for n in ("floor", "float_weights", "wide_ids")] == [0, 1, 0]
    assert second.size("m") == 64
    for engine in (BLOCK, TWIN):
        monkeypatch.setenv(ENVIRONMENT, engine)
        first, second = variants(ROW, TARGET, handed_over(given), False)
        assert first is None
        assert second.size("shared") == SHARED
        assert (second.tuning("block"), second.tuning("mxfp8")) == (engine == BLOCK, 1)


def test_what_the_block_scaled_engine_does_not_take_runs_the_twin() -> None:
    """Weights on 16 bytes, and experts wider than a tile; other architectures."""
    given = operands(2)
    assert launching.engine("sm_103a", given) == BLOCK  # the control
    assert launching.engine("sm_90a", given) == TWIN
    store = torch.zeros(given.w2.numel() + 48, dtype=torch.uint8)
    start = 16 + -store.data_ptr() % 32
    apart = store[start : start + given.w2.numel()].view(given.w2.shape)
    wide = given.w2.repeat(1, 1, 9)
    for w2 in (apart, wide):
        other = replace(given, w2=w2)
        assert launching.engine("sm_103a", other) == TWIN
        assert misfit(ROW, TARGET, other, SITU) == ""
        assert variants(ROW, TARGET, other, False)[1].tuning("block") == 0


def in_vllms_order(latent: int, inter: int) -> Operands:
    """Operands whose weights are stored as vLLM does; their values do not matter."""
    given, stored = operands(2), max(inter, 256)

    def zeros(*size: int) -> Tensor:
        return torch.zeros(1, *size, dtype=torch.uint8)

    return replace(
        given, hidden=torch.zeros(2, latent, dtype=BF16), layout=TRTLLM, width=inter,
        w13=zeros(2 * stored, latent // 2), w13_scale=zeros(2 * stored, latent // 32),
        w2=zeros(latent, stored // 2), w2_scale=zeros(latent, stored // 32),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("latent", "inter", "said"),
    [(3584, 192, ""), (3584, 384, ""), (1792, 128, ""), (896, 192, "shuffled rows of 896 by 192"),
     (3584, 64, "shuffled rows of 3584 by 64"), (3584, 640, "an expert of 3584 by 640")],
)  # fmt: skip
def test_vllms_order_has_the_policys_engine_where_it_fits(
    latent: int, inter: int, said: str
) -> None:
    given = in_vllms_order(latent, inter)
    because = launching.twin_because("sm_103a", given)
    assert because.startswith(said)
    assert bool(because) == bool(said)
    variant = variants(ROW, TARGET, given, False)[1]
    assert (variant.tuning("block"), variant.tuning("shuffled")) == (int(not said), 1)


def test_the_environment_chooses_the_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    given = operands(2)
    assert launching.twin_because("sm_103a", given) == ""  # the control
    assert "the engine of sm_90a" in launching.twin_because("sm_90a", given)
    monkeypatch.setenv(ENVIRONMENT, TWIN)
    assert launching.twin_because("sm_103a", given) == f"{ENVIRONMENT}={TWIN}"
    assert variants(ROW, TARGET, given, False)[1].tuning("block") == 0
    monkeypatch.setenv(ENVIRONMENT, "mma")
    with pytest.raises(ValueError, match=r"EXPERTS_ENGINE='mma' .* use block_scaled or bf16"):
        launching.engine("sm_103a", given)
    monkeypatch.setenv(ENVIRONMENT, BLOCK)
    assert launching.engine("sm_103a", given) == BLOCK
    with pytest.raises(ValueError, match="no engine of sm_90a; use bf16"):
        launching.engine("sm_90a", given)


def test_operands_that_do_not_fit_are_named() -> None:
    given = operands(2)
    for change, said in (
        ({"hidden": given.hidden.float()}, "hidden is torch.float32"),
        ({"shared_hidden": given.shared_x.half()}, "shared_hidden is torch.float16"),
        ({"topk_weights": given.topk_weights.half()}, "topk_weights is torch.float16"),
        ({"w13_scale": None, "w2_scale": None}, "have no scales"),
        ({"shared_down": None, "shared_gate_up": []}, "no shared expert"),
        ({"w13": given.w13.repeat(256, 1, 1)}, "1024 experts"),
        ({"hidden": given.hidden[:, :800]}, "latent=800"),
        ({"shared_down": torch.zeros(7000, SHARED, dtype=BF16)}, "hidden=7000"),
        ({"up_weight": None}, "no latent norm with an up-projection"),
        ({"up_weight": torch.zeros(HIDDEN, 896, dtype=BF16)}, r"up_weight is \(7168, 896\)"),
    ):
        message = misfit(ROW, TARGET, replace(given, **change), SITU)  # type: ignore[arg-type]
        assert re.search(said, message), message
    assert misfit(ROW, TARGET, handed_over(given), SITU) == ""
    odd = torch.zeros(2, 193, dtype=BF16)
    message = misfit(ROW, TARGET, replace(handed_over(given), shared_row=odd), SITU)
    assert "shared=193" in message
    assert "activation is 'silu'" in misfit(ROW, TARGET, given, Activation("silu", 0.0, 0.0))
    assert misfit(ROW, TARGET, given, SITU) == ""  # the control


def test_the_op_ends_with_the_tail() -> None:
    """Three launches, as the policy says, or two; the tail takes the partials as they are left."""
    mapped = SimpleNamespace(multicast=4096, addresses=tuple(range(0, 16 * 4096, 4096)))
    space = SimpleNamespace(own=0, rank=3, multicast=True, mapped=mapped)
    for m, target, table in (
        (2, "gb300:tp8", TABLE), (40, TARGET, TABLE), (2, TARGET, TAKING), (40, TARGET, TAKING),
    ):  # fmt: skip
        row = table.lookup(target, m)
        assert row is not None
        recorder = Recorder()
        runtime: Any = recorder
        place: Any = lambda group, tp: space  # noqa: E731
        given = operands(m) if table is TABLE else handed_over(operands(m))
        (out,) = launch(
            row, target, "g", given, SITU, 1e-5, {"round_before_weight"}, runtime=runtime,
            space=place,
        )  # fmt: skip
        assert (tuple(out.shape), out.dtype) == ((m, HIDDEN), BF16)
        ops = [variant.op for variant, _ in recorder.launched]
        assert ops == ["shared_gate_up", "experts", "tail"][3 - row.launches :]
        *_, (made, values), (last, taken) = recorder.launched
        made_of = dict(zip(parameter_names(made), values, strict=True))
        tail_names = tail_config(last)
        took = dict(zip((*tail_names.addresses, *tail_names.sizes), taken, strict=True))
        assert took["routed"] == made_of["routed"]
        assert took["shared"] == made_of["shared_out"]
        assert last.size("m") == made.size("m") >= m


@pytest.mark.parametrize("mixes", [False, True])
def test_the_next_weights_are_asked_for_before_the_tail(mixes: bool) -> None:
    mapped = SimpleNamespace(multicast=4096, addresses=tuple(range(0, 16 * 4096, 4096)))
    space = SimpleNamespace(own=0, rank=3, multicast=True, mapped=mapped)
    weight = torch.zeros(64, 64, dtype=BF16)
    for m, asked in ((8, ["l2_prefetch"]), (9, [])):
        row = TABLE.lookup(TARGET, m)
        assert row is not None
        recorder = Recorder()
        runtime: Any = recorder
        place: Any = lambda group, tp: space  # noqa: E731
        mix = mix_behind(m) if mixes else None
        launch(
            row, TARGET, "g", operands(m), SITU, 1e-5, set(), mix, ahead=Ahead([weight]),
            runtime=runtime, space=place,
        )  # fmt: skip
        ops = [variant.op for variant, _ in recorder.launched]
        front = ["shared_gate_up", "experts", *asked, "tail"]
        assert ops[: len(front)] == front
        assert "l2_prefetch" not in ops[len(front) :]


def mix_behind(m: int, num_blocks: int = 2, norm: bool = True) -> Mix:
    """An AttnRes that reads the delta of m tokens."""
    rows = [torch.zeros(m, HIDDEN, dtype=BF16) for _ in range(num_blocks + 1)]
    score, proj, out = torch.zeros(3, HIDDEN, dtype=BF16)
    return Mix(rows[0], rows[1:], num_blocks, score, proj, out if norm else None, 1e-5, 1e-6, False)


def test_the_op_ends_with_the_mix() -> None:
    """In the tail's launch up to 8 tokens, in one of its own above; of the tail's delta."""
    mapped = SimpleNamespace(multicast=4096, addresses=tuple(range(0, 16 * 4096, 4096)))
    space = SimpleNamespace(own=0, rank=3, multicast=True, mapped=mapped)
    for m in (1, 8, 9, 40):
        row, given, mix = MIXING.lookup(TARGET, m), operands(m), mix_behind(m)
        assert row is not None
        recorder = Recorder()
        runtime: Any = recorder
        place: Any = lambda group, tp: space  # noqa: E731
        made = launch(
            row, TARGET, "g", given, SITU, 1e-5, set(), mix, runtime=runtime, space=place,
        )  # fmt: skip
        assert [(tuple(t.shape), t.dtype) for t in made] == 3 * [((m, HIDDEN), BF16)]
        delta, out, prefix = made
        ops = [variant.op for variant, _ in recorder.launched]
        assert ops == ["shared_gate_up", "experts", "tail", "attn_res"][: row.launches]
        last, values = recorder.launched[-1]
        took = dict(zip(parameter_names(last), values, strict=True))
        read = {"prefix": mix.prefix, "block0": mix.blocks[0], "out_norm": mix.out_norm_weight}
        if m > 8:
            read |= {"delta": delta, "out": out, "new_prefix": prefix}
        else:
            read |= {"out": delta, "mixed": out, "new_prefix": prefix}
        for name, tensor in read.items():
            assert took[name] == tensor.data_ptr(), name  # type: ignore[union-attr]
        assert took["m"] == m


def test_a_mix_that_does_not_fit_is_named() -> None:
    given = operands(2)
    assert misfit(ROW, TARGET, given, SITU, mix_behind(2)) == ""  # the control
    assert "num_blocks is 9" in misfit(ROW, TARGET, given, SITU, mix_behind(2, 9))
    wide = replace(mix_behind(2), score_norm_weight=torch.zeros(HIDDEN))
    assert "score_norm_weight is torch.float32" in misfit(ROW, TARGET, given, SITU, wide)


@pytest.mark.parametrize("tp", [8, 16])
def test_the_policy_says_up_to_where_the_tail_mixes(tp: int) -> None:
    for m in range(1, 65):
        for without, mixing in ((TABLE, MIXING), (TAKING, TAKING_MIXING)):
            before, row = without.lookup(f"gb300:tp{tp}", m), mixing.lookup(f"gb300:tp{tp}", m)
            assert before is not None
            assert row is not None
            assert row.launches - before.launches == (m > 8)
            assert row.kernel == (EXPERTS if m > 8 else MIXED)
        assert mixes(f"gb300:tp{tp}", m) == (m <= 8)
        assert mixes("reference", m)
    assert not mixes("reference", 65)


@pytest.mark.parametrize("tp", [8, 16])
def test_every_token_count_has_kernels_that_hold_it(tp: int) -> None:
    for m in range(1, 65):
        row = TABLE.lookup(f"gb300:tp{tp}", m)
        assert row is not None
        assert (row.kernel, row.launches) == (EXPERTS, 3)
        assert TAKING.lookup(f"gb300:tp{tp}", m) == replace(row, launches=2)
        assert m <= row.m_max <= max(8, 2 * m)
        config_of(kernel("sm_103a", k3(tp, row.m_max)))
