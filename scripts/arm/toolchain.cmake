# Cross build for aarch64 with Debian's g++-aarch64-linux-gnu. What needs neither torch nor Python (the kernels and
# their tests) needs nothing else; the extension needs the tree and the wheels that make_root.sh lays.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)

find_program(CMAKE_C_COMPILER NAMES aarch64-linux-gnu-gcc REQUIRED)
find_program(CMAKE_CXX_COMPILER NAMES aarch64-linux-gnu-g++ REQUIRED)

# try_compile() reads this file again, in a project of its own.
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES TLE_ARM_CACHE)
if(NOT DEFINED TLE_ARM_CACHE)
  set(TLE_ARM_CACHE "$ENV{TLE_ARM_CACHE}")
endif()

# No CMAKE_SYSROOT: the cross compiler brings a libc and a libstdc++ of the same Debian release as the tree's.
if(TLE_ARM_CACHE)
  set(CMAKE_FIND_ROOT_PATH "${TLE_ARM_CACHE}/root" "${TLE_ARM_CACHE}/site/torch")
endif()
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
