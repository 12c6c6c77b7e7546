"""Which kernel serves an attention projection: one launch, whatever the number of linears.

Two engines can: `stationary_gemm` (mma.sync) and `stream_gemm` (tcgen05). The counts decide, those
of `docs/kernels/attention_projection.md`: both ask for the same bytes, and the stream kernel needs
fewer instructions at every shape and token count. So both GB300 targets have one engine, compiled
for up to 8, 16, 32 and 64 tokens, and a token has the same bits in every batch.

`SHARDED` serves calls that name rows which all ranks have alike (`row_sharded`): each rank reads
its share of them, and one exchange inside the launch brings the rows together. Off until a GPU
says that it pays: it saves 26.5 MB (TP8) or 28.4 MB (TP16) of a rank's reads a layer, 3.3 or 3.5 us
at 8 TB/s, and puts a hop in front of the query.
"""

from __future__ import annotations

from k3fuse.kernels.common.policy import MAX_M, Row, table

STATIONARY, STREAM = "stationary_gemm", "stream_gemm"
SHARDED_STREAM = "row_sharded_stream_gemm"


def _row(m_min: int, m_max: int, least: str, most: str) -> Row:
    reason = f"the bytes of {STATIONARY}, {least} to {most} times its instructions"
    return Row(m_min, m_max, STREAM, 1, reason)


TABLE = table(
    "attention_projection",
    _row(1, 8, "0.55", "0.75"),
    _row(9, 16, "0.40", "0.55"),
    _row(17, 32, "0.30", "0.40"),
    _row(33, 64, "0.22", "0.27"),
)


def _sharded(m_min: int, m_max: int) -> Row:
    reason = "each rank reads its share of the rows that all have; one hop inside the launch"
    return Row(m_min, m_max, SHARDED_STREAM, 1, reason, hops=1)


SHARDED = table(
    "attention_projection", _sharded(1, 8), _sharded(9, 16), _sharded(17, 32), _sharded(33, 64)
)


def row_of(target: str, m: int, *, batch_invariant: bool) -> Row | None:
    """The row that serves m tokens; None for a count outside the policy.

    batch_invariant: by the engine of the largest count, which takes the same operands at every
    count, so that a token's bits do not depend on its batch whatever the table says.
    """
    row = TABLE.lookup(target, m)
    last = TABLE.lookup(target, MAX_M)
    if row is None or last is None or not batch_invariant or row.kernel == last.kernel:
        return row
    return Row(row.m_min, row.m_max, last.kernel, last.launches, f"batch-invariant: {last.reason}")
