"""What the kernel workbench knows of an op's kernels, for the report: geometry, registers."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from k3fuse.rewriter.site import Site
from k3fuse.rewriter.target import Target

# Size of a variant -> symbol of a site.
_SIZES = {"m": "M", "tp": "TP", "k": "K", "blocks": "num_blocks"}


def facts(
    op: str, site: Site, target: Target, sizes: Mapping[str, int] | None = None
) -> Mapping[str, Mapping[str, Any]]:
    """Variant -> grid, block, cluster, dynamic_smem, and registers, spills, shared memory if built.

    Of the variant with the site's own sizes, and with `sizes` that no symbol holds; where the op
    has none of that size, of the listed ones for as many ranks that hold its M. Empty for an op
    without a builder and for a symbolic M.
    """
    values = {s.name: int(v) for s, v in site.values.items() if getattr(v, "is_Integer", False)}
    if not target.sm or "M" not in values:
        return {}
    known = {name: values[symbol] for name, symbol in _SIZES.items() if symbol in values}
    known = {"tp": target.tp, **known, **(sizes or {})}
    return _facts(op, target.sm, tuple(sorted(known.items())))


@lru_cache(maxsize=256)
def _facts(op: str, arch: str, sizes: tuple[tuple[str, int], ...]) -> dict[str, dict[str, Any]]:
    from k3fuse.kernels.build.cache import Cache
    from k3fuse.kernels.build.errors import PackedError, VariantError
    from k3fuse.kernels.build.variant import BUILDERS, builder

    if op not in BUILDERS:
        return {}
    source, wanted = builder(op), dict(sizes)
    listed = source.variants(arch)
    known = {name for v in listed for name, _ in v.shape}
    try:
        chosen = [source.variant(arch, {n: s for n, s in wanted.items() if n in known}, {})]
    except VariantError:
        chosen = [
            v for v in listed
            if v.size("m") >= wanted["m"] and dict(v.shape).get("tp", wanted["tp"]) == wanted["tp"]
        ]  # fmt: skip
    found: dict[str, dict[str, Any]] = {}
    for variant in chosen:
        plan = source.plan(variant)
        row: dict[str, Any] = {name: list(getattr(plan, name)) for name in ("grid", "block")}
        row |= {"cluster": list(plan.cluster), "dynamic_smem": plan.dynamic_smem}
        try:
            built = Cache().peek(variant)
        except PackedError:  # damaged: the next build replaces it
            built = None
        if built is not None:
            row["registers"] = built.resources.registers
            row["spill_bytes"] = built.resources.spill_bytes
            row["smem_bytes"] = built.smem_bytes
        found[variant.name] = row
    return found
