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
step "mypy and pytest"
types=$(mktemp)
trap 'rm -f "$types"' EXIT
"$bin/mypy" -p k3fuse.rewriter -p k3fuse.patterns -p k3fuse.kernels -p k3fuse_vllm >"$types" 2>&1 &
mypy=$!
# One thread a process: several processes run side by side, and sums stay in one order. Each takes
# tests that follow one another, which share what is traced, from the other once it has none left.
export OMP_NUM_THREADS=1
code=0
"$bin/python" -m pytest -n "${K3FUSE_WORKERS:-2}" --dist worksteal "$@" || code=$?
wait "$mypy" || code=$?
step "mypy"
cat "$types"
exit "$code"
