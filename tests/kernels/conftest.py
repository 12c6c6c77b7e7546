"""Test-wide set-up: the tolerance table is importable, the ops are registered, one thread."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from k3fuse.kernels import register_all

register_all()
torch.set_num_threads(1)
