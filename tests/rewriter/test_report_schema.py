"""The JSON schema in the package against real reports, and against reports that are wrong."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import jsonschema
import pytest

from k3fuse.patterns.models.config import KimiK3Config
from k3fuse.rewriter.reasons import Code
from k3fuse.rewriter.report import SCHEMA, not_reached
from reports import full_size, small

TEXT = files("k3fuse.rewriter").joinpath("report.schema.json").read_text()
DOCUMENT: dict[str, Any] = json.loads(TEXT)


def faults(report: dict[str, Any]) -> list[str]:
    validator = jsonschema.Draft202012Validator(DOCUMENT)
    return [e.message[:120] for e in validator.iter_errors(report)]


def test_the_schema_is_one_and_names_the_version() -> None:
    jsonschema.Draft202012Validator.check_schema(DOCUMENT)
    assert DOCUMENT["properties"]["schema"]["const"] == SCHEMA
    assert set(DOCUMENT["$defs"]["code"]["enum"]) == {c.value for c in Code}


@pytest.mark.parametrize(
    "report",
    [
        full_size,
        small,
        lambda: small(plan=False),
        lambda: json.loads(json.dumps(not_reached("gb300:tp8", {"router": 1}).to_json())),
    ],
    ids=["full size", "planned", "refused", "not reached"],
)
def test_real_reports_are_valid(report: Callable[[], dict[str, Any]]) -> None:
    assert faults(report()) == []


def test_every_key_of_a_report_is_described() -> None:
    assert set(small()) == set(DOCUMENT["properties"])
    assert set(DOCUMENT["required"]) == set(DOCUMENT["properties"])


@pytest.mark.parametrize(
    "damage",
    [
        lambda d: d.pop("site_hash"),
        lambda d: d.update(extra=1),
        lambda d: d["sites"][0].update(outcome="maybe"),
        lambda d: d["sites"][0].pop("guards"),
        lambda d: d["nodes"].update(before=-1),
        lambda d: d["layers"][0]["rows"][0].update(hops="none"),
        lambda d: d.update(schema="k3fuse.report/1"),
    ],
)
def test_wrong_reports_are_not(damage: Callable[[dict[str, Any]], Any]) -> None:
    report = small()
    damage(report)
    assert faults(report) != []


def test_the_saved_report_is_of_the_full_model() -> None:
    report = full_size()
    found = {name: c["found"] for name, c in report["patterns"].items()}
    assert found == dict(KimiK3Config().expected_sites(93))
    assert set(report) == set(small())
    assert {tuple(sorted(s)) for s in report["sites"]} == {tuple(sorted(small()["sites"][0]))}
