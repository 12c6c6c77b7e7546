"""Tensor maps as parameters: plan, compiled kernel, packed file, launch, simulation."""

from __future__ import annotations

import ctypes
import json
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from k3fuse.kernels.build import packed, variant
from k3fuse.kernels.build.compile import compile_variant
from k3fuse.kernels.build.errors import BuildError, LaunchError, VariantError
from k3fuse.kernels.build.launch import Launcher, Rows
from k3fuse.kernels.build.variant import Parameter, Plan, offsets
from k3fuse.kernels.check import ParameterError, run
from k3fuse.kernels.common.tensor_map import TileMap
from k3fuse.kernels.simulator import TensorMap, simulate
from test_launch import FakeApi, driver_of
from tile_kernel import BOX, BUILDER, ROWS, TileCopyBuilder, tiles
from workbench_cases import FakeDriver, made

PARAMETERS = BUILDER.plan(BUILDER.variant("sm_103a", {}, {})).parameters
SOURCE, TARGET = 0x7F00_0000_1000, 0x7F00_0002_0000


@pytest.fixture
def listed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(variant.BUILDERS, "tile_copy", "tile_kernel:BUILDER")


def test_a_map_has_128_bytes_at_a_multiple_of_64() -> None:
    assert [p.size for p in PARAMETERS] == [128, 4, 128]
    assert offsets(PARAMETERS) == (0, 128, 192)
    assert offsets((Parameter("x", "pointer"), *PARAMETERS)) == (0, 64, 192, 256)
    assert offsets(PARAMETERS, "sm_90a") == (48, 176, 240)
    assert offsets((Parameter("x", "pointer"), *PARAMETERS), "sm_90a") == (0, 48, 176, 240)


def test_kinds_and_tiles_go_together() -> None:
    for kind, given in (("tensor_map", None), ("pointer", tiles())):
        with pytest.raises(VariantError, match=r"give tiles=TileMap\(...\) for a tensor_map"):
            Parameter("x", kind, given)


def test_plans_with_maps_are_plain_data() -> None:
    full = TileMap("f32", (64, 32), (256,), (16, 8), 64, (1, 2), "nan")
    plan = Plan((1, 1, 1), (32, 1, 1), (1, 1, 1), 0, (Parameter("m", "tensor_map", full),))
    data = json.loads(json.dumps(plan.to_json()))
    assert Plan.from_json(data) == plan
    data["parameters"][0]["tiles"]["box"] = [16, 999]
    with pytest.raises(VariantError, match=r"parameter 'm': box is \(16, 999\)"):
        Plan.from_json(data)


def test_the_author_s_call_wants_the_map_of_the_plan() -> None:
    kernel = replace(made(), plan=BUILDER.plan(BUILDER.variant("sm_103a", {}, {})), ptx="none")
    source = torch.zeros(ROWS, 64).bfloat16()
    for wrong in (source, TensorMap(source, (8, 8))):
        with pytest.raises(ParameterError, match=r"'source' is a tensor map; give TensorMap.of"):
            run(kernel, [{"source": wrong, "skip": 0, "target": source}])


def test_a_kernel_with_maps(listed: None, tmp_path: Path) -> None:
    pytest.importorskip("cutlass")
    for arch in ("sm_90a", "sm_103a"):
        built = compile_variant(BUILDER.variant(arch, {}, {}))
        assert built.plan.parameters == PARAMETERS
    packed.pack([built], tmp_path / "tiles.k3pack")
    (loaded,) = packed.load(tmp_path / "tiles.k3pack")
    assert loaded.plan == built.plan
    source = torch.randn(ROWS, 64).bfloat16()
    for skip in (0, 1):
        target = torch.zeros(ROWS, 64).bfloat16()
        first, last = (loaded.plan.parameters[place].tiles for place in (0, 2))
        assert first is not None
        assert last is not None
        report = simulate(
            loaded.ptx, grid=loaded.plan.grid, block=loaded.plan.block,
            dynamic_smem=loaded.plan.dynamic_smem, names=["source", "skip", "target"],
            params=[[TensorMap.of(source, first), skip, TensorMap.of(target, last, fresh=True)]],
        )  # fmt: skip
        again = torch.zeros(ROWS, 64).bfloat16()
        maps = {"source": TensorMap.of(source, first), "target": TensorMap.of(again, last)}
        named = run(loaded, [{**maps, "skip": skip}])
        assert torch.equal(again, target)
        assert {b.name for b in named.buffers()} == {"source", "target"}
        wanted = source.roll(-skip * BOX, 0)
        wanted[ROWS - skip * BOX :] = 0
        assert torch.equal(target, wanted)
        assert report.traffic[0, "target", 0, "write"].distinct == ROWS * 128


@pytest.mark.parametrize("stated", [tiles(8), tiles(swizzle=0)])
def test_a_plan_with_another_map_is_refused(
    listed: None, monkeypatch: pytest.MonkeyPatch, stated: TileMap
) -> None:
    pytest.importorskip("cutlass")
    right = TileCopyBuilder.plan
    monkeypatch.setattr(
        TileCopyBuilder, "plan", lambda self, v: right(replace(self, stated=stated), v)
    )
    with pytest.raises(BuildError, match="states tensor map source TileMap") as caught:
        compile_variant(BUILDER.variant("sm_103a", {}, {}))
    assert "correct the builder's plan" in str(caught.value)


def launcher(driver: Any) -> Launcher:
    return Launcher(made(parameters=PARAMETERS), driver, stream=lambda: 0)


def test_a_map_is_encoded_once_for_an_address() -> None:
    driver = FakeDriver(sizes=(128, 4, 128))
    launch = launcher(driver)
    for source, skip in ((SOURCE, 1), (SOURCE, 2), (SOURCE + 16, 3), (SOURCE + 16, 4)):
        launch(source, skip, TARGET)
    encoded = [(call[1], call[2]) for call in driver.named("encode_tensor_map")]
    assert encoded == [(tiles(), SOURCE), (tiles(), TARGET), (tiles(), SOURCE + 16)]
    read = [call[4] for call in driver.named("launch")]
    assert [struct.unpack("<i", r[1])[0] for r in read] == [1, 2, 3, 4]
    assert [TileMap.decode(r[0])[0] for r in read] == [SOURCE] * 2 + [SOURCE + 16] * 2
    assert {TileMap.decode(r[2]) for r in read} == {(TARGET, tiles())}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ((SOURCE,), r"1 parameters given, the kernel takes source \(tensor_map\), skip \(i32\)"),
        ((SOURCE + 8, 0, TARGET), "parameter source: address 0x7f0000001008 is no multiple of 16"),
        ((SOURCE, 0, None), r"parameter target=None is no tensor_map \(tensor.data_ptr\(\)\)"),
        ((SOURCE, 2**31, TARGET), "parameter skip=2147483648 is no i32"),
    ],
)
def test_parameters_that_do_not_fit(values: tuple[Any, ...], message: str) -> None:
    driver = FakeDriver(sizes=(128, 4, 128))
    launch = launcher(driver)
    with pytest.raises(LaunchError, match=message):
        launch(*values)
    launch(SOURCE, 0, TARGET)
    assert len(driver.named("launch")) == 1


OPEN = Parameter("source", "tensor_map", tiles(), True)


def test_maps_with_open_rows() -> None:
    plan = Plan((1, 1, 1), (32, 1, 1), (1, 1, 1), 0, (OPEN, *PARAMETERS[1:]))
    assert Plan.from_json(json.loads(json.dumps(plan.to_json()))) == plan
    assert "open_rows" not in PARAMETERS[0].to_json(0)
    for kind, given in (("pointer", None), ("tensor_map", TileMap("bf16", (64,), (), (64,)))):
        with pytest.raises(VariantError, match="open_rows needs tiles"):
            Parameter("x", kind, given, True)
    assert tiles().with_rows(5, 256) == replace(tiles(), dims=(64, 5), strides=(256,))
    for count, pitch, said in ((33, 128, "33 rows given; the map takes 1 to 32"), (0, 128, "0 row"),
                               (5, 120, "strides is")):  # fmt: skip
        with pytest.raises(ValueError, match=said):
            tiles().with_rows(count, pitch)
    with pytest.raises(ValueError, match="two dimensions"):
        TileMap("bf16", (64,), (), (64,)).with_rows(1, 128)


def test_each_launch_gives_the_rows_of_an_open_map() -> None:
    driver = FakeDriver(sizes=(128, 4, 128))
    made_ = made(parameters=(OPEN, *PARAMETERS[1:]))
    launch = Launcher(made_, driver, stream=lambda: 0)
    given = [Rows(SOURCE, 5, 256), Rows(SOURCE, 5, 256), Rows(SOURCE, 6, 256), Rows(SOURCE, 6, 128)]
    for rows in given:
        launch(rows, 0, TARGET)
    encoded = [call[1] for call in driver.named("encode_tensor_map") if call[2] == SOURCE]
    assert encoded == [tiles().with_rows(r.number, r.pitch) for r in given[1:]]
    for bad, said in (
        (SOURCE, r"is no tensor_map \(Rows\(address, number, pitch\)\)"),
        (Rows(SOURCE, 40, 128), "40 rows given"),
        (Rows(SOURCE + 8, 4, 128), "no multiple of 16"),
    ):
        with pytest.raises(LaunchError, match=said):
            launch(bad, 0, TARGET)
    with pytest.raises(LaunchError, match=r"target=Rows.* is no tensor_map \(tensor.data_ptr"):
        launch(given[0], 0, Rows(TARGET, 4, 128))


def test_the_author_s_call_takes_other_rows_where_they_are_open() -> None:
    plan = Plan((1, 1, 1), (32, 1, 1), (1, 1, 1), 0, (OPEN, *PARAMETERS[1:]))
    kernel = replace(made(), plan=plan, ptx="none")
    source = torch.zeros(ROWS, 64).bfloat16()
    target = TensorMap.of(source, tiles())
    for bad in (tiles(8), replace(tiles(), dims=(64, 33))):
        given = {"source": TensorMap.of(source, bad), "skip": 0, "target": target}
        with pytest.raises(ParameterError, match=r"with_rows\(count, pitch\)"):
            run(kernel, [given])
    good = {"source": TensorMap.of(source, tiles().with_rows(7, 256)), "target": target}
    with pytest.raises(ParameterError, match="'skip'"):  # the control: the map is not in the way
        run(kernel, [good])


def test_what_the_driver_is_asked_for() -> None:
    real = pytest.importorskip("cuda.bindings.driver")
    from k3fuse.kernels.build.cuda_driver import _ENCODE

    asked: list[tuple[Any, ...]] = []
    answer = [0]

    def encode(place: int, *arguments: Any) -> int:
        assert place % 64 == 0
        rank = arguments[1]
        asked.append(tuple(x[:rank] if hasattr(x, "contents") else x for x in arguments))
        ctypes.memset(place, 7, 128)
        return answer[0]

    function = _ENCODE(encode)
    place = ctypes.cast(function, ctypes.c_void_p).value

    class Api(FakeApi):
        def cuGetProcAddress(self, *arguments: Any) -> tuple[Any, ...]:
            assert arguments == (b"cuTensorMapEncodeTiled", 12000, 0)
            return self.real.CUresult.CUDA_SUCCESS, 0 if self.fail else place, 0

    padded = TileMap("u4_padded", (256, 24, 7), (128, 4096), (128, 8, 2), 128)
    for given, element, swizzle, fill in (
        (replace(tiles(), fill="nan"), "BFLOAT16", "128B", "NAN_REQUEST_ZERO_FMA"),
        (replace(tiles(), swizzle=0), "BFLOAT16", "NONE", "NONE"),
        (padded, "16U4_ALIGN16B", "128B", "NONE"),
    ):
        assert driver_of(Api(real)).encode_tensor_map(given, SOURCE) == b"\7" * 128
        kind, rank, address, dims, strides, box, steps, *modes = asked.pop()
        assert kind == getattr(real.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{element}")
        assert (rank, address) == (len(given.dims), SOURCE)
        assert (tuple(dims), tuple(strides[:-1])) == (given.dims, given.strides)
        assert (tuple(box), tuple(steps)) == (given.box, given.element_strides)
        assert modes == [
            real.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            getattr(real.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}"),
            real.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            getattr(real.CUtensorMapFloatOOBfill, f"CU_TENSOR_MAP_FLOAT_OOB_FILL_{fill}"),
        ]
    answer[0] = 1
    with pytest.raises(LaunchError, match="cuTensorMapEncodeTiled failed: CUDA_ERROR_INVALID_VAL"):
        driver_of(Api(real)).encode_tensor_map(tiles(), SOURCE)
    with pytest.raises(LaunchError, match="this driver has no cuTensorMapEncodeTiled"):
        driver_of(Api(real, fail="none")).encode_tensor_map(tiles(), SOURCE)
