"""Builds the C++ extension with CMake against the torch that is installed, and pins that torch's minor version in the
wheel.

Environment: TLE_BUILD_DIR, the folder to build in; TLE_CMAKE_ARGS, more arguments for CMake, quoted as in a shell;
TLE_TORCH_DIR, another torch package to build against than the one that is imported, for a cross build.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_ext import build_ext
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent


TORCH_DIR = os.environ.get("TLE_TORCH_DIR")


def torch_version() -> str:
    if TORCH_DIR:  # made for another machine: it can be read, but not imported
        found = re.search(r"__version__ = '([^']+)'", (Path(TORCH_DIR) / "version.py").read_text())
        version = found[1] if found else sys.exit(f"tle_torch: {TORCH_DIR} is no torch package")
    else:
        try:
            from torch import __version__ as version
        except ImportError:
            sys.exit("tle_torch: install torch first (2.9 or later), then: pip install --no-build-isolation .")
    if tuple(int(part) for part in version.split(".")[:2]) < (2, 9):
        sys.exit(f"tle_torch: needs torch 2.9 or later, found {version}")
    return version.split("+")[0]


TORCH = torch_version()
MAJOR, MINOR = (int(part) for part in TORCH.split(".")[:2])


def write_build_info(folder: Path) -> None:
    """What tle_torch.ops compares with the torch that is imported."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "_build_info.py").write_text(
        f'"""Written by setup.py: what this build was made for."""\n\nTORCH_VERSION = "{TORCH}"\n'
    )


class BuildPy(build_py):
    def run(self):
        super().run()
        write_build_info(Path(self.build_lib) / "tle_torch")


class CMakeBuild(build_ext):
    """Runs CMake and Ninja; for -e installs the module goes into the source package and the build folder stays, so
    that a kernel edit rebuilds in seconds."""

    def build_extension(self, extension):
        # Absolute even for -e installs, where setuptools asks for a path relative to the project.
        target = (ROOT / self.get_ext_fullpath(extension.name)).resolve()
        if self.editable_mode:
            write_build_info(target.parent)
        build = ROOT / "build" / f"cmake-{sys.implementation.cache_tag}"
        build = Path(os.environ.get("TLE_BUILD_DIR", build)).resolve()
        configure = [
            "cmake", "-S", str(ROOT), "-B", str(build), "-G", "Ninja",
            f"-DTLE_PYTHON={sys.executable}",
            f"-DTLE_PACKAGE_DIR={target.parent}",
            *([f"-DTLE_TORCH_DIR={TORCH_DIR}"] if TORCH_DIR else []),
            *shlex.split(os.environ.get("TLE_CMAKE_ARGS", "")),
        ]  # fmt: skip
        target.parent.mkdir(parents=True, exist_ok=True)
        jobs = os.environ.get("MAX_JOBS", str(len(os.sched_getaffinity(0))))
        subprocess.run(configure, check=True)
        subprocess.run(["cmake", "--build", str(build), "-j", jobs], check=True)
        if not target.exists():
            sys.exit(f"tle_torch: the build did not produce {target.name}")


setup(
    packages=["tle_torch", "tle_torch.families"],
    ext_modules=[Extension("tle_torch._C", sources=[])],
    cmdclass={"build_ext": CMakeBuild, "build_py": BuildPy},
    install_requires=[
        f"torch>={MAJOR}.{MINOR},<{MAJOR}.{MINOR + 1}",
        "transformers>=5.23",
        "accelerate",
        "gguf",
        "rich",
    ],
)
