#!/usr/bin/env bash
# Runs a program of the aarch64 environment under qemu-user; make_root.sh lays the environment.
#
#   run.sh [--cpu MODEL] ARGS...              the arm64 python with ARGS; `tle_torch` is the clone's, built by build.sh
#   run.sh [--cpu MODEL] --exec FILE ARGS...  another arm64 program
#
# MODEL is a qemu CPU with its options, for instance cortex-a53, cortex-a76, neoverse-n1, a64fx, max, max,sve=off,
# max,sve-max-vq=2 (vector length in units of 128 bits). TLE_QEMU_ARGS gives qemu more options (-plugin ..., -strace).
set -euo pipefail
. "$(dirname "$0")/env.sh"

if [ "${1:-}" = --cpu ]; then
  TLE_ARM_CPU=${2:?--cpu wants a model}
  shift 2
fi
[ -e "$ARM_ROOT/usr/bin/python3.11" ] ||
  die "no arm64 environment in $TLE_ARM_CACHE: run scripts/arm/make_root.sh first"

ulimit -c 0 # a guest's crash would leave a core file of qemu's own
unset LD_PRELOAD LD_LIBRARY_PATH
unset PYTHONDONTWRITEBYTECODE # Debian's library comes without bytecode: compiling it at each start takes ten seconds
# The guest sees the host's cores and OpenMP would take them all: two keep an emulated run predictable.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-2}
qemu=("$TLE_QEMU" -cpu "$TLE_ARM_CPU" -L "$ARM_ROOT")
# shellcheck disable=SC2206 # several options in one variable
qemu+=(${TLE_QEMU_ARGS:-})
if [ "${1:-}" = --exec ]; then
  shift
  exec "${qemu[@]}" "$@"
fi
export PYTHONPATH=$ARM_PACKAGE:$ARM_SITE
export TLE_BUILD_DIR=$ARM_BUILD # whose objects tests/python/test_symbols.py reads
# For -c and -m Python puts the current folder first; in the clone that would be the host's tle_torch.
case ${1:-} in -c | -m) export PYTHONSAFEPATH=1 ;; esac
# argv[0] is the script beside the interpreter that starts qemu again: it becomes the guest's sys.executable.
exec "${qemu[@]}" -0 "$ARM_ROOT/usr/bin/python" "$ARM_ROOT/usr/bin/python3.11" "$@"
