"""Instructions per weight byte and per multiply-add against the committed table: benchmarks/counts.py says how they are
counted.

A change of a kernel, or of what the compiler makes of it, shows here before it shows in any timing. After one that is
meant: python benchmarks/counts.py --update
"""

import os
import platform
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "benchmarks"))

import counts  # noqa: E402

TOLERANCE = 0.03
COMPILERS, TABLE = counts.read_table()
# What stepping can do in seconds; the other formats are the slow test's.
STEPPED_FORMATS = ("w8a8", "w4a8-g32")

EMULATED = platform.machine() == "aarch64" and "TLE_ARM_CPU" in os.environ


def counted(level: str, kind: str, format: str = "", counter=None) -> counts.Counts:
    if EMULATED:
        pytest.skip("an emulated CPU: its kernels are counted from outside")
    try:
        compiler, found = counts.count(level, kind, format, counter)
    except counts.CannotCount as reason:
        pytest.skip(str(reason))
    if compiler != COMPILERS[counts.architecture_of(level)]:
        pytest.skip(f"the table is {COMPILERS[counts.architecture_of(level)]}'s, not {compiler}'s")
    return found


def check(found: counts.Counts, level: str, kind: str, format: str = "") -> None:
    committed = {key: n for key, n in TABLE.items() if key[0] == kind and key[2] == level and format in ("", key[1])}
    assert found.keys() == committed.keys()
    different = {key: (found[key], n) for key, n in committed.items() if abs(found[key] / n - 1) > TOLERANCE}
    assert not different, f"(counted, table): {different}"


LEVELS = [level for levels in counts.LEVELS.values() for level in levels]
STEPPED_LEVELS = [level for level in LEVELS if counts.counter_of(level) is counts.by_stepping]


@pytest.mark.parametrize(
    ("kind", "level"), sorted({(kind, level) for kind, _, level in TABLE if level not in STEPPED_LEVELS})
)
def test_counts_are_the_table_s(kind, level):
    check(counted(level, kind), level, kind)


@pytest.mark.parametrize("format", STEPPED_FORMATS)
@pytest.mark.parametrize("level", STEPPED_LEVELS)
def test_stepped_counts_are_the_table_s(level, format):
    check(counted(level, "gemv", format), level, "gemv", format)


@pytest.mark.slow
@pytest.mark.parametrize("level", STEPPED_LEVELS)
def test_all_stepped_counts_are_the_table_s(level):
    check(counted(level, "gemv"), level, "gemv")


@pytest.mark.slow
def test_stepping_counts_what_callgrind_counts():
    key = ("gemv", "w4a8-g32", "avx2")
    by_stepping = counted("avx2", "gemv", "w4a8-g32", counts.by_stepping)[key]
    assert by_stepping == pytest.approx(counted("avx2", "gemv", "w4a8-g32", counts.under_callgrind)[key], rel=1e-4)


@pytest.mark.parametrize("level", ["neon", "avx2"])
def test_attention_shares_what_a_plain_loop_does_for_each_head(level):
    assert TABLE["attention", "bf16", level] <= 0.6 * TABLE["attention", "bf16-naive", level]


def test_every_variant_is_in_the_table():
    schemes = ["w8a8", "w8a8-g32", "w8a8-a32"]
    schemes += [f"w4a8-g{group}{minima}" for group in (32, 64, 128) for minima in ("", "-asym")]
    missing = {(s, level) for s in schemes for level in LEVELS if ("gemv", s, level) not in TABLE}
    assert missing == {(s, "sve2") for s in schemes if s != "w8a8"}  # linear_group has no SVE2 variant
