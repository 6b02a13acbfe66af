#!/usr/bin/env bash
# build.sh   cross-compiles the extension for aarch64. Lays the environment first when it is missing; quick when nothing
# changed. The guest's tle_torch lies in $TLE_ARM_CACHE/package: links to the clone's Python files, so that an edit
# needs no build, beside the module and the record of what it was built for, which differ from the host's.
set -euo pipefail
. "$(dirname "$0")/env.sh"

bash "$TLE_ROOT/scripts/arm/make_root.sh"
export PATH=$TLE_VENV/bin:$PATH
say "cross build: $ARM_BUILD"
quietly "$TLE_CACHE/logs/arm-configure.log" cmake -S "$TLE_ROOT" -B "$ARM_BUILD" -G Ninja \
  -DCMAKE_TOOLCHAIN_FILE="$TLE_ROOT/scripts/arm/toolchain.cmake" \
  -DTLE_TORCH_DIR="$ARM_SITE/torch" \
  -DTLE_PYTHON_INCLUDE="$ARM_ROOT/usr/include/python3.11" \
  -DTLE_EXTENSION_SUFFIX=.cpython-311-aarch64-linux-gnu.so
quietly "$TLE_CACHE/logs/arm-build.log" cmake --build "$ARM_BUILD" --parallel "$(nproc)"

# What is right stays as it is: somebody may be running it.
package=$ARM_PACKAGE/tle_torch
mkdir -p "$package"
for link in "$package"/*; do
  target=$(readlink "$link") || continue
  case $target in
    "$TLE_ROOT"/tle_torch/* | "$ARM_BUILD"/*) [ -e "$target" ] || rm "$link" ;;
    *) rm "$link" ;; # another clone's
  esac
done
for entry in "$TLE_ROOT"/tle_torch/* "$ARM_BUILD"/_C.*.so; do
  case $entry in
    "$TLE_ROOT"/tle_torch/*.so | */_build_info.py | */__pycache__) ;;
    *) [ -L "$package/${entry##*/}" ] || ln -s "$entry" "$package/" ;;
  esac
done
version=$(basename "$ARM_SITE"/torch-*.dist-info .dist-info)
version=${version#torch-}
info="TORCH_VERSION = \"${version%%+*}\""
[ "$(cat "$package/_build_info.py" 2>/dev/null || true)" = "$info" ] || printf '%s\n' "$info" >"$package/_build_info.py"
say "aarch64 package: $package"
