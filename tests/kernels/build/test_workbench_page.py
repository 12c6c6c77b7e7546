"""The page on the workbench: what it shows is what the commands print, and its examples run."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from click.testing import CliRunner

from k3fuse.kernels.build import packed
from k3fuse.kernels.build.launch import Launcher
from k3fuse.kernels.build.resources import find_tool
from k3fuse.rewriter.cli import main
from workbench_cases import STORED, FakeDriver

PAGE = Path(__file__).parents[3] / "docs" / "workbench.md"
# Another version compiles otherwise; the output on the page is of this one.
DSL = "4.8.1"


def blocks(kind: str) -> list[str]:
    return re.findall(rf"```{kind}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def printed(command: str) -> str:
    """What a command prints, without the lines on progress; sizes of files are masked."""
    result = CliRunner().invoke(main, shlex.split(command)[1:])
    lines = [x for x in result.output.splitlines() if not x.endswith(" ...")]
    return masked("\n".join(lines))


def masked(text: str) -> str:
    # The packed file holds hashes of the sources, so its size varies by a few bytes.
    text = re.sub(r"(kernels), \d+ bytes", r"\1, N bytes", text.rstrip())
    # Seconds at the end of a line.
    return re.sub(r" +\d+\.\d$", "", text, flags=re.M)


def test_the_output_on_the_page_is_real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("cutlass")
    if find_tool("nvdisasm") is None:
        pytest.skip("needs nvidia-cuda-nvdisasm")
    if version("nvidia-cutlass-dsl") != DSL:
        pytest.skip(f"the page shows DSL {DSL}")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("K3FUSE_KERNEL_CACHE", str(tmp_path / "cache"))
    shown = blocks("console")
    assert len(shown) == 7
    for block in shown:
        first, _, rest = block.partition("\n")
        assert printed(first.removeprefix("$ ")) == masked(rest), first


def test_the_key_example_runs() -> None:
    (code,) = (b for b in blocks("python") if "diff_factors" in b)
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        timeout=300,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "{'name': ('m1_n7168_k768_r4_w4', 'm8_n7168_k768_r4_w4'), 'shape'"
    )


def test_the_launch_example_takes_what_it_shows() -> None:
    """The example's calls, against the stored kernel and without a GPU."""
    (code,) = (b for b in blocks("python") if "Launcher(" in b)
    compile(code, "page", "exec")
    kernel = packed.select(packed.load(STORED), "sm_103a", "workbench_gemv", {"m": 2})
    driver = FakeDriver()
    Launcher(kernel, driver, carveout=100, stream=lambda: 0)(1, 2, 3)
    assert len(driver.named("launch")) == 1
    assert code.count(".data_ptr()") == len(kernel.plan.parameters)
