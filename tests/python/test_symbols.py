"""The built objects: what a kernel file exports, and the flags that it was compiled with.

Inline functions, templates and std:: code are weak symbols, and the linker keeps one copy for the whole library. Were
it the copy of a file compiled for AVX-512, every CPU would run it. So a kernel file compiled with wide flags defines
exactly one symbol that others can see, and no weak one.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
BUILD = Path(os.environ.get("TLE_BUILD_DIR") or ROOT / "build")
WIDE = ("neon", "dotprod", "i8mm", "sve2", "avx2", "avx512", "vnni", "amx")
KERNEL_OBJECT = re.compile(r"csrc/kernels/.*_(%s|ref)\.cc\.o$" % "|".join(WIDE))
# Flags that change what arithmetic means, or that make the build depend on the machine that it runs on.
FORBIDDEN = ("-march=native", "-mcpu=native", "-mtune=native", "-ffast-math", "-Ofast", "-funsafe-math-optimizations")
BASELINE = {"-march=armv8-a"}  # named by NEON files, and what every aarch64 compiler assumes anyway


def kernel_objects() -> list[Path]:
    return sorted(path for path in BUILD.rglob("*.o") if KERNEL_OBJECT.search(path.as_posix()))


def defined_symbols(path: Path) -> list[tuple[str, str]]:
    """(type, name) of each symbol that an object defines for others, as nm prints them: T strong, W and V weak, u
    unique."""
    listing = subprocess.run(
        ["nm", "--defined-only", "--extern-only", "--format=posix", str(path)],
        check=True,
        capture_output=True,
        text=True,
    ).stdout
    return [(kind, name) for name, kind, *_ in (line.split() for line in listing.splitlines())]


def compile_commands() -> list[tuple[Path, list[str]]]:
    """(source, arguments) of every compilation that the builds recorded."""
    entries = [entry for file in BUILD.rglob("compile_commands.json") for entry in json.loads(file.read_text())]
    return [(Path(entry["file"]), entry.get("arguments") or shlex.split(entry["command"])) for entry in entries]


def test_there_is_something_to_look_at():
    assert kernel_objects(), f"no kernel objects below {BUILD}: build first, with scripts/setup.sh"
    assert compile_commands(), f"no compile_commands.json below {BUILD}"


@pytest.mark.parametrize("path", kernel_objects(), ids=lambda path: path.relative_to(BUILD).as_posix())
def test_a_kernel_file_exports_one_strong_symbol(path):
    symbols = defined_symbols(path)
    assert [kind for kind, _ in symbols] == ["T"], symbols


def test_no_compilation_has_a_forbidden_flag():
    for source, arguments in compile_commands():
        assert not set(arguments) & set(FORBIDDEN), source
    for ninja in BUILD.rglob("build.ninja"):  # linking with -ffast-math sets flush-to-zero for the whole process
        text = ninja.read_text()
        assert not any(flag in text for flag in FORBIDDEN), ninja


def test_the_suffix_decides_the_flags():
    ours = [(source, arguments) for source, arguments in compile_commands() if "csrc" in source.parts]
    assert ours
    for source, arguments in ours:
        assert "-ffp-contract=off" in arguments, f"{source}: a contracted multiply-add would change the bits"
        suffix = source.stem.rpartition("_")[2] if "kernels" in source.parts else ""
        machine = {flag for flag in arguments if re.match(r"-m(arch|cpu|avx|fma|f16c|sse4)", flag)} - BASELINE
        if suffix in WIDE and suffix != "neon":  # NEON is part of aarch64's baseline
            assert machine, f"{source}: compiled without the flags of its level"
        else:
            assert not machine, f"{source}: compiled with {machine}, but its name does not say so"
