"""What a builder is asked for, checked: names it has, values it covers."""

from __future__ import annotations

from collections.abc import Mapping

from k3fuse.kernels.build.errors import VariantError


def merged(
    op: str, what: str, defaults: Mapping[str, int], given: Mapping[str, int]
) -> dict[str, int]:
    """The defaults with what is given over them. what: "shape" or "config".

    Raises VariantError for a name that the defaults do not have.
    """
    unknown = sorted(set(given) - set(defaults))
    if unknown:
        raise VariantError(f"{op} has no {what} {unknown[0]!r}; it has {', '.join(defaults)}")
    return {**defaults, **given}


def need(op: str, holds: bool, name: str, value: int, fits: str) -> None:
    """Raise VariantError with the name, the value and what would fit, unless it holds."""
    if not holds:
        raise VariantError(f"{op}: {name}={value} is outside the kernel; use {fits}")
