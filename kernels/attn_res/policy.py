"""Which kernel serves AttnRes where it stands alone."""

from __future__ import annotations

from k3fuse.kernels.common.policy import planned, table

TABLE = table("attn_res", planned(1, 64, "attn_res", 1))
