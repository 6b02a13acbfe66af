#!/usr/bin/env python3
"""Runs every test of the project and ends with one line: `N passed, N failed, N skipped`. scripts/test.sh calls it.

    --fast    the inner loop, under two minutes: C++ natively and for one aarch64 CPU, pytest without its slow tests
    --all     adds what is slow: every emulated CPU runs everything, and pytest runs at every level of this CPU
    --only X  only stages whose name contains X (may be given several times); `--list` names them
    ARGS      what comes after `--` goes to pytest

A stage is one command that writes a JUnit file. What it prints goes to a log, shown when the stage fails. A stage that
dies (a signal, a time-out) or runs no test counts as a failure, whatever its file says.
"""

from __future__ import annotations

import argparse
import os
import platform
import shutil
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
CACHE = Path(os.environ.get("TLE_CACHE") or ROOT / ".cache")
BUILD = ROOT / "build"
RESULTS = CACHE / "test-results"
HOST = platform.machine()

# The emulated CPUs. Armv8.0 without dotprod (a53, a72), with dotprod (a76, n1), SVE of 512 bits without SVE2, dotprod
# and i8mm (a64fx), everything (max) at three vector lengths, and everything but SVE.
AARCH64_CPUS = (
    "cortex-a53",
    "cortex-a72",
    "cortex-a76",
    "neoverse-n1",
    "a64fx",
    "max,sve=off",
    "max,sve-max-vq=1",
    "max,sve-max-vq=2",
    "max,sve-max-vq=4",
)
AARCH64_CPU_FAST = "max,sve-max-vq=2"
# What --arm adds: the least and the most that an aarch64 CPU has, and of tests/python the files that look at bits.
# scripts/arm/test.sh runs all of it on any CPU.
AARCH64_PYTEST_CPUS = ("cortex-a53", "max,sve-max-vq=2")
AARCH64_PYTEST_FILES = ("test_golden.py", "test_rows.py", "test_sdot.py", "test_frequencies.py")
# x86-64's baseline (SSE2 to SSE4.2, no AVX) and AVX2 without AVX-512.
X86_64_CPUS = ("Nehalem", "Haswell")


@dataclass
class Result:
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    note: str = ""

    def __add__(self, other: "Result") -> "Result":
        return Result(self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)


@dataclass
class Stage:
    """One command that writes a JUnit file at `junit`; `needs` is the build whose failure fails this stage too."""

    name: str
    command: list[str]
    timeout: int
    environment: dict[str, str] = field(default_factory=dict)
    needs: "Build | None" = None
    alone: bool = False  # wants the whole machine: it times things or starts threads of its own

    @property
    def junit(self) -> Path:
        return RESULTS / f"{self.name}.xml"

    @property
    def log(self) -> Path:
        return RESULTS / f"{self.name}.log"


@dataclass
class Build:
    """A CMake build of the kernels and their tests: without torch in a folder of its own, or in the extension's build
    folder, whose objects are the same."""

    name: str
    options: list[str]
    with_extension: bool = False
    counted: bool = True  # whether pytest counts its kernels' instructions

    @property
    def folder(self) -> Path:
        return BUILD / (f"cmake-{sys.implementation.cache_tag}" if self.with_extension else f"tests-{self.name}")

    @property
    def binary(self) -> Path:
        return self.folder / "tests" / "cpp" / "tle_kernel_tests"

    def run(self) -> None:
        log = RESULTS / f"build-{self.name}.log"
        configure = ["cmake", "-S", str(ROOT), "-B", str(self.folder), "-G", "Ninja"]
        configure += ["-DTLE_TESTS=ON", f"-DTLE_TORCH={'ON' if self.with_extension else 'OFF'}", *self.options]
        configure += ["-DTLE_BENCHMARKS=ON"] if self.counted else []
        targets = ["tle_kernel_tests", *(["tle_kernel_count"] if self.counted else [])]
        build = ["cmake", "--build", str(self.folder), "--target", *targets, "--parallel", str(os.cpu_count() or 1)]
        with open(log, "w") as output:
            for command in (configure, build):
                subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


@dataclass
class Aarch64Package(Build):
    """The extension for aarch64 and what it runs in, made by scripts/arm/build.sh."""

    def run(self) -> None:
        with open(RESULTS / f"build-{self.name}.log", "w") as output:
            command = ["bash", str(ROOT / "scripts" / "arm" / "build.sh")]
            subprocess.run(command, check=True, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)


def gtest(name: str, build: Build, emulator: list[str], timeout: int) -> Stage:
    stage = Stage(name, [*emulator, str(build.binary)], timeout, needs=build)
    stage.environment["GTEST_OUTPUT"] = f"xml:{stage.junit}"
    return stage


def host_has_avx512() -> bool:
    flags = Path("/proc/cpuinfo").read_text().split()
    return "avx512bw" in flags and "avx512_vnni" in flags


def stages(options: argparse.Namespace) -> list[Stage]:
    """The table of stages, in the order in which they run."""
    native = Build("native", [], with_extension=True)
    table = [gtest("cpp", native, [], 600)]
    if HOST == "x86_64":
        emulated = () if options.fast else X86_64_CPUS
        table += [gtest(f"cpp-{cpu}", native, ["qemu-x86_64", "-cpu", cpu], 900) for cpu in emulated]
        if not options.fast or not host_has_avx512():
            include = subprocess.run(
                [sys.executable, str(ROOT / "scripts" / "fetch.py"), "simde"],
                check=True, text=True, capture_output=True,
            ).stdout.strip()
            table.append(gtest("cpp-simde", Build("simde", [f"-DTLE_SIMDE={include}"], counted=False), [], 900))
        aarch64 = Build("aarch64", [f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'scripts' / 'arm' / 'toolchain.cmake'}"])
    else:
        aarch64 = native
    for cpu in (AARCH64_CPU_FAST,) if options.fast else AARCH64_CPUS:
        table.append(gtest(f"cpp-{cpu}", aarch64, ["qemu-aarch64", "-cpu", cpu], 900))
    if HOST == "x86_64" and (options.arm or options.all):
        table += aarch64_pytest_stages()
    table += pytest_stages(options)
    return [stage for stage in table if not options.only or any(part in stage.name for part in options.only)]


def aarch64_pytest_stages() -> list[Stage]:
    package = Aarch64Package("aarch64-package", [])
    cores = sorted(os.sched_getaffinity(0))
    table = []
    for index, cpu in enumerate(AARCH64_PYTEST_CPUS):
        stage = Stage(f"pytest-{cpu}", [], timeout=1800, needs=package)
        # A core each: threads that wait for each other under emulation cost more than a second core brings.
        stage.command = ["taskset", "-c", str(cores[index % len(cores)])]
        stage.command += ["bash", str(ROOT / "scripts" / "arm" / "run.sh"), "--cpu", cpu, "-m", "pytest", "-q", "-ra"]
        stage.command += ["-p", "no:cacheprovider", "-m", "not slow", f"--junitxml={stage.junit}"]
        stage.command += [str(ROOT / "tests" / "python" / name) for name in AARCH64_PYTEST_FILES]
        stage.environment |= {"OMP_NUM_THREADS": "1", "TLE_GOLDEN_TOKENS": "8"}
        table.append(stage)
    return table


def pytest_stages(options: argparse.Namespace) -> list[Stage]:
    # Two workers for the inner loop only: the whole suite looks at memory and threads too, and wants the machine to
    # itself.
    selection = ["-m", "not slow", "-n", "2", "--dist", "worksteal"] if options.fast else []
    levels = [""]
    if options.all:
        listing = [sys.executable, "-c", "import tle_torch._C as c; print(*c.isas())"]
        found = subprocess.run(listing, cwd=ROOT, check=True, text=True, capture_output=True).stdout.split()
        levels += found[:-1]  # the best one is what runs anyway
    table = []
    for level in levels:
        stage = Stage(f"pytest-{level}" if level else "pytest", [], timeout=3600, alone=True)
        stage.command = [sys.executable, "-m", "pytest", "-q", "-ra", f"--junitxml={stage.junit}", *selection,
                         "tests/python"]
        stage.command += options.pytest
        if level:
            stage.environment["TLE_ISA"] = level
        table.append(stage)
    return table


def read_junit(path: Path) -> Result:
    """Counts the test cases of a JUnit file, pytest's or GoogleTest's."""
    result = Result()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            result.skipped += 1
        elif case.get("result") != "suppressed":  # GoogleTest lists what a filter left out
            result.passed += 1
    return result


def run(stage: Stage, broken_builds: set[str]) -> Result:
    if stage.needs and stage.needs.name in broken_builds:
        return Result(failed=1, note="its build failed")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TLE_ISA")}
    environment.pop("TLE_NUM_THREADS", None)
    environment |= stage.environment
    start = time.monotonic()
    note = ""
    with open(stage.log, "w") as output:
        try:
            code = subprocess.run(
                stage.command, cwd=ROOT, env=environment, timeout=stage.timeout, stdout=output,
                stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
            ).returncode
        except subprocess.TimeoutExpired:
            code, note = 1, f"no end after {stage.timeout} s"
    result = read_junit(stage.junit) if stage.junit.exists() else Result()
    result.seconds = time.monotonic() - start
    if result.passed + result.failed == 0:
        result.failed, note = 1, note or f"ran no test (exit code {code})"
    elif code != 0 and result.failed == 0:
        result.failed, note = 1, note or f"exit code {code}"
    result.note = note
    return result


def report(stage: Stage, result: Result) -> None:
    counts = f"{result.passed:6d} passed {result.failed:4d} failed {result.skipped:4d} skipped"
    print(f"{stage.name:24s} {counts} {result.seconds:7.1f} s  {result.note}".rstrip(), flush=True)
    if result.failed and stage.log.exists():
        lines = stage.log.read_text(errors="replace").splitlines()
        # Indented, so that no line of a failed stage can be taken for the closing line.
        print("\n".join(f"    | {line}" for line in lines[-80:]), flush=True)
        print(f"    whole output: {stage.log}", flush=True)


def build_all(table: list[Stage]) -> set[str]:
    """Makes what the stages need, each once, and returns the names of the builds that failed."""
    broken = set()
    for build in {stage.needs.name: stage.needs for stage in table if stage.needs}.values():
        start = time.monotonic()
        try:
            build.run()
        except subprocess.CalledProcessError:
            broken.add(build.name)
            log = RESULTS / f"build-{build.name}.log"
            print("\n".join(f"    | {line}" for line in log.read_text(errors="replace").splitlines()[-60:]))
        state = "FAILED" if build.name in broken else "built"
        print(f"{'build-' + build.name:24s} {state:>13s} {time.monotonic() - start:36.1f} s", flush=True)
    return broken


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--arm", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="X")
    parser.add_argument("--list", action="store_true")
    arguments = sys.argv[1:]
    split = arguments.index("--") if "--" in arguments else len(arguments)
    options = parser.parse_args(arguments[:split])
    options.pytest = arguments[split + 1 :]
    if options.fast and (options.all or options.arm):
        parser.error("--fast excludes --arm and --all")
    return options


def main() -> int:
    options = parse_arguments()
    table = stages(options)
    if options.list:
        print("\n".join(stage.name for stage in table))
        return 0
    shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True)
    broken = build_all(table)
    total = Result()
    together = [stage for stage in table if not stage.alone]
    with ThreadPoolExecutor(max_workers=min(2, os.cpu_count() or 1)) as pool:
        for stage, result in zip(together, pool.map(lambda stage: run(stage, broken), together)):
            report(stage, result)
            total += result
    for stage in table:
        if stage.alone:
            result = run(stage, broken)
            report(stage, result)
            total += result
    if total.passed == 0:
        total.failed = max(total.failed, 1)
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
