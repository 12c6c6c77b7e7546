"""Which kernel serves the tail."""

from __future__ import annotations

from k3fuse.kernels.common.policy import planned, table

TABLE = table("tail", planned(1, 64, "latent_tail", 1))
