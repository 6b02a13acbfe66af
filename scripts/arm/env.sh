# shellcheck shell=bash
# What the commands in this folder share. On an x86-64 machine they build and run everything for aarch64: a Debian
# arm64 tree and aarch64 wheels below $TLE_ARM_CACHE, a cross compiler, and qemu-user.
#
#   TLE_ARM_CACHE   where all of it lies; default: .cache/arm in the clone
#   TLE_ARM_CPU     qemu's -cpu for what runs; default: max
#   TLE_QEMU        the emulator; default: qemu-aarch64

# shellcheck source=scripts/lib.sh
. "$(dirname "${BASH_SOURCE[0]}")/../lib.sh"

export TLE_ARM_CACHE=${TLE_ARM_CACHE:-$TLE_CACHE/arm}
export TLE_ARM_CPU=${TLE_ARM_CPU:-max}
export TLE_QEMU=${TLE_QEMU:-qemu-aarch64}
ARM_ROOT=$TLE_ARM_CACHE/root
ARM_SITE=$TLE_ARM_CACHE/site
ARM_BUILD=$TLE_ARM_CACHE/build
# tle_torch as the guest imports it: the clone's Python files, its own module.
ARM_PACKAGE=${TLE_ARM_PACKAGE:-$TLE_ARM_CACHE/package}
