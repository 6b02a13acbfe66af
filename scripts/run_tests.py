#!/usr/bin/env python3
"""Runs every test of the project and ends with one line: `N passed, N failed, N skipped`. scripts/test.sh calls it.

    --fast    the inner loop, under two minutes: C++ natively and for one aarch64 CPU, pytest without its slow tests
    --arm     adds pytest for aarch64: all of tests/python on every emulated CPU, some stages for each
    --all     adds what is slow: that, and pytest at every level of this CPU
    --only X  only stages whose name contains X (may be given several times); `--list` names them
    --resume  stages that passed in an earlier run, of the same sources, are reported and not run again
    ARGS      what comes after `--` goes to pytest

A stage is one command that writes a JUnit file. What it prints goes to a log, shown when the stage fails. A stage that
dies (a signal, a time-out) or runs no test counts as a failure, whatever its file says.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import os
import platform
import queue
import re
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
PYTHON_TESTS = ROOT / "tests" / "python"
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
# Those on which pytest runs with --arm; a72 is a53 to it.
AARCH64_PYTEST_CPUS = tuple(cpu for cpu in AARCH64_CPUS if cpu != "cortex-a72")
# Of those with the same best level, the first runs everything; the slow tests of these two files, real weights with
# every other scheme, are left out on the others: the kernels that they reach are that level's.
AARCH64_WHOLE_CPUS = ("cortex-a53", "cortex-a76", "max,sve=off", "max,sve-max-vq=2")
AARCH64_LEVEL_TESTS = ("test_golden.py", "test_smollm2.py")
# Files of tests/python that share a process there, since one takes half a minute to start; "rest": what is not named.
AARCH64_PYTEST_PARTS = {
    "operators": ("attention", "counts", "decoder", "gguf_ops", "linear", "rows", "sdot", "symbols"),
    "golden": ("golden",),
    "smollm2": ("smollm2", "gguf_tokenizer"),
    "rest": (),
}
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
        counts = (self.passed + other.passed, self.failed + other.failed, self.skipped + other.skipped)
        return Result(*counts, self.seconds + other.seconds)


@dataclass
class Stage:
    """One command that writes a JUnit file at `junit`; `needs` is the build whose failure fails this stage too.

    `tests` are the files of tests/python that it runs, if not all; stages of one `group` are summed up in a line.
    """

    name: str
    command: list[str]
    timeout: int
    environment: dict[str, str] = field(default_factory=dict)
    needs: "Build | None" = None
    alone: bool = False  # wants the whole machine: it times things or starts threads of its own
    one_core: bool = False  # emulated threads that wait for each other cost more than a second core brings
    tests: tuple[str, ...] = ()
    group: str = ""

    @property
    def junit(self) -> Path:
        return RESULTS / f"{self.name}.xml"

    @property
    def log(self) -> Path:
        return RESULTS / f"{self.name}.log"

    @property
    def record(self) -> Path:
        """What it gave, and with which sources."""
        return RESULTS / f"{self.name}.json"

    def sources(self) -> str:
        """A digest of everything in the clone that its result depends on."""
        tests, wanted = set(), list(self.tests) or [path.name for path in PYTHON_TESTS.glob("test_*.py")]
        while wanted:  # test files import each other
            name = wanted.pop()
            if name not in tests:
                tests.add(name)
                imported = re.findall(r"^from (test_\w+) import", (PYTHON_TESTS / name).read_text(), re.MULTILINE)
                wanted += [f"{module}.py" for module in imported]
        digest = hashlib.sha256(repr((self.command, sorted(self.environment.items()))).encode())
        for path, of_file in source_digests().items():
            if path.parent != PYTHON_TESTS or not path.name.startswith("test_") or path.name in tests:
                digest.update(f"{path.relative_to(ROOT)} {of_file}\n".encode())
        return digest.hexdigest()


@functools.cache
def source_digests() -> dict[Path, str]:
    """A digest of each file that the build, the package, the tests or the scripts consist of, but for this one."""
    files = [ROOT / "CMakeLists.txt", ROOT / "pyproject.toml", ROOT / "setup.py"]
    for folder in ("csrc", "tle_torch", "tests", "benchmarks", "scripts"):
        files += [path for path in (ROOT / folder).rglob("*") if path.is_file()]
    made = ("__pycache__", ".hypothesis", ".pytest_cache")
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(files)
        if path.suffix != ".so" and not set(made) & set(path.parts) and path != Path(__file__).resolve()
    }


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


def host_has_every_level() -> bool:
    """Of x86-64: what SIMDe would emulate runs by itself."""
    return {"avx512bw", "avx512_vnni", "amx_int8"} <= set(Path("/proc/cpuinfo").read_text().split())


def stages(options: argparse.Namespace) -> list[Stage]:
    """The table of stages, in the order in which they run."""
    native = Build("native", [], with_extension=True)
    table = [gtest("cpp", native, [], 600)]
    if HOST == "x86_64":
        emulated = () if options.fast else X86_64_CPUS
        table += [gtest(f"cpp-{cpu}", native, ["qemu-x86_64", "-cpu", cpu], 900) for cpu in emulated]
        if not options.fast or not host_has_every_level():
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
        table += aarch64_pytest_stages(options)
    table += pytest_stages(options)
    return [stage for stage in table if not options.only or any(part in stage.name for part in options.only)]


def aarch64_pytest_stages(options: argparse.Namespace) -> list[Stage]:
    package = Aarch64Package("aarch64-package", [])
    table = []
    named = {name for names in AARCH64_PYTEST_PARTS.values() for name in names}
    rest = {path.stem.removeprefix("test_") for path in PYTHON_TESTS.glob("test_*.py")} - named
    for cpu in AARCH64_PYTEST_CPUS:
        for part, names in AARCH64_PYTEST_PARTS.items():
            stage = Stage(f"pytest-{cpu}-{part}", [], timeout=7200, needs=package)
            stage.tests = tuple(f"test_{name}.py" for name in sorted(names or rest))
            stage.command = ["bash", str(ROOT / "scripts" / "arm" / "run.sh"), "--cpu", cpu, "-m", "pytest", "-v"]
            stage.command += ["-ra", "-p", "no:cacheprovider", f"--junitxml={stage.junit}", *options.pytest]
            if cpu not in AARCH64_WHOLE_CPUS and set(AARCH64_LEVEL_TESTS) & set(stage.tests):
                stage.command += ["-m", "not slow"]
            stage.command += [str(PYTHON_TESTS / name) for name in stage.tests]
            stage.environment["OMP_NUM_THREADS"] = "1"
            stage.group, stage.one_core = f"pytest-{cpu}", True
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


def read_junit(path: Path, module: str = "") -> Result:
    """Counts the test cases of a JUnit file, pytest's or GoogleTest's; of pytest's those of `module`, if given."""
    result = Result()
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        if module and module not in case.get("classname", "").split("."):
            continue
        result.seconds += float(case.get("time") or 0)
        if case.find("failure") is not None or case.find("error") is not None:
            result.failed += 1
        elif case.find("skipped") is not None or case.get("result") == "skipped":
            result.skipped += 1
        elif case.get("result") != "suppressed":  # GoogleTest lists what a filter left out
            result.passed += 1
    return result


def earlier_result(stage: Stage) -> Result | None:
    """What the stage gave in an earlier run, if it passed and nothing that it depends on has changed since."""
    if not stage.record.exists():
        return None
    record = json.loads(stage.record.read_text())
    if record.pop("sources") != stage.sources():
        return None
    return Result(**record, note="earlier")


def run(stage: Stage, broken_builds: set[str], free_cores: queue.Queue) -> Result:
    if stage.needs and stage.needs.name in broken_builds:
        return Result(failed=1, note="its build failed")
    for left in (stage.record, stage.junit):
        left.unlink(missing_ok=True)
    sources = stage.sources()
    core = free_cores.get() if stage.one_core else None
    try:
        result = run_command(stage, [] if core is None else ["taskset", "-c", str(core)])
    finally:
        if core is not None:
            free_cores.put(core)
    if not result.failed:
        record = {key: value for key, value in dataclasses.asdict(result).items() if key != "note"}
        stage.record.write_text(json.dumps(record | {"sources": sources}))
    return result


def run_command(stage: Stage, prefix: list[str]) -> Result:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TLE_ISA")}
    environment.pop("TLE_NUM_THREADS", None)
    environment |= stage.environment
    start = time.monotonic()
    note = ""
    with open(stage.log, "w") as output:
        try:
            code = subprocess.run(
                [*prefix, *stage.command], cwd=ROOT, env=environment, timeout=stage.timeout, stdout=output,
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


def print_counts(name: str, result: Result) -> None:
    counts = f"{result.passed:6d} passed {result.failed:4d} failed {result.skipped:4d} skipped"
    print(f"{name:40s} {counts} {result.seconds:7.1f} s  {result.note}".rstrip(), flush=True)


def report(stage: Stage, result: Result) -> None:
    print_counts(stage.name, result)
    if len(stage.tests) > 1 and stage.junit.exists():
        for name in stage.tests:
            print_counts(f"    {name}", read_junit(stage.junit, name.removesuffix(".py")))
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
        print(f"{'build-' + build.name:40s} {state:>13s} {time.monotonic() - start:36.1f} s", flush=True)
    return broken


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fast", action="store_true")
    parser.add_argument("--arm", action="store_true")
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--only", action="append", default=[], metavar="X")
    parser.add_argument("--list", action="store_true")
    parser.add_argument("--resume", action="store_true")
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
    if not options.resume:
        shutil.rmtree(RESULTS, ignore_errors=True)
    RESULTS.mkdir(parents=True, exist_ok=True)
    total, groups = Result(), {}

    def account(stage: Stage, result: Result) -> None:
        nonlocal total
        report(stage, result)
        total += result
        if stage.group:
            groups[stage.group] = groups.get(stage.group, Result()) + result

    if options.resume:
        earlier = [(stage, result) for stage in table if (result := earlier_result(stage))]
        for stage, result in earlier:
            account(stage, result)
            table.remove(stage)
    broken = build_all(table)
    cores = sorted(os.sched_getaffinity(0))[:2]
    free_cores = queue.Queue()
    for core in cores:
        free_cores.put(core)
    together = [stage for stage in table if not stage.alone]
    with ThreadPoolExecutor(max_workers=len(cores)) as pool:
        for stage, result in zip(together, pool.map(lambda stage: run(stage, broken, free_cores), together)):
            account(stage, result)
    for stage in table:
        if stage.alone:
            account(stage, run(stage, broken, free_cores))
    for group, result in groups.items():
        print_counts(group, result)
    if total.passed == 0:
        total.failed = max(total.failed, 1)
    print(f"{total.passed} passed, {total.failed} failed, {total.skipped} skipped")
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
