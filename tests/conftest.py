"""Test-wide set-up: helper modules are importable, options come from the tests, one thread."""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

# Scalar code from Inductor: finding out what vectors the machine has takes the compiler 15 s of
# processor time in each fresh cache, and torch's vectors are not what is tested here.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")

import torch

TESTS = Path(__file__).parent
for folder in (TESTS, TESTS / "rewriter"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# Options come from the tests alone. K3FUSE_VLLM is none: the folder of an unpacked vLLM.
for name in [n for n in os.environ if n.startswith("K3FUSE_") and n != "K3FUSE_VLLM"]:
    del os.environ[name]

torch.set_num_threads(1)


# Where the kernels lie that a run compiled: for its processes and theirs, gone at its end.
_KERNELS = "K3FUSE_KERNEL_CACHE"


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    node.workerinput[_KERNELS] = os.environ[_KERNELS]


def pytest_configure(config: pytest.Config) -> None:
    given = getattr(config, "workerinput", {}).get(_KERNELS)
    os.environ[_KERNELS] = given or tempfile.mkdtemp(prefix="k3fuse-tests-")


def pytest_unconfigure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):
        shutil.rmtree(os.environ[_KERNELS])


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--nightly", action="store_true", help="run the wide matrices too")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="another order of files and tests")


def _shuffle(items: list[pytest.Item], seed: int) -> None:
    """Files in another order, and the tests of each: a file's fixtures are made once all the same.

    The processes of xdist all come to the same order.
    """
    rng = random.Random(seed)
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    order = sorted(files)
    rng.shuffle(order)
    for tests in files.values():
        rng.shuffle(tests)
    items[:] = [item for file in order for item in files[file]]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if (seed := config.getoption("--shuffle")) is not None:
        _shuffle(items, seed)
    if config.getoption("--nightly"):
        return
    skip = pytest.mark.skip(reason="nightly; run with --nightly")
    for item in items:
        if "nightly" in item.keywords:
            item.add_marker(skip)
