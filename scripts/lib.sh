# shellcheck shell=bash
# What the commands in this folder share: from a fresh machine to a clone in which Python and the tests run.
# Source it. Each `need_*` function is idempotent and costs milliseconds when there is nothing to do.
#
#   TLE_PYTHON   the python3 (3.10 or later) that the virtual environment is made from; default: python3
#   TLE_CACHE    downloads and converted weights; default: .cache in the clone

TLE_ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
TLE_VENV=$TLE_ROOT/.venv
TLE_CACHE=${TLE_CACHE:-$TLE_ROOT/.cache}
PY=$TLE_VENV/bin/python
export TLE_CACHE
mkdir -p "$TLE_CACHE"

# The caller's environment must not leak into the clone's: an active virtual environment, a PYTHONPATH, `pip install
# --user`.
unset VIRTUAL_ENV PYTHONHOME PYTHONPATH TLE_BUILD_DIR TLE_ISA TLE_NUM_THREADS
export PIP_USER=0 PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore
# Nothing is ever fetched from the model hub; without this transformers asks it all the same.
export HF_HUB_OFFLINE=1 HF_HUB_DISABLE_TELEMETRY=1
if command -v ccache >/dev/null; then
  export CMAKE_C_COMPILER_LAUNCHER=ccache CMAKE_CXX_COMPILER_LAUNCHER=ccache
  export CCACHE_SLOPPINESS=pch_defines,time_macros # what ccache asks for to cache with precompiled headers
fi

say() { printf '[%s %4ds] %s\n' "$(basename "$0" .sh)" "$SECONDS" "$*" >&2; }
die() {
  printf '%s: %s\n' "$(basename "$0")" "$*" >&2
  exit 1
}

# quietly LOG COMMAND ARGS...   runs COMMAND with its output in LOG, which is shown only when it fails.
quietly() {
  local log=$1
  shift
  mkdir -p "$(dirname "$log")"
  if ! "$@" >"$log" 2>&1 </dev/null; then
    tail -n 60 "$log" >&2
    die "failed: $* (whole output: $log)"
  fi
}

# apt_install PACKAGE...   installs Debian packages; the caller has found that something is missing.
apt_install() {
  local sudo=()
  command -v apt-get >/dev/null \
    || die "this needs the Debian packages: $*. There is no apt-get here: install their equivalents."
  if [ "$(id -u)" != 0 ]; then
    command -v sudo >/dev/null || die "this needs the Debian packages: $*. Install them as root: apt-get install $*"
    sudo=(sudo)
  fi
  say "apt: $*"
  if [ -z "${TLE_APT_UPDATED:-}" ]; then
    quietly "$TLE_CACHE/logs/apt-update.log" "${sudo[@]}" apt-get -q update
    TLE_APT_UPDATED=1
  fi
  quietly "$TLE_CACHE/logs/apt-install.log" "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive \
    apt-get -q -y --no-install-recommends install "$@"
}

# The interpreter that the virtual environment is made from. When an environment is active, its base interpreter.
base_python() {
  local python
  python=$(command -v "${TLE_PYTHON:-python3}") || die "no ${TLE_PYTHON:-python3} here: install Python 3.10 or later"
  "$python" - <<'PY' || die "$python is too old: Python 3.10 or later is needed (name another one in TLE_PYTHON)"
import sys
sys.exit(sys.version_info < (3, 10))
PY
  # Resolved: an environment names it python3.11 where the same interpreter names itself python3.
  "$python" -c 'import os, sys; print(os.path.realpath(getattr(sys, "_base_executable", sys.executable)))'
}

# g++, Python's headers and the venv module: what the extension needs from the system.
need_build_tools() {
  local python missing=()
  python=$(base_python)
  command -v g++ >/dev/null || missing+=(g++)
  "$python" -c 'import venv, ensurepip' 2>/dev/null || missing+=(python3-venv)
  "$python" -c 'import os, sysconfig, sys
sys.exit(not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")))' || missing+=(python3-dev)
  [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
}

# Compilers, emulators and GoogleTest's sources for the C++ tests, valgrind for the counts of instructions.
need_test_tools() {
  local missing=()
  [ -e /usr/src/googletest/CMakeLists.txt ] || missing+=(libgtest-dev)
  command -v nm >/dev/null || missing+=(binutils)
  if [ "$(uname -m)" = x86_64 ]; then
    command -v qemu-aarch64 >/dev/null && command -v qemu-x86_64 >/dev/null || missing+=(qemu-user)
    command -v valgrind >/dev/null || missing+=(valgrind)
    command -v aarch64-linux-gnu-g++ >/dev/null || missing+=(g++-aarch64-linux-gnu libc6-dev-arm64-cross)
  fi
  [ ${#missing[@]} = 0 ] || apt_install "${missing[@]}"
}

# stamp_matches FILE TEXT / write_stamp FILE TEXT   a step is done when its stamp holds what it was done with.
stamp_matches() { [ "$(cat "$1" 2>/dev/null || true)" = "$2" ]; }
write_stamp() { printf '%s' "$2" >"$1"; }

# need_venv [test]   .venv with torch first, then what runs and builds; with `test` also what tests.
need_venv() {
  local want base req=$TLE_ROOT/scripts/requirements
  need_build_tools
  base=$(base_python)
  want="$base $("$base" -V) $TLE_ROOT $(cat "$req"/{constraints,build,run}.txt | cksum)"
  if ! stamp_matches "$TLE_VENV/.stamp-run" "$want"; then
    say "virtual environment: $TLE_VENV ($("$base" -V))"
    rm -rf "$TLE_VENV"
    "$base" -m venv "$TLE_VENV"
    # torch by itself and first: whatever comes later finds it there. TLE_TORCH_INDEX names another package index
    # for this one package, for instance one that has the CPU build where the default has one with CUDA.
    say "pip: torch"
    quietly "$TLE_CACHE/logs/pip-torch.log" "$PY" -m pip install ${TLE_TORCH_INDEX:+--index-url "$TLE_TORCH_INDEX"} \
      -c "$req/constraints.txt" torch
    say "pip: transformers and what builds the extension"
    quietly "$TLE_CACHE/logs/pip-run.log" \
      "$PY" -m pip install -c "$req/constraints.txt" -r "$req/build.txt" -r "$req/run.txt"
    write_stamp "$TLE_VENV/.stamp-run" "$want"
  fi
  [ "${1:-}" = test ] || return 0
  want="$want $(cksum <"$req/test.txt")"
  if ! stamp_matches "$TLE_VENV/.stamp-test" "$want"; then
    say "pip: what the tests need"
    quietly "$TLE_CACHE/logs/pip-test.log" "$PY" -m pip install -c "$req/constraints.txt" -r "$req/test.txt"
    write_stamp "$TLE_VENV/.stamp-test" "$want"
  fi
}

# need_extension   the C++ extension, built in place: `import tle_torch` in .venv is the clone's package.
need_extension() {
  local want build
  build=$TLE_ROOT/build/cmake-$("$PY" -c 'import sys; print(sys.implementation.cache_tag)')
  want="$TLE_ROOT $("$PY" -c 'from importlib.metadata import version; print(version("torch"))')"
  want+=" $(cat "$TLE_ROOT"/{setup.py,pyproject.toml} | cksum)"
  if ! stamp_matches "$TLE_VENV/.stamp-extension" "$want" || [ ! -e "$build/build.ninja" ]; then
    say "building the extension"
    rm -rf "$build"
    PATH=$TLE_VENV/bin:$PATH quietly "$TLE_CACHE/logs/build.log" \
      "$PY" -m pip install --no-build-isolation --no-deps -v -e "$TLE_ROOT"
    # pip had the module copied to a folder of its own; from now on it goes straight into the package.
    PATH=$TLE_VENV/bin:$PATH quietly "$TLE_CACHE/logs/configure.log" \
      cmake "-DTLE_PACKAGE_DIR=$TLE_ROOT/tle_torch" "$build"
    write_stamp "$TLE_VENV/.stamp-extension" "$want"
  fi
  PATH=$TLE_VENV/bin:$PATH quietly "$TLE_CACHE/logs/build.log" cmake --build "$build" --target _C --parallel "$(nproc)"
}

# need_smollm2_hf   the weights of the tests, as a Hugging Face folder.
need_smollm2_hf() {
  [ -e "$TLE_CACHE/smollm2/hf-fp32/config.json" ] || say "SmolLM2-135M-Instruct: download and de-quantise"
  quietly "$TLE_CACHE/logs/smollm2.log" "$PY" "$TLE_ROOT/scripts/fetch.py" smollm2-hf
}
