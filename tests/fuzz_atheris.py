"""Coverage-guided fuzzing of what reads files, by atheris (pip install atheris).

    python tests/fuzz_atheris.py graph --seconds 300
    python tests/fuzz_atheris.py packed --seconds 300 --kept DIR

graph: texts of saved graphs; packed: files of packed kernels. An input is either the file's bytes,
or a list of alterations of a good file, with right checksums, so that what lies behind them is
reached. Whatever is raised but the one class of error, in more than one line or slower than ten
seconds, ends the run with code 77; the input is left in DIR (default: a new folder).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import atheris

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE / "rewriter")]

import torch  # noqa: E402, F401 - not instrumented: slow, and not what is tested

with atheris.instrument_imports(include=["k3fuse", "json", "zipfile"]):
    from k3fuse.kernels.build import packed
    from k3fuse.kernels.build.errors import PackedError
    from k3fuse.rewriter.graph_file import GraphFileError
    from k3fuse.rewriter.graph_load import parse_graph

from test_fuzz_files import PACKED, altered, places, texts  # noqa: E402 - by the path above

_WORDS = (
    None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, -(2**70), 0.5, 1e308, "", "x", "s0", "s0*s0",
    "1//0", "Mod(s0,0)", "aten.mm.default", "aten.t.default", "operator.getitem", "os.system",
    "float32", "bfloat16", "cuda:0", "meta", [], {}, [0], [1, 2], ["s0"], {"node": "x"},
    {"sym": "s0"}, {"dtype": "float32"}, {"device": "cpu"}, {"op": "x"}, {"val": None},
)  # fmt: skip
_HOW = ("replace", "replace", "delete", "repeat")


def value(data: atheris.FuzzedDataProvider) -> Any:
    """A value to put into a document."""
    if data.ConsumeBool():
        return data.PickValueInList(list(_WORDS))
    kinds = (
        lambda: data.ConsumeInt(9), lambda: data.ConsumeFloat(),
        lambda: data.ConsumeUnicodeNoSurrogates(12), lambda: [value(data), value(data)],
    )  # fmt: skip
    return kinds[data.ConsumeIntInRange(0, 3)]()


def alter(data: atheris.FuzzedDataProvider, document: Any) -> Any:
    """The document with one to three places altered."""
    for _ in range(data.ConsumeIntInRange(1, 3)):
        found = places(document)
        if not found:
            break
        path = found[data.ConsumeIntInRange(0, len(found) - 1)]
        document = altered(document, path, value(data), data.PickValueInList(list(_HOW)))
    return document


def graph(raw: bytes) -> None:
    """One text of a graph."""
    data = atheris.FuzzedDataProvider(raw)
    if data.ConsumeBool():
        text = json.dumps(alter(data, json.loads(data.PickValueInList(list(texts())))))
    else:
        text = data.ConsumeBytes(len(raw)).decode("utf-8", "replace")
    try:
        parse_graph(text, "fuzz")
    except GraphFileError as error:
        _one_line(error)


_FILE = Path(tempfile.mkdtemp(prefix="k3fuse_fuzz_")) / "fuzz.k3pack"


def pack(raw: bytes) -> None:
    """One file of kernels."""
    data = atheris.FuzzedDataProvider(raw)
    if data.ConsumeBool():
        _altered_kernels(data)
    else:
        _FILE.write_bytes(data.ConsumeBytes(len(raw)))
    try:
        packed.load(_FILE)
    except PackedError as error:
        _one_line(error)


def _altered_kernels(data: atheris.FuzzedDataProvider) -> None:
    with zipfile.ZipFile(PACKED) as archive:
        files = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(files[packed.MANIFEST])
    manifest["kernels"] = alter(data, manifest["kernels"])
    manifest["sha256"] = packed._digest(packed._canonical(manifest["kernels"]))
    files[packed.MANIFEST] = json.dumps(manifest).encode()
    with zipfile.ZipFile(_FILE, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)


def _one_line(error: Exception) -> None:
    if "\n" in str(error):
        raise RuntimeError(f"an error of more than one line: {error!r}")


def seeds(what: str, folder: Path) -> None:
    """Good files to start from, whole and as the start of alterations."""
    good = [t.encode() for t in texts()] if what == "graph" else [PACKED.read_bytes()]
    for number, content in enumerate(good):
        # ConsumeBool reads the last byte: even is False.
        (folder / f"good_{number}").write_bytes(content + b"\0")
    for number in range(16):
        (folder / f"altered_{number}").write_bytes(bytes(range(number, number + 40)) + b"\1")


def main() -> None:
    parser = argparse.ArgumentParser(description="Fuzz what reads files, guided by coverage.")
    parser.add_argument("what", choices=("graph", "packed"))
    parser.add_argument("--seconds", type=int, default=300)
    parser.add_argument("--kept", type=Path, help="folder of the corpus and of what failed")
    parser.add_argument("--seed", type=int, default=0, help="0: another one each time")
    given = parser.parse_args()
    kept = given.kept or Path(tempfile.mkdtemp(prefix="k3fuse_corpus_"))
    kept.mkdir(parents=True, exist_ok=True)
    seeds(given.what, kept)
    limit = ["-timeout=10", "-rss_limit_mb=4096", f"-max_total_time={given.seconds}"]
    where = [f"-artifact_prefix={kept}/", str(kept)]
    options = [
        sys.argv[0],
        *limit,
        "-max_len=200000",
        f"-seed={given.seed}",
        "-print_final_stats=1",
    ]
    atheris.Setup([*options, *where], {"graph": graph, "packed": pack}[given.what])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
