"""Where the rewrite enters one engine, or why it does not."""

from __future__ import annotations

from dataclasses import dataclass

from k3fuse.rewriter.reasons import Code, Reason
from k3fuse_vllm.facts import MODES, Facts
from k3fuse_vllm.settings import Route, Settings, names_backend, names_pass
from k3fuse_vllm.versions import unknown_version

# Tokens of one step that a policy row covers at most; a larger step runs stock.
MAX_TOKENS = 64
# Tokens a request brings to one step: one and up to seven drafts.
MAX_REQUEST_TOKENS = 8


@dataclass(frozen=True)
class Decision:
    """Route, and what stands against it. With a reason nothing is rewritten."""

    route: Route
    reasons: tuple[Reason, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def active(self) -> bool:
        """Whether anything is to be rewritten."""
        return self.route is not Route.NONE and not self.reasons


def decide(facts: Facts, settings: Settings) -> Decision:
    """Choose the route from the configuration alone; every worker comes to the same end."""
    if unknown := unknown_version(facts.vllm):
        return Decision(Route.NONE, (_reason(unknown, "0.32 or 0.33", facts.vllm),))
    route, reason, notes = _route(facts, settings)
    if reason is not None:
        return Decision(Route.NONE, (reason,), notes)
    return Decision(route, tuple(objections(facts, settings)), notes)


def _route(facts: Facts, settings: Settings) -> tuple[Route, Reason | None, tuple[str, ...]]:
    by_pass, by_backend = names_pass(facts), names_backend(facts)
    used = (facts.mode == 3 and by_pass) or (facts.mode in (1, 2) and by_backend)
    mode = f"mode {facts.mode} ({MODES[facts.mode]})"
    if used and settings.asks_for_regional:
        return Route.NONE, _conflict(mode), ()
    if facts.is_k3:
        return _k3_route(facts, settings, used=used, named=by_pass or by_backend, mode=mode)
    if used and by_pass:
        return Route.PASS, None, _range_notes(facts)
    if used:
        return Route.BACKEND, None, ()
    if by_pass or by_backend:
        what = "inductor_passes" if by_pass else f"backend {facts.backend!r}"
        needs = "mode 3" if by_pass else "mode 1 or 2"
        why = ", because enforce_eager is set" if facts.eager else ""
        return Route.NONE, _never(f"{what} needs {needs}, and vLLM runs {mode}{why}"), ()
    if settings.asks_for_regional:
        if facts.mode:
            return Route.NONE, _conflict(mode), ()
        return Route.REGIONAL, None, ()
    text = (
        f"nothing leads there: vLLM runs {mode} for {facts.architecture or 'this model'}; add the "
        'pass (mode 3), the backend (modes 1, 2), or "route": "regional" with "region" naming the '
        "layer class (mode 0)"
    )
    return Route.NONE, _never(text), ()


def _k3_route(
    facts: Facts, settings: Settings, *, used: bool, named: bool, mode: str
) -> tuple[Route, Reason | None, tuple[str, ...]]:
    """Kimi K3: no class of it is compile-decorated, so modes 2 and 3 compile nothing."""
    if facts.mode == 1:
        if used:
            return Route.BACKEND, None, ()
        return Route.NONE, _conflict(mode), ()
    if named and not settings.explicit:
        text = (
            f"vLLM runs {mode} and never compiles its Kimi K3 classes, so no pass and no backend "
            "is called; give --additional-config '{\"k3fuse\": {}}' instead"
        )
        return Route.NONE, _never(text), ()
    notes = ("the pass or backend is not called for Kimi K3; its layers are compiled",)
    return Route.REGIONAL, None, notes if named else ()


def _range_notes(facts: Facts) -> tuple[str, ...]:
    if MAX_TOKENS in facts.ranges:
        return ()
    return (
        f"no compile range ends at {MAX_TOKENS}, so prefill graphs are rewritten too and choose "
        f'when they run; set "compile_ranges_endpoints": [{MAX_TOKENS}]',
    )


def objections(facts: Facts, settings: Settings) -> list[Reason]:
    """What the engine does that the kernels do not cover, each with what to change."""
    target = settings.options.target
    reference = target is not None and target.is_reference
    found = []
    for name, on, fix in (
        ("pipeline parallelism", facts.pp > 1, "set pipeline_parallel_size to 1"),
        ("expert parallelism", facts.expert_parallel, "drop enable_expert_parallel"),
        ("LoRA", facts.lora, "serve without LoRA"),
        ("dual batch overlap (DBO)", facts.dbo, "drop enable_dbo"),
        (
            "vLLM's own specialised decode",
            facts.additional.get("decode_backend", "auto") != "auto",
            'set "decode_backend" to "auto"',
        ),
    ):
        if on:
            found.append(_reason(f"{name} is not covered", "off", "on", fix))
    if facts.mode == 2 and settings.options.inner != "inductor":
        found.append(
            _reason(
                "mode 2 saves what it compiled, and only Inductor's code can be saved",
                "inductor",
                settings.options.inner,
                'set "inner" to "inductor", or use mode 1 or 3',
            )
        )
    if facts.dcp not in (1, facts.tp):
        found.append(
            _reason(
                f"decode context parallel size {facts.dcp} is not covered",
                f"1 or the tensor-parallel size, {facts.tp}",
                str(facts.dcp),
                "set decode_context_parallel_size to 1",
            )
        )
    if 1 + facts.draft_tokens > MAX_REQUEST_TOKENS:
        found.append(
            Reason(
                Code.M_OUT_OF_RANGE,
                f"a step brings {1 + facts.draft_tokens} tokens a request",
                expected=f"at most {MAX_REQUEST_TOKENS}",
                actual=str(1 + facts.draft_tokens),
                hint="set num_speculative_tokens to 7 or less",
            )
        )
    if facts.dtype != "bfloat16" and not reference:
        found.append(
            Reason(
                Code.DTYPE_MISMATCH,
                f"the model runs in {facts.dtype}",
                expected="bfloat16",
                actual=facts.dtype,
                hint="set dtype to bfloat16",
            )
        )
    if not facts.full_graphs and not reference:
        found.append(
            _reason(
                "decode steps are not captured as FULL CUDA graphs"
                + (", because enforce_eager is set" if facts.eager else ""),
                "FULL or FULL_DECODE_ONLY",
                "none",
                'drop enforce_eager; set "cudagraph_mode" to "FULL_DECODE_ONLY"',
            )
        )
    return found


def _reason(sentence: str, expected: str, actual: str, hint: str = "") -> Reason:
    return Reason(
        Code.ENGINE_UNSUPPORTED, sentence, expected=expected, actual=actual or "unknown", hint=hint
    )


def _never(sentence: str) -> Reason:
    return Reason(Code.COMPILE_NOT_REACHED, sentence)


def _conflict(mode: str) -> Reason:
    return _reason(
        f"two routes at once: vLLM's {mode} compiles the model that the regional route compiles",
        "one route",
        "two",
        'keep the pass or backend without "route" and "region", or set mode 0 with them',
    )
