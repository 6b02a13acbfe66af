#!/usr/bin/env bash
# build_wheels.sh [x86_64] [aarch64]   builds the wheels into dist/, by default both on an x86-64 machine; installs each
# in an environment that has never seen the clone, and tests it there.
#
#   this machine's   against the torch of .venv; tested in a fresh virtual environment: every test that is not slow
#   aarch64          cross-compiled on x86-64, against the torch that scripts/arm/make_root.sh brings, for CPython 3.11;
#                    tested under qemu on cortex-a53 (Armv8.0) and max: the golden digests of every operator, and
#                    patched models
#
# Both are linux_* wheels: they link to torch's own libraries, which no manylinux policy knows.
set -euo pipefail
. "$(dirname "$0")/arm/env.sh"

WORK=$TLE_ROOT/build/wheels
ARM_CPUS=(cortex-a53 max)
ARM_TESTS=(test_golden.py::test_operators test_sdot.py test_frequencies.py)

# build ARCHITECTURE [NAME=VALUE...]   one wheel, into a folder of its own so that it is the only one there.
build() {
  local architecture=$1
  shift
  say "wheel for $architecture"
  # What setuptools leaves in build/lib would go into the wheel, files that the clone no longer has included.
  rm -rf "$TLE_ROOT"/build/{lib,bdist}.* "$WORK/$architecture"
  quietly "$TLE_CACHE/logs/wheel-$architecture.log" env "PATH=$TLE_VENV/bin:$PATH" \
    "TLE_BUILD_DIR=$TLE_ROOT/build/wheel-$architecture" \
    "$@" "$PY" -m pip wheel --no-build-isolation --no-deps -v -w "$WORK/$architecture" "$TLE_ROOT"
  mkdir -p "$TLE_ROOT/dist"
  cp "$WORK/$architecture"/*.whl "$TLE_ROOT/dist/"
}

# run_tests PYTHON... -- TESTS...   pytest on files of tests/python, from a folder in which no tle_torch lies.
run_tests() {
  local python=()
  while [ "$1" != -- ]; do
    python+=("$1")
    shift
  done
  shift
  (cd "$WORK" && PYTHONSAFEPATH=1 "${python[@]}" -m pytest -q -p no:cacheprovider -m "not slow" "$@")
}

native() {
  local architecture environment
  architecture=$(uname -m)
  environment=$WORK/venv
  build "$architecture"
  say "a fresh environment"
  rm -rf "$environment"
  "$(base_python)" -m venv "$environment"
  quietly "$TLE_CACHE/logs/wheel-torch.log" "$environment/bin/python" -m pip install \
    ${TLE_TORCH_INDEX:+--index-url "$TLE_TORCH_INDEX"} -c "$TLE_ROOT/scripts/requirements/constraints.txt" torch
  quietly "$TLE_CACHE/logs/wheel-install.log" "$environment/bin/python" -m pip install \
    -c "$TLE_ROOT/scripts/requirements/constraints.txt" -r "$TLE_ROOT/scripts/requirements/test.txt" \
    "$WORK/$architecture"/*.whl
  say "the wheel for $architecture, every test that is not slow"
  TLE_BUILD_DIR=$TLE_ROOT/build/wheel-$architecture run_tests "$environment/bin/python" -- -n 2 --dist worksteal \
    "$TLE_ROOT/tests/python"
}

cross() {
  local cpu name tests=() running=() status=0
  [ "$("$PY" -c 'import sys; print("%d.%d" % sys.version_info[:2])')" = 3.11 ] ||
    die "the aarch64 wheel is for CPython 3.11, the version of the Debian tree: name a python3.11 in TLE_PYTHON"
  bash "$TLE_ROOT/scripts/arm/make_root.sh"
  # Quotes inside: setup.py splits the options as a shell would.
  local options="'-DCMAKE_TOOLCHAIN_FILE=$TLE_ROOT/scripts/arm/toolchain.cmake'"
  options+=" '-DTLE_PYTHON_INCLUDE=$ARM_ROOT/usr/include/python3.11'"
  options+=" -DTLE_EXTENSION_SUFFIX=.cpython-311-aarch64-linux-gnu.so"
  build aarch64 _PYTHON_HOST_PLATFORM=linux-aarch64 SETUPTOOLS_EXT_SUFFIX=.cpython-311-aarch64-linux-gnu.so \
    "TLE_TORCH_DIR=$ARM_SITE/torch" \
    "TLE_CMAKE_ARGS=$options"
  quietly "$TLE_CACHE/logs/wheel-install-aarch64.log" \
    "$PY" -m pip install --no-deps --target "$WORK/site-aarch64" --upgrade \
    --implementation cp --python-version 3.11 --platform linux_aarch64 --only-binary=:all: "$WORK"/aarch64/*.whl
  for name in "${ARM_TESTS[@]}"; do tests+=("$TLE_ROOT/tests/python/$name"); done
  # Emulation uses one core well and two badly: the CPUs run side by side.
  say "the wheel for aarch64 on ${ARM_CPUS[*]}"
  for cpu in "${ARM_CPUS[@]}"; do
    TLE_ARM_PACKAGE=$WORK/site-aarch64 OMP_NUM_THREADS=1 run_tests bash "$TLE_ROOT/scripts/arm/run.sh" --cpu "$cpu" -- \
      "${tests[@]}" >"$WORK/aarch64-$cpu.log" 2>&1 &
    running+=($!)
  done
  for cpu in "${ARM_CPUS[@]}"; do
    wait "${running[0]}" || status=$?
    running=("${running[@]:1}")
    say "$cpu: $(tail -n 1 "$WORK/aarch64-$cpu.log")"
  done
  [ "$status" = 0 ] || die "the wheel for aarch64 failed; whole output: $WORK/aarch64-*.log"
}

need_venv test
need_smollm2_hf
mkdir -p "$WORK"
architectures=("$@")
[ $# -gt 0 ] || architectures=("$(uname -m)" aarch64)
for architecture in $(printf '%s\n' "${architectures[@]}" | sort -ru); do
  case $architecture in
    "$(uname -m)") native ;;
    aarch64) cross ;;
    *) die "no wheel for $architecture can be built here" ;;
  esac
done
ls -l "$TLE_ROOT"/dist/*.whl
