#!/usr/bin/env bash
# test.sh [--fast | --arm | --all] [--only STAGE] [-- PYTEST ARGS]   sets up everything, then runs every test.
# See scripts/run_tests.py for the stages. The last line is the sum: N passed, N failed, N skipped.
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_venv test
need_test_tools
need_extension
case " $* " in *" --list "* | *" --help "* | *" -h "*) ;; *) need_smollm2_hf ;; esac
PATH=$TLE_VENV/bin:$PATH exec "$PY" "$TLE_ROOT/scripts/run_tests.py" "$@"
