"""Decode and prefill speed of patched models against unpatched transformers and other projects, in one run.

    python benchmarks/speed.py                                         the table of the README
    python benchmarks/speed.py --models smollm2 --threads 2 --repeats 7 --json out.json --plot out.png
    python benchmarks/speed.py --contenders llama:Q8_0 tle:w8a8-g32+head --contexts 16 1024 4096 8192
    python benchmarks/speed.py --as-avx2                               as on a CPU without AVX-512

Every contender is a process of its own that loads the model once (benchmarks/contender.py lists them; benchmarks/peers.py installs the other
projects). The contenders take turns, repetition by repetition, so that a change of the machine's speed meets all of them. Figures are
medians, ratios are medians of the ratios within a repetition. `of bound`: against the read bandwidth, measured in the same
repetition, over the bytes of weights, keys and values that a token reads. `KV slope`: the time that a token takes longer in the longest
context than in the shortest, over the time that reading the additional keys and values takes at that bandwidth. `busy core`: speed
with another process spinning on the machine, over the speed without.
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

import peers

HERE = Path(__file__).resolve().parent


class Worker:
    """A contender's process."""

    def __init__(self, name: str, threads: int, as_avx2: bool):
        self.name = name
        peer = peers.CONTENDERS.get(name.partition(":")[0])
        python = peers.python(peer) if peer else sys.executable
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "TOKENIZERS_PARALLELISM": "false",
                       "TLE_BENCHMARK_PYTHON": sys.executable}
        if as_avx2:
            # A CPU with AVX2 only: neither TLE nor torch nor MKL uses more, and oneDNN does not take bf16 products there.
            environment |= {"TLE_ISA": "avx2", "ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2",
                            "ONEDNN_MAX_CPU_ISA": "AVX2", "TLE_BENCHMARK_NO_ONEDNN": "1"}
        self.process = subprocess.Popen([str(python), str(HERE / "contender.py"), name], stdin=subprocess.PIPE,
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
    """One row per contender, with every single figure: row["decode"][context], row["step"][context], row["prefill"][tokens] and
    row["bandwidth_gb_s"] are lists over the repetitions."""
    workers, rows = [], []
    for name in names:
        console.print(f"[dim]{model}, {threads} threads: loading {name}")
        worker = Worker(name, threads, options.as_avx2)
        workers.append(worker)
        rows.append({"model": model, "threads": threads, "contender": name, **worker("load", model=model, threads=threads),
                     "decode": {c: [] for c in options.contexts}, "step": {c: [] for c in options.contexts},
                     "prefill": {n: [] for n in options.prefill}, "bandwidth_gb_s": [], "busy": {}})
        worker("decode", context=min(options.contexts, default=8), tokens=2)  # warm
    ours = next((w for w in workers if w.name.startswith("tle")), None)
    for repeat in range(options.repeats):
        console.print(f"[dim]{model}, {threads} threads: repetition {repeat + 1} of {options.repeats}")
        for context in options.contexts:
            for worker, row in zip(workers, rows):
                if ours:
                    row["bandwidth_gb_s"].append(ours("bandwidth")["gb_s"])
                row["decode"][context].append(worker("decode", context=context, tokens=options.tokens)["tok_s"])
                if options.busy and worker.name.startswith("tle"):
                    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinner:
                        row["busy"].setdefault(context, []).append(worker("decode", context=context, tokens=options.tokens)["tok_s"])
                        spinner.kill()
                if options.step and worker.name.startswith("tle"):
                    row["step"][context].append(worker("step", context=context, tokens=options.tokens)["tok_s"])
        for length in options.prefill:
            for worker, row in zip(workers, rows):
                row["prefill"][length].append(worker("prefill", tokens=length)["tok_s"])
    for worker, row in zip(workers, rows):
        row.update(worker("memory"))
        worker.close()
    return rows


def ratio(mine: list[float], others: list[float]) -> float:
    return statistics.median(a / b for a, b in zip(mine, others))


def of_bound(row: dict, what: str, context: int, position: int) -> float:
    """Share of the bandwidth: bytes that were read per second over the bandwidth measured right before."""
    bytes_read = row["bytes"] + row["kv_bytes"] * context
    bandwidth = row["bandwidth_gb_s"][position :: len(row["decode"])]
    return statistics.median(t * bytes_read / (b * 1e9) for t, b in zip(row[what][context], bandwidth))


def kv_slope(row: dict) -> float:
    short, long = min(row["decode"]), max(row["decode"])
    longer = 1 / statistics.median(row["decode"][long]) - 1 / statistics.median(row["decode"][short])
    return longer * statistics.median(row["bandwidth_gb_s"]) * 1e9 / (row["kv_bytes"] * (long - short))


def show(rows: list[dict], options: argparse.Namespace, console: Console) -> None:
    base = next((r for r in rows if r["contender"] == "transformers:bfloat16"), rows[0])
    fp32 = next((r for r in rows if r["contender"] == "transformers:float32"), None)
    title = f"{base['model']}, {base['threads']} thread(s)" + (", as on a CPU with AVX2 only" if options.as_avx2 else "")
    bandwidth = base["bandwidth_gb_s"]
    table = Table(title=title + (f", read bandwidth {statistics.median(bandwidth):.1f} GB/s" if bandwidth else ""))
    table.add_column("contender")
    against = base["contender"].removeprefix("transformers:").replace("bfloat16", "bf16")
    for context in options.contexts:
        table.add_column(f"decode tok/s\ncontext {context}", justify="right")
        table.add_column(f"x {against}", justify="right")
        table.add_column("of bound", justify="right")
        if options.step:
            table.add_column("operators\nof bound", justify="right")
    for length in options.prefill:
        table.add_column(f"prefill({length})\ntok/s", justify="right")
        table.add_column(f"x {against}", justify="right")
        if fp32:
            table.add_column("x fp32", justify="right")
    extra = {"KV slope": len(options.contexts) > 1 and bandwidth, "busy core": options.busy}
    for head in (*(name for name, wanted in extra.items() if wanted), "MB read\na token", "peak MB", "load s"):
        table.add_column(head, justify="right")
    for row in rows:
        cells = [row["contender"]]
        for position, context in enumerate(options.contexts):
            cells += [f"{statistics.median(row['decode'][context]):.1f}", f"{ratio(row['decode'][context], base['decode'][context]):.2f}",
                      f"{of_bound(row, 'decode', context, position):.0%}" if bandwidth else "-"]
            if options.step:
                cells.append(f"{of_bound(row, 'step', context, position):.0%}" if row["step"][context] else "-")
        for length in options.prefill:
            speed = row["prefill"][length]
            cells += [f"{statistics.median(speed):.0f}", f"{ratio(speed, base['prefill'][length]):.2f}"]
            if fp32:
                cells.append(f"{ratio(speed, fp32['prefill'][length]):.2f}")
        if extra["KV slope"]:
            cells.append(f"{kv_slope(row):.2f}")
        if extra["busy core"]:
            cells.append(f"{min(ratio(row['busy'][c], row['decode'][c]) for c in row['busy']):.2f}" if row["busy"] else "-")
        cells += [f"{row['bytes'] / 1e6:.0f}", f"{row['peak_mb']:.0f}", f"{row['load_s']:.1f}"]
        table.add_row(*cells)
    console.print(table)


def plot(rows: list[dict], path: Path) -> None:
    """Decode speed of every contender over the context, one panel per model and number of threads, with the bound."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    panels = list(dict.fromkeys((r["model"], r["threads"]) for r in rows))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5 * len(panels), 4.5), squeeze=False)
    for axis, (model, threads) in zip(axes[0], panels):
        for row in (r for r in rows if (r["model"], r["threads"]) == (model, threads)):
            contexts = list(row["decode"])
            (line,) = axis.plot(contexts, [statistics.median(v) for v in row["decode"].values()], "o-", label=row["contender"])
            if row["bandwidth_gb_s"] and row["contender"].startswith("tle"):
                bandwidth = statistics.median(row["bandwidth_gb_s"]) * 1e9
                axis.plot(contexts, [bandwidth / (row["bytes"] + row["kv_bytes"] * c) for c in contexts], ":", color=line.get_color())
        axis.set(title=f"{model}, {threads} thread(s)", xlabel="context, tokens", ylabel="tokens per second (dotted: bound)", xscale="log")
        axis.set_ylim(bottom=0)
        axis.legend(fontsize="small")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def parser_of_options() -> argparse.ArgumentParser:
    """What `measure` and `show` are told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["smollm2", "qwen3-0.6b"])
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--contenders", nargs="+",
                        default=["transformers:bfloat16", "transformers:float32", "tle:w8a8"])
    parser.add_argument("--contexts", nargs="+", type=int, default=[16])
    parser.add_argument("--prefill", nargs="+", type=int, default=[512])
    parser.add_argument("--tokens", type=int, default=24, help="tokens per decode figure")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step", action="store_true", help="also time the decode operators by themselves")
    parser.add_argument("--busy", action="store_true", help="also decode while another process keeps a core busy")
    parser.add_argument("--as-avx2", action="store_true", help="keep everybody to AVX2, as on a CPU that has no more")
    parser.add_argument("--json", type=Path, help="also save every single figure here")
    parser.add_argument("--plot", type=Path, help="also save a plot (PNG) of the decode speeds here; needs matplotlib")
    return parser


def main() -> None:
    options = parser_of_options().parse_args()
    console = Console(width=200)
    everything = []
    for model in options.models:
        for threads in options.threads:
            rows = measure(model, threads, options.contenders, options, console)
            everything += rows
            if options.json:
                options.json.write_text(json.dumps(everything, indent=1))
            show(rows, options, console)
    if options.plot:
        plot(everything, options.plot)


if __name__ == "__main__":
    main()
