"""Variants and plans: names, defaults, what a kernel covers, and what is refused."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from k3fuse.kernels.build.errors import BuildError, VariantError
from k3fuse.kernels.build.variant import BUILDERS, Parameter, Plan, Variant, builder, offsets
from workbench_cases import ARCHS, OP, SMALL, gemv, mixed_plan


def test_a_variant_has_a_name_and_sorted_sizes() -> None:
    found = builder(OP).variant("sm_103a", {"m": 8}, {"warps": 2})
    assert found.label == "workbench_gemv/m8_n7168_k768_r4_w2@sm_103a"
    assert found.shape == (("k", 768), ("m", 8), ("n", 7168))
    assert found.config == (("pdl", 0), ("rows", 4), ("warps", 2))
    assert (found.size("n"), found.tuning("warps")) == (7168, 2)


@pytest.mark.parametrize("op", BUILDERS)
@pytest.mark.parametrize("arch", ARCHS)
def test_every_listed_variant_has_a_plan(op: str, arch: str) -> None:
    source = builder(op)
    found = source.variants(arch)
    assert source.op == op
    assert len({v.name for v in found}) == len(found) >= 1
    for variant in found:
        assert (variant.op, variant.arch) == (op, arch)
        assert source.plan(variant).ctas >= 1
        assert source.variant(arch, dict(variant.shape), dict(variant.config)) == variant


def test_the_gemv_is_planned() -> None:
    plan = builder(OP).plan(builder(OP).variant("sm_103a", {"m": 8}, {"rows": 2, "pdl": 1}))
    assert (plan.grid, plan.block, plan.cluster) == ((3584, 1, 1), (128, 1, 1), (1, 1, 1))
    assert plan.dynamic_smem == 4 * 4 * 2 * 8
    assert plan.pdl
    assert [p.name for p in plan.parameters] == ["x", "w", "y"]


@pytest.mark.parametrize(
    ("shape", "config", "names"),
    [
        ({"m": 0}, {}, "m=0"),
        ({"m": 9}, {}, "m=9"),
        ({"n": 7170}, {}, "n=7170"),
        ({"k": 764}, {}, "k=764"),
        ({"n": 2**20, "k": 2**12}, {}, "n*k="),
        ({}, {"rows": 0}, "rows=0"),
        ({}, {"warps": 17}, "warps=17"),
        ({}, {"pdl": 2}, "pdl=2"),
        ({"m": 8}, {"rows": 8, "warps": 1}, "rows*m=64"),
        ({"h": 1}, {}, "shape 'h'"),
        ({}, {"stages": 2}, "config 'stages'"),
    ],
)
def test_what_the_gemv_does_not_cover(
    shape: dict[str, int], config: dict[str, int], names: str
) -> None:
    with pytest.raises(VariantError) as caught:
        builder(OP).variant("sm_103a", shape, config)
    assert names in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_edges_of_what_the_gemv_covers() -> None:
    for shape, config in (
        ({"m": 8}, {"rows": 4, "warps": 1}),
        ({"m": 1, "n": 16, "k": 8}, {"rows": 16, "warps": 16, "pdl": 1}),
    ):
        assert builder(OP).variant("sm_90a", shape, config).size("m") == shape["m"]


def test_a_builder_of_ones_own_is_found_by_place() -> None:
    own = "k3fuse.kernels.build.workbench_gemv:BUILDER"
    assert builder(own) is builder(OP)
    for place, message in (
        ("no_such_module:BUILDER", "No module named 'no_such_module'"),
        ("k3fuse.kernels.build.workbench_gemv:OTHER", "has no attribute 'OTHER'"),
        (":BUILDER", "Empty module name"),
    ):
        with pytest.raises(VariantError, match=f"'{place}' names no builder .*{message}"):
            builder(place)


def test_unknown_names_list_the_known() -> None:
    with pytest.raises(VariantError, match="use one of workbench_gemv"):
        builder("gemm")
    with pytest.raises(VariantError, match="'sm_80' is not covered; use one of sm_90a, sm_100a"):
        builder(OP).variant("sm_80", {}, {})
    with pytest.raises(VariantError, match="has no 'h'; it has k, m, n"):
        gemv().size("h")


def test_variants_and_plans_survive_json() -> None:
    variant = gemv(pdl=1)
    assert Variant.from_json(json.loads(json.dumps(variant.to_json()))) == variant
    for plan in (builder(OP).plan(variant), mixed_plan()):
        assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    for broken in ({"op": "x"}, {**variant.to_json(), "shape": [1]}):
        with pytest.raises(VariantError, match="no kernel variant"):
            Variant.from_json(broken)
    with pytest.raises(VariantError, match="no launch plan"):
        Plan.from_json({"grid": [1, 1, 1]})


def test_parameters_are_naturally_aligned() -> None:
    kinds = ("pointer", "i32", "u64", "u32", "i32", "i32", "pointer")
    places = offsets(tuple(Parameter(k, k) for k in kinds))
    assert places == (0, 8, 16, 24, 28, 32, 40)
    with pytest.raises(VariantError, match="kind 'f64' is unknown"):
        Parameter("x", "f64")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"grid": (0, 1, 1)}, "grid"),
        ({"block": (1025, 1, 1)}, "block"),
        ({"block": (512, 4, 1)}, "2048 threads"),
        ({"cluster": (4, 1, 1)}, "no multiple of cluster"),
        ({"dynamic_smem": -1}, "negative"),
    ],
)
def test_impossible_plans(change: dict[str, object], message: str) -> None:
    fields: dict[str, object] = {
        "grid": (6, 1, 1), "block": (64, 1, 1), "cluster": (3, 1, 1), "dynamic_smem": 0,
        "parameters": (),
    }  # fmt: skip
    assert Plan(**fields).ctas == 6  # type: ignore[arg-type]
    with pytest.raises(VariantError, match=message):
        Plan(**{**fields, **change})  # type: ignore[arg-type]


def test_describing_a_kernel_loads_no_dsl() -> None:
    code = (
        "import sys\n"
        "from k3fuse.kernels.build import builder, compile, cache, packed, launch, cuda_driver\n"
        f"b = builder({OP!r}); b.plan(b.variant('sm_103a', {SMALL!r}, {{}}))\n"
        "print([m for m in sys.modules if m.split('.')[0] in ('cutlass', 'cuda', 'torch')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert done.stdout.strip() == "[]", done.stderr[-1000:]


def test_errors_are_value_errors() -> None:
    assert issubclass(VariantError, BuildError)
    assert issubclass(BuildError, ValueError)
