#!/usr/bin/env bash
# Installs what it needs and runs the main job: a script that hangs, under the watchdog. Arguments go to `safelaunch demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh demo
unset PYTHONDONTWRITEBYTECODE  # else the launcher and each rank compile all that they import of torch
exec "${VENV:-.venv}/bin/safelaunch" demo "$@"
