#!/usr/bin/env bash
# Sets everything up, the frameworks (the extra `frameworks`: gigabytes in some environments) included, and runs each of
# them healthy and with a planted hang, and the commands of docs/frameworks.md. About seven minutes on 2 cores; not part of
# CI. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/../.."
bash scripts/setup.sh
"${VENV:-.venv}/bin/python" -m pip install -q -e '.[torch,frameworks]'
export OMP_NUM_THREADS=1
exec "${VENV:-.venv}/bin/python" -m pytest -v tests/qa/test_frameworks.py \
  "tests/docs/test_docs_commands.py::test_the_commands_of[docs/frameworks.md]" "$@"
