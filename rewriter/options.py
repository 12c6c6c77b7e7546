"""Options of the backend and the command, in one dataclass, with environment overrides."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from k3fuse.rewriter.target import Target

INNER = ("inductor", "aot_eager", "eager")
VALIDATE = ("off", "structure", "values")
LOG = ("off", "summary", "explain", "all")


# Set by a host program that reads its own configuration, such as an inference server.
_PROCESS: dict[str, Any] = {}


def set_process_options(values: Mapping[str, Any]) -> None:
    """Set defaults of this process; they go before environment variables, after a call's own."""
    _PROCESS.clear()
    _PROCESS.update(values)


class OptionError(ValueError):
    """An option that does not exist or has a wrong value."""


@dataclass(frozen=True)
class Options:
    """How to rewrite.

    target: see Target.parse; None detects it. inner: what compiles the rewritten graph; "inductor",
    "aot_eager" or "eager". plan: treat kernels that do not exist yet as if they did. dry_run: match
    and report, edit nothing. strict: an expected site that was not rewritten, or a rank that
    disagrees, is an error. expect: pattern name -> expected sites of one graph; for a model of
    several graphs call backend.check(expect) after its first step. disable: pattern names left
    alone. only_layers: rewrite only these layers (None: all). first_layer: number of the graph's
    first layer. validate: checks of the rewrite, "off", "structure" (the graph's rules) or "values"
    (each site's nodes are also run against its op on random inputs; a site that differs, or cannot
    be run, is left). log: what each rewrite
    logs; "off", "summary" (3 reasons), "explain" or "all" (every reason). dump_dir: folder for text
    dumps ("": none). groups: process group name -> ranks, where torch.distributed cannot tell.
    batch_invariant: one engine for all token counts of the policy, so that a token's bits do not
    depend on the batch that it is in. row_sharded: rows of weights that all ranks have alike (q_a
    and kv_a of latent attention) are split over the ranks, at the price of an exchange a layer; off
    until a GPU says that it pays. A site that cannot be split is refused. prefetch: ops that
    exchange rows with other ranks ask for the next weights beside it, in a launch of its own; off
    until a GPU says that it pays. No value depends on it.
    """

    target: Target | None = None
    inner: Literal["inductor", "aot_eager", "eager"] = "inductor"
    plan: bool = False
    dry_run: bool = False
    strict: bool = False
    expect: Mapping[str, int] = field(default_factory=dict)
    disable: tuple[str, ...] = ()
    only_layers: tuple[int, ...] | None = None
    first_layer: int = 0
    validate: Literal["off", "structure", "values"] = "structure"
    log: Literal["off", "summary", "explain", "all"] = "summary"
    dump_dir: str = ""
    groups: Mapping[str, int] = field(default_factory=dict)
    batch_invariant: bool = False
    row_sharded: bool = False
    prefetch: bool = False

    def __post_init__(self) -> None:
        for name, value, known in (
            ("inner", self.inner, INNER),
            ("validate", self.validate, VALIDATE),
            ("log", self.log, LOG),
        ):
            if value not in known:
                raise OptionError(
                    f"option {name}={value!r} is unknown; use one of {', '.join(known)}"
                )

    @classmethod
    def make(cls, given: Mapping[str, Any] | None = None) -> Options:
        """Build from a user's dict; the process's defaults and then environment variables fill it.

        Raises OptionError naming the option, its value and what exists.
        """
        values: dict[str, Any] = dict(_environment())
        values.update(_PROCESS)
        values.update(given or {})
        known = {f.name for f in dataclasses.fields(cls)}
        for name in values:
            if name not in known:
                raise OptionError(
                    f"option {name!r} does not exist; use one of {', '.join(sorted(known))}"
                )
        target = values.get("target")
        if isinstance(target, str):
            values["target"] = Target.parse(target)
        elif target is not None and not isinstance(target, Target):
            raise OptionError(
                f"option target={target!r} is no target; use a string such as 'gb300:tp8'"
            )
        for name in ("disable", "only_layers"):
            value = values.get(name)
            if isinstance(value, str):
                raise OptionError(f"option {name}={value!r} is a string; use a list")
            if value is not None:
                values[name] = tuple(value)
        for name in ("strict", "plan", "dry_run", "batch_invariant", "row_sharded", "prefetch"):
            if name in values and not isinstance(values[name], bool):
                raise OptionError(f"option {name}={values[name]!r} is no bool; use True or False")
        return cls(**values)

    def changed(self) -> dict[str, Any]:
        """Options that differ from their defaults, as text, for the summary."""
        defaults = Options()
        names = [f.name for f in dataclasses.fields(self)]
        return {
            name: getattr(self, name)
            for name in names
            if name not in ("target", "groups", "expect")
            and getattr(self, name) != getattr(defaults, name)
        }


def _environment() -> dict[str, Any]:
    """K3FUSE_TARGET, _DUMP_DIR, _LOG, _DISABLE, _ONLY_LAYERS, _STRICT, _PLAN, _DRY_RUN, _VALIDATE,
    _INNER, _BATCH_INVARIANT, _ROW_SHARDED and _PREFETCH.
    """
    found: dict[str, Any] = {}
    for name in ("target", "dump_dir", "log", "validate", "inner"):
        text = os.environ.get(f"K3FUSE_{name.upper()}")
        if text:
            found[name] = text
    for name in ("strict", "plan", "dry_run", "batch_invariant", "row_sharded", "prefetch"):
        text = os.environ.get(f"K3FUSE_{name.upper()}")
        if text:
            if text not in ("0", "1"):
                raise OptionError(f"K3FUSE_{name.upper()}={text!r} is neither 0 nor 1")
            found[name] = text == "1"
    if text := os.environ.get("K3FUSE_DISABLE"):
        found["disable"] = tuple(p.strip() for p in text.split(",") if p.strip())
    if text := os.environ.get("K3FUSE_ONLY_LAYERS"):
        try:
            found["only_layers"] = tuple(int(p) for p in text.split(","))
        except ValueError:
            raise OptionError(
                f"K3FUSE_ONLY_LAYERS={text!r} is no list of integers, e.g. 0,3,12"
            ) from None
    return found
