"""Offline engine in a process of its own: `offline.py MODEL ENGINE_ARGUMENTS_JSON`.

Prints one JSON line: {"tokens": [[...], ...]}. Engine and worker run in this process where
VLLM_ENABLE_V1_MULTIPROCESSING=0 and TP is 1: the imports are most of a start.
"""

from __future__ import annotations

import json
import os
import sys
import time

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
    if os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING") == "0":
        base["distributed_executor_backend"] = "uni"
    start = time.perf_counter()
    llm = LLM(model=sys.argv[1], **{**base, **arguments})
    seconds = time.perf_counter() - start
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.0, detokenize=False, ignore_eos=True)
    # One at a time: an engine in a process of its own batches by arrival, and sums by batch.
    results = [llm.generate([{"prompt_token_ids": p}], sampling)[0] for p in PROMPTS]
    tokens = [list(r.outputs[0].token_ids) for r in results]
    print("RESULT " + json.dumps({"tokens": tokens, "start_seconds": round(seconds, 2)}))


if __name__ == "__main__":
    main()
