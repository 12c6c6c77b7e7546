"""Malformed files: one class of error, nothing run, nothing written, no half file.

FUZZ_EXAMPLES raises the number of examples a test (nightly: 20000).
"""

from __future__ import annotations

import copy
import functools
import json
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from build import Hand, aten
from k3fuse.kernels.build import packed
from k3fuse.kernels.build.errors import PackedError
from k3fuse.rewriter.graph_file import GraphFileError, graph_text
from k3fuse.rewriter.graph_load import parse_graph

EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "120"))
FUZZ = settings(
    max_examples=EXAMPLES, deadline=None, derandomize=EXAMPLES <= 1000, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip
ROOT = Path(__file__).parents[2]
PACKED = ROOT / "tests" / "data" / "kernels" / "gemv.k3pack"
STORED = ROOT / "tests" / "data" / "vllm_k3" / "final_tp8_mdyn_plain.json"


@functools.cache
def texts() -> tuple[str, ...]:
    """A written graph and a stored one with symbols and operators of another library."""
    h = Hand()
    x, w = h.input("x", 4, 16), h.input("w", 8, 16)
    y = h.call(aten.mm.default, x, h.call(aten.t.default, w))
    parts = h.call(aten.split.Tensor, y, 4, 1)
    module = h.done(h.item(parts, 0), h.call(aten.add.Scalar, y, 1.5))
    return graph_text(module, {"name": "small"}), STORED.read_text()


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False)
    | st.text(max_size=12)
    | st.sampled_from(["s0", "s0*s0", "1//0", "Mod(s0,0)", "x", "aten.mm.default", "os.system"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(["node", "sym", "op", "device", "val", "x"]), inner, max_size=2
        )
    ),
    max_leaves=5,
)


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of every value in a JSON document."""
    found = [path] if path else []
    items = document.items() if isinstance(document, dict) else (
        enumerate(document) if isinstance(document, list) else ()
    )  # fmt: skip
    for key, value in items:
        found += places(value, (*path, key))
    return found


def altered(document: Any, path: tuple[Any, ...], value: Any, how: str) -> Any:
    document = copy.deepcopy(document)
    owner = document
    for key in path[:-1]:
        owner = owner[key]
    if how == "delete":
        del owner[path[-1]]
    elif how == "repeat" and isinstance(owner, list):
        owner.insert(0, owner[path[-1]])
    else:
        owner[path[-1]] = value
    return document


def one_line(error: Exception) -> bool:
    assert "\n" not in str(error)
    return False


def attempt(text: str) -> bool:
    """Whether a text loads; any error but the one class fails the test."""
    try:
        parse_graph(text, "fuzz")
    except GraphFileError as error:
        return one_line(error)
    return True


@FUZZ
@given(st.data())
def test_an_altered_graph_loads_or_is_refused(data: st.DataObject) -> None:
    document = json.loads(data.draw(st.sampled_from(texts())))
    for _ in range(data.draw(st.integers(1, 2))):
        path = data.draw(st.sampled_from(places(document)))
        how = data.draw(st.sampled_from(["replace", "replace", "delete", "repeat"]))
        document = altered(document, path, data.draw(VALUES), how)
    attempt(json.dumps(document))


@FUZZ
@given(st.integers(0, 10**6), st.binary(max_size=4))
def test_altered_bytes_of_a_graph(place: int, put: bytes) -> None:
    raw = texts()[0].encode()
    place %= len(raw)
    attempt((raw[:place] + put + raw[place + len(put) :]).decode("utf-8", "replace"))


def test_the_unaltered_texts_load() -> None:
    assert all(attempt(text) for text in texts())


@FUZZ
@given(st.integers(0, 10**7), st.binary(min_size=1, max_size=6), st.booleans())
def test_altered_bytes_of_packed_kernels(
    tmp_path_factory: pytest.TempPathFactory, place: int, put: bytes, cut: bool
) -> None:
    raw = PACKED.read_bytes()
    place %= len(raw)
    file = tmp_path_factory.getbasetemp() / "fuzz.k3pack"
    file.write_bytes(raw[:place] if cut else raw[:place] + put + raw[place + len(put) :])
    try:
        packed.load(file)
    except PackedError as error:
        one_line(error)


@FUZZ
@given(st.data())
def test_an_altered_manifest(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """With a right checksum, so that what is behind the checksum is reached."""
    with zipfile.ZipFile(PACKED) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(files[packed.MANIFEST])
    entries = manifest["kernels"]
    path = data.draw(st.sampled_from(places(entries)))
    manifest["kernels"] = altered(
        entries, path, data.draw(VALUES), data.draw(st.sampled_from(["replace", "delete"]))
    )
    manifest["sha256"] = packed._digest(packed._canonical(manifest["kernels"]))
    files[packed.MANIFEST] = json.dumps(manifest).encode()
    file = tmp_path_factory.getbasetemp() / "manifest.k3pack"
    with zipfile.ZipFile(file, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    try:
        packed.load(file)
    except PackedError as error:
        one_line(error)


# --- nothing runs, nothing is written elsewhere -------------------------------------------------

HOSTILE = (
    "os.system", "builtins.eval", "builtins.exec.default", "subprocess.Popen",
    "operator.attrgetter",
    "torch.load", "torch.hub.load", "_operator.call", "importlib.import_module", "posix.system",
    "aten.__class__.default", "k3fuse.os.system", "operator.methodcaller", "aten.mm.__globals__",
)  # fmt: skip


@pytest.mark.parametrize("target", HOSTILE)
def test_a_target_that_is_no_operator_is_refused(target: str, tmp_path: Path) -> None:
    mark = tmp_path / "run"
    document = json.loads(texts()[0])
    calls = [n for n in document["nodes"] if n["op"] == "call_function"]
    calls[0]["target"] = target
    calls[0]["args"] = [f"touch {mark}"]
    assert not attempt(json.dumps(document))
    assert not mark.exists()


CODE = "open({mark!r}, 'w')"
# Where a name of the file comes into the text of the module's forward(); the last three are good.
NAMES = {
    "an input's default value": ("placeholder", "q=" + CODE),
    "an input's annotation": ("placeholder", "q: " + CODE),
    "an input with a new line": ("placeholder", "q\n" + CODE),
    "an attribute's path": ("get_attr", 'a") + ' + CODE + ' + ("'),
    "an attribute with a new line": ("get_attr", "a\n    " + CODE),
    "an argument's name": ("kwargs", "a=" + CODE + ", b"),
    "an argument's name with a new line": ("kwargs", "a=1)\n" + CODE + "\nprint(b"),
    "an input": ("placeholder", "arg7_1"),
    "an attribute": ("get_attr", "layers.0.weight"),
    "an argument": ("kwargs", "alpha"),
}


@pytest.mark.parametrize("what", NAMES)
def test_a_name_of_the_file_is_a_name_and_no_code(what: str, tmp_path: Path) -> None:
    """FX writes these into Python text as they are, and runs the text when a module is made."""
    place, text = NAMES[what]
    mark = tmp_path / "run"
    document = json.loads(texts()[0])
    nodes = document["nodes"]
    first = next(n for n in nodes if n["op"] == "placeholder")
    last = [n for n in nodes if n["op"] == "placeholder"][-1]
    text = text.replace("{mark!r}", repr(str(mark)))
    if place == "placeholder":
        last["target"] = text
    elif place == "get_attr":
        nodes.insert(0, {**copy.deepcopy(first), "name": "c", "op": place, "target": text})
    else:
        next(n for n in nodes if "add" in str(n["target"]))["kwargs"] = {text: 1}
    assert attempt(json.dumps(document)) == ("open(" not in text)
    assert not mark.exists()


@pytest.mark.parametrize(
    "text",
    ["__import__('os')", "s0.__class__", "(lambda: 1)()", "[1][0]", "9**9**9", "s0 if 1 else 2"],
)
def test_a_shape_is_arithmetic_and_nothing_else(text: str) -> None:
    document = json.loads(STORED.read_text())
    node = next(n for n in document["nodes"] if "s0" in str(n.get("val", {}).get("shape", "")))
    node["val"]["shape"][0] = text
    begin = time.monotonic()
    assert not attempt(json.dumps(document))
    assert time.monotonic() - begin < 20


def test_a_pickle_is_not_read(tmp_path: Path) -> None:
    """Neither as a graph nor as kernels; no source of the loaders unpickles."""
    mark = tmp_path / "run"

    class Bomb:
        def __reduce__(self) -> tuple[Any, ...]:
            return (Path.touch, (mark,))

    file = tmp_path / "bomb"
    file.write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(PackedError):
        packed.load(file)
    assert not attempt(file.read_bytes().decode("latin1"))
    assert not mark.exists()
    for source in [*(ROOT / "rewriter").rglob("*.py"), *(ROOT / "kernels").rglob("*.py")]:
        text = source.read_text()
        assert "import pickle" not in text, source
        assert "torch.load(" not in text, source


def test_members_that_climb_out_are_only_read(tmp_path: Path) -> None:
    """Nothing is unpacked to disk, whatever a member is called."""
    file = tmp_path / "folder" / "evil.k3pack"
    file.parent.mkdir()
    with zipfile.ZipFile(PACKED) as old, zipfile.ZipFile(file, "w") as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
        new.writestr("../../escaped", b"x")
        new.writestr("/absolute", b"x")
    assert packed.load(file)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["evil.k3pack", "folder"]


_WRITER = """
import sys
from pathlib import Path
from k3fuse.kernels.build import packed
kernels = packed.load(Path(sys.argv[1]))
print("ready", flush=True)
while True:
    packed.pack(kernels, Path(sys.argv[2]))
"""


def test_a_killed_run_leaves_no_half_file(tmp_path: Path) -> None:
    goal = tmp_path / "out.k3pack"
    for seed in range(3):
        child = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(PACKED), str(goal)],
            stdout=subprocess.PIPE,
            cwd=ROOT,
        )
        assert child.stdout is not None
        child.stdout.readline()
        time.sleep(0.2 + 0.1 * random.Random(seed).random())
        child.send_signal(signal.SIGKILL)
        child.wait()
        assert packed.load(goal), "the goal is the old file or the whole new one"
