"""Engine runs, each once a session whichever test and test process asks first."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Without vLLM there is nothing to run here: tests/run_vllm.sh makes the environment.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

HERE = Path(__file__).parent
LIMIT = 600  # seconds of one engine, from start to tokens


@dataclass(frozen=True)
class Run:
    """What one engine process left: exit code, tokens (None where it failed), log, report."""

    code: int
    tokens: Any
    start_seconds: float
    log: str
    report: dict[str, Any] | None

    @property
    def sites(self) -> dict[str, int]:
        """Accepted sites by pattern, patterns without one left out."""
        assert self.report is not None, self.log[-3000:]
        counts = self.report.get("sites")
        if counts is None:
            patterns = self.report["report"]["patterns"] if self.report["report"] else {}
            counts = {name: c["found"] for name, c in patterns.items()}
        return {name: n for name, n in counts.items() if n}


def environment(folder: Path, adapt: str, extra: Mapping[str, str]) -> dict[str, str]:
    """Environment of an engine with caches of its own."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("K3FUSE_", "VLLM_", "PYTEST"))}
    return {
        **kept,
        "OMP_NUM_THREADS": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CACHE_ROOT": str(folder / "vllm"),
        "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"),
        "K3FUSE_TEST_VLLM": adapt,
        "PYTHONPATH": str(HERE / "plugin"),
        **extra,
    }


@pytest.fixture(scope="session")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder that all test processes of this session share."""
    root = tmp_path_factory.getbasetemp()
    shared = root.parent if os.environ.get("PYTEST_XDIST_WORKER") else root
    return shared / "vllm"


@pytest.fixture(scope="session")
def model(base: Path) -> Path:
    """The small model, written once."""
    from model import write_model

    with _lock(base / "model.lock"):
        folder = base / "model"
        return folder if (folder / "model.safetensors").exists() else write_model(folder)


class _lock:
    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.file = path.open("w")

    def __enter__(self) -> None:
        fcntl.flock(self.file, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.file.close()


Engine = Callable[..., Run]


@pytest.fixture(scope="session")
def engine(base: Path, model: Path) -> Engine:
    """engine(name, arguments, adapt=..., caches=..., env=..., spawn=...): run once, kept by name.

    adapt: what tests/vllm/plugin does to the CPU platform. caches: name of the cache folder, so
    that a second run finds the first one's. One process unless `spawn` or two ranks ask for more.
    """

    def run(
        name: str,
        arguments: Mapping[str, Any],
        *,
        adapt: str = "cuda_ops,fallback",
        caches: str = "",
        env: Mapping[str, str] | None = None,
        spawn: bool = False,
    ) -> Run:
        folder, kept = base / (caches or name), base / f"{name}.json"
        # vLLM's cache keys hold all of additional_config: the same file name for the same caches.
        report = folder / "report.json"
        with _lock(base / f"{name}.lock"):
            if not kept.exists():
                report.unlink(missing_ok=True)
                two = arguments.get("tensor_parallel_size", 1) > 1
                extra = {"VLLM_CPU_OMP_THREADS_BIND": "0|1"} if two else {}
                if not (two or spawn):
                    extra["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
                extra |= dict(env or {})
                document = _run(folder, model, _reporting(arguments, report), adapt, extra)
                document["report"] = json.loads(report.read_text()) if report.exists() else None
                kept.write_text(json.dumps(document))
            return Run(**json.loads(kept.read_text()))

    return run


def _reporting(arguments: Mapping[str, Any], report: Path) -> dict[str, Any]:
    """The arguments, with the report file named where k3fuse is asked for."""
    found = json.loads(json.dumps(arguments))
    asked = found.get("additional_config", {}).get("k3fuse")
    if isinstance(asked, dict):
        asked["report"] = str(report)
    return found


def _run(
    folder: Path, model: Path, arguments: Mapping[str, Any], adapt: str, extra: Mapping[str, str]
) -> dict[str, Any]:
    command = [sys.executable, str(HERE / "offline.py"), str(model), json.dumps(arguments)]
    done = subprocess.run(
        command, env=environment(folder, adapt, extra), capture_output=True, text=True,
        timeout=LIMIT, check=False,
    )  # fmt: skip
    log = done.stdout + done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(lines[0].removeprefix("RESULT ")) if lines else {}
    return {
        "code": done.returncode,
        "tokens": result.get("tokens"),
        "start_seconds": result.get("start_seconds", 0.0),
        "log": log,
    }


@pytest.fixture(scope="session")
def server(base: Path, model: Path) -> Callable[..., tuple[list[int], str]]:
    """server(arguments, prompt, tokens): one request to an API server; its tokens and its log."""
    import socket
    import urllib.error
    import urllib.request

    def ask(flags: list[str], prompt: list[int], tokens: int, adapt: str) -> tuple[list[int], str]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        log = base / "server.log"
        command = [
            sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model),
            "--skip-tokenizer-init", "--max-model-len", "128", "--max-num-seqs", "4", "--dtype",
            "bfloat16", "--host", "127.0.0.1", "--port", str(port), "--seed", "0", *flags,
        ]  # fmt: skip
        with log.open("w") as sink:
            process = subprocess.Popen(
                command, env=environment(base / "server", adapt, {}), stdout=sink, stderr=sink
            )
        body = {
            "model": str(model), "prompt": prompt, "max_tokens": tokens, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True, "detokenize": False,
        }  # fmt: skip
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        end = time.monotonic() + LIMIT
        try:
            while True:
                if process.poll() is not None or time.monotonic() > end:
                    raise AssertionError(log.read_text()[-4000:])
                try:
                    urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5)
                    break
                except (urllib.error.URLError, OSError):
                    time.sleep(1)
            with urllib.request.urlopen(request, timeout=120) as answer:
                found = json.loads(answer.read())["choices"][0]["token_ids"]
        finally:
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        return list(found), log.read_text()

    return ask
