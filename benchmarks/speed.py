"""Decode and prefill speed of patched models against unpatched transformers, in one run.

    python benchmarks/speed.py                                         the table of the README
    python benchmarks/speed.py --models smollm2 --threads 2 --repeats 7 --json out.json

Every contender is a process of its own that loads the model once; the contenders take turns, repetition by repetition, so that a change of the
machine's speed meets all of them. Figures are medians; `bound` is the read bandwidth measured in the same run over the bytes that a
token reads.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from rich.console import Console
from rich.table import Table

HERE = Path(__file__).resolve().parent


class Worker:
    """A contender's process."""

    def __init__(self, name: str, threads: int):
        self.name = name
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false"}
        self.process = subprocess.Popen([sys.executable, str(HERE / "contender.py"), name], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True, env=environment)

    def __call__(self, do: str, **arguments) -> dict:
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"contender {self.name} ended during '{do}'; its own message stands above")
        return json.loads(line)

    def close(self) -> None:
        self.process.stdin.close()
        self.process.wait()


def measure(model: str, threads: int, names: list[str], options: argparse.Namespace, console: Console) -> list[dict]:
    workers = []
    rows = []
    for name in names:
        worker = Worker(name, threads)
        workers.append(worker)
        row = {"model": model, "threads": threads, "contender": name, **worker("load", model=model, threads=threads)}
        rows.append({**row, "decode": {c: [] for c in options.contexts}, "prefill": {n: [] for n in options.prefill}})
        worker("decode", context=8, tokens=2)  # warm
    bandwidth = []
    for repeat in range(options.repeats):
        console.print(f"[dim]{model}, {threads} threads: repetition {repeat + 1} of {options.repeats}")
        for worker, row in zip(workers, rows):
            if worker.name.startswith("tle"):
                bandwidth.append(worker("bandwidth")["gb_s"])
            for context in options.contexts:
                row["decode"][context].append(worker("decode", context=context, tokens=options.tokens)["tok_s"])
            for length in options.prefill:
                row["prefill"][length].append(worker("prefill", tokens=length)["tok_s"])
    for worker, row in zip(workers, rows):
        row.update(worker("memory"), bandwidth_gb_s=statistics.median(bandwidth) if bandwidth else None)
        row["decode"] = {c: statistics.median(v) for c, v in row["decode"].items()}
        row["prefill"] = {n: statistics.median(v) for n, v in row["prefill"].items()}
        worker.close()
    return rows


def show(rows: list[dict], options: argparse.Namespace, console: Console) -> None:
    base = next((r for r in rows if r["contender"].startswith("transformers:bfloat16")), rows[0])
    fp32 = next((r for r in rows if r["contender"] == "transformers:float32"), None)
    table = Table(title=f"{base['model']}, {base['threads']} thread(s)"
                  + (f", read bandwidth {rows[-1]['bandwidth_gb_s']:.1f} GB/s" if rows[-1]["bandwidth_gb_s"] else ""))
    table.add_column("contender")
    for context in options.contexts:
        table.add_column(f"decode tok/s\ncontext {context}", justify="right")
        table.add_column("x bf16", justify="right")
    table.add_column("of bound", justify="right")
    for length in options.prefill:
        table.add_column(f"prefill({length})\ntok/s", justify="right")
        table.add_column("x bf16", justify="right")
        table.add_column("x fp32", justify="right")
    table.add_column("MB read\na token", justify="right")
    table.add_column("peak MB", justify="right")
    table.add_column("load s", justify="right")
    for row in rows:
        cells = [row["contender"]]
        for context in options.contexts:
            cells += [f"{row['decode'][context]:.1f}", f"{row['decode'][context] / base['decode'][context]:.2f}"]
        bound = row["bandwidth_gb_s"] * 1e9 / row["bytes"] if row["bandwidth_gb_s"] else None
        cells.append(f"{row['decode'][options.contexts[0]] / bound:.0%}" if bound else "-")
        for length in options.prefill:
            speed = row["prefill"][length]
            cells += [f"{speed:.0f}", f"{speed / base['prefill'][length]:.2f}",
                      f"{speed / fp32['prefill'][length]:.2f}" if fp32 else "-"]
        cells += [f"{row['bytes'] / 1e6:.0f}", f"{row['peak_mb']:.0f}", f"{row['load_s']:.1f}"]
        table.add_row(*cells)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "qwen3-0.6b"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--contenders", nargs="+",
                        default=["transformers:bfloat16", "transformers:float32", "tle:w8a8"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[16])
    parser.add_argument("--prefill", nargs="+", type=int, default=[512])
    parser.add_argument("--tokens", type=int, default=24, help="tokens per decode figure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--json", type=Path, help="also save the rows here")
    options = parser.parse_args()
    console = Console(width=160)
    everything = []
    for model in options.models:
        for threads in options.threads:
            rows = measure(model, threads, options.contenders, options, console)
            show(rows, options, console)
            everything += rows
    if options.json:
        options.json.write_text(json.dumps(everything, indent=1))


if __name__ == "__main__":
    main()
