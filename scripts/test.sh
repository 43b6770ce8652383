#!/usr/bin/env bash
# Sets everything up and runs the tests. Arguments go to pytest.
#
#   READY=1 bash scripts/test.sh   # without the setup, which has just been done
#   bash scripts/test.sh --fast    # the unit tests without the slow ones, and a few real jobs: under a minute on 2 cores
set -euo pipefail
cd "$(dirname "$0")/.."
if [ -z "${READY:-}" ] && { [ "${1:-}" != --fast ] || [ ! -x "${VENV:-.venv}/bin/pytest" ]; }; then
  bash scripts/setup.sh
fi
export OMP_NUM_THREADS=1
# As in an installed wheel, also where PYTHONDONTWRITEBYTECODE is set: else each of a thousand starts compiles it anew.
"${VENV:-.venv}/bin/python" -m compileall -q safelaunch
unset PYTHONDONTWRITEBYTECODE  # pytest, too, keeps what it has compiled: half of what finding the tests takes
# Most of a real job is waiting: five at a time keep two cores busy. Each worker gets one test at a time, because files
# of several minutes would leave the others idle at the end.
at_once=5
if [ "${1:-}" = --fast ]; then
  shift
  at_once=2
  set -- -m "quick or not (slow or torch)" tests/unit tests/e2e/test_{crashes,hangs,healthy_exit}.py "$@"
fi
exec "${VENV:-.venv}/bin/python" -m pytest -n "$at_once" --dist loadgroup "$@"
