#!/usr/bin/env bash
# The same tests under other versions and without optional parts: one environment a row, made under
# $K3FUSE_COMPAT (default ./.venv-compat), CPU builds only. Arguments choose rows; none: all of them.
#
#   bash tests/compat.sh torch-2.14.0 no-dsl
#
# Rows: torch-VERSION, dsl-VERSION, no-dsl (no CuTe DSL; no row has vLLM), optimised (python -O).
# Prints one line a row; exit code 1 where tests failed, 2 where an environment could not be made.
# torch builds without CUDA: see K3FUSE_TORCH_INDEX in tests/venv.sh.
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

ROWS=(torch-2.11.0 torch-2.13.0 torch-2.14.0 dsl-4.8.0 dsl-4.8.1 no-dsl optimised)
# Every part of the rewriter, the ops and their export; what needs no DSL first.
REWRITER=(
    tests/rewriter/test_engine.py tests/rewriter/test_edit.py tests/rewriter/test_safety.py
    tests/rewriter/test_backend.py tests/rewriter/test_graph_file.py tests/rewriter/test_values.py
    tests/rewriter/test_linear_concept.py tests/rewriter/test_rms_norm_concept.py
    tests/rewriter/test_routing_concept.py tests/patterns/test_vllm_sites.py
    tests/nearmiss/test_counterexamples.py tests/nearmiss/test_every_reason.py
    tests/kernels/test_op_contract.py tests/kernels/test_export.py
)
KERNELS=(
    tests/kernels/build/test_compile.py tests/kernels/build/test_packed.py
    tests/kernels/build/test_resources.py tests/kernels/simulator/test_simulator_dsl.py
    tests/kernels/attention_projection/test_attention_projection_resources.py
)
base=${K3FUSE_COMPAT:-.venv-compat}
export OMP_NUM_THREADS=1

row() {
    local name=$1 extra="[test,kernels]" tests=("${REWRITER[@]}") flags=()
    K3FUSE_TORCH=2.13.0
    K3FUSE_VENV=$base/$name
    case $name in
        torch-*) K3FUSE_TORCH=${name#torch-} extra="[test]" ;;
        dsl-*) tests=("${KERNELS[@]}") ;;
        no-dsl) extra="[test]" ;;
        optimised) flags=(-O) extra="[test]" ;;
        *) echo "no row $name; rows: ${ROWS[*]}" >&2 && return 2 ;;
    esac
    (set -e && ready "$extra") || return 2
    bin=$K3FUSE_VENV/bin
    if [ "${name%%-*}" = dsl ]; then
        "$bin/python" -m pip install -q "nvidia-cutlass-dsl==${name#dsl-}" || return 2
    fi
    step "pytest"
    "$bin/python" "${flags[@]}" -m pytest -q -n "${K3FUSE_WORKERS:-2}" "${tests[@]}" || return 1
}

table=() worst=0
for name in "${@:-${ROWS[@]}}"; do
    step "row $name"
    row "$name"
    code=$?
    case $code in 0) word=passed ;; 1) word=FAILED ;; *) word="no environment" ;; esac
    table+=("$(printf '%-14s %s' "$name" "$word")")
    [ "$code" -le "$worst" ] || worst=$code
done
printf '\n%s\n' "${table[@]}"
exit "$worst"
