#!/usr/bin/env bash
# test.sh [--cpu MODEL]... [PYTEST ARGS]   builds for aarch64 and runs pytest there under qemu, once for each MODEL
# (default: max). Without PYTEST ARGS: the whole of tests/python. The C++ tests for aarch64 run in scripts/test.sh.
set -euo pipefail
. "$(dirname "$0")/env.sh"

cpus=()
while [ "${1:-}" = --cpu ]; do
  cpus+=("${2:?--cpu wants a model}")
  shift 2
done
[ ${#cpus[@]} -gt 0 ] || cpus=("$TLE_ARM_CPU")
[ $# -gt 0 ] || set -- "$TLE_ROOT/tests/python"

bash "$TLE_ROOT/scripts/arm/build.sh"
need_smollm2_hf
status=0
for cpu in "${cpus[@]}"; do
  say "pytest on $cpu"
  bash "$TLE_ROOT/scripts/arm/run.sh" --cpu "$cpu" -m pytest -q -p no:cacheprovider "$@" || status=$?
done
exit "$status"
