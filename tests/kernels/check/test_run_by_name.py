"""`run` and `run_sequence`: parameters by name, what is returned, what the report counts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from hand_kernels import DOUBLE, built, double, exchange, exchange_step
from k3fuse.kernels.build.errors import BuildError
from k3fuse.kernels.build.variant import Parameter
from k3fuse.kernels.check import Launch, ParameterError, RunReport, run, run_sequence
from k3fuse.kernels.simulator import (
    Fresh,
    Inside,
    MemoryAccessError,
    Multicast,
    OverlapError,
)


def xy(count: int = 32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(float(count)), torch.full((count,), -1.0)


def doubled(**options: Any) -> RunReport:
    x, y = xy()
    report = run(double(), [{"x": x, "y": Fresh(y)}], **options)
    assert torch.equal(y, 2 * x)
    assert report.outputs[0]["y"] is y
    return report


def test_the_order_of_names_does_not_matter() -> None:
    x, y = xy()
    report = run(double(), [{"y": y, "x": x}])
    assert torch.equal(y, 2 * x)
    assert list(report.outputs[0]) == ["y"]


def test_bytes_are_counted_beside_what_is_needed() -> None:
    report = doubled(needed={"x": 128, "y": 64})
    assert [(b.name, b.place, b.access, b.requested, b.distinct) for b in report.buffers()] == [
        ("x", "own", "read", 128, 128),
        ("y", "own", "write", 128, 128),
    ]
    assert (report.bytes_requested, report.bytes_distinct, report.bytes_needed) == (256, 256, 192)
    # ld.param x 2, mov x 2, mad, mul, add x 2, ld, add, st, ret.
    assert report.sim.warp_instructions == 12
    assert doubled().bytes_needed is None
    assert doubled(needed={"y": 128}).bytes_needed is None


def test_the_report_prints_and_is_json() -> None:
    report = doubled(needed={"x": 128, "y": 64}, seed=3)
    text = str(report)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert lines[0] == "by_hand/double@sm_103a: 1 rank, random schedule 3"
    assert "x own read 128 128 128 1.00" in lines
    assert "y own write 128 64 128 2.00" in lines
    assert "all 256 192 256 1.33" in lines
    assert "32 registers, 0 bytes spilled" in text
    document = json.loads(json.dumps(report.to_json()))
    assert document["bytes_requested"] == 256
    assert document["races"] is None
    assert document["buffers"][1] == {
        "name": "y", "place": "own", "access": "write", "requested": 128, "distinct": 128,
    }  # fmt: skip


def test_peers_are_counted_under_the_owners_names() -> None:
    step = exchange_step(exchange(), 0)
    report = run_sequence(step.launches).reports[0]
    assert all(torch.equal(o.tensor, o.expected) for o in step.outputs)
    places = {(b.name, b.place, b.access): b.requested for b in report.buffers()}
    # Two ranks of 64 floats; `inbox` is what its owner calls what the peer writes.
    assert places["inbox", "peer", "write"] == 2 * 256
    assert places["inbox", "own", "read"] == 2 * 256
    assert places["flag", "peer", "write"] == 2 * 4
    assert not any(name.startswith("peer_") for name, _, _ in places)
    assert [sorted(outputs) for outputs in report.outputs] == [["flag", "inbox", "y"]] * 2
    peers = report.to_json()["peers"]
    assert [(p["rank"], p["owner"], p["requested"]) for p in peers] == [(0, 1, 260), (1, 0, 260)]
    # Both ranks poll their flag: once counts, where the launch says so.
    again = places["flag", "own", "read"] - 2 * 4
    assert again > 0
    launch = replace(exchange_step(exchange(), 0).launches[0], polled=frozenset({"flag"}))
    assert run_sequence([launch]).reports[0].bytes_requested == report.bytes_requested - again


def test_a_sequence_runs_in_stream_order() -> None:
    x, y = xy()
    z = torch.empty(32)
    first = Launch(double(), [{"x": x, "y": Fresh(y)}], {"x": 128})
    second = Launch(double(), [{"x": y, "y": Fresh(z)}])
    report = run_sequence([first, second])
    assert torch.equal(z, 4 * x)
    document = report.to_json()
    assert [r["bytes_requested"] for r in document["launches"]] == [256, 256]
    assert (document["bytes_requested"], document["bytes_needed"]) == (512, None)
    # What the first one calls y is x of the second, which has a y of its own.
    uses = [[(b.name, b.access, b.requested) for b in r.buffers()] for r in report.reports]
    assert uses == [[("x", "read", 128), ("y", "write", 128)]] * 2
    assert [list(r.outputs[0]) for r in report.reports] == [["y"]] * 2
    assert report.reports[1].outputs[0]["y"] is z
    first_end, second_begin = document["timeline"][0]["ended"], document["timeline"][1]["begun"]
    assert first_end <= second_begin
    assert str(report).count("by_hand/double") == 2
    # The control: the other way round, the second kernel reads what nobody wrote.
    with pytest.raises(MemoryAccessError, match="before anyone wrote it"):
        run_sequence([Launch(double(), [{"x": Fresh(torch.empty(32)), "y": z}])])


def pdl_pair(wait: str) -> None:
    """A kernel that triggers before it stores, and a successor that was built with PDL."""
    trigger = "\n  griddepcontrol.launch_dependents;" + DOUBLE
    first = built("producer", trigger, "x y")
    second = built("consumer", wait + DOUBLE, "x y", pdl=True)
    for seed in (None, 1, 2, 3):
        x, y = xy()
        z = torch.empty(32)
        pair = [Launch(first, [{"x": x, "y": y}]), Launch(second, [{"x": y, "y": Fresh(z)}])]
        run_sequence(pair, seed=seed)
        assert torch.equal(z, 4 * x)


def test_a_pdl_successor_that_does_not_wait_is_found() -> None:
    pdl_pair("\n  griddepcontrol.wait;")
    with pytest.raises(OverlapError, match=r"griddepcontrol\.wait"):
        pdl_pair("")


def refused(values: dict[str, Any], kernel: Any = None) -> str:
    with pytest.raises(ParameterError) as caught:
        run(kernel or double(), [values])
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_parameters_that_do_not_fit_are_named() -> None:
    x, y = xy()
    assert refused({"x": x}).endswith("rank 0: parameter 'y' (pointer) is missing")
    assert "names 'z'; the kernel's parameters are x, y" in refused({"x": x, "y": y, "z": y})
    assert "parameter 'x' is a list; use a CPU tensor" in refused({"x": [1.0], "y": y})
    number = replace(double(), plan=replace(double().plan, parameters=(
        Parameter("x", "pointer"), Parameter("n", "i32"))))  # fmt: skip
    assert "parameter 'n' is an i32; give an int" in refused({"x": x, "n": y}, number)
    with pytest.raises(ParameterError, match="needed names 'w'"):
        run(double(), [{"x": x, "y": y}], needed={"w": 1})
    with pytest.raises(ParameterError, match="launches is empty"):
        run_sequence([])
    with pytest.raises(ParameterError, match="launched on 2 ranks, the first kernel on 1"):
        run_sequence([Launch(double(), [{"x": x, "y": y}]), Launch(double(), [{}, {}])])
    doubled()


def test_a_kernel_without_ptx_is_refused() -> None:
    x, y = xy()
    with pytest.raises(BuildError, match="holds no PTX, which the simulator runs; pack it without"):
        run(replace(double(), ptx=""), [{"x": x, "y": y}])


def test_integers_and_multicast_addresses_are_parameters() -> None:
    body = """
  add.s64 %d0, %p0, %b4;
  mov.f32 %f0, 0f40000000;
  multimem.st.relaxed.sys.global.f32 [%d0], %f0;
"""
    rows = [torch.zeros(32), torch.zeros(32)]
    kernel = built("spread", body, "all own")
    ranks: list[dict[str, Any]] = [{"all": Multicast(tuple(rows)), "own": row} for row in rows]
    report = run(kernel, ranks)
    assert all(torch.equal(row, torch.full((32,), 2.0)) for row in rows)
    assert [list(outputs) for outputs in report.outputs] == [["own"], ["own"]]


def test_an_address_inside_a_tensor() -> None:
    bank, y = torch.arange(96.0), torch.full((32,), -1.0)
    report = run(double(), [{"x": Inside(bank, 128), "y": Fresh(y)}])
    assert torch.equal(y, 2 * bank[32:64])
    assert {b.name for b in report.buffers()} == {"x", "y"}
    with pytest.raises(ValueError, match="parameter x: offset 388 is outside its 384 bytes"):
        run(double(), [{"x": Inside(bank, 388), "y": Fresh(y)}])
