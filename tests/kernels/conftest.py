"""The ops are registered."""

from __future__ import annotations

from k3fuse.kernels import register_all

register_all()
