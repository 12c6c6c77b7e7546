#!/usr/bin/env bash
# The long checks, each by name; none: all of them, one after the other. Needs tests/run.sh once.
#
#   bash tests/nightly.sh nearmiss     100,000 near-miss graphs, continued from the ledger
#   bash tests/nightly.sh fuzz         damaged files for ten minutes
#   bash tests/nightly.sh guided       the same guided by coverage (needs k3fuse[fuzz])
#   bash tests/nightly.sh coverage     lines and branches of rewriter/ and patterns/, against a floor
#   bash tests/nightly.sh flakes       the fast tests 20 times, in 20 orders
#   bash tests/nightly.sh matrices     the tests marked nightly
#   bash tests/nightly.sh compat       other versions: see tests/compat.sh
#
# K3FUSE_PYTHON: interpreter with k3fuse[test,coverage] (default ./.venv/bin/python).
# K3FUSE_NIGHTLY: folder of what is kept (default ./.nightly).
set -uo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${K3FUSE_PYTHON:-.venv/bin/python}
kept=${K3FUSE_NIGHTLY:-.nightly}
workers=${K3FUSE_WORKERS:-2}
mkdir -p "$kept"
export OMP_NUM_THREADS=1
FAST=(
    tests/rewriter/test_engine.py tests/rewriter/test_edit.py tests/rewriter/test_safety.py
    tests/rewriter/test_guards.py tests/rewriter/test_values.py tests/rewriter/test_ranks.py
    tests/rewriter/test_fuzz_files.py tests/rewriter/test_graph_file.py
    tests/rewriter/test_warm_backend.py tests/rewriter/test_cli.py tests/rewriter/test_cli_run.py
    tests/patterns/test_guards_of_patterns.py tests/nearmiss/test_counterexamples.py
    tests/kernels/test_op_contract.py tests/kernels/test_op_refusals.py
    tests/kernels/test_exchange.py
    tests/kernels/build/test_cache.py tests/kernels/build/test_packed.py
)

nearmiss() {
    "$python" tests/nearmiss/run.py --graphs "${GRAPHS:-100000}" --seed "${SEED:-2}" --again \
        --ledger "$kept/nearmiss_ledger.json" --processes "$workers"
}

fuzz() {
    local end=$((SECONDS + ${FUZZ_SECONDS:-600})) seed=0 code
    while [ "$SECONDS" -lt "$end" ]; do
        # Above 1,000 examples the seed counts. -x: a failure ends it with 1, the time with 124.
        FUZZ_EXAMPLES=1500 timeout --signal INT $((end - SECONDS)) "$python" -m pytest -q -x \
            tests/rewriter/test_fuzz_files.py --hypothesis-seed "$seed"
        code=$?
        [ "$code" = 0 ] || [ "$code" = 124 ] || return 1
        seed=$((seed + 1))
    done
}

guided() {
    local half=$((${FUZZ_SECONDS:-600} / 2)) what
    for what in graph packed; do
        "$python" tests/fuzz_atheris.py "$what" --seconds "$half" --kept "$kept/$what" || return 1
    done
}

coverage() {
    rm -f "$kept"/coverage "$kept"/coverage.*
    COVERAGE_FILE=$kept/coverage "$python" -m pytest -q -n "$workers" --dist worksteal \
        tests/rewriter \
        tests/patterns tests/nearmiss tests/kernels/build/test_kernels_cli.py tests/test_docs.py \
        tests/test_bench.py tests/kernels/check/test_check_cli.py tests/kernels/check/test_gpu_runs.py \
        --cov --cov-branch --cov-report= || return 1
    "$python" tests/coverage_floor.py "$kept/coverage"
}

flakes() {
    local runs=${RUNS:-20} failed=0 i
    for i in $(seq "$runs"); do
        # Another order, another spread over the processes and another hash seed each time.
        PYTHONHASHSEED=$i "$python" -m pytest -q -n $((1 + i % 3)) --dist load --shuffle "$i" \
            "${FAST[@]}" \
            >"$kept/flakes_$i.log" 2>&1 || failed=$((failed + 1))
        tail -n 1 "$kept/flakes_$i.log"
    done
    echo "$failed of $runs runs failed; logs in $kept"
    [ "$failed" = 0 ]
}

matrices() {
    "$python" -m pytest -q -n "$workers" --dist worksteal --nightly -m nightly tests
}

compat() {
    bash tests/compat.sh
}

worst=0
for name in "${@:-nearmiss fuzz guided coverage flakes matrices compat}"; do
    for part in $name; do
        printf '\n== %s\n' "$part"
        "$part" && echo "$part: passed" || { echo "$part: FAILED" && worst=1; }
    done
done
exit "$worst"
