"""Memory order and scope of an access, as PTX writes them."""

from __future__ import annotations

from typing import NamedTuple

SCOPES = ("", "cta", "cluster", "gpu", "sys")


class Order(NamedTuple):
    """Memory order and scope of an access: `strength` is 0 for weak, else 1 (cta) to 4 (sys)."""

    sem: str
    strength: int

    @property
    def acquires(self) -> bool:
        """Whether the access is an acquire."""
        return self.sem in ("acquire", "acq_rel")

    @property
    def releases(self) -> bool:
        """Whether the access is a release."""
        return self.sem in ("release", "acq_rel")


WEAK = Order("weak", 0)


def order_of(sem: str | None, scope: str | None, default: str = "gpu") -> Order:
    """The order of an access with these modifiers; `default` is the scope when there is none."""
    if sem is None or sem == "weak":
        return WEAK
    if sem in ("volatile", "mmio"):
        return Order("relaxed", 4)
    return Order(sem, SCOPES.index(scope or default))
