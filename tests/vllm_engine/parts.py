"""Parts of vLLM 0.32 that need no engine: a quantised linear, the pass object, the plugin.

`parts.py MODEL`, run by the launcher, in a fork that has imported vLLM; prints one JSON line.
"""

from __future__ import annotations

import copy
import importlib
import json
import pickle
import sys
import tempfile
from types import SimpleNamespace
from typing import Any

import torch


def main() -> None:
    """Look at each part."""
    print("RESULT " + json.dumps({"linears": _linears(), "pass": _pass(), "plugin": _plugin()}))


def _linears() -> dict[str, list[str]]:
    """What a decoder layer is told by the method of its linear: BF16, FP8, and experts alone."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.fp8 import Fp8Config

    from k3fuse.rewriter.reasons import Refusal
    from k3fuse_vllm import blockers

    found = {}
    config = EngineArgs(model=sys.argv[1], skip_tokenizer_init=True, enforce_eager=True)
    engine = config.create_engine_config()
    with set_current_vllm_config(engine), tempfile.TemporaryDirectory() as folder:
        address = f"file://{folder}/store"
        parallel_state.init_distributed_environment(1, 0, address, 0, "gloo")
        parallel_state.initialize_model_parallel(1)
        for name, quantised in (("bf16", None), ("fp8", Fp8Config(True))):
            layer: Any = torch.nn.Module()
            layer.self_attn = torch.nn.Module()
            layer.self_attn.prefix = "model.layers.0.self_attn"
            layer.self_attn.in_proj = ReplicatedLinear(
                64, 64, bias=False, quant_config=quantised, prefix="in_proj", disable_tp=True
            )
            # Experts are no linear: what they are quantised with is theirs alone.
            layer.experts = torch.nn.Module()
            layer.experts.quant_method = SimpleNamespace()
            layer.use_sequence_parallel = False
            try:
                blockers.prepare_layer(layer)
                found[name] = []
            except Refusal as refusal:
                found[name] = [refusal.reason.code.value, refusal.reason.sentence]
    return found


def _pass() -> dict[str, bool]:
    """The pass travels to workers by name, and its cache key follows the engine's options."""
    import k3fuse_vllm
    from k3fuse_vllm.facts import Facts
    from k3fuse_vllm.graph_pass import set_engine
    from k3fuse_vllm.routes import decide
    from k3fuse_vllm.settings import Settings

    keys = []
    hook = {"post_grad_custom_post_pass": "k3fuse_vllm.decode_pass"}
    for options in ({"target": "reference"}, {"target": "reference", "disable": ["router"]}):
        facts = Facts(vllm="0.32.0", mode=3, passes=hook, additional={"k3fuse": options})
        settings = Settings.of(facts)
        assert settings is not None
        set_engine(settings, decide(facts, settings))
        keys.append(k3fuse_vllm.decode_pass.uuid())
    found = k3fuse_vllm.decode_pass
    small, large = SimpleNamespace(start=1, end=64), SimpleNamespace(start=65, end=2048)
    return {
        "pickled": pickle.loads(pickle.dumps(found)) is found,
        "copied": copy.deepcopy(found) is found,
        "keyed": keys[0] != keys[1] and keys[0] != "",
        "small": found.is_applicable_for_range(small),
        "large": found.is_applicable_for_range(large),
    }


def _plugin() -> dict[str, bool]:
    """Registering wraps once, however often and whether the worker is imported before or behind."""
    from k3fuse_vllm import plugin

    name = "vllm.v1.worker.worker_base"
    first = importlib.import_module(name)
    plugin.register()
    once = first.WorkerWrapperBase.init_device
    plugin.register()
    again = first.WorkerWrapperBase.init_device
    del sys.modules[name]
    plugin.register()
    plugin.register()
    late = name not in sys.modules  # registering imports nothing
    later = importlib.import_module(name).WorkerWrapperBase.init_device

    def wrapped_once(function: Any) -> bool:
        mark = "_k3fuse_wrapped"
        return hasattr(function, mark) and not hasattr(function.__wrapped__, mark)

    return {
        "once": again is once,
        "wrapped": wrapped_once(once),
        "late": late and wrapped_once(later),
    }


if __name__ == "__main__":
    main()
