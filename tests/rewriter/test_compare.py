"""Two dumps side by side, and one site as a picture for issues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner, Result

from k3fuse.rewriter.cli import main
from k3fuse.rewriter.compare import compare, compare_text
from k3fuse.rewriter.html.boxes import MOST_BOXES, draw
from reports import dumped, full_size, small

SAME, DIFFERENT, WRONG_USE = 0, 1, 2


def call(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, [str(a) for a in arguments])


def saved(folder: Path, document: dict[str, Any]) -> Path:
    folder.mkdir()
    (folder / "summary.json").write_text(json.dumps(document))
    return folder


# --- diff A B -----------------------------------------------------------------------------------


def test_equal_reports() -> None:
    found = compare(small(), small())
    assert found["same"]
    assert (found["asked"], found["counts"], found["sites"]) == ({}, {}, [])
    assert compare_text(found) == "the same sites\n"


def test_seconds_alone_are_no_difference() -> None:
    assert compare(small(), {**small(), "seconds": 9.0, "phases": {}})["same"]


def test_a_version_is_named_and_is_no_difference_of_sites() -> None:
    other = small()
    other["versions"]["torch"] = "9.9"
    other["options"]["log"] = "all"
    found = compare(small(), other)
    assert found["same"]
    assert set(found["asked"]) == {"version of torch", "option log"}
    assert found["asked"]["option log"] == ["off", "all"]


def test_planned_against_refused() -> None:
    found = compare(small(), small(plan=False))
    assert not found["same"]
    assert found["asked"]["plan"] == [True, False]
    assert found["counts"]["experts"] == {"found": [1, 0], "refused": [0, 1]}
    assert {s["pattern"] for s in found["sites"]} >= {"experts"}
    experts = next(s for s in found["sites"] if s["pattern"] == "experts")
    assert experts["layer"] == 3
    assert experts["fields"]["outcome"] == ["found", "refused"]
    assert experts["fields"]["reason"] == [None, "KERNEL_UNAVAILABLE"]


def test_new_and_gone_sites() -> None:
    cut = full_size()
    cut["sites"] = [s for s in cut["sites"] if s["layer"] not in (5, 6, 9)]
    found = compare(full_size(), cut)
    assert {(s["layer"], s["change"]) for s in found["sites"]} == {
        (5, "gone"), (6, "gone"), (9, "gone"),
    }  # fmt: skip
    assert "router: gone (found)  (layers 5-6, 9)" in compare_text(found)
    back = compare(cut, full_size())
    assert {s["change"] for s in back["sites"]} == {"new"}


def test_a_guard_and_a_graph_that_differ() -> None:
    other = full_size()
    site = next(s for s in other["sites"] if (s["layer"], s["pattern"]) == (57, "router"))
    site["guards"][1].update(actual="K = 128", passed=False)
    site["pieces"]["before"] = other["sites"][0]["pieces"]["before"]
    (entry,) = compare(full_size(), other)["sites"]
    assert (entry["layer"], entry["pattern"], entry["change"]) == (57, "router", "other")
    fields = entry["fields"]
    guard = next(v for k, v in fields.items() if k.startswith("guard "))
    assert guard[1] == "K = 128 FAIL"
    assert "graph before" in fields


def test_diff_of_two_dumps_by_exit_code(tmp_path: Path) -> None:
    one, two = saved(tmp_path / "a", small()), saved(tmp_path / "b", small(plan=False))
    assert call("diff", one, one).exit_code == SAME
    result = call("diff", one, two)
    assert result.exit_code == DIFFERENT
    assert "plan: True -> False" in result.stdout
    assert "1 site differs" in result.stdout
    document = json.loads(call("diff", one, two, "--json", "--pattern", "experts").stdout)
    assert [s["pattern"] for s in document["sites"]] == ["experts"]
    assert call("diff", one, tmp_path / "none").exit_code == WRONG_USE


# --- show ---------------------------------------------------------------------------------------


def test_a_site_as_mermaid(tmp_path: Path) -> None:
    folder = dumped(tmp_path / "dump")
    text = call("show", folder, "--layer", "57", "--pattern", "router").stdout
    lines = text.splitlines()
    assert lines[0] == "flowchart TD"
    assert lines.count("  end") == 2
    assert '["<b>+ k3fuse.router' in text
    assert "<b>- aten.topk</b>" in text
    assert " --> " in text
    document = json.loads(call("show", folder, "--layer", "57", "--json").stdout)
    assert (document["layer"], document["pattern"]) == (57, "attn_res")
    assert set(document["pieces"]) == {"before", "after"}


@pytest.mark.parametrize("part", ["before", "after"])
def test_a_site_as_svg(part: str, tmp_path: Path) -> None:
    folder = dumped(tmp_path / "dump")
    text = call(
        "show", folder, "--layer", "57", "--pattern", "experts", "--svg", "--part", part
    ).stdout
    root = ElementTree.fromstring(text)  # well-formed by itself
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    boxes = root.findall(".//{http://www.w3.org/2000/svg}rect")
    assert len(boxes) == (34 if part == "before" else 1)
    assert root.get("aria-label") == f"experts, layer 57, {part} the rewrite"


def test_what_cannot_be_shown_is_wrong_use(tmp_path: Path) -> None:
    bare = saved(tmp_path / "bare", {**small(), "graphs": {}})
    assert "has no graph pieces" in call("show", bare).stderr
    refused = saved(tmp_path / "refused", small(plan=False))
    result = call("show", refused, "--svg", "--part", "after", "--pattern", "experts")
    assert result.exit_code == WRONG_USE
    assert "use --part before" in result.stderr
    assert call("show", refused).exit_code == SAME


# --- pictures -----------------------------------------------------------------------------------


def test_pictures_are_small_and_complete() -> None:
    for key, piece in full_size()["graphs"].items():
        drawing = draw(piece)
        assert 1 <= len(drawing.boxes) <= MOST_BOXES, key
        inside = [n["op"] for n in piece["nodes"] if n["op"] != "input"]
        drawn = [op for box in drawing.boxes for op in box.ops]
        assert sorted(drawn) == sorted(inside), key


def test_pictures_have_no_cycle() -> None:
    """Folding may not put a way out of a box and back into it."""
    for key, piece in full_size()["graphs"].items():
        drawing = draw(piece, most=12)  # folds as far as it can
        left = set(range(len(drawing.boxes)))
        edges = set(drawing.edges)
        while left:
            free = {b for b in left if not any(t == b and f in left for f, t in edges)}
            assert free, key
            left -= free


def test_a_cycle_would_be_noticed() -> None:
    """Two heavy operations between small ones stay apart."""
    nodes = [
        {"name": "a", "op": "aten.add", "value": "f32[4]", "inputs": [], "text": "a"},
        {"name": "m", "op": "aten.mm", "value": "f32[4]", "inputs": ["a"], "text": "m"},
        {"name": "b", "op": "aten.mul", "value": "f32[4]", "inputs": ["a", "m"], "text": "b"},
    ]
    drawing = draw({"nodes": nodes}, most=1)
    assert [b.ops for b in drawing.boxes] == [["aten.add"], ["aten.mm"], ["aten.mul"]]
