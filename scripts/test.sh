#!/usr/bin/env bash
# Sets up and runs every check: lint, format, types, unit and multi-process tests.
#
#   bash scripts/test.sh [--slow] [pytest arguments ...]
#
#   --slow    also the tests marked slow
set -euo pipefail

SETUP_DEV=1
source "$(dirname "${BASH_SOURCE[0]}")/_setup.sh"
cd "$ROOT"

pytest_args=()
for arg in "$@"; do
    if [ "$arg" = --slow ]; then
        pytest_args+=(-m "slow or not slow")
    else
        pytest_args+=("$arg")
    fi
done

"$VENV_PYTHON" -m ruff check .
"$VENV_PYTHON" -m ruff format --check .
"$VENV_PYTHON" -m mypy
exec "$VENV_PYTHON" -m pytest ${pytest_args[@]+"${pytest_args[@]}"}
