"""Decode and prefill speed of patched models beside unpatched transformers and other projects, in one run.

    python benchmarks/speed.py                     everything: three models, 1 and 2 threads; hours
    python benchmarks/speed.py --short             SmolLM2 against transformers at a short context: minutes
    python benchmarks/speed.py --models llama-1b --threads 2 --contenders llama:Q8_0 tle:w8a8-g32+head --prefill 512
    python benchmarks/speed.py --contenders tle:w8a8-a32 tle:w8a8-a32+kv8 --contexts 16 8192
    python benchmarks/speed.py --as-avx2           as on a CPU without AVX-512

Every contender is a process of its own that loads the model once (benchmarks/contender.py lists them;
benchmarks/peers.py installs the other projects). The contenders take turns, repetition by repetition, so that a change
of the machine's speed meets all of them. One that is not installed, does not find room in memory or fails costs its own
figures only, and is named with the reason.

Figures are medians, ratios are medians of the ratios within a repetition. `of bound`: against the read bandwidth over
the bytes of weights, keys and values that a token reads. The bandwidth is what a loop that only reads reaches over as
many bytes, again and again (from memory, or from a last-level cache that has room for them): the median of its passes,
1 GB of them right before the figures that are held against it and 1 GB right after; `best`, beside it in a table's
title, is the median of the fastest of them. `KV slope`: the time that a token takes longer in the longest context
than in the shortest, over the time that reading the additional keys and values takes at that bandwidth. `busy core`:
speed with another process spinning on the machine, over the speed without. `sampled`: tokens per second where tokens
are drawn as Qwen3's generation config asks (temperature, top-k, top-p). `one step a call`, `many`: `of bound` for the
decode operators by themselves, planned_logits and planned_greedy_steps (contender.py). `peak MB`: of resident memory,
until it is loaded and until the end. `KL` and `changed`: what benchmarks/accuracy.py prints, against the eager fp32
model, where the weights are real.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import divergence
import models
import torch
from rich.console import Console
from rich.table import Table
from worker import Failed, Worker

HERE = Path(__file__).resolve().parent
BASE = "transformers:bfloat16"
# Equal bits stand together.
CONTENDERS = [BASE, "tle:w8a8-a32", "llama:Q8_0", "tle:w8a8-g32+head", "llama:Q4_1", "tle-gguf",
              "tle:w4a8-g32-asym+head", "llama:Q4_0", "tle:w4a8-g32+head", "ort:int4", "transformers-gguf:bfloat16",
              "transformers-packed:Q8_0", "torchao:int8"]
SHORT = {"models": ["smollm2"], "contenders": [BASE, "transformers:float32", "tle:w8a8-a32"], "contexts": [16],
         "prefill": [512], "repeats": 3, "accuracy_tokens": 512}
# What loading a contender may take for a moment, in bytes per weight: fp32 weights, and half of them once more.
BYTES_TO_LOAD = 6


def available_memory() -> int:
    """Bytes that the kernel says can be used without swapping."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def start(name: str, model: str, threads: int, options: argparse.Namespace) -> tuple[Worker, dict]:
    """A contender with its model loaded, and the row for its figures.

    Raises:
        Failed: it is not installed, finds no room, or cannot load or run the model.
    """
    need = BYTES_TO_LOAD * models.parameters(model) if model in models.SHAPES else 0
    if available_memory() < need:
        raise Failed(f"{available_memory() / 1e9:.1f} GB of memory are left, and loading it may take {need / 1e9:.1f}")
    worker = Worker(name, threads, options.as_avx2)
    try:
        row = {"model": model, "threads": threads, "contender": name, "patch_s": 0.0,
               **worker("load", model=model, threads=threads), "loaded_mb": worker("memory")["peak_mb"], "missing": {},
               "decode": {c: [] for c in options.contexts}, "step": {c: [] for c in options.contexts},
               "steps": {c: [] for c in options.contexts}, "sampled": {c: [] for c in options.contexts},
               "busy": {c: [] for c in options.contexts}, "bandwidth_gb_s": {c: [] for c in options.contexts},
               "best_bandwidth_gb_s": {c: [] for c in options.contexts},
               "prefill": {n: [] for n in options.prefill}}
        warm = worker("decode", context=min(options.contexts, default=8), tokens=2)["tok_s"]
    except Failed:
        worker.close()
        raise
    row["tokens"] = min(options.tokens, max(4, round(warm * options.seconds)))
    return worker, row


def take(figures: list, row: dict, what: str, worker: Worker, do: str, **arguments) -> None:
    """Appends what a command gives. After one that fails `figures` stays empty, and row["missing"][what] is why."""
    if what in row["missing"]:
        return
    try:
        (value,) = worker(do, **arguments).values()
        figures.append(value)
    except Failed as reason:
        figures.clear()
        row["missing"][what] = str(reason)


def measure(model: str, threads: int, names: list[str], options: argparse.Namespace, console: Console,
            accuracy: dict[str, dict] | None = None) -> list[dict]:
    """One row per contender, with every single figure.

    row["decode"][context], ["sampled"], ["step"], ["steps"], ["busy"], ["bandwidth_gb_s"], ["best_bandwidth_gb_s"]
    and row["prefill"][tokens] are lists over the repetitions, empty where there is no figure; row["missing"] says why.
    A contender that has no row at all is {"model", "threads", "contender", "failed": the reason}. `accuracy` holds
    what is known about contenders already.
    """
    accuracy = {} if accuracy is None else accuracy
    pairs, rows = [], []
    for name in names:
        console.print(f"[dim]{model}, {threads} threads: loading {name}")
        try:
            worker, row = start(name, model, threads, options)
        except Failed as reason:
            row = {"model": model, "threads": threads, "contender": name, "failed": str(reason)}
        else:
            pairs.append((worker, row))
        rows.append(row)
    meter = Worker("bandwidth", threads, options.as_avx2)
    meter("load", model=model, threads=threads)
    for repeat in range(options.repeats):
        console.print(f"[dim]{model}, {threads} threads: repetition {repeat + 1} of {options.repeats}")
        for context in options.contexts:
            for worker, row in pairs:
                tle, how = worker.name.startswith("tle"), {"context": context, "tokens": row["tokens"]}
                passes: list[list[float]] = []
                size = row["bytes"] + context * row["kv_bytes"]
                take(passes, row, "bandwidth", meter, "bandwidth", size=size)
                take(row["decode"][context], row, f"decode at {context}", worker, "decode", **how)
                if options.sample and worker.name.startswith(("tle", "transformers")):
                    take(row["sampled"][context], row, f"sampled at {context}", worker, "decode", sample=True, **how)
                if options.busy and tle:
                    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as spinner:
                        take(row["busy"][context], row, f"busy at {context}", worker, "decode", **how)
                        spinner.kill()
                if options.step and tle:
                    for figures, together in (("step", False), ("steps", True)):
                        what = f"{figures} at {context}"
                        take(row[figures][context], row, what, worker, "step", together=together, **how)
                take(passes, row, "bandwidth", meter, "bandwidth", size=size)
                if passes:
                    row["bandwidth_gb_s"][context].append(statistics.median(sum(passes, [])))
                    row["best_bandwidth_gb_s"][context].append(max(sum(passes, [])))
        for length in options.prefill:
            for worker, row in pairs:
                take(row["prefill"][length], row, f"prefill of {length}", worker, "prefill", tokens=length)
    meter.close()
    if model in models.REAL and options.accuracy_tokens:
        console.print(f"[dim]{model}, {threads} threads: accuracy")
        measure_accuracy(model, pairs, options.accuracy_tokens, accuracy)
    for worker, row in pairs:
        try:
            row.update(worker("memory"))
        except Failed as reason:
            row["missing"]["memory"] = str(reason)
        worker.close()
    return rows


def measure_accuracy(model: str, pairs: list[tuple[Worker, dict]], tokens: int, known: dict[str, dict]) -> None:
    """Puts row["accuracy"] (benchmarks/divergence.py: Cost) against the eager fp32 model, and into `known`."""
    if any(worker.name not in known for worker, _ in pairs):
        from transformers import AutoTokenizer

        models.quiet()
        tokenizer = AutoTokenizer.from_pretrained(models.fetched(f"{model}-hf"))
        text = (HERE / "data" / "text.txt").read_text(encoding="utf-8")
        windows = divergence.windows_of(text, tokenizer, tokens, min(tokens, 512))
        reference = divergence.logits(models.load(model, torch.float32), windows)
    for worker, row in pairs:
        if worker.name not in known:
            try:
                cost = divergence.cost(worker.name, reference, worker.logits(windows))
            except Failed as reason:
                row["missing"]["accuracy"] = str(reason)
                continue
            known[worker.name] = cost.figures()
        row["accuracy"] = known[worker.name]


def ratio(mine: list[float], others: list[float]) -> float | None:
    return statistics.median(a / b for a, b in zip(mine, others)) if mine and others else None


def of_bound(row: dict, what: str, context: int) -> float | None:
    """Share of the bandwidth: bytes that were read per second over the bandwidth measured right before."""
    bytes_read = row["bytes"] + row["kv_bytes"] * context
    share = ratio(row[what][context], row["bandwidth_gb_s"][context])
    return None if share is None else share * bytes_read / 1e9


def kv_slope(row: dict) -> float | None:
    """How much longer a token takes in the longest context than in the shortest, over what the bandwidth asks for."""
    short, long = min(row["decode"]), max(row["decode"])
    figures = row["decode"][short], row["decode"][long], row["bandwidth_gb_s"][long]
    if short == long or not all(figures):
        return None
    longer = statistics.median((1 / b - 1 / a) * bandwidth * 1e9 for a, b, bandwidth in zip(*figures))
    return longer / (row["kv_bytes"] * (long - short))


def cell(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def middle(figures: list[float]) -> float | None:
    return statistics.median(figures) if figures else None


def show(rows: list[dict], options: argparse.Namespace, console: Console) -> None:
    """Prints the rows of one model and number of threads."""
    title = f"{rows[0]['model']}, {rows[0]['threads']} thread(s)"
    title += ", as on a CPU with AVX2 only" if options.as_avx2 else ""
    failed = [row for row in rows if "failed" in row]
    rows = [row for row in rows if "failed" not in row]
    if rows:
        base = next((r for r in rows if r["contender"] == BASE), rows[0])
        fp32 = next((r for r in rows if r["contender"] == "transformers:float32"), None)
        against = "x bf16" if base["contender"] == BASE else f"x {base['contender']}"
        show_decode(rows, base, against, title, options, console)
        show_rest(rows, base, fp32, against, title, options, console)
    for row in failed:
        console.print(f"no row: {row['contender']}: {row['failed']}", highlight=False, markup=False)
    for row in rows:
        for what, reason in row["missing"].items():
            console.print(f"no figure: {row['contender']}, {what}: {reason}", highlight=False, markup=False)


def table_of(title: str, *heads: str) -> Table:
    table = Table(title=title)
    table.add_column("contender")
    for head in heads:
        table.add_column(head, justify="right")
    return table


def show_decode(rows, base, against, title, options, console) -> None:
    bandwidth, best = ([figure for figures in base[which].values() for figure in figures]
                       for which in ("bandwidth_gb_s", "best_bandwidth_gb_s"))
    heads = []
    for context in options.contexts:
        heads += [f"tok/s at\n{context}", against, "of bound"] + ["sampled"] * options.sample
        heads += ["one step\na call", "many"] * options.step
    heads += ["KV slope"] * (len(options.contexts) > 1) + ["busy core"] * options.busy
    read = (f"; read bandwidth {statistics.median(bandwidth):.1f} GB/s, best {statistics.median(best):.1f}"
            if bandwidth else "")
    table = table_of(f"decode: {title}{read}", *heads)
    for row in rows:
        cells = [row["contender"]]
        for context in options.contexts:
            speed = row["decode"][context]
            cells += [cell(middle(speed), ".1f"), cell(ratio(speed, base["decode"][context]), ".2f"),
                      cell(of_bound(row, "decode", context), ".0%")]
            cells += [cell(middle(row["sampled"][context]), ".1f")] * options.sample
            if options.step:
                cells += [cell(of_bound(row, figures, context), ".0%") for figures in ("step", "steps")]
        if len(options.contexts) > 1:
            cells.append(cell(kv_slope(row), ".2f"))
        if options.busy:
            kept = [ratio(row["busy"][c], row["decode"][c]) for c in options.contexts if row["busy"][c]]
            cells.append(cell(min(kept, default=None), ".2f"))
        table.add_row(*cells)
    if options.contexts:
        console.print(table)


def show_rest(rows, base, fp32, against, title, options, console) -> None:
    heads = []
    for length in options.prefill:
        heads += [f"prefill({length})\ntok/s", against] + ["x fp32"] * (fp32 is not None)
    heads += ["MB read\na token", "peak MB\nloaded, all", "load + patch\ns", "mean KL\nnats", "changed"]
    table = table_of(f"prefill and cost: {title}", *heads)
    for row in rows:
        cells = [row["contender"]]
        for length in options.prefill:
            speed = row["prefill"][length]
            cells += [cell(middle(speed), ".0f"), cell(ratio(speed, base["prefill"][length]), ".2f")]
            if fp32:
                cells.append(cell(ratio(speed, fp32["prefill"][length]), ".2f"))
        accuracy = row.get("accuracy", {})
        load = None if row["load_s"] is None else row["load_s"] - row["patch_s"]
        cells += [f"{row['bytes'] / 1e6:.0f}", f"{row['loaded_mb']:.0f}, {cell(row.get('peak_mb'), '.0f')}",
                  f"{cell(load, '.1f')} + {row['patch_s']:.1f}", cell(accuracy.get("mean_kl"), ".4f"),
                  cell(accuracy.get("changed"), ".1%")]
        table.add_row(*cells)
    console.print(table)


def plot(rows: list[dict], path: Path) -> None:
    """Decode speed over the context: a column per model, a row per number of threads, with each of our bounds."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as pyplot

    rows = [row for row in rows if "failed" not in row]
    names, columns, lines = (list(dict.fromkeys(r[key] for r in rows)) for key in ("contender", "model", "threads"))
    colors = dict(zip(names, pyplot.get_cmap("tab20").colors * len(names)))
    size = (5 * len(columns) + 2.5, 4 * len(lines))
    figure, axes = pyplot.subplots(len(lines), len(columns), figsize=size, squeeze=False, layout="constrained")
    for row in rows:
        axis = axes[lines.index(row["threads"])][columns.index(row["model"])]
        axis.set(title=f"{row['model']}, {row['threads']} thread(s)", xlabel="context, tokens", xscale="log",
                 ylabel="tokens per second (dotted: bound)")
        axis.set_xticks(list(row["decode"]), list(map(str, row["decode"])))
        axis.minorticks_off()
        color = colors[row["contender"]]
        points = {c: statistics.median(figures) for c, figures in row["decode"].items() if figures}
        axis.plot(list(points), list(points.values()), "o-", color=color)
        if row["contender"].startswith("tle"):
            bounds = {c: statistics.median(figures) * 1e9 / (row["bytes"] + row["kv_bytes"] * c)
                      for c, figures in row["bandwidth_gb_s"].items() if figures}
            axis.plot(list(bounds), list(bounds.values()), ":", color=color)
    for axis in axes.flat:
        axis.set_ylim(bottom=0)
    handles = [matplotlib.lines.Line2D([], [], color=colors[name], marker="o", label=name) for name in names]
    figure.legend(handles=handles, loc="outside right upper", fontsize="small")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """What `measure` and `show` are told."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--short", action="store_true", help=f"other defaults: {SHORT}")
    parser.add_argument("--models", nargs="+", choices=models.NAMES, default=list(models.NAMES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--contenders", nargs="+", default=CONTENDERS, help="default: " + " ".join(CONTENDERS))
    parser.add_argument("--contexts", nargs="*", type=int, default=[16, 1024, 4096, 8192])
    parser.add_argument("--prefill", nargs="*", type=int, default=[128, 512, 2048])
    parser.add_argument("--tokens", type=int, default=24, help="tokens per decode figure")
    parser.add_argument("--seconds", type=float, default=10.0,
                        help="a contender too slow to decode those in this time gets fewer, at least 4")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--accuracy-tokens", type=int, default=2048, help="0: no accuracy")
    parser.add_argument("--step", action="store_true", help="also time the decode operators by themselves")
    parser.add_argument("--sample", action="store_true", help="also decode with sampling")
    parser.add_argument("--busy", action="store_true", help="also decode while another process keeps a core busy")
    parser.add_argument("--as-avx2", action="store_true", help="keep everybody to AVX2, as on a CPU that has no more")
    saved = HERE.parent / "build" / "benchmarks"
    parser.add_argument("--json", type=Path, default=saved / "speed.json", help="every single figure goes there")
    parser.add_argument("--plot", type=Path, default=saved / "speed.png", help="a plot (PNG) of the decode speeds")
    options = parser.parse_args(arguments)
    if options.short:
        parser.set_defaults(**SHORT)
        options = parser.parse_args(arguments)
    return options


def main() -> None:
    options = parse()
    console = Console(width=200)
    everything = []
    for path in (options.json, options.plot):
        path.parent.mkdir(parents=True, exist_ok=True)
    for model in options.models:
        accuracy: dict[str, dict] = {}
        for threads in options.threads:
            rows = measure(model, threads, options.contenders, options, console, accuracy)
            everything += rows
            options.json.write_text(json.dumps(everything, indent=1))
            show(rows, options, console)
    if all("failed" in row for row in everything):
        return
    try:
        plot(everything, options.plot)
    except ImportError as error:
        console.print(f"saved: {options.json}; no plot: {error}", highlight=False)
    else:
        console.print(f"saved: {options.json}, {options.plot}", highlight=False)


if __name__ == "__main__":
    main()
