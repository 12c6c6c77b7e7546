"""vLLM 0.33's own Kimi K3 experts, read through its layer registry, on meta weights.

`k3_experts.py WHEEL TP BACKEND...` prints one JSON line: what k3fuse reads of layer 1. BACKEND
"" stands for BF16 experts, else one of vLLM's MXFP4 backends. A process of its own, as k3_layers.
"""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any


def main() -> None:
    """Build one layer, read it twice: by the engine's registry, and in a forward context."""
    from k3fuse.patterns.sources.vllm_k3 import environment, layers

    wheel, tp = Path(sys.argv[1]), int(sys.argv[2])
    warnings.simplefilter("ignore")
    environment.prepare(wheel, tp)
    found = {}
    for n, backend in enumerate(sys.argv[3:]):
        with layers.engine(tp, moe_backend=backend) as config:
            if n == 0:
                layers.init_groups(tp)
            from k3fuse_vllm import blockers  # imports vLLM

            blockers.prepare()
            found[backend] = _read(config, layers.build_layers(config, [1]))
    print("RESULT " + json.dumps(found))


def _read(config: Any, built: Any) -> dict[str, Any]:
    from k3fuse.patterns.experts_partials import objections
    from k3fuse.rewriter.reasons import Refusal
    from k3fuse_vllm import experts
    from k3fuse_vllm.expert_layout import of_method
    from k3fuse_vllm.layer_ref import layer_ref

    names = ("B12X_MXFP4_MXFP8", "FLASHINFER_TRTLLM_MXFP4_MXFP8")
    rows, trtllm = (
        of_method(SimpleNamespace(mxfp4_backend=SimpleNamespace(name=n))) for n in names
    )
    (name,) = config.compilation_config.static_all_moe_layers
    held = built.layers[1].block_sparse_moe.experts.routed_experts
    experts.use_engine(config)
    layer = experts.survey(config)[name]
    with built.decode_context([1], 4):
        running = experts.lookup(layer_ref()(name))
        try:
            experts.lookup("model.layers.0.mlp")
        except Refusal as refusal:
            missing = str(refusal)
    return {
        **layer.describe(),
        "name": name,
        "same": all(
            a is b and a is getattr(held, field)
            for a, b, field in (
                (layer.w13, running.w13, "w13_weight"),
                (layer.w2, running.w2, "w2_weight"),
                *([(layer.w13_scale, running.w13_scale, "w13_weight_scale")] * layer.packed),
            )
        ),
        "missing": missing,
        "shapes": {
            "w13": list(layer.w13.shape),
            "w2": list(layer.w2.shape),
            "w13_scale": list(layer.w13_scale.shape) if layer.packed else None,
            "w2_scale": list(layer.w2_scale.shape) if layer.packed else None,
            "shared": [list(w.shape) for w in layer.shared.tensors().values()],
            "bias": [*layer.routing.bias.shape, str(layer.routing.bias.dtype)],
        },
        "betas": [layer.beta, layer.linear_beta],
        "shared betas": layer.shared.facts(),
        "router": layer.routing.router,
        "not loaded": _refused(experts, name),
        "routing": [
            layer.routing.scoring,
            layer.routing.renormalise,
            layer.routing.scale,
            layer.routing.groups,
        ],
        "widths": [layer.width, layer.width_used],
        "extras": list(layer.extras),
        "objections": [str(r) for r in objections(layer)],
        # The same layer, had its backend kept another order: no weights are loaded here.
        "by_rows": [str(r) for r in objections(replace(layer, layout=rows))],
        "by_trtllm": [str(r) for r in objections(replace(layer, layout=trtllm))],
        "report": experts.report(config),
    }


def _refused(experts: Any, name: str) -> str:
    """Why a graph's layer is not taken: this engine's weights have shapes alone."""
    from k3fuse.rewriter.reasons import Refusal

    try:
        experts.find(name)
    except Refusal as refusal:
        return str(refusal)
    return ""


if __name__ == "__main__":
    main()
