"""Frozen tables: which kernel serves which token count on which target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

# The largest token count that a decode kernel serves: DSpark verify steps and plain decode batches
# above it are compute-bound enough that the stock kernels win.
MAX_M = 64
REFERENCE = "reference"

# Chip of a target -> the architecture its kernels are compiled for.
CHIPS = {"gb300": "sm_103a"}
TP_SIZES = (8, 16)


@dataclass(frozen=True)
class Row:
    """Token counts m_min..m_max (inclusive) of one target.

    `kernel` is "reference", a kernel's name, or None where none exists yet; then `planned` names
    the kernel that will serve the row and `reason` says why it is missing. `launches` counts the
    kernels that one call of the op launches (or will launch); `hops` the exchanges between ranks in
    them that the replaced graph did not have.
    """

    m_min: int
    m_max: int
    kernel: str | None
    launches: int
    reason: str
    planned: str = ""
    hops: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.m_min <= self.m_max <= MAX_M:
            raise ValueError(f"row {self.m_min}..{self.m_max} is no range within 1..{MAX_M}")
        if self.launches < 1:
            raise ValueError(f"row {self.m_min}..{self.m_max}: launches={self.launches}, need >= 1")
        if self.hops < 0:
            raise ValueError(f"row {self.m_min}..{self.m_max}: hops={self.hops}, need >= 0")
        if not self.reason:
            raise ValueError(f"row {self.m_min}..{self.m_max} gives no reason")
        if self.kernel is None and not self.planned:
            raise ValueError(f"row {self.m_min}..{self.m_max} has neither a kernel nor a plan")


@dataclass(frozen=True)
class Table:
    """Rows of every target of one op; each target's rows cover 1..MAX_M once, in order."""

    op: str
    rows: Mapping[str, tuple[Row, ...]]

    def __post_init__(self) -> None:
        for target, rows in self.rows.items():
            expected = 1
            for row in rows:
                if row.m_min != expected:
                    kind = "gap" if row.m_min > expected else "overlap"
                    raise ValueError(
                        f"policy of {self.op} for {target}: {kind} at M={min(row.m_min, expected)}"
                    )
                expected = row.m_max + 1
            if expected != MAX_M + 1:
                raise ValueError(f"policy of {self.op} for {target}: gap at M={expected}")
        object.__setattr__(self, "rows", MappingProxyType(dict(self.rows)))

    @property
    def targets(self) -> tuple[str, ...]:
        """Targets that the table knows, in order."""
        return tuple(self.rows)

    def lookup(self, target: str, m: int) -> Row | None:
        """The row that serves `m` tokens, None for a count outside the policy.

        Raises ValueError for a target that the table does not know.
        """
        rows = self.rows.get(target)
        if rows is None:
            raise ValueError(
                f"target={target!r} has no policy for {self.op}; known: {', '.join(self.rows)}"
            )
        return next((row for row in rows if row.m_min <= m <= row.m_max), None)


def planned(m_min: int, m_max: int, name: str, launches: int) -> Row:
    """A row whose kernel is not there yet."""
    return Row(m_min, m_max, None, launches, "no kernel is built for this target yet", name)


def table(op: str, *gb300: Row, tp16: tuple[Row, ...] = ()) -> Table:
    """Table of `op`: the reference everywhere, and `gb300` for both GB300 group sizes.

    tp16: other rows for 16 ranks.
    """
    reference = Row(1, MAX_M, REFERENCE, 1, "PyTorch reference, any device and geometry")
    return Table(op, {REFERENCE: (reference,), "gb300:tp8": gb300, "gb300:tp16": tp16 or gb300})


def chip_of(target: str) -> tuple[str, int]:
    """Architecture and ranks of a target with kernels: "gb300:tp8" -> ("sm_103a", 8).

    Raises ValueError for a target that has none.
    """
    chip, _, ranks = target.partition(":tp")
    if chip not in CHIPS or ranks not in map(str, TP_SIZES):
        known = ", ".join(f"{c}:tp{n}" for c in CHIPS for n in TP_SIZES)
        raise ValueError(f"target={target!r} has no kernels; known: {known}")
    return CHIPS[chip], int(ranks)
