#!/usr/bin/env bash
# The same tests under other versions and without optional parts: one environment a row, made under
# $K3FUSE_COMPAT (default ./.venv-compat), CPU builds only. Arguments choose rows; none: all of them.
#
#   bash tests/compat.sh torch-2.14.1 no-dsl
#
# Rows: torch-VERSION, dsl-VERSION, no-dsl (no CuTe DSL; no row has vLLM), optimised (python -O).
# Prints one line a row with its counts; exit code 1 where tests failed, 2 where an environment
# could not be made. torch builds without CUDA: see K3FUSE_TORCH_INDEX in tests/venv.sh.
#
# K3FUSE_COMPAT_PYTHON  installed interpreter to use as it is, for one row: refused where its
#                       versions are not the row's
# K3FUSE_COMPAT_CUDA=1  by hand, never in CI: take the default index's torch, a CUDA build of some
#                       gigabytes, which runs on the CPU as well
# K3FUSE_COMPAT_TESTS   test files instead of the row's own
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source tests/venv.sh

ROWS=(torch-2.11.0 torch-2.13.0 torch-2.14.1 dsl-4.8.0 dsl-4.8.1 no-dsl optimised)
# Every part of the rewriter, the ops and their export; what needs no DSL first.
REWRITER=(
    tests/rewriter/test_engine.py tests/rewriter/test_edit.py tests/rewriter/test_safety.py
    tests/rewriter/test_backend.py tests/rewriter/test_graph_file.py tests/rewriter/test_values.py
    tests/rewriter/test_linear_concept.py tests/rewriter/test_rms_norm_concept.py
    tests/rewriter/test_routing_concept.py tests/patterns/test_vllm_sites.py
    tests/nearmiss/test_counterexamples.py tests/nearmiss/test_every_reason.py
    tests/kernels/test_op_contract.py tests/kernels/test_op_refusals.py tests/kernels/test_export.py
)
KERNELS=(
    tests/kernels/build/test_compile.py tests/kernels/build/test_packed.py
    tests/kernels/build/test_resources.py tests/kernels/simulator/test_simulator_dsl.py
    tests/kernels/attention_projection/test_attention_projection_resources.py
)
base=${K3FUSE_COMPAT:-.venv-compat}
export OMP_NUM_THREADS=1

# Whether an interpreter is what a row is about. Says what differs.
fits() {
    "$1" - "$2" <<'PYTHON'
import importlib.util
import sys
from importlib.metadata import PackageNotFoundError, version

row = sys.argv[1]
kind, _, wanted = row.partition("-")
if row == "no-dsl":
    problem = "cutlass can be imported" if importlib.util.find_spec("cutlass") else ""
elif kind in ("torch", "dsl"):
    try:
        found = version({"torch": "torch", "dsl": "nvidia-cutlass-dsl"}[kind]).split("+")[0]
    except PackageNotFoundError:
        found = "none"
    problem = "" if found == wanted else f"{kind} is {found}"
else:
    problem = ""
if problem:
    sys.exit(f"{sys.executable} is not row {row}: {problem}")
PYTHON
}

# Make or find the environment of a row; sets python.
environment() {
    local name=$1 extra=$2
    if [ -n "${K3FUSE_COMPAT_PYTHON:-}" ]; then
        python=$K3FUSE_COMPAT_PYTHON
        return
    fi
    K3FUSE_VENV=$base/$name
    python=$K3FUSE_VENV/bin/python
    if [ "${K3FUSE_COMPAT_CUDA:-}" = 1 ] && [ ! -x "$python" ]; then
        "$(find_python)" -m venv "$K3FUSE_VENV" || return 1
        step "install torch, whatever build"
        "$python" -m pip install -q --no-cache-dir "torch==$K3FUSE_TORCH" || return 1
    fi
    (set -e && ready "$extra") || return 1
    if [ "${name%%-*}" = dsl ]; then
        "$python" -m pip install -q "nvidia-cutlass-dsl==${name#dsl-}" || return 1
    fi
}

row() {
    local name=$1 extra="[test,kernels]" tests=("${REWRITER[@]}") flags=() out code
    K3FUSE_TORCH=2.13.0
    case $name in
        torch-*) K3FUSE_TORCH=${name#torch-} extra="[test]" ;;
        dsl-*) tests=("${KERNELS[@]}") ;;
        no-dsl) extra="[test]" ;;
        optimised) flags=(-O) extra="[test]" ;;
        *) echo "no row $name; rows: ${ROWS[*]}" >&2 && return 2 ;;
    esac
    environment "$name" "$extra" && fits "$python" "$name" || return 2
    [ -z "${K3FUSE_COMPAT_TESTS:-}" ] || read -ra tests <<<"$K3FUSE_COMPAT_TESTS"
    step "pytest"
    out=$(mktemp)
    "$python" "${flags[@]}" -m pytest -q -n "${K3FUSE_WORKERS:-2}" "${tests[@]}" | tee "$out"
    code=${PIPESTATUS[0]}
    counts=$(tail -n 1 "$out")
    rm -f "$out"
    [ "$code" = 0 ] || return 1
}

table=() worst=0
for name in "${@:-${ROWS[@]}}"; do
    step "row $name"
    counts=""
    row "$name"
    code=$?
    case $code in 0) word=passed ;; 1) word=FAILED ;; *) word="no environment" ;; esac
    table+=("$(printf '%-14s %-15s %s' "$name" "$word" "$counts")")
    [ "$code" -le "$worst" ] || worst=$code
done
printf '\n%s\n' "${table[@]}"
exit "$worst"
