"""What the user asked for: `--additional-config '{"k3fuse": {...}}'`, a pass, or a backend."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any

from k3fuse.rewriter.options import OptionError, Options
from k3fuse.rewriter.target import ARCHITECTURES, TP_SIZES, Target
from k3fuse_vllm.facts import Facts

KEY = "k3fuse"
# Options of this package beside those of k3fuse.rewriter.options.Options.
OWN = ("route", "region", "report", "fresh")
_CAPABILITIES = {(10, 3): "gb300"}


class Route(StrEnum):
    """How the rewrite gets into the engine."""

    PASS = "pass"
    BACKEND = "backend"
    REGIONAL = "regional"
    NONE = "none"


@dataclass(frozen=True)
class Settings:
    """One engine's wish.

    route: "auto" or "regional" (compile decoder layers whatever vLLM's mode is). region: classes of
    the modules to compile, () = K3's decoder layers, ("model",) = its whole text model. report:
    file that rank 0's report goes to, "" for vLLM's cache folder. fresh: compile anew, so that no
    warm cache hides the rewrite.
    """

    options: Options
    given: Mapping[str, Any] = field(default_factory=dict)
    route: str = "auto"
    region: tuple[str, ...] = ()
    report: str = ""
    fresh: bool = False
    explicit: bool = False

    @classmethod
    def of(cls, facts: Facts) -> Settings | None:
        """Read the wish; None where nobody asked.

        Raises OptionError naming the option, its value and what exists.
        """
        given = facts.additional.get(KEY)
        if given is None or given is False:
            return cls(_options({}, facts)) if _named(facts) else None
        if not isinstance(given, Mapping):
            raise OptionError(
                f"additional_config[{KEY!r}] is {given!r}; give an object of options, {{}} for "
                "the defaults"
            )
        own = {name: given[name] for name in OWN if name in given}
        options = _options({k: v for k, v in given.items() if k not in OWN}, facts)
        region = own.get("region", ())
        if region in ("layers", "model"):
            region = () if region == "layers" else ("model",)
            if region and not facts.is_k3:
                raise OptionError(
                    f"option region='model' is for Kimi K3; name the class to compile for "
                    f'{facts.architecture or "this model"}: "region": ["ModelClass"]'
                )
        if own.get("route", "auto") not in ("auto", "regional"):
            raise OptionError(
                f"option route={own['route']!r} is unknown; use one of auto, regional"
            )
        if not isinstance(region, (list, tuple)) or not all(isinstance(r, str) for r in region):
            raise OptionError(
                f"option region={region!r} is no list of class names, nor 'layers' or 'model'"
            )
        for name in ("fresh",):
            if not isinstance(own.get(name, False), bool):
                raise OptionError(f"option {name}={own[name]!r} is no bool; use true or false")
        if not isinstance(own.get("report", ""), str):
            raise OptionError(f"option report={own['report']!r} is no file name")
        return cls(
            options,
            given=dict(given),
            route=own.get("route", "auto"),
            region=tuple(region),
            report=own.get("report", ""),
            fresh=own.get("fresh", False) or options.dry_run or bool(options.dump_dir),
            explicit=True,
        )

    def with_groups(self, groups: Mapping[str, int]) -> Settings:
        """Return the same wish, with the sizes of vLLM's process groups by name."""
        return replace(self, options=replace(self.options, groups=dict(groups)))

    @property
    def asks_for_regional(self) -> bool:
        """Whether the user named the regional route or its region."""
        return self.route == "regional" or bool(self.region)


def _options(given: Mapping[str, Any], facts: Facts) -> Options:
    try:
        options = Options.make(given)
    except OptionError as error:
        text = str(error)
        if "does not exist" in text:
            text += f", {', '.join(OWN)}"
        raise OptionError(text) from None
    if options.target is None:
        values = {**given, "target": detected(facts)}
        options = Options.make(values)
    return options


def detected(facts: Facts) -> Target:
    """Return the target of the engine's GPU and tensor-parallel size, "none" where none fits."""
    arch = _CAPABILITIES.get(facts.capability) if facts.capability is not None else None
    if arch in ARCHITECTURES and facts.tp in TP_SIZES:
        return Target(arch, facts.tp)
    return Target("")


def _named(facts: Facts) -> bool:
    return names_pass(facts) or names_backend(facts)


def names_pass(facts: Facts) -> bool:
    """Whether a pass of ours is configured."""
    return any(name.startswith("k3fuse_vllm.") for name in facts.passes.values())


def names_backend(facts: Facts) -> bool:
    """Whether our backend is configured, by registered or qualified name."""
    return facts.backend == "k3fuse" or facts.backend.startswith("k3fuse.rewriter.backend.")
