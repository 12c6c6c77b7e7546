"""Which kernel serves the tail, alone and with the next layer's AttnRes behind it.

One launch, for all token counts.

The latent partials are exchanged one-shot, every rank adding all of them itself, until a rank
would take in more than 3.7 MB: TP x M x 7,168 bytes, 7.3 MB at TP16 with M = 64 and just 3.7 MB at
TP8. There the exchange is two-shot: a token's owner adds and normalises its row, 2 x M x 7,168
bytes a rank, at the price of a hop between the GPUs in place of one within the GPU. The border is a
byte count, the same as the output projection's, not a measured time. The bits are the same in both.

AttnRes goes along in that launch up to 8 tokens, as behind the output projection: a cluster then
has a token or two. Above, its own kernel follows.
"""

from __future__ import annotations

from dataclasses import replace

from k3fuse.kernels.common.policy import Row, table

ONE_SHOT = "latent_tail"
TWO_SHOT = "latent_tail_two_shot"
MIXED = "latent_tail_attn_res"


def _one_shot(m_min: int, m_max: int) -> Row:
    # The ranks split the up-projection, so its rows take a hop that whole weights do not.
    reason = "every rank adds all latent partials: one hop"
    return Row(m_min, m_max, ONE_SHOT, 1, reason, hops=1)


_TWO_SHOT = Row(
    33, 64, TWO_SHOT, 1, "owners add and normalise their tokens: 2 / TP of the bytes", hops=2
)

TABLE = table(
    "tail",
    _one_shot(1, 8),
    _one_shot(9, 16),
    _one_shot(17, 32),
    _one_shot(33, 64),
    tp16=(_one_shot(1, 8), _one_shot(9, 16), _one_shot(17, 32), _TWO_SHOT),
)

_MIXED = Row(1, 8, MIXED, 1, "AttnRes of the finished rows in the same launch", hops=1)


def _apart(row: Row) -> Row:
    return replace(row, launches=2, reason=f"{row.reason}; then AttnRes alone")


MIXED_TABLE = table(
    "tail_attn_res",
    _MIXED,
    *(_apart(row) for row in TABLE.rows["gb300:tp8"][1:]),
    tp16=(_MIXED, *(_apart(row) for row in TABLE.rows["gb300:tp16"][1:])),
)
