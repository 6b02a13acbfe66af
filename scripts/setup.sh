#!/usr/bin/env bash
# setup.sh [test]   brings a fresh machine to a clone in which `.venv/bin/python -c "import tle_torch"` works: Debian
# packages, a virtual environment with torch, the extension built in place. With `test`, what the tests need too.
# Quick when everything is up to date: it is also the way to rebuild after an edit.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_venv "${1:-}"
[ "${1:-}" != test ] || need_test_tools
need_extension
say "ready: $PY"
