"""The `k3fuse` command: exit codes, keys, one document on standard output, one line an error."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from build import DATA
from calls import MISSING, OK, WRONG_USE, call, document, forget, one_line
from k3fuse.kernels.common.policy import planned, table
from k3fuse.patterns import experts
from reports import without_a_kernel

LAYER = str(DATA / "layer1_tp8_m4_opaque.json")
KEYS = {"schema", "target", "m", "patterns", "sites", "launches", "nodes", "seconds"}


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    forget()
    yield
    forget()


@pytest.fixture(scope="module")
def dump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dump") / "here"
    assert call("inspect", LAYER, "--plan", "--dump", folder).exit_code == OK
    return folder


@pytest.fixture(scope="module")
def stock(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dump in which a site is refused."""
    folder = tmp_path_factory.mktemp("stock") / "here"
    with without_a_kernel():
        assert call("inspect", LAYER, "--dump", folder).exit_code == OK
    return folder


# --- inspect ------------------------------------------------------------------------------------


def test_inspect_gives_one_document() -> None:
    result = call("inspect", LAYER, "--plan", "--json")
    assert result.exit_code == OK
    d = document(result)
    assert set(d) >= KEYS
    assert (d["target"], d["m"], d["tp"], d["plan"]) == ("gb300:tp8", 4, 8, True)
    taken = ("attention_projection", "output_projection", "router", "experts", "attn_res")
    found = {n: c["found"] for n, c in d["patterns"].items()}
    # The weights behind vLLM's op are an engine's.
    assert found == {**dict.fromkeys(taken, 1), "experts_partials": 0}
    assert {s["layer"] for s in d["sites"]} == {1}
    assert {s["pattern"] for s in d["sites"] if s["kernel"]} == set(taken)


def test_inspect_gives_a_table() -> None:
    result = call("inspect", LAYER, "--plan")
    assert result.exit_code == OK
    assert "attention_projection" in result.stdout
    assert "{" not in result.stdout


@pytest.mark.parametrize(("plan", "code"), [(True, OK), (False, MISSING)])
def test_missing_sites_of_a_built_in_model_are_an_exit_code(
    plan: bool, code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    later = table("experts", planned(1, 64, "a_kernel_to_come", 2))
    monkeypatch.setitem(experts._TABLES, (False, False), later)
    result = call("inspect", "kimi-k3", "--layers", 2, "--json", *(["--plan"] if plan else []))
    assert result.exit_code == code
    d = document(result)
    assert d["patterns"]["attn_res"]["expected"] == 3
    assert d["patterns"]["attn_res"]["found"] == 3
    assert d["patterns"]["attention_projection"]["found"] == 2
    assert d["patterns"]["router"]["found"] == 1
    assert d["patterns"]["experts"]["found"] == (1 if plan else 0)
    if not plan:
        assert {s["reason"] for s in d["sites"]} == {None, "KERNEL_UNAVAILABLE"}


def test_filters() -> None:
    d = document(call("inspect", LAYER, "--plan", "--json", "--pattern", "router", "--layer", 1))
    assert list(d["patterns"]) == ["router"]
    assert [s["pattern"] for s in d["sites"]] == ["router"]


def test_output_goes_to_a_file_at_once(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")
    result = call("inspect", LAYER, "--plan", "--json", "-o", file)
    assert (result.exit_code, result.stdout) == (OK, "")
    assert set(json.loads(file.read_text())) >= KEYS
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]  # no partial file is left


def test_a_failed_command_leaves_the_output_file(tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")
    one_line(call("inspect", "no-such-model", "-o", file))
    assert file.read_text() == "old"


# --- a user's module ----------------------------------------------------------------------------

FACTORIES = """
import torch

class Fine(torch.nn.Module):
    def forward(self, x):
        return torch.relu(x) * 2

class Breaks(torch.nn.Module):
    def forward(self, x):
        return x.tolist()

class Apart(torch.nn.Module):
    def forward(self, x):
        return torch.tensor(torch.relu(x).tolist()) * 2

def apart():
    return Apart(), (torch.zeros(3, 4),)

def fine():
    return Fine(), (torch.randn(3, 4),)

def breaks():
    return Breaks(), (torch.zeros(3, 4),)

def number():
    return 5
"""


@pytest.fixture
def factories(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "k3fuse_test_factories.py").write_text(FACTORIES)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield "k3fuse_test_factories"
    sys.modules.pop("k3fuse_test_factories", None)


def test_a_module_of_the_users(factories: str) -> None:
    d = document(call("inspect", f"{factories}:fine", "--json"))
    assert d["sites"] == []
    assert d["nodes"]["before"] == d["nodes"]["after"] > 2


def test_a_module_that_cannot_be_traced_says_where(factories: str) -> None:
    line = one_line(call("inspect", f"{factories}:breaks"))
    assert f"{factories}:breaks: no graph came out; Dynamo broke at " in line
    assert f"{factories}.py" in line
    assert ", line " in line


def test_a_module_that_breaks_apart_is_reported_with_a_note(factories: str) -> None:
    d = document(call("inspect", f"{factories}:apart", "--json"))
    (note,) = d["notes"]
    assert "Dynamo broke the model apart, first at " in note
    assert f"{factories}.py" in note
    assert note in " ".join(call("inspect", f"{factories}:apart").stdout.split())
    assert document(call("inspect", f"{factories}:fine", "--json"))["notes"] == []


# --- wrong use ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (["inspect", LAYER, "--target", "h100:tp8"], "architecture 'h100' is unknown; use one of"),
        (["inspect", LAYER, "--target", "gb300:tp4"], "tp4 is not covered; use one of gb300:tp8"),
        (["inspect", LAYER, "--target", "gb300"], "not of the form ARCH:tpN"),
        (["inspect", LAYER, "--m", "0"], "--m '0' is no token count"),
        (["inspect", LAYER, "--m", "many"], "--m 'many' is no token count"),
        (
            ["inspect", LAYER, "--pattern", "rooter"],
            "--pattern 'rooter' does not exist; use one",
        ),
        (["inspect", LAYER, "--layer", "7"], "--layer 7 has no site; layers with sites: 1 to 1"),
        (["inspect", "kimi-k4"], "source 'kimi-k4' is unknown; use kimi-k3"),
        (["inspect", "kimi-k3", "--layers", "94"], "layers=94 is out of range; use 1 to 93"),
        (["inspect", "kimi-k3", "--form", "rows"], "form 'rows' of kimi-k3 is unknown"),
        (["inspect", "no/such/file.json"], "does not exist"),
        (["inspect", "no_such_package:factory"], "cannot be imported"),
        (["inspect", "json:no_such_factory"], "has no 'no_such_factory'"),
        (["explain", "no/such/dump"], "has no summary.json; name a folder written by --dump"),
        (["diff", "no/such/dump"], "has no summary.json"),
        (["check", "no/such/dump"], "has no summary.json"),
        (["run", "no/such/script.py"], "does not exist"),
        (["bench", "rewrite", "--layers", "a"], "--layers 'a' is no list of counts"),
    ],
)
def test_wrong_use_is_one_line(arguments: list[str], part: str) -> None:
    assert part in one_line(call(*arguments))


def test_a_factory_that_returns_no_module(factories: str) -> None:
    assert "returned int; return (module, args)" in one_line(call("inspect", f"{factories}:number"))


@pytest.mark.parametrize("command", ["inspect", "explain", "diff", "check", "run"])
def test_an_option_that_does_not_exist(command: str) -> None:
    result = call(command, "--no-such-option", "x")
    assert result.exit_code == WRONG_USE
    assert "Traceback" not in result.output
    if command != "run":  # passes what it does not know to the script
        assert "--no-such-option" in result.stderr


@pytest.mark.parametrize("damage", ["schema", "truncated", "none"])
def test_a_damaged_graph_file(damage: str, tmp_path: Path) -> None:
    text = Path(LAYER).read_text()
    if damage == "schema":
        text = text.replace("k3fuse.graph/1", "k3fuse.graph/9")
    elif damage == "truncated":
        text = text[: len(text) // 2]
    file = tmp_path / "graph.json"
    file.write_text(text)
    result = call("inspect", file, "--plan")
    if damage == "none":
        assert result.exit_code == OK
    else:
        assert "graph.json" in one_line(result)


@pytest.mark.parametrize("damage", ["schema", "truncated"])
@pytest.mark.parametrize("command", ["explain", "diff", "check"])
def test_a_damaged_dump(command: str, damage: str, dump: Path, tmp_path: Path) -> None:
    text = (dump / "summary.json").read_text()
    damaged = (
        text.replace("k3fuse.report/2", "k3fuse.report/9") if damage == "schema" else text[:99]
    )
    (tmp_path / "summary.json").write_text(damaged)
    assert "write the dump again" in one_line(call(command, tmp_path))


# --- dumps --------------------------------------------------------------------------------------


def test_a_dump_is_complete(dump: Path) -> None:
    assert {"index.md", "summary.json", "00_input.txt", "01_rewritten.txt", "sites"} <= {
        p.name for p in dump.iterdir()
    }
    stems = {p.name.split(".")[0] for p in (dump / "sites").iterdir()}
    assert stems == {
        f"L001_{p}"
        for p in ("attention_projection", "output_projection", "router", "experts", "attn_res")
    }
    why = (dump / "sites" / "L001_router.why.txt").read_text()
    assert "router (front + latent), layer 1: found" in why
    assert "FAIL" not in why


def test_explain(dump: Path, stock: Path) -> None:
    (first, reason, *_) = call("explain", dump).stdout.strip().splitlines()
    assert first == "layer 1  experts_partials  near  at moe_forward_shared"
    assert reason.strip().endswith("are not loaded: no engine runs here")
    near = document(call("explain", dump, "--json"))["sites"]
    assert [(s["pattern"], s["outcome"]) for s in near] == [("experts_partials", "near")]
    d = document(call("explain", stock, "--json"))
    assert [s["pattern"] for s in d["sites"]] == ["experts", "experts_partials"]
    assert {r["code"] for r in d["sites"][0]["reasons"]} == {"KERNEL_UNAVAILABLE"}
    assert d["sites"][1] == near[0]
    assert all(r["hint"] for s in d["sites"] for r in s["reasons"])
    text = call("explain", stock, "--pattern", "experts").stdout
    assert "KERNEL_UNAVAILABLE" in text
    assert "fix: " in text
    assert "router" not in text


def test_diff(dump: Path, stock: Path) -> None:
    text = call("diff", dump, "--pattern", "output_projection").stdout
    assert "+" in text
    assert "k3fuse.output_projection_attn_res" in text
    d = document(call("diff", dump, "--json"))
    assert len(d["diffs"]) == 5
    assert {"layer", "pattern", "diff"} == set(d["diffs"][0])
    nothing = call("diff", stock, "--pattern", "experts")
    assert nothing.stdout.strip() == "no site was rewritten"


def test_diff_of_a_bare_report_is_wrong_use(dump: Path, tmp_path: Path) -> None:
    file = tmp_path / "report.json"
    file.write_text((dump / "summary.json").read_text())
    assert "is no dump folder" in one_line(call("diff", file))
    assert call("explain", file).exit_code == OK


@pytest.mark.parametrize(
    ("expect", "code", "missing"),
    [({"router": 1}, OK, {}), ({"router": 3, "experts": 1}, MISSING, {"router": 2})],
)
def test_check(
    expect: dict[str, int], code: int, missing: dict[str, int], dump: Path, tmp_path: Path
) -> None:
    file = tmp_path / "expect.json"
    file.write_text(json.dumps(expect))
    result = call("check", dump, "--expect", file, "--json")
    assert result.exit_code == code
    d = document(result)
    assert (d["ok"], d["missing"]) == (code == OK, missing)
    assert call("check", dump).exit_code == OK


@pytest.mark.parametrize(
    ("text", "part"),
    [
        (None, "cannot be read"),
        ("{", "is no JSON"),
        ("[1]", "is no object of counts"),
        ('{"router": "many"}', "is no object of counts"),
        ('{"rooter": 1}', "pattern 'rooter' does not exist; use attention_projection"),
    ],
)
def test_a_bad_expectation(text: str | None, part: str, dump: Path, tmp_path: Path) -> None:
    file = tmp_path / "expect.json"
    if text is not None:
        file.write_text(text)
    assert part in one_line(call("check", dump, "--expect", file))


def test_help_and_version() -> None:
    for arguments in (["-h"], ["--help"], ["inspect", "-h"], ["--version"]):
        result = call(*arguments)
        assert result.exit_code == OK
        assert result.stdout
    words = " ".join(call("-h").stdout.split())
    assert "0 as expected, 1 sites missing or a check failed, 2 wrong use, 3 backend never" in words
