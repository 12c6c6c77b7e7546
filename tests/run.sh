#!/usr/bin/env bash
# Every check of the repository on a fresh machine: ruff, mypy, pytest. No GPU needed.
# Arguments go to pytest: bash tests/run.sh -k router. See tests/venv.sh for the environment variables;
# K3FUSE_WORKERS: processes that run tests (default 2).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

ready "[test,kernels,sentryward]"
step "ruff"
"$bin/ruff" check .
"$bin/ruff" format --check .
step "mypy"
"$bin/mypy" -p k3fuse.rewriter -p k3fuse.patterns -p k3fuse.kernels -p k3fuse_vllm
step "pytest"
# One thread a process: several processes run side by side, and sums stay in one order.
export OMP_NUM_THREADS=1
"$bin/python" -m pytest -n "${K3FUSE_WORKERS:-2}" "$@"
