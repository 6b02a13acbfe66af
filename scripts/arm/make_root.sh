#!/usr/bin/env bash
# make_root.sh   lays what a cross build and a run under qemu-user need below $TLE_ARM_CACHE (default .cache/arm):
#   root/   an arm64 Debian tree with CPython 3.11 and its headers: the sysroot, and qemu's -L   (120 MB)
#   site/   the aarch64 wheels (torch, transformers, pytest, ...): PYTHONPATH                     (900 MB)
# The host's package database is not touched: apt resolves against an empty private one, and nothing is installed,
# only unpacked. A part that is complete (its stamp matches) is left as it is.
set -euo pipefail
. "$(dirname "$0")/env.sh"

DEB_PACKAGES=(python3.11 libpython3.11-dev python3-distutils libstdc++6 libgomp1)
# torch's own needs, named: see pip_arm below.
TORCH_NEEDS=(filelock fsspec jinja2 networkx sympy typing_extensions)
REQUIREMENTS=("$TLE_ROOT"/scripts/requirements/{run,test}.txt)

# The arm64 tree comes from the mirror that the host's own apt uses.
debian_source() {
  # shellcheck source=/dev/null
  . /etc/os-release
  # shellcheck disable=SC2016 # the format is apt's, not the shell's
  apt-get indextargets --format '$(REPO_URI) $(RELEASE) $(COMPONENT)' 'Created-By: Packages' |
    awk -v release="$VERSION_CODENAME" \
      '$2 == release && $3 == "main" && $1 ~ /\/debian\/?$/ { print "deb [arch=arm64] " $1 " " $2 " main" }' | sort -u
}

make_root() {
  local apt=$TLE_ARM_CACHE/apt part=$ARM_ROOT.part deb link
  rm -rf "$apt" "$part" "$ARM_ROOT"
  mkdir -p "$apt/state/lists/partial" "$apt/cache/archives/partial" "$apt/etc/none"
  : >"$apt/state/status"
  debian_source >"$apt/etc/sources.list"
  [ -s "$apt/etc/sources.list" ] || die "no Debian 'main' source in the host's apt configuration"
  apt_arm64() {
    apt-get -q -y -o APT::Architecture=arm64 -o APT::Architectures::=arm64 -o APT::Install-Recommends=false \
      -o Dir::State="$apt/state" -o Dir::State::status="$apt/state/status" -o Dir::Cache="$apt/cache" \
      -o Dir::Etc::sourcelist="$apt/etc/sources.list" -o Dir::Etc::sourceparts="$apt/etc/none" \
      -o Dir::Etc::preferencesparts="$apt/etc/none" -o APT::Sandbox::User=root -o Acquire::Languages=none \
      -o Acquire::Retries=3 "$@"
  }
  quietly "$TLE_CACHE/logs/arm-apt-update.log" apt_arm64 update
  quietly "$TLE_CACHE/logs/arm-apt.log" apt_arm64 --download-only install "${DEB_PACKAGES[@]}"

  # No maintainer script runs. The links of the merged /usr come first, as in every Debian 12 tree.
  mkdir -p "$part"/usr/{lib,bin,sbin}
  for link in lib bin sbin; do ln -s "usr/$link" "$part/$link"; done
  for deb in "$apt"/cache/archives/*.deb; do
    dpkg-deb --fsys-tarfile "$deb" | tar -C "$part" --no-same-owner --keep-directory-symlink -xf -
  done
  # An absolute link (libm.so -> /lib/...) would lead out of the tree, to the host's files.
  find "$part" -lname '/*' -print0 | while IFS= read -r -d '' link; do
    ln -sfn "$(realpath -ms --relative-to="$(dirname "$link")" "$part$(readlink "$link")")" "$link"
  done
  rm -rf "$part"/usr/share/{doc,man,locale} "$apt"

  # The guest's sys.executable is a host script that starts the emulator again, so that subprocess, multiprocessing
  # and DataLoader work without any binfmt_misc registration.
  cat >"$part/usr/bin/python" <<'SH'
#!/bin/sh
here=$(dirname "$(readlink -f "$0")")
exec "${TLE_QEMU:-qemu-aarch64}" -cpu "${TLE_ARM_CPU:-max}" -L "${here%/usr/bin}" -0 "$here/python" "$here/python3.11" "$@"
SH
  chmod +x "$part/usr/bin/python"
  mv "$part" "$ARM_ROOT"
}

# pip for the other architecture. It weighs "; platform_machine == ..." by the host, so that torch with its
# dependencies would ask for CUDA packages that no aarch64 has: torch comes without them, and they are named.
pip_arm() {
  "$PY" -m pip install --target "$ARM_SITE.part" --no-warn-conflicts --implementation cp --python-version 3.11 \
    --platform manylinux_2_28_aarch64 --platform manylinux_2_17_aarch64 --platform manylinux2014_aarch64 \
    --only-binary=:all: "$@"
}

make_site() {
  local wanted constraints=$TLE_ARM_CACHE/constraints.txt
  rm -rf "$ARM_SITE" "$ARM_SITE.part"
  local pins=$TLE_ROOT/scripts/requirements/constraints.txt
  wanted=$(sed -n 's/^\(torch==[^;]*\); *platform_machine == "aarch64".*/\1/p' "$pins")
  [ -n "$wanted" ] || die "scripts/requirements/constraints.txt names no torch for aarch64"
  quietly "$TLE_CACHE/logs/arm-pip-torch.log" pip_arm --no-deps "$wanted"
  quietly "$TLE_CACHE/logs/arm-pip-needs.log" pip_arm "${TORCH_NEEDS[@]}"
  # peft and accelerate require torch, which a second call with --target does not see: they come without their
  # dependencies, all of which transformers brings, except psutil.
  grep '^transformers' "$TLE_ROOT/scripts/requirements/constraints.txt" >"$constraints"
  grep -hvE '^(peft|accelerate)' "${REQUIREMENTS[@]}" >"$TLE_ARM_CACHE/requirements.txt"
  quietly "$TLE_CACHE/logs/arm-pip.log" pip_arm -c "$constraints" -r "$TLE_ARM_CACHE/requirements.txt" psutil
  quietly "$TLE_CACHE/logs/arm-pip-peft.log" pip_arm --no-deps peft accelerate
  rm -f "$constraints" "$TLE_ARM_CACHE/requirements.txt"
  mv "$ARM_SITE.part" "$ARM_SITE"
}

need_venv test
need_test_tools
mkdir -p "$TLE_ARM_CACHE"
exec 9>"$TLE_ARM_CACHE/.lock"
flock 9
root_stamp="${DEB_PACKAGES[*]} $(sed -n '/^make_root()/,/^}/p' "$0" | cksum)"
if ! stamp_matches "$TLE_ARM_CACHE/root.stamp" "$root_stamp"; then
  rm -f "$TLE_ARM_CACHE/root.stamp"
  say "arm64 Debian tree"
  make_root
  write_stamp "$TLE_ARM_CACHE/root.stamp" "$root_stamp"
fi
site_stamp="${TORCH_NEEDS[*]} $(cat "${REQUIREMENTS[@]}" "$TLE_ROOT/scripts/requirements/constraints.txt" | cksum)"
if ! stamp_matches "$TLE_ARM_CACHE/site.stamp" "$site_stamp"; then
  rm -f "$TLE_ARM_CACHE/site.stamp"
  say "aarch64 wheels"
  make_site
  write_stamp "$TLE_ARM_CACHE/site.stamp" "$site_stamp"
fi
