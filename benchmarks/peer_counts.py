#!/usr/bin/env python3
"""Instructions of our aarch64 kernels beside those of ggml (llama.cpp) and KleidiAI, counted alike on the same shapes,
and what models of three cores make of our inner loops.

    python benchmarks/peer_counts.py                      everything that is here
    python benchmarks/peer_counts.py --ggml FOLDER        FOLDER: an unpacked llama-cpp-python source package
    python benchmarks/peer_counts.py --no-kleidiai        leaves out what takes a minute

ggml's kernels are compiled from the source package of llama-cpp-python, which is downloaded once into the cache, by the
compiler and with the flags that ours have. KleidiAI's are those inside torch's aarch64 wheel (scripts/arm/make_root.sh
lays it). Units are those of counts.py; a weight's bytes include its scales, 16 bits for each 32 weights everywhere.

Cycles come from llvm-mca (Debian: llvm-19): the inner loop as qemu executed it, everything in the first-level cache. A
core at 3 GHz that reads 20 GB/s has 0.15 cycles for each byte: below that the loop waits for memory.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import counts

ROOT = counts.ROOT
CACHE = Path(os.environ.get("TLE_CACHE") or ROOT / ".cache")
ARM_CACHE = Path(os.environ.get("TLE_ARM_CACHE") or CACHE / "arm")
LLAMA = "llama-cpp-python==0.3.36"
# Flags of the two levels; ggml's own builds for them have half-precision arithmetic too.
LEVELS = {"dotprod": "armv8.2-a+fp16+dotprod", "i8mm": "armv8.2-a+fp16+dotprod+i8mm"}
CPUS = {"dotprod": "neoverse-n1", "i8mm": "max,sve=off"}
MODELS = {"dotprod": ("neoverse-n1", "neoverse-n2", "neoverse-v2"), "i8mm": ("neoverse-n2", "neoverse-v2")}
BOUND = 20e9, 3e9  # bytes and cycles per second

# kind, what is compared, our format, ggml's format, KleidiAI's format
COMPARED = (
    ("gemv", "int8", "w8a8-g32", "Q8_0", ""),
    ("gemv", "int4", "w4a8-g32", "Q4_0", "int4-g32"),
    ("gemv", "int4 with minima", "w4a8-g32-asym", "Q4_1", ""),
    ("gemm", "int8", "w8a8-g32", "Q8_0", ""),
    ("gemm", "int4", "w4a8-g32", "Q4_0", "int4-g32"),
)

Windows = list[tuple[str, str, str, int, int]]  # kind, format, kernel, units, instructions


def plugin(folder: Path) -> Path:
    path = folder / "insn_plugin.so"
    source = ROOT / "scripts" / "arm" / "insn_plugin.c"
    counts.run([counts.need("cc"), "-O2", "-shared", "-fPIC", "-o", str(path), str(source)])
    return path


def windows(stdout: str, stderr: str) -> Windows:
    instructions = counts.printed_counts(stderr)
    lines = re.findall(r"^window (\d+) (\S+) (\S+) (\S+) (\d+)$", stdout, re.MULTILINE)
    return [(kind, format, kernel, int(units), instructions[int(n)]) for n, kind, format, kernel, units in lines]


def ggml_sources(folder: str) -> Path:
    """The ggml folder of an unpacked llama-cpp-python; downloads the package where none is named."""
    peers = CACHE / "peers"
    if not folder and not list(peers.glob("llama_cpp_python-*/vendor")):
        peers.mkdir(parents=True, exist_ok=True)
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "llama-cpp-python"]
        counts.run([*download, "-d", str(peers), LLAMA])
        for archive in peers.glob("llama_cpp_python-*.tar.gz"):
            shutil.unpack_archive(archive, peers, filter="data")
    roots = [Path(folder)] if folder else sorted(peers.glob("llama_cpp_python-*/"))
    found = [path for root in roots for path in root.rglob("ggml-cpu/arch/arm/repack.cpp")]
    if not found:
        raise counts.CannotCount(f"no ggml sources in {roots}")
    return found[0].parents[4]


def count_ggml(ggml: Path, level: str, folder: Path) -> dict[tuple[str, str, str], float]:
    """(kind, format, kernel) -> instructions per unit."""
    include = [f"-I{ggml / part}" for part in ("include", "src", "src/ggml-cpu")]
    flags = ["-O3", "-DNDEBUG", "-D_GNU_SOURCE", f"-march={LEVELS[level]}", "-ffunction-sections", "-fdata-sections"]
    objects = []
    for source in ("repack.cpp", "quants.c"):
        objects.append(str(folder / f"{source}.o"))
        compiler = counts.need("aarch64-linux-gnu-gcc" if source.endswith(".c") else "aarch64-linux-gnu-g++")
        counts.run([compiler, *flags, *include, "-c", str(ggml / "src/ggml-cpu/arch/arm" / source), "-o", objects[-1]])
    program = folder / "count_ggml"
    driver = ROOT / "benchmarks" / "kernels" / "count_ggml.cc"
    # What the two files refer to beyond these kernels is dropped with the functions that do.
    link = ["-static", "-Wl,--gc-sections", str(driver), *objects, "-o", str(program)]
    counts.run([counts.need("aarch64-linux-gnu-g++"), "-std=c++20", *flags, *link])
    done = counts.run([counts.need("qemu-aarch64"), "-cpu", CPUS[level], "-plugin", str(plugin(folder)), str(program)])
    found, empty = {}, 0
    for kind, format, kernel, units, instructions in windows(done.stdout, done.stderr):
        if units == 0:
            empty = instructions
        else:
            found[kind, format, kernel] = (instructions - empty) / units
    return found


def count_kleidiai(level: str, folder: Path) -> dict[tuple[str, str], float]:
    """(kind, format) -> instructions per unit, from the difference of two numbers of channels."""
    if not (ARM_CACHE / "root" / "usr" / "bin" / "python3.11").exists():
        raise counts.CannotCount("no aarch64 environment: scripts/arm/make_root.sh lays it")
    environment = os.environ | {
        "TLE_ARM_CACHE": str(ARM_CACHE),
        "TLE_QEMU_ARGS": f"-plugin {plugin(folder)},match=libtorch_cpu",
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "passive",
    }
    script = ROOT / "benchmarks" / "count_kleidiai.py"
    command = ["bash", str(ROOT / "scripts" / "arm" / "run.sh"), "--cpu", CPUS[level], str(script)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise RuntimeError(done.stderr[-2000:])
    both = windows(done.stdout, done.stderr)
    found = {}
    for (kind, format, _, units, instructions), (_, _, _, more_units, more_instructions) in zip(both[::2], both[1::2]):
        found[kind, format] = (more_instructions - instructions) / (more_units - units)
    return found


def table_row(kind: str, what: str, level: str, ours: float, peers: list[tuple[str, float]]) -> str:
    beside = ", ".join(f"{name} {value:.4f} (ours {ours / value:.2f})" for name, value in peers) or "-"
    return f"{kind:5s} {what:17s} {level:8s} {ours:8.4f}   {beside}"


def compare(options: argparse.Namespace) -> None:
    print("Instructions per weight byte (gemv: 1 row, K = 4096) and per multiply-add (gemm: 128 rows, K = 1024)")
    print(f"{'kind':5s} {'weights':17s} {'level':8s} {'ours':>8s}   peers")
    for level in LEVELS:
        ours = {kind: counts.count(level, kind)[1] for kind in ("gemv", "gemm")}
        with tempfile.TemporaryDirectory() as folder:
            try:
                ggml = count_ggml(ggml_sources(options.ggml), level, Path(folder))
            except counts.CannotCount as reason:
                print(f"ggml: not counted: {reason}")
                ggml = {}
            try:
                kleidiai = count_kleidiai(level, Path(folder)) if options.kleidiai else {}
            except counts.CannotCount as reason:
                print(f"KleidiAI: not counted: {reason}")
                kleidiai = {}
        for kind, what, format, of_ggml, of_kleidiai in COMPARED:
            kernels = {kernel: value for (k, f, kernel), value in ggml.items() if (k, f) == (kind, of_ggml)}
            peers = []
            if kernels:  # the best one that ggml has for the level
                kernel = min(kernels, key=kernels.__getitem__)
                peers.append((f"ggml {of_ggml} {kernel}", kernels[kernel]))
            if (kind, of_kleidiai) in kleidiai:
                peers.append(("KleidiAI", kleidiai[kind, of_kleidiai]))
            print(table_row(kind, what, level, ours[kind][kind, format, level], peers), flush=True)
    attention = counts.count("neon", "attention")[1]
    ours, naive = attention["attention", "bf16", "neon"], attention["attention", "bf16-naive", "neon"]
    print(table_row("attn", "bf16, 16:8 heads", "neon", ours, [("plain loop per head", naive)]))


def inner_loops(level: str) -> dict[str, tuple[list[str], float]]:
    """For each gemv format of a level: the instructions of its inner loop, and the weight bytes of one round."""
    program = counts.Program("aarch64").build()
    listing = counts.run([counts.need("aarch64-linux-gnu-objdump"), "-d", "--no-show-raw-insn", str(program)]).stdout
    lines = re.findall(r"^ *([0-9a-f]+):\t(.*)$", listing, re.MULTILINE)
    text = {int(address, 16): code.strip() for address, code in lines}
    with tempfile.TemporaryDirectory() as folder:
        qemu = [counts.need("qemu-aarch64"), "-cpu", counts.QEMU_CPU, "-plugin", f"{plugin(Path(folder))},blocks=on"]
        done = counts.run([*qemu, str(program), "--kind", "gemv", "--isa", level])
    blocks: dict[int, list[tuple[int, int, int]]] = {}
    lines = re.findall(r"^insn block (\d+) 0x([0-9a-f]+) (\d+) (\d+)$", done.stderr, re.MULTILINE)
    for number, address, size, times in lines:
        blocks.setdefault(int(number), []).append((int(address, 16), int(size), int(times)))
    found = {}
    for number, (_, format, _, units, _) in enumerate(windows(done.stdout, done.stderr)):
        if units == 0:
            continue
        of_loop = sorted(blocks[number])
        code = [text[at] for address, size, _ in of_loop for at in range(address, address + size, 4)]
        # Branches, which a model of straight code does not follow, keep their place with a target that assembles.
        code = [re.sub(r"\b[0-9a-f]+ <.*>.*$", "0", instruction).split("//")[0] for instruction in code]
        found[format] = code, units / max(times for _, _, times in of_loop)
    return found


def cycles(mca: str, model: str, code: list[str]) -> float:
    """Cycles of one round of a loop, when it repeats."""
    rounds = 200
    command = [mca, "-mtriple=aarch64-linux-gnu", f"-mcpu={model}", f"-iterations={rounds}"]
    command += ["-all-views=false", "-summary-view"]
    done = subprocess.run(command, input="\n".join(code), capture_output=True, text=True)
    total = re.search(r"Total Cycles:\s+(\d+)", done.stdout)
    if total is None:
        raise RuntimeError(f"llvm-mca: {done.stderr[-2000:]}")
    return int(total[1]) / rounds


def model(options: argparse.Namespace) -> None:
    mca = next((found for name in ("llvm-mca-19", "llvm-mca") if (found := shutil.which(name))), None)
    if mca is None:
        return print("llvm-mca: not here (Debian: llvm-19)")
    bytes_per_second, hertz = BOUND
    bound = hertz / bytes_per_second
    print("\nCycles per weight byte by llvm-mca, one row;", end=" ")
    print(f"{bytes_per_second / 1e9:.0f} GB/s at {hertz / 1e9:.0f} GHz leaves {bound:.2f}")
    for level, models in MODELS.items():
        for format, (code, size) in inner_loops(level).items():
            values = {name: cycles(mca, name, code) / size for name in models}
            shown = [f"{name} {value:.3f}{'' if value <= bound else ' (above)'}" for name, value in values.items()]
            print(f"{format:16s} {level:8s} {'  '.join(shown)}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ggml", default="", metavar="FOLDER")
    parser.add_argument("--no-kleidiai", dest="kleidiai", action="store_false")
    options = parser.parse_args()
    try:
        compare(options)
        model(options)
    except counts.CannotCount as reason:
        print(f"not counted: {reason}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
