#!/usr/bin/env python3
"""What loading a GGUF file costs, from imports done to model and tokenizer ready.

    python benchmarks/load.py [--model GGUF] [--repeat 3] [--json FILE]

Ways: `tle_torch.from_gguf`, and `AutoModelForCausalLM.from_pretrained(gguf_file=...)` with its tokenizer in bf16, as
transformers loads the same file. Each runs in fresh processes, in turn, and in each of them twice:

- cold: seconds and resident memory of the first call. Memory then also counts what the process touches for the first
  time whatever it loads: torch's code, of which every operator brings some 64 KiB pages, and Python modules that are
  imported when needed.
- warm: of a second call, while the first model is still there. This is what the model and its tokenizer hold.

Printed: the median of the seconds, and memory as growth of the resident set over the size of the file.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

WAYS = ("tle_torch", "transformers")


def resident() -> int:
    """Bytes of this process's resident set."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def measure(way: str, file: Path) -> None:
    """Loads the file twice and prints [[seconds, bytes] cold, [seconds, bytes] warm]."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import tle_torch

    def load():
        if way == "tle_torch":
            return tle_torch.from_gguf(file)
        options = {"gguf_file": file.name}
        model = AutoModelForCausalLM.from_pretrained(file.parent, dtype=torch.bfloat16, **options)
        return model, AutoTokenizer.from_pretrained(file.parent, **options)

    costs, kept = [], []
    for _ in range(2):
        before, begin = resident(), time.perf_counter()
        kept.append(load())
        costs.append((time.perf_counter() - begin, resident() - before))
    print(json.dumps(costs))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also writes the figures there")
    parser.add_argument("--measure", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.model is None:
        from models import fetched

        options.model = fetched("smollm2")
    if options.measure:
        measure(options.measure, options.model)
        return
    runs: dict[str, list] = {way: [] for way in WAYS}
    for _ in range(options.repeat):
        for way in WAYS:
            command = [sys.executable, __file__, "--measure", way, "--model", str(options.model)]
            run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
            runs[way].append(json.loads(run.stdout.strip().splitlines()[-1]))
    size = options.model.stat().st_size
    table = Table(title=f"{options.model.name}, {size / 1e6:.1f} MB, median of {options.repeat}", title_justify="left")
    for column in ("", "cold, s", "cold, x file", "warm, s", "warm, x file"):
        table.add_column(column, justify="left" if not column else "right")
    figures = {}
    for way, results in runs.items():
        cold, warm = ([statistics.median(values) for values in zip(*when)] for when in zip(*results))
        figures[way] = {
            "cold_seconds": cold[0],
            "cold_bytes": cold[1],
            "warm_seconds": warm[0],
            "warm_bytes": warm[1],
            "runs": results,
        }
        cells = (f"{value[0]:.2f}\t{value[1] / size:.2f}".split("\t") for value in (cold, warm))
        table.add_row(way, *(cell for pair in cells for cell in pair))
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps({"file_bytes": size, **figures}, indent=1))


if __name__ == "__main__":
    main()
