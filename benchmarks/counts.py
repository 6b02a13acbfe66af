#!/usr/bin/env python3
"""Instructions of the kernels' hot loops, counted and held against the committed table, counts.json.

    python benchmarks/counts.py                 counts whatever this machine can and prints it beside the table
    python benchmarks/counts.py --isa dotprod   one level only; --kind and --format choose likewise
    python benchmarks/counts.py --update        writes what was counted into the table

A count does not depend on the machine or on what else it does, only on the source and on the compiler. Kinds and units:

    gemv       one row of x: instructions per byte of the packed weight, scales and minima included
    gemm       128 rows: instructions per multiply-add
    attention  one token, 16 query heads on 8 of keys and values, 128 wide, 1024 keys in bf16 or int8: instructions per
               multiply-add of scores and values. bf16-naive is a plain loop over the query heads, with the same flags

x86-64 is counted by callgrind up to AVX2 and, beyond what valgrind decodes, by stepping (the CPU's trap flag); aarch64
under qemu-aarch64 with scripts/arm/insn_plugin.c. Both programs are built when needed (benchmarks/kernels/count.cc).
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TABLE = Path(__file__).resolve().parent / "counts.json"
BUILD = ROOT / "build"
KINDS = ("gemv", "gemm", "attention")
LEVELS = {"x86_64": ("avx2", "avx512", "vnni"), "aarch64": ("neon", "dotprod", "i8mm", "sve2")}
# SVE2 is counted with vectors of 256 bits: with 128 it is not chosen.
QEMU_CPU = "max,sve-max-vq=2"

Counts = dict[tuple[str, str, str], float]  # (kind, format, level) -> instructions per unit


class CannotCount(Exception):
    """A tool or a CPU feature that a level needs is not here."""


def architecture_of(level: str) -> str:
    return next(name for name, levels in LEVELS.items() if level in levels)


@dataclass(frozen=True)
class Program:
    """The counted program of one architecture: where it is built, and how a folder that is missing is configured."""

    architecture: str

    @property
    def folder(self) -> Path:
        """The build folder of the tests where there is one, since its objects are the same."""
        native = self.architecture == platform.machine()
        shared = BUILD / (f"cmake-{sys.implementation.cache_tag}" if native else f"tests-{self.architecture}")
        return shared if (shared / "build.ninja").exists() else BUILD / f"counts-{self.architecture}"

    @functools.cache
    def build(self) -> Path:
        """The program's path, up to date. Raises CannotCount without a compiler."""
        options = ["-DTLE_BENCHMARKS=ON"]
        if not (self.folder / "build.ninja").exists():
            options += ["-G", "Ninja", "-DTLE_TORCH=OFF"]
            if self.architecture != platform.machine():
                need("aarch64-linux-gnu-g++")
                options += [f"-DCMAKE_TOOLCHAIN_FILE={ROOT / 'scripts' / 'arm' / 'toolchain.cmake'}"]
        # cmake and ninja of the environment that runs this, which need not be the active one.
        path = os.pathsep.join((str(Path(sys.executable).parent), os.environ.get("PATH", "")))
        cmake = need("cmake", path)
        self.folder.mkdir(parents=True, exist_ok=True)
        with open(self.folder / ".counts-lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # the tests may run in several processes
            run([cmake, "-S", str(ROOT), "-B", str(self.folder), *options], path)
            target = ["--target", "tle_kernel_count", "--parallel", str(os.cpu_count() or 1)]
            run([cmake, "--build", str(self.folder), *target], path)
        return self.folder / "benchmarks" / "kernels" / "tle_kernel_count"


def run(command: list[str], path: str | None = None) -> subprocess.CompletedProcess[str]:
    environment = os.environ | ({"PATH": path} if path else {})
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL, env=environment)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed with {done.returncode}:\n{(done.stdout + done.stderr)[-4000:]}")
    return done


def need(tool: str, path: str | None = None) -> str:
    found = shutil.which(tool, path=path)
    if found is None:
        raise CannotCount(f"no {tool} here")
    return found


def printed_counts(stderr: str) -> list[int]:
    """What the plugin and the stepping program print, by window number."""
    lines = re.findall(r"^insn window (\d+) (\d+)$", stderr, re.MULTILINE)
    found = {int(number): int(instructions) for number, instructions in lines}
    return [found[number] for number in range(len(found))]


def under_qemu(program: Path, arguments: list[str], folder: Path) -> tuple[str, list[int]]:
    qemu = need(os.environ.get("TLE_QEMU", "qemu-aarch64"))
    plugin = folder / "insn_plugin.so"
    run([need("cc"), "-O2", "-shared", "-fPIC", "-o", str(plugin), str(ROOT / "scripts" / "arm" / "insn_plugin.c")])
    done = run([qemu, "-cpu", QEMU_CPU, "-plugin", str(plugin), str(program), *arguments])
    return done.stdout, printed_counts(done.stderr)


def under_callgrind(program: Path, arguments: list[str], folder: Path) -> tuple[str, list[int]]:
    out = folder / "callgrind.out"
    window = ["--toggle-collect=tle_window", "--dump-after=tle_window"]
    done = run([need("valgrind"), "--tool=callgrind", f"--callgrind-out-file={out}", *window, str(program), *arguments])
    # One numbered file for each window, and at the end one without a number.
    dumps = sorted(folder.glob("callgrind.out.*"), key=lambda path: int(path.suffix[1:]))
    return done.stdout, [int(re.search(r"^totals: (\d+)", dump.read_text(), re.MULTILINE)[1]) for dump in dumps]


def by_stepping(program: Path, arguments: list[str], folder: Path) -> tuple[str, list[int]]:
    done = run([str(program), "--step", *arguments])
    return done.stdout, printed_counts(done.stderr)


def counter_of(level: str):
    """The way to count a level: a function of (program, arguments, folder for files)."""
    if architecture_of(level) == "aarch64":
        return under_qemu
    return under_callgrind if level == "avx2" else by_stepping


def count(level: str, kind: str, format: str = "", counter=None) -> tuple[str, Counts]:
    """The program's compiler, and the counts of one level and kind (and weight format, if named).

    Raises CannotCount where the compiler, the emulator or the CPU feature is missing."""
    machine = architecture_of(level)
    if machine == "x86_64" and platform.machine() != "x86_64":
        raise CannotCount(f"{level} is counted on x86-64 machines")
    arguments = ["--isa", level, "--kind", kind, *(["--format", format] if format else [])]
    with tempfile.TemporaryDirectory() as folder:
        output, instructions = (counter or counter_of(level))(Program(machine).build(), arguments, Path(folder))
    windows = re.findall(r"^window (\d+) (\S+) (\S+) (\S+) (\d+)$", output, re.MULTILINE)
    if len(windows) != len(instructions):
        raise RuntimeError(f"{len(windows)} windows, but {len(instructions)} counts: {instructions}")
    found: Counts = {}
    for number, of_kind, of_format, of_level, units in windows:
        if int(units) == 0:
            empty = instructions[int(number)]
        else:
            found[of_kind, of_format, of_level] = (instructions[int(number)] - empty) / int(units)
    if not found and machine == "x86_64":
        raise CannotCount(f"this CPU lacks {level}")
    return re.search(r"^compiler (.*)$", output, re.MULTILINE)[1], found


def feasible(level: str, kind: str) -> bool:
    """Stepping takes microseconds an instruction: one row is a second, the rest would be minutes."""
    return counter_of(level) is not by_stepping or kind == "gemv"


def read_table(path: Path = TABLE) -> tuple[dict[str, str], Counts]:
    """Compilers by architecture, and the committed counts."""
    table = json.loads(path.read_text()) if path.exists() else {"compilers": {}}
    rows = ((kind, format, level) for kind in KINDS for format in table.get(kind, {}) for level in table[kind][format])
    return table["compilers"], {(kind, format, level): table[kind][format][level] for kind, format, level in rows}


def write_table(compilers: dict[str, str], counts: Counts, path: Path = TABLE) -> None:
    units = {
        "gemv": "instructions per byte of the packed weight",
        "gemm": "instructions per multiply-add",
        "attention": "instructions per multiply-add of scores and values",
    }
    table: dict = {"units": units, "compilers": dict(sorted(compilers.items()))}
    for kind in KINDS:
        table[kind] = {}
        for of_kind, format, level in counts:
            if of_kind == kind:
                table[kind].setdefault(format, {})[level] = round(counts[kind, format, level], 4)
    path.write_text(json.dumps(table, indent=2) + "\n")


def count_all(levels: Iterable[str], kinds: Iterable[str], format: str) -> tuple[dict[str, str], Counts]:
    compilers: dict[str, str] = {}
    counts: Counts = {}
    for level in levels:
        for kind in kinds:
            if not feasible(level, kind):
                print(f"{level}: {kind} is not counted: stepping would take minutes", file=sys.stderr)
                continue
            try:
                compilers[architecture_of(level)], found = count(level, kind, format)
            except CannotCount as reason:
                print(f"{level}: not counted: {reason}", file=sys.stderr)
                break
            counts |= found
    return compilers, counts


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    all_levels = [level for of_machine in LEVELS.values() for level in of_machine]
    parser.add_argument("--isa", action="append", choices=all_levels, default=[])
    parser.add_argument("--kind", action="append", choices=KINDS, default=[])
    parser.add_argument("--format", default="", help="a scheme, bf16, int8 or sdot")
    parser.add_argument("--update", action="store_true")
    options = parser.parse_args()

    compilers, counts = count_all(options.isa or all_levels, options.kind or KINDS, options.format)
    table_compilers, table = read_table()
    for machine, compiler in compilers.items():
        if table_compilers.get(machine, compiler) != compiler:
            print(f"{machine}: counted with {compiler}, the table with {table_compilers[machine]}")
    print(f"{'kind':10s} {'format':16s} {'level':8s} {'counted':>9s} {'table':>9s}")
    for (kind, format, level), value in counts.items():
        committed = table.get((kind, format, level))
        beside = f"{committed:9.4f} {100 * (value / committed - 1):+6.1f} %" if committed else "        -"
        print(f"{kind:10s} {format:16s} {level:8s} {value:9.4f} {beside}")
    if options.update:
        write_table(table_compilers | compilers, table | counts)
    return 0 if counts else 1


if __name__ == "__main__":
    sys.exit(main())
