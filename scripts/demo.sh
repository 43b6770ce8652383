#!/usr/bin/env bash
# Sets everything up and runs the main job: a script that hangs, under the watchdog. Arguments go to `safelaunch demo`.
set -euo pipefail
cd "$(dirname "$0")/.."
bash scripts/setup.sh
exec "${VENV:-.venv}/bin/safelaunch" demo "$@"
