"""docs/writing_a_kernel.md: its kernel passes, its broken one fails, its output is real."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from k3fuse.rewriter.cli import main

PAGE = Path(__file__).parents[3] / "docs" / "writing_a_kernel.md"
DSL = "4.8.1"  # whose registers and instructions the page shows
BARRIER = "        cute.arch.sync_threads()\n"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The page's files in a folder, which is the current one."""
    pytest.importorskip("cutlass")
    for block in blocks("python"):
        if named := re.match(r"# (\w+\.py)\n", block):
            (tmp_path / named[1]).write_text(block)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("K3FUSE_KERNEL_CACHE", str(tmp_path / "cache"))
    yield tmp_path
    for name in ("my_norm", "my_norm_device"):
        sys.modules.pop(name, None)


def printed(command: str) -> tuple[int, str]:
    """Exit code and standard output of a command."""
    result = CliRunner().invoke(main, shlex.split(command, comments=True)[1:])
    return result.exit_code, result.stdout


def masked(text: str) -> str:
    """Without seconds."""
    lines = [re.sub(r" +\d+\.\d$", "", line.rstrip()) for line in text.splitlines()]
    return "\n".join(re.sub(r"[\d.]+ s,", "T s,", line) for line in lines)


def test_the_page_shows_what_the_check_prints(folder: Path) -> None:
    right, broken = blocks("console")
    command, _, shown = right.partition("\n")
    code, output = printed(command.removeprefix("$ "))
    assert code == 0, output
    assert output.splitlines()[-1] == "passed"
    device = folder / "my_norm_device.py"
    whole = device.read_text()
    assert whole.count(BARRIER) == 1
    device.write_text(whole.replace(BARRIER, ""))
    done = subprocess.run(
        [sys.executable, "-m", "k3fuse.rewriter.cli", *shlex.split(broken.partition("\n")[0][2:],
                                                                  comments=True)[1:]],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    assert re.search(r"^protocol +FAILED .*before anyone wrote it", done.stdout, re.M)
    assert re.search(r"^numerics +passed ", done.stdout, re.M)
    assert re.search(r"^races +FAILED .*shared memory", done.stdout, re.M)
    if version("nvidia-cutlass-dsl") != DSL:
        pytest.skip(f"the page shows DSL {DSL}")
    assert masked(output) == masked(shown)
    assert masked(done.stdout) == masked(broken.partition("\n")[2])


def test_the_report_on_the_page_is_real(folder: Path) -> None:
    (code,) = (b for b in blocks("python") if "print(report)" in b)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=300, cwd=folder
    )
    assert done.returncode == 0, done.stderr
    if version("nvidia-cutlass-dsl") != DSL:
        pytest.skip(f"the page shows DSL {DSL}")
    (shown,) = blocks("text")
    assert masked(done.stdout) == masked(shown)
