#!/usr/bin/env bash
# build.sh   cross-compiles the extension and the C++ tests for aarch64 and puts the module into tle_torch/, beside the
# host's own (their file names differ by platform). Lays the environment first when it is missing; quick when nothing changed.
set -euo pipefail
. "$(dirname "$0")/env.sh"

bash "$TLE_ROOT/scripts/arm/make_root.sh"
export PATH=$TLE_VENV/bin:$PATH
say "cross build: $ARM_BUILD"
quietly "$TLE_CACHE/logs/arm-configure.log" cmake -S "$TLE_ROOT" -B "$ARM_BUILD" -G Ninja \
  -DCMAKE_TOOLCHAIN_FILE="$TLE_ROOT/scripts/arm/toolchain.cmake" \
  -DTLE_TORCH_DIR="$ARM_SITE/torch" \
  -DTLE_PYTHON_INCLUDE="$ARM_ROOT/usr/include/python3.11" \
  -DTLE_EXTENSION_SUFFIX=.cpython-311-aarch64-linux-gnu.so \
  -DTLE_PACKAGE_DIR="$TLE_ROOT/tle_torch" \
  -DTLE_TESTS=ON
quietly "$TLE_CACHE/logs/arm-build.log" cmake --build "$ARM_BUILD" --parallel
say "cross build: done"
