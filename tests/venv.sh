# Sourced by tests/run.sh and docs/first_run.sh. `ready EXTRA` makes the virtual environment in
# $K3FUSE_VENV (default ./.venv) with a CPU build of torch and this checkout in it, and sets $bin.
# Needs bash and Python 3.11 to 3.14; no GPU, no compiler. Safe to repeat: what is there stays.
#
# K3FUSE_PYTHON       interpreter to use (default: the first suitable one on PATH)
# K3FUSE_TORCH        torch version (default 2.13.0)
# K3FUSE_TORCH_INDEX  package index with CPU builds, for a default index that has none

step() { printf '\n== %s (%ds)\n' "$1" "$SECONDS"; }

find_python() {
    local candidate
    for candidate in ${K3FUSE_PYTHON:-python3 python3.13 python3.12 python3.11 python3.14}; do
        if "$candidate" -c 'import sys, venv, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 15))' \
            2>/dev/null; then
            echo "$candidate"
            return
        fi
    done
    echo "k3fuse: no Python 3.11 to 3.14 with venv found; install one (Debian: python3-venv)" \
        "or set K3FUSE_PYTHON" >&2
    return 1
}

# The default wheel of Linux carries CUDA and several gigabytes; nothing here needs it.
install_torch() {
    local version=${K3FUSE_TORCH:-2.13.0}
    if "$bin/python" -c 'import torch; v = tuple(map(int, torch.__version__.split(".")[:2]))
raise SystemExit(not (2, 11) <= v < (2, 16))' 2>/dev/null; then
        return
    fi
    if [ "$(uname -s)" = Darwin ]; then
        "$bin/pip" install -q "torch==$version"
    elif ! "$bin/pip" install -q "torch==$version+cpu" 2>/dev/null; then
        "$bin/pip" install -q "torch==$version" \
            --index-url "${K3FUSE_TORCH_INDEX:-https://download.pytorch.org/whl/cpu}"
    fi
}

ready() {
    local venv=${K3FUSE_VENV:-.venv} python
    if [ ! -x "$venv/bin/python" ]; then
        step "create $venv"
        python=$(find_python)
        "$python" -m venv "$venv"
    fi
    bin=$venv/bin
    step "install torch, CPU build"
    install_torch
    step "install k3fuse$1"
    # A strict editable install lays the packages out as files, which is what mypy can follow.
    "$bin/pip" install -q -e ".$1" --config-settings editable_mode=strict
}
