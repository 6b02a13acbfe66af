"""One block to paste into an issue: what this machine is, and what it reaches.

    python benchmarks/report.py                    1 thread, and the default number
    python benchmarks/report.py --threads 1 2 4

SmolLM2-135M with its real weights, eager and patched, contenders taking turns (see speed.py): some minutes.
"""

from __future__ import annotations

import argparse
import platform
from collections import Counter
from pathlib import Path
from statistics import median

import speed
import torch
import transformers
from rich.console import Console

import tle_torch
from tle_torch.ops import _C

CONTENDERS = ["transformers:bfloat16", "tle:w8a8", "tle:w8a8+head", "tle:w4a8-g32+head"]
CONTEXT, PROMPT = 16, 128
CPUS = Path("/sys/devices/system/cpu")


def read(path: Path) -> str:
    """The text of a file of sysfs, or "?"."""
    try:
        return path.read_text().strip()
    except OSError:
        return "?"


def counted(name: str) -> str:
    """How often each value of a file of every CPU occurs, such as "4 x 1024, 4 x 446"."""
    values = Counter(read(cpu / name) for cpu in CPUS.glob("cpu[0-9]*"))
    return ", ".join(f"{count} x {value}" for value, count in sorted(values.items(), reverse=True))


def machine() -> list[str]:
    """Lines about hardware, system and library."""
    info = tle_torch.cpu_info()
    huge_pages = read(Path("/sys/kernel/mm/transparent_hugepage/enabled"))
    variants = sorted(_C.variants().items())
    chosen = {operator: next(row["name"] for row in rows if row["chosen"]) for operator, rows in variants}
    return [
        f"{info['model']}, {platform.machine()}, Linux {platform.release()}, {'-'.join(platform.libc_ver())}",
        f"capacity {counted('cpu_capacity')}; max kHz {counted('cpufreq/cpuinfo_max_freq')}; "
        f"governor {counted('cpufreq/scaling_governor')}; huge pages {huge_pages}",
        f"tle_torch {tle_torch.__version__}, torch {torch.__version__}, transformers {transformers.__version__}; "
        f"usable cores {info['usable_cores']}; levels {' '.join(info['isas'])}, in force {info['isa']}",
        "variants " + ", ".join(f"{operator} {name}" for operator, name in chosen.items()),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", nargs="+", type=int, default=sorted({1, tle_torch.get_num_threads()}))
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    settings = speed.parse(["--contexts", str(CONTEXT), "--prefill", str(PROMPT), "--repeats", str(options.repeats),
                            "--accuracy-tokens", "0"])
    console = Console(stderr=True)
    lines = machine()
    for threads in options.threads:
        rows = speed.measure("smollm2", threads, CONTENDERS, settings, console)
        if reasons := [f"{row['contender']}: {row['failed']}" for row in rows if "failed" in row]:
            raise SystemExit("\n".join(reasons))
        bandwidth = median(rows[0]["bandwidth_gb_s"][CONTEXT])
        heads = f"decode tok/s (of bound), prefill({PROMPT}) tok/s"
        lines.append(f"{threads} threads, read bandwidth {bandwidth:.1f} GB/s; {heads}")
        for row in rows:
            part = speed.of_bound(row, "decode", CONTEXT)
            decode, prefill = median(row["decode"][CONTEXT]), median(row["prefill"][PROMPT])
            lines.append(f"  {row['contender']:<24s}{decode:8.1f} ({part:4.0%}) {prefill:9.0f}")
    print("\n".join(["```", *lines, "```"]))


if __name__ == "__main__":
    main()
