"""Engine runs, each once a session whichever test and test process asks first."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

# Without vLLM there is nothing to run here: tests/run_vllm.sh makes the environment.
collect_ignore_glob = [] if importlib.util.find_spec("vllm") else ["test_*.py"]

HERE = Path(__file__).parent
LIMIT = 1200  # seconds of one engine, from start to tokens
# Folder of vLLM 0.33's unpacked wheel.
UNPACKED = os.environ.get("K3FUSE_VLLM", "")


@dataclass(frozen=True)
class Run:
    """What one engine process left: exit code, log, report, and what offline.py prints.

    tokens and what follows are None where it failed; seconds: from the request to its end.
    """

    code: int
    log: str
    tokens: Any
    start_seconds: float | None
    cpu_seconds: float | None
    modules: list[str] | None
    experts: dict[str, Any] | None
    seconds: float
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
    # What vLLM asks a process of its own about the model, ten seconds each time: shared.
    (infos := folder.parent / "modelinfos").mkdir(parents=True, exist_ok=True)
    (folder / "vllm").mkdir(parents=True, exist_ok=True)
    if not (link := folder / "vllm" / "modelinfos").is_symlink():
        link.symlink_to(infos)
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


class Launcher:
    """One process that has imported vLLM and forks an engine a request; started on first use."""

    def __init__(self, log: Path) -> None:
        self.log = log
        self.process: subprocess.Popen[str] | None = None

    def run(self, request: Mapping[str, Any]) -> int:
        """Exit code of the engine."""
        if self.process is None or self.process.poll() is not None:
            self.log.parent.mkdir(parents=True, exist_ok=True)
            self.process = subprocess.Popen(
                [sys.executable, str(HERE / "launcher.py")],
                env=environment(self.log.parent / "launcher", "", {}),
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self.log.open("a"), text=True,
            )  # fmt: skip
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps(request) + "\n")
        self.process.stdin.flush()
        answer = self.process.stdout.readline()
        assert answer, self.log.read_text()[-3000:]
        return int(json.loads(answer)["code"])

    def close(self) -> None:
        """End the process: it stops where its input ends."""
        if self.process is not None and self.process.stdin is not None:
            self.process.stdin.close()
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@pytest.fixture(scope="session")
def launcher(base: Path) -> Iterator[Launcher]:
    """The launcher of this test process."""
    name = os.environ.get("PYTEST_XDIST_WORKER", "main")
    found = Launcher(base / f"launcher_{name}.log")
    yield found
    found.close()


@pytest.fixture(scope="session")
def engine(base: Path, model: Path, launcher: Launcher) -> Engine:
    """engine(name, arguments, adapt=..., caches=..., env=..., spawn=...): run once, kept by name.

    adapt: what tests/vllm_engine/plugin does to the CPU platform. caches: name of the cache folder,
    so that a second run finds the first one's. The engine core is in the process of the engine, one
    rank is, too; more ranks are forks of it. spawn: all as vLLM does it, every one a new process.
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
        shared = caches or name
        folder, kept = base / shared, base / f"{name}.json"
        # vLLM's cache keys hold all of additional_config: the same file name for the same caches,
        # so one engine at a time in a folder, or one finds the other's report.
        report = folder / "report.json"
        with _lock(base / f"{shared}.lock"):
            if not kept.exists():
                report.unlink(missing_ok=True)
                two = arguments.get("tensor_parallel_size", 1) > 1
                extra = {} if spawn else {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
                if two:
                    extra |= {"VLLM_CPU_OMP_THREADS_BIND": "0|1"}
                    adapt = adapt if spawn else f"{adapt},fork"
                extra |= dict(env or {})
                log = base / f"{name}.log"
                request = {
                    "script": "offline",
                    "env": environment(folder, adapt, extra),
                    "log": str(log),
                    "arguments": [str(model), json.dumps(_reporting(arguments, report))],
                    "limit": LIMIT,
                }
                start = time.monotonic()
                document = _outcome(launcher.run(request), log.read_text())
                document["seconds"] = round(time.monotonic() - start, 1)
                document["report"] = json.loads(report.read_text()) if report.exists() else None
                kept.write_text(json.dumps(document))
            return Run(**json.loads(kept.read_text()))

    return run


@pytest.fixture(scope="session")
def script(base: Path) -> Callable[..., dict[str, Any]]:
    """script(name, argument...): what a script beside this file finds in $K3FUSE_VLLM; run once."""

    def run(name: str, *arguments: str) -> dict[str, Any]:
        digest = hashlib.sha256(repr((name, arguments)).encode()).hexdigest()[:12]
        kept = base / f"script_{digest}.json"
        with _lock(base / f"script_{digest}.lock"):
            if not kept.exists():
                done = subprocess.run(
                    [sys.executable, str(HERE / name), UNPACKED, *arguments],
                    capture_output=True, text=True, timeout=LIMIT, check=False,
                )  # fmt: skip
                lines = [r for r in done.stdout.splitlines() if r.startswith("RESULT ")]
                assert lines, done.stderr[-3000:]
                kept.write_text(lines[0].removeprefix("RESULT "))
            found: dict[str, Any] = json.loads(kept.read_text())
            return found

    return run


@pytest.fixture(scope="session")
def parts(base: Path, model: Path, launcher: Launcher) -> dict[str, Any]:
    """What parts.py found, in a process without an engine."""
    log = base / "parts.log"
    env = environment(base / "parts", "", {})
    request = {"script": "parts", "env": env, "log": str(log), "limit": LIMIT}
    code = launcher.run({**request, "arguments": [str(model)]})
    lines = [line for line in log.read_text().splitlines() if line.startswith("RESULT ")]
    assert code == 0, log.read_text()[-3000:]
    found: dict[str, Any] = json.loads(lines[0].removeprefix("RESULT "))
    return found


def _reporting(arguments: Mapping[str, Any], report: Path) -> dict[str, Any]:
    """The arguments, with the report file named where k3fuse is asked for."""
    found: dict[str, Any] = json.loads(json.dumps(arguments))
    asked = found.get("additional_config", {}).get("k3fuse")
    if isinstance(asked, dict):
        asked["report"] = str(report)
    return found


def _outcome(code: int, log: str) -> dict[str, Any]:
    lines = [line for line in log.splitlines() if line.startswith("RESULT ")]
    result = json.loads(lines[0].removeprefix("RESULT ")) if lines else {}
    kept = ("tokens", "start_seconds", "cpu_seconds", "modules", "experts")
    log = "\n".join(line for line in log.splitlines() if not line.startswith("RESULT "))
    return {"code": code, "log": log, **{name: result.get(name) for name in kept}}


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
