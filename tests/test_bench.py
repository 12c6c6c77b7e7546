"""`k3fuse bench rewrite`: the keys of the command contract, with figures that can be true."""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner

from k3fuse.rewriter.cli import main

KEYS = {
    "layers",
    "nodes",
    "rewrite_seconds",
    "rewrite_cpu_seconds",
    "microseconds_per_node",
    "inductor_pattern_seconds",
    "compile_seconds",
}


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    result = CliRunner().invoke(main, ["bench", "rewrite", "--layers", "1,2", "--json"])
    assert result.exit_code == 0, result.output
    # Nothing but the document on standard output.
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def test_rows_have_the_contract_keys_and_positive_figures(document: dict[str, Any]) -> None:
    assert document["schema"] == "k3fuse.bench/1"
    assert document["target"] == "gb300:tp8"
    assert "cores" in document["machine"]
    assert document["first_rewrite_seconds"] > 0
    assert [row["layers"] for row in document["rows"]] == [1, 2]
    for row in document["rows"]:
        assert set(row) == KEYS
        assert row["rewrite_seconds"] > 0
        assert row["rewrite_cpu_seconds"] > 0
        assert row["inductor_pattern_seconds"] > 0
        assert row["compile_seconds"] is None
        expected = 1e6 * row["rewrite_seconds"] / row["nodes"]
        # Seconds are rounded to a millisecond.
        assert row["microseconds_per_node"] == pytest.approx(expected, abs=600 / row["nodes"])


def test_more_layers_have_more_nodes(document: dict[str, Any]) -> None:
    one, two = (row["nodes"] for row in document["rows"])
    assert two > one > 100


@pytest.mark.parametrize("layers", ["0", "1,x", "", "1,,2"])
def test_a_wrong_list_is_wrong_use(layers: str) -> None:
    result = CliRunner().invoke(main, ["bench", "rewrite", "--layers", layers])
    assert result.exit_code == 2
    assert "--layers" in result.stderr


def test_a_wrong_target_is_wrong_use() -> None:
    result = CliRunner().invoke(
        main, ["bench", "rewrite", "--layers", "1", "--target", "gb200:tp8"]
    )
    assert result.exit_code == 2
    assert "gb200" in result.stderr
