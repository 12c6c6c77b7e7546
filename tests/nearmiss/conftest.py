"""The generator's modules, shared builders and the tolerance table are importable, one thread."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

TESTS = Path(__file__).parents[1]
for folder in (TESTS, TESTS / "rewriter", TESTS / "nearmiss"):
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))

# Options come from the tests alone.
for name in [n for n in os.environ if n.startswith("K3FUSE_")]:
    del os.environ[name]

torch.set_num_threads(1)
