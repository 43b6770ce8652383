#!/usr/bin/env bash
# Sets everything up and runs the tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
export OMP_NUM_THREADS=1
exec "${VENV:-.venv}/bin/python" -m pytest -n 2 --dist loadfile "$@"
