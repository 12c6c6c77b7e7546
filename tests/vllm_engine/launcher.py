"""Starts engines from one process that has imported vLLM: imports are most of an engine's start.

Reads one JSON request a line, {"script": MODULE, "env": {...}, "log": FILE, "arguments": [...],
"limit": SECONDS}, and answers with one line {"code": N}. Every script (offline, parts) runs in a
fork of this process with the environment of its request; the process itself starts no engine, loads
no plugin and no k3fuse.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import signal
import sys
import time
import traceback
from typing import Any

# What an engine of the small model imports; only time is lost where a name is not there.
PRELOAD = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.llm_engine",
    "vllm.v1.engine.core",
    "vllm.v1.executor.uniproc_executor",
    "vllm.v1.executor.multiproc_executor",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.deepseek_v2",
    "vllm.model_executor.layers.fused_moe.experts.cpu_moe",
    "vllm.compilation.backends",
    "torch._inductor.compile_fx",
)


def main() -> None:
    """Import, then serve requests until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    # Whatever the imports print is no answer.
    os.dup2(2, 1)
    for name in PRELOAD:
        try:
            importlib.import_module(name)
        except ImportError as error:
            print(f"not preloaded: {name} ({error})", file=sys.stderr)
    for line in sys.stdin:
        request = json.loads(line)
        print(json.dumps({"code": serve(request)}), file=answers, flush=True)
    os._exit(0)  # tearing all those modules down takes long


def serve(request: dict[str, Any]) -> int:
    """Run one engine; its exit code, -9 where it took longer than its limit."""
    child = os.fork()
    if child == 0:
        _become(request)
    end = time.monotonic() + request["limit"]
    while True:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            code = os.waitstatus_to_exitcode(status)
            break
        if time.monotonic() > end:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return -signal.SIGKILL
        time.sleep(0.02)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child, signal.SIGKILL)  # what an engine that failed left behind
    return code


def _become(request: dict[str, Any]) -> None:
    """Turn this fork into the engine's process; does not return."""
    code = 1
    try:
        os.setsid()
        log = os.open(request["log"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        os.environ.clear()
        os.environ.update(request["env"])
        # Paths of the environment that an interpreter reads at its start.
        for path in reversed(os.environ.get("PYTHONPATH", "").split(os.pathsep)):
            if path and path not in sys.path:
                sys.path.insert(1, path)
        sys.argv = [request["script"], *request["arguments"]]
        importlib.import_module(request["script"]).main()
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
