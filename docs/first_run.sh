#!/usr/bin/env bash
# First run on a fresh machine: set up ./.venv, then rewrite the full Kimi K3 decode graph for GB300.
# Arguments replace those of the inspection: bash docs/first_run.sh kimi-k3 --layers 4 --plan
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

ready ""
[ $# -gt 0 ] || set -- kimi-k3 --target gb300:tp8 --m 8 --plan
step "k3fuse inspect $*"
exec "$bin/k3fuse" inspect "$@"
