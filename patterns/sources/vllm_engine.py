"""The source `vllm:CONFIG.json`: what a vLLM engine of that configuration would rewrite.

No weights, no GPU and no engine: the route and its refusals come from the configuration, the graphs
from vLLM 0.33's own Kimi K3 layers where that vLLM is at hand, else from the built-in model.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from k3fuse.patterns.models.config import KimiK3Config
from k3fuse.patterns.sources import kimi_k3
from k3fuse.rewriter.reasons import Code, Reason
from k3fuse.rewriter.sources import SourceError, SourceGraph, SourceRequest, from_file
from k3fuse_vllm.facts import K3_ARCHITECTURES, Facts
from k3fuse_vllm.routes import Decision, decide
from k3fuse_vllm.settings import Settings
from k3fuse_vllm.versions import SERIES

# The folder that holds vLLM 0.33 (site-packages or an unpacked wheel), where it is not importable.
FOLDER = "K3FUSE_VLLM"
_LAYERS = 93
_BLOCK = 12
_MODES = {"NONE": 0, "STOCK_TORCH_COMPILE": 1, "DYNAMO_TRACE_ONCE": 2, "VLLM_COMPILE": 3}
_FULL = ("FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


class EngineRefusedError(SourceError):
    """The engine would run stock; the text is the reason. exit_code: for the command line."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(f"this engine runs stock: {reason}; fix: {reason.fix}")
        self.exit_code = 3 if reason.code is Code.COMPILE_NOT_REACHED else 1


def build(request: SourceRequest) -> list[SourceGraph]:
    """Read the configuration and return the graphs of its engine.

    Raises SourceError for what cannot be read, EngineRefusedError where the engine would run stock.
    """
    if not request.argument:
        raise SourceError("source 'vllm' needs a configuration: vllm:CONFIG.json")
    facts = read_facts(Path(request.argument), request)
    settings = Settings.of(facts)
    if settings is None:
        raise EngineRefusedError(
            Reason(
                Code.COMPILE_NOT_REACHED,
                "nothing in the configuration asks for k3fuse",
                hint='add "additional_config": {"k3fuse": {}}',
            )
        )
    decision = decide(facts, settings)
    if decision.reasons:
        raise EngineRefusedError(decision.reasons[0])
    if not facts.is_k3:
        raise SourceError(
            f"vLLM compiles {facts.architecture} inside its engine, and its graphs exist there "
            'only; start the engine once with "dry_run": true and read the report'
        )
    graphs = list(_graphs(request))
    graphs[0].notes = (*_notes(facts, decision, settings), *graphs[0].notes)
    return graphs


def read_facts(path: Path, request: SourceRequest) -> Facts:
    """Read engine arguments (names as of vLLM's LLM class) or a model's config.json.

    A model's config.json stands for an engine of the target's size that asks for k3fuse.
    Raises SourceError naming the file and what is wrong in it.
    """
    document = _json(path)
    if "architectures" in document:
        document = {"hf_config": document, "additional_config": {"k3fuse": {}}}
        document["tensor_parallel_size"] = request.target.tp or 1
    compilation = document.get("compilation_config") or {}
    if not isinstance(compilation, Mapping):
        raise SourceError(f"{path}: compilation_config is no object")
    model = _model(path, document)
    names = model.get("architectures") or [""]
    eager = bool(document.get("enforce_eager"))
    mode = _mode(compilation.get("mode"), eager=eager)
    architecture = str(names[0])
    breakable = os.environ.get("VLLM_USE_BREAKABLE_CUDAGRAPH", "1") == "1"
    if architecture in K3_ARCHITECTURES and breakable:
        mode = 0  # vLLM captures Kimi K3 in breakable graphs, which turn its own compile off
    graphs = str(compilation.get("cudagraph_mode", "FULL_AND_PIECEWISE"))
    speculative = document.get("speculative_config") or {}
    facts = Facts(
        architecture=architecture,
        vllm=str(document.get("vllm_version") or f"{SERIES[-1]}.0"),
        tp=int(document.get("tensor_parallel_size", 1)),
        pp=int(document.get("pipeline_parallel_size", 1)),
        dcp=int(document.get("decode_context_parallel_size", 1)),
        expert_parallel=bool(document.get("enable_expert_parallel")),
        lora=bool(document.get("enable_lora")),
        dbo=bool(document.get("enable_dbo")),
        dtype=_dtype(document, model),
        draft_tokens=int(speculative.get("num_speculative_tokens", 0)),
        mode=mode,
        backend=str(compilation.get("backend", "")),
        passes=dict(compilation.get("inductor_passes") or {}),
        ranges=tuple(compilation.get("compile_ranges_endpoints") or ()),
        full_graphs=graphs in _FULL and not eager and not (mode == 1 and not breakable),
        eager=eager,
        additional=document.get("additional_config") or {},
    )
    # Without a GPU there is nothing to detect: the command's target stands in.
    return replace(facts, capability=(10, 3)) if request.target.arch == "gb300" else facts


def _json(path: Path) -> dict[str, Any]:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SourceError(f"configuration {str(path)!r} cannot be read: {error.strerror}") from None
    except json.JSONDecodeError as error:
        raise SourceError(f"configuration {path} is no JSON ({error})") from None
    if not isinstance(document, dict):
        raise SourceError(f"configuration {path} is no object of engine arguments")
    return document


def _model(path: Path, document: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(document.get("hf_config"), dict):
        return dict(document["hf_config"])
    folder = document.get("model")
    if not isinstance(folder, str):
        raise SourceError(f'{path}: give "model", a folder with config.json, or "hf_config"')
    file = (path.parent / folder / "config.json").resolve()
    if not file.is_file():
        raise SourceError(
            f"{path}: model {folder!r} has no config.json beside it; download the model's "
            "config.json (no weights are needed) and name its folder"
        )
    return _json(file)


def _mode(value: Any, *, eager: bool) -> int:
    if eager:
        return 0
    if value is None:
        return 3
    if isinstance(value, int) and 0 <= value <= 3:
        return value
    if value in _MODES:
        return _MODES[value]
    raise SourceError(f"compilation_config.mode={value!r} is unknown; use 0 to 3")


def _dtype(document: Mapping[str, Any], model: Mapping[str, Any]) -> str:
    given = str(document.get("dtype", "auto"))
    text = model.get("text_config") if isinstance(model.get("text_config"), dict) else {}
    own = model.get("torch_dtype") or model.get("dtype") or (text or {}).get("torch_dtype")
    return str(own or "bfloat16") if given == "auto" else given.removeprefix("torch.")


def _notes(facts: Facts, decision: Decision, settings: Settings) -> tuple[str, ...]:
    forms = len({_form(i) for i in range(_LAYERS)})
    graphs = f"{forms} graphs of decoder layers, one of the last AttnRes"
    if settings.region == ("model",):
        graphs = "one graph of the whole text model (shown layer by layer)"
    return (
        f"vLLM {facts.vllm}, route {decision.route.value}: {graphs}, for steps of up to 64 tokens",
        *decision.notes,
    )


def _form(layer: int) -> tuple[bool, bool, bool, int]:
    """What a layer's graph depends on: MLA, MoE, block write, AttnRes blocks before it."""
    mla = (layer + 1) % 4 == 0 or layer == _LAYERS - 1
    return mla, layer > 0, layer % _BLOCK == 0, -(-layer // _BLOCK)


def _graphs(request: SourceRequest) -> Iterator[SourceGraph]:
    folder = _vllm_folder()
    if folder is None:
        found = kimi_k3.build(replace(request, form=request.form or "bank"))
        found[0].notes = (
            f"vLLM 0.33 is not at hand (set {FOLDER}=FOLDER): counted on k3fuse's own spelling of "
            "the model",
        )
        yield from found
        return
    count = request.layers or _LAYERS
    first: dict[Any, int] = {}
    for layer in range(count):
        first.setdefault(_form(layer), layer)
    with tempfile.TemporaryDirectory(prefix="k3fuse-") as scratch:
        _capture(folder, request, sorted(first.values()), Path(scratch))
        tp, m = request.target.tp or 8, "dyn" if request.m is None else str(request.m)
        expected = KimiK3Config().expected_sites(count)
        for layer in range(count):
            kept = first[_form(layer)]
            text = (Path(scratch) / f"layer{kept}_tp{tp}_m{m}_opaque.json").read_text("utf-8")
            file = Path(scratch) / "one.json"
            file.write_text(text.replace(f"layers.{kept}.", f"layers.{layer}."), "utf-8")
            graph = from_file(file)
            graph.name, graph.first_layer = "vllm kimi-k3", layer
            graph.expected = expected if layer == 0 else {}
            yield graph
        last = from_file(Path(scratch) / f"final_tp{tp}_m{m}_plain.json")
        last.name = "vllm kimi-k3"
        yield last


def _vllm_folder() -> Path | None:
    """The folder that holds vLLM 0.33's Python, None where there is none."""
    spec = importlib.util.find_spec("vllm")
    places = [
        os.environ.get(FOLDER),
        str(Path(spec.origin).parents[1]) if spec and spec.origin else None,
    ]
    for place in filter(None, places):
        if any(Path(place).glob("vllm-0.33.*.dist-info")):
            return Path(place)
    return None


def _capture(folder: Path, request: SourceRequest, layers: list[int], output: Path) -> None:
    """Trace vLLM's layers in a process of its own: the stand-ins for CUDA stay for good."""
    request.progress(f"trace {len(layers)} layer forms of vLLM 0.33")
    command = [
        sys.executable, "-m", "k3fuse.patterns.sources.vllm_k3", "--vllm", str(folder),
        "--tp", str(request.target.tp or 8), "--layers", ",".join(map(str, layers)),
        "--m", "dynamic" if request.m is None else str(request.m), "--core", "opaque",
        "--final-attn-res", "-o", str(output),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        lines = done.stderr.strip().splitlines() or ["no message"]
        raise SourceError(f"vLLM's layers cannot be traced: {lines[-1]}")
