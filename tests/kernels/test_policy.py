"""Policy tables: complete, frozen, and honest about what exists."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from k3fuse.kernels.common.policy import MAX_M, Row, Table, planned
from k3fuse.kernels.common.registry import OPS
from op_cases import Draw, attention_projection

# Launches of one op at M = 8 and at M = 9, per the launch budget of a layer.
LAUNCHES = {
    "attention_projection": (1, 1),
    "output_projection": (1, 2),
    "attn_res": (1, 1),
    "router": (2, 2),
    "experts": (3, 3),
    "experts_partials": (3, 3),
    "tail": (1, 1),
}


def test_registry_lists_every_op() -> None:
    assert set(OPS) == set(LAUNCHES)
    for name, info in OPS.items():
        assert info.name == info.table.op == name
        assert info.docs
        for op in info.torch_ops:
            namespace, packet, overload = op.split(".")
            schema = str(getattr(getattr(getattr(torch.ops, namespace), packet), overload)._schema)
            assert schema.startswith(f"k3fuse::{packet}(")
            assert "str target" in schema
            assert "str composition" in schema


@pytest.mark.parametrize("name", LAUNCHES)
def test_every_count_has_one_row(name: str) -> None:
    table = OPS[name].table
    assert table.targets == ("reference", "gb300:tp8", "gb300:tp16")
    for target in table.targets:
        for m in range(1, MAX_M + 1):
            row = table.lookup(target, m)
            assert row is not None
            assert row.m_min <= m <= row.m_max
            if target == "reference":
                assert row.kernel == "reference"
            else:
                assert row.kernel is not None or row.planned
                assert row.launches == LAUNCHES[name][m > 8]
        assert table.lookup(target, 0) is None
        assert table.lookup(target, MAX_M + 1) is None


def test_unknown_target_lists_the_known_ones() -> None:
    message = r"target='gb300:tp4' has no policy for tail; known: reference, gb300:tp8, gb300:tp16"
    with pytest.raises(ValueError, match=message):
        OPS["tail"].table.lookup("gb300:tp4", 1)


def _row(low: int, high: int) -> Row:
    return planned(low, high, "name", 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ((_row(1, 8), _row(10, 64)), "gap at M=9"),
        ((_row(1, 8), _row(8, 64)), "overlap at M=8"),
        ((_row(2, 64),), "gap at M=1"),
        ((_row(1, 63),), "gap at M=64"),
        ((_row(9, 64), _row(1, 8)), "gap at M=1"),
        ((), "gap at M=1"),
    ],
)
def test_bad_tables_are_refused(rows: tuple[Row, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Table("op", {"t": rows})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, 8, "k", 1, "r"), "no range"),
        ((8, 7, "k", 1, "r"), "no range"),
        ((1, 65, "k", 1, "r"), "no range"),
        ((1, 8, "k", 0, "r"), "launches=0"),
        ((1, 8, "k", 1, ""), "no reason"),
        ((1, 8, None, 1, "r"), "neither a kernel nor a plan"),
    ],
)
def test_bad_rows_are_refused(
    arguments: tuple[int, int, str | None, int, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        Row(*arguments)


def test_good_rows_and_tables_are_not() -> None:
    """Control of the refusals above."""
    table = Table("op", {"t": (Row(1, 8, "k", 1, "r"), _row(9, 64))})
    row = table.lookup("t", 8)
    assert row is not None
    assert row.kernel == "k"


def test_tables_are_frozen() -> None:
    table = OPS["tail"].table
    with pytest.raises(TypeError):
        table.rows["new"] = ()  # type: ignore[index]
    with pytest.raises(dataclasses.FrozenInstanceError):
        table.rows["reference"][0].launches = 9  # type: ignore[misc]


@pytest.mark.parametrize(
    ("target", "m", "message"),
    [
        ("reference", 65, r"k3fuse\.attention_projection: M=65 .* outside its policy \(1\.\.64\)"),
        ("gb300:tp8", 8, r"M=8 on target 'gb300:tp8': its kernel .* on cpu, .* no composition"),
    ],
)
def test_without_composition_the_error_says_what_to_do(target: str, m: int, message: str) -> None:
    case = attention_projection(Draw(0), m, 8, 4, target=target)
    with pytest.raises(RuntimeError, match=message):
        case()
    attention_projection(Draw(0), 64, 8, 4)()  # control


def test_unknown_target_is_an_error_of_the_op() -> None:
    with pytest.raises(ValueError, match="has no policy for attention_projection; known"):
        attention_projection(Draw(0), 1, 8, 4, target="gb300")()
