"""Offline engine in a process of its own: `offline.py MODEL ENGINE_ARGUMENTS_JSON`.

Prints one JSON line: tokens, start_seconds, cpu_seconds (of the start), modules (of k3fuse, those
imported), experts (what k3fuse reads of the MoE layers). With VLLM_ENABLE_V1_MULTIPROCESSING=0 the
engine core is in this process, and at TP 1 the worker, too.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from typing import Any

PROMPTS = [[3, 4, 5, 6, 7], [9, 8, 7], [11, 300, 40, 41]]
TOKENS = 12


def main() -> None:
    """Greedy tokens of fixed prompts."""
    from vllm import LLM, SamplingParams

    arguments = json.loads(sys.argv[2])
    base = {
        "skip_tokenizer_init": True,
        "max_model_len": 128,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 128,
        "dtype": "bfloat16",
        "seed": 0,
        "disable_log_stats": True,
    }
    if (
        os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0"
        and arguments.get("tensor_parallel_size", 1) == 1
    ):
        base["distributed_executor_backend"] = "uni"
    start, used = time.perf_counter(), cpu_seconds()
    llm = LLM(model=sys.argv[1], **{**base, **arguments})
    seconds, used = time.perf_counter() - start, cpu_seconds() - used
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, detokenize=False, ignore_eos=True)
    # One at a time: an engine in a process of its own batches by arrival, and sums by batch.
    results = [llm.generate([{"prompt_token_ids": p}], sampling)[0] for p in PROMPTS]
    tokens = [list(r.outputs[0].token_ids) for r in results]
    found = {
        "tokens": tokens,
        "start_seconds": round(seconds, 3),
        "cpu_seconds": round(used, 3),
        "modules": sorted(m for m in sys.modules if m.startswith(("k3fuse.", "k3fuse_vllm."))),
        "experts": experts(llm) if "distributed_executor_backend" in base else None,
    }
    print("RESULT " + json.dumps(found), flush=True)


def cpu_seconds() -> float:
    """Processor time of this process and of those that it waited for."""
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(u.ru_utime + u.ru_stime for u in used)


def experts(llm: Any) -> dict[str, Any] | None:
    """What k3fuse reads of the engine's MoE layers, where it was asked for."""
    if "k3fuse_vllm.worker" not in sys.modules:
        return None
    from k3fuse.patterns.experts_partials import objections
    from k3fuse_vllm import experts as reading

    config = llm.llm_engine.vllm_config
    table = config.compilation_config.static_forward_context
    found = {}
    for name, layer in reading.survey(config).items():
        held = table[name].routed_experts
        found[name] = {
            **layer.describe(),
            "in_place": layer.w13 is held.w13_weight and layer.w2 is held.w2_weight,
            "bias": list(layer.routing.bias.shape) if layer.routing.bias is not None else None,
            "routing": [layer.routing.scoring, layer.routing.groups, layer.routing.kept],
            "scale": layer.routing.scale,
            "shared": [list(w.shape) for w in layer.shared.tensors().values()],
            "objections": sorted({r.code.value for r in objections(layer, reference=True)}),
            "extras": list(layer.extras),
        }
    return found


if __name__ == "__main__":
    main()
