#!/usr/bin/env bash
# demo.sh [QUESTION]   in a fresh clone on a fresh machine: sets everything up, then shows SmolLM2-135M-Instruct
# answering as Hugging Face runs it and as tle_torch.patch_model makes it run, with both speeds. Options:
# scripts/demo.py --help
set -euo pipefail
. "$(dirname "$0")/lib.sh"

need_venv
need_extension
exec "$PY" "$TLE_ROOT/scripts/demo.py" "$@"
