# Makes the project's virtual environment, or finds it up to date. Sourced by the other scripts;
# `bash scripts/_setup.sh` does the same by itself, from any folder.
#
# Reads:
#   VENV_DIR    the environment to make or reuse (default: .venv in this clone)
#   PYTHON      the interpreter to make it with (default: the first of python3, python3.13, python3.12,
#               python3.11 that is new enough); not used when the environment exists already
#   SETUP_DEV   1: also what the tests need
# Sets ROOT (this clone), VENV_DIR and VENV_PYTHON.
set -euo pipefail

ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
export VENV_DIR=${VENV_DIR:-$ROOT/.venv}
case $VENV_DIR in
    /*) ;;
    *) VENV_DIR=$PWD/$VENV_DIR ;; # the scripts change folders
esac
VENV_PYTHON=$VENV_DIR/bin/python

_die() {
    printf '%s\n' "$@" >&2
    exit 1
}

# Makes outputs/NAME-N with the first N that is free, and prints that path, relative to the clone.
_new_output_folder() {
    local name=$1 n=1
    mkdir -p "$ROOT/outputs"
    # mkdir fails if the folder exists, also when another run has made it just now.
    until mkdir "$ROOT/outputs/$name-$n" 2>/dev/null; do
        n=$((n + 1))
        [ "$n" -le 10000 ] || _die "cannot make a folder in $ROOT/outputs"
    done
    echo "outputs/$name-$n"
}

# Succeeds if the interpreter exists, runs and is new enough.
_new_enough() {
    "$1" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1
}

# Prints "NAME: VERSION" of an interpreter, for messages.
_describe_python() {
    local version
    if version=$("$1" -c 'import platform; print("Python", platform.python_version())' 2>/dev/null); then
        echo "  $1: $version"
    elif command -v "$1" >/dev/null 2>&1; then
        echo "  $1: does not run"
    else
        echo "  $1: not found"
    fi
}

# Prints the interpreter to make the environment with.
_choose_python() {
    local candidates=(python3 python3.13 python3.12 python3.11) candidate
    if [ -n "${PYTHON:-}" ]; then
        candidates=("$PYTHON")
    fi
    for candidate in "${candidates[@]}"; do
        if _new_enough "$candidate"; then
            echo "$candidate"
            return
        fi
    done
    _die "Python 3.11 or newer is needed. Found:" \
        "$(for candidate in "${candidates[@]}"; do _describe_python "$candidate"; done)" \
        "Install one, or name one: PYTHON=/path/to/python3.11 bash scripts/..."
}

# Runs a command silently; if it fails, shows what it printed and ends the script.
_quietly() {
    local log
    log=$(mktemp)
    if ! "$@" >"$log" 2>&1; then
        cat "$log" >&2
        rm -f "$log"
        _die "" "Set-up failed at: $*"
    fi
    rm -f "$log"
}

_setup() {
    local extras="" wanted stamp python
    if [ "${SETUP_DEV:-0}" = 1 ]; then
        extras="[dev]"
    fi
    # The clone's own path is part of the stamp: the package is installed as a link to it.
    wanted=$(printf '%s' "$ROOT" | cat - "$ROOT/pyproject.toml" | sha256sum | cut -d ' ' -f 1)
    for stamp in "$VENV_DIR/.matrixfsdp-setup$extras" "$VENV_DIR/.matrixfsdp-setup[dev]"; do
        if [ "$(cat "$stamp" 2>/dev/null)" = "$wanted" ] && [ -x "$VENV_PYTHON" ]; then
            return
        fi
    done

    if [ -x "$VENV_PYTHON" ]; then
        _new_enough "$VENV_PYTHON" || _die "Python 3.11 or newer is needed. $VENV_DIR has:" \
            "$(_describe_python "$VENV_PYTHON")" "Remove that folder, or set VENV_DIR to another."
    elif [ -e "$VENV_DIR/pyvenv.cfg" ]; then
        _die "$VENV_DIR is a virtual environment whose interpreter is gone." \
            "Remove that folder, or set VENV_DIR to another."
    else
        python=$(_choose_python)
        echo "Making a virtual environment in $VENV_DIR with $python"
        _quietly "$python" -m venv "$VENV_DIR"
    fi
    if ! "$VENV_PYTHON" -m pip --version >/dev/null 2>&1; then
        _quietly "$VENV_PYTHON" -m ensurepip
    fi

    echo "Installing torch, TorchTitan and this package into $VENV_DIR (a few minutes the first time)"
    # torch alone and first: of the builds of one version that pip is offered it takes the one with a
    # local tag, so where a CPU build (2.13.0+cpu) is on offer, that one, which is a tenth the size
    # and enough without an NVIDIA GPU. A plain index offers only the CUDA build, which runs on a CPU
    # as well. To use another build, install it into VENV_DIR beforehand: it is kept.
    _quietly "$VENV_PYTHON" -m pip install --disable-pip-version-check "torch==2.13.0"
    _quietly "$VENV_PYTHON" -m pip install --disable-pip-version-check -e "$ROOT$extras"
    # Last, so that an interrupted installation isn't taken for a complete one.
    echo "$wanted" >"$VENV_DIR/.matrixfsdp-setup$extras"
}

_setup
