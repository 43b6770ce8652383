#!/usr/bin/env bash
# Makes the virtual environment .venv (or $VENV) with torch, safelaunch (editable) and the tools for tests, lint and docs.
# Takes the first python3 that is at least 3.10 ($PYTHON to choose another). Run again at will: it only adds what is missing.
#
#   bash scripts/setup.sh demo    # torch and safelaunch alone, and pip says what it does
set -euo pipefail
cd "$(dirname "$0")/.."
VENV=${VENV:-.venv}
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 10))' || {
  echo "safelaunch needs Python 3.10 or newer; set PYTHON to one" >&2
  exit 2
}
make_environment() {
  if [ ! -x "$VENV/bin/python" ]; then
    "$PYTHON" -m venv "$VENV"
  fi
}
if [ "${1:-}" = demo ]; then
  [ -x "$VENV/bin/safelaunch" ] && exit
  echo "setting up $VENV: torch and safelaunch, about a minute if pip has them, else as long as the download takes" >&2
  make_environment
  # Without compiling: most of torch is never imported, and Python compiles the rest when it is.
  exec "$VENV/bin/python" -m pip install --no-compile "$TORCH" -e '.[torch]'
fi
# The tests compile a small program that blocks in the kernel; everything else needs no compiler.
if ! command -v gcc >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  apt-get update -q && apt-get install -y -q gcc libc6-dev
fi
# The fault matrix for nodes makes network namespaces; it is skipped where there is no ip.
if ! command -v ip >/dev/null && command -v apt-get >/dev/null && [ "$(id -u)" = 0 ]; then
  { apt-get update -q && apt-get install -y -q iproute2; } || echo "without iproute2, the fault matrix for nodes is skipped" >&2
fi
# The tests of the report's page open it in Chromium, which comes while pip works; they are skipped where there is none.
get_chromium() {
  command -v chromium >/dev/null || command -v chromium-headless-shell >/dev/null && return
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get update -q >/dev/null 2>&1 &&
    apt-get install -y -q --no-install-recommends chromium-headless-shell fonts-dejavu-core >/dev/null 2>&1 ||
    echo "without Chromium, the tests of the report's page are skipped" >&2
}
# Those of the completions run in the shells, and the man page is rendered.
get_shells() {
  command -v zsh >/dev/null && command -v fish >/dev/null && command -v groff >/dev/null && return
  [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null &&
    apt-get update -q >/dev/null 2>&1 && apt-get install -y -q --no-install-recommends zsh fish groff >/dev/null 2>&1 ||
    echo "without zsh, fish or groff, their tests are skipped" >&2
}
{ get_chromium; get_shells; } &
make_environment
"$VENV/bin/python" -c 'import torch' 2>/dev/null || "$VENV/bin/python" -m pip install -q "$TORCH"
"$VENV/bin/python" -m pip install -q -e '.[torch,test,lint,docs]'
wait
