#!/usr/bin/env python3
"""What quantisation costs: how far a patched model's next-token distributions are from the unpatched model's.

    python benchmarks/accuracy.py [--model FOLDER_OR_GGUF] [--scheme w8a8] [--text FILE] [--tokens 2048] [--json FILE]
    python benchmarks/accuracy.py --reference float32 --scheme w8a8-g32 --scheme file --peer Q8_0 --peer Q4_1
    python benchmarks/accuracy.py --reference float32 --dtype float32 --scheme w8a8-a32+cal --peer Q8_0

The text (by default data/text.txt: English and Python, written for this purpose) is cut into windows that the model
reads one by one. At every position the distribution of the reference, the model in bf16 (or fp32) as transformers runs
it eagerly, is compared with

- the patched model's, where the scheme `file` means the GGUF file's own codes (tle_torch.from_gguf), and
- what the scheme itself costs: the same eager model with weights and activations fake-quantised to the scheme's grid,
  in plain torch: rows or groups x -> round(x 127 / max|x|) max|x| / 127 (for the 8-bit schemes), and
- llama.cpp's with its file types (--peer; benchmarks/peers.py installs it).

Printed per variant: mean, with its standard error, and 99th percentile of the Kullback-Leibler divergence
KL(reference || variant) in nats, and the share of positions whose most likely token changes. For each patched model and
each peer: the mean difference of their divergences at the same positions, which the text's easy and hard places do not
blur. The exit code is 1 if a patched model's mean KL is above 1.05 times its scheme's own, where the reference has the
patched model's dtype.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
from pathlib import Path

import torch
from divergence import Cost, cost, logits, mean_and_error, windows_of
from models import fetched, quiet
from rich.console import Console
from rich.table import Table
from transformers import AutoModelForCausalLM, AutoTokenizer
from worker import Worker

import tle_torch

HERE = Path(__file__).resolve().parent
# How much more than the scheme itself the implementation may cost.
LIMIT = 1.05

# The schemes whose grid is simple enough to fake in eager torch: k per scale of (weights, activations), 0: a whole row.
GRIDS = {"w8a8": (0, 0), "w8a8-a32": (0, 32), "w8a8-g32": (32, 32)}


def on_grid(x: torch.Tensor, group: int) -> torch.Tensor:
    """Each row, or group of a row, of x on its int8 grid, fp32: round_half_even(x 127 / amax) amax / 127."""
    size = x.shape[-1]
    wide = x.float()
    if group:
        wide = torch.nn.functional.pad(wide, (0, -size % group)).unflatten(-1, (-1, group))
    amax = wide.abs().amax(-1, keepdim=True)
    inverse = torch.where(amax > 0, 127 / amax, 0)
    wide = (wide * inverse).round() * (amax / 127)
    return wide.flatten(-2)[..., :size] if group else wide


def fake_quantised(model, weight_group: int, activation_group: int):
    """A copy of an eager model whose layers compute with weights and activations on their grids; the head excepted."""
    model = copy.deepcopy(model)
    for module in model.model.layers.modules():
        if isinstance(module, torch.nn.Linear):
            # fp32 weights on the grid and a product in fp32: what int8 codes and one rounding at the end give.
            weight, bias = on_grid(module.weight.data, weight_group), module.bias

            def forward(x, weight=weight, bias=bias):
                product = torch.nn.functional.linear(on_grid(x, activation_group), weight)
                return (product if bias is None else product + bias.float()).to(x.dtype)

            module.forward = forward
    return model


def load(path: Path, dtype: torch.dtype):
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager", **where)
    return model.eval(), AutoTokenizer.from_pretrained(folder, **where)


def patched_model(path: Path, scheme: str, dtype: torch.dtype, calibration: Path):
    """The model with activations of `dtype`, patched. `+head`: its head quantised too, as llama.cpp's files have it;
    `+kv8`: with keys and values as int8; `+cal`: calibrated."""
    scheme, *more = scheme.split("+")
    settings = {"kv_dtype": torch.int8 if "kv8" in more else None, "progress": False}
    if scheme == "file":
        return tle_torch.from_gguf(path, dtype=dtype, **settings)[0]
    model, tokenizer = load(path, dtype)
    if "cal" in more:
        settings["calibration"] = windows_of(calibration.read_text(), tokenizer, 2048, 32)
    tle_torch.patch_model(model, scheme, quantize_head="head" in more, **settings)
    return model


def llama_cpp(bits: str, windows: torch.Tensor) -> torch.Tensor:
    """SmolLM2's logits as llama.cpp gives them, from a process of its own environment."""
    threads = os.cpu_count() or 1
    worker = Worker(f"llama:{bits}", threads)
    worker("load", model="smollm2", threads=threads)
    try:
        return worker.logits(windows)
    finally:
        worker.close()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, help="a model folder or a GGUF file (default: SmolLM2-135M-Instruct)")
    parser.add_argument("--scheme", action="append",
                        help="of patch_model, with +head for its head too, or `file`; +kv8: with int8 keys and values; "
                        "+cal: calibrated; several times (default: w8a8)")
    parser.add_argument("--peer", action="append", default=[],
                        help="a file type of llama.cpp: Q8_0, Q4_0 or Q4_1; several times")
    parser.add_argument("--reference", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16",
                        help="activations of the patched models")
    parser.add_argument("--calibration", type=Path, default=HERE.parent / "LICENSE",
                        help="whose first 2,048 tokens +cal reads, 32 at a time (default: the licence)")
    parser.add_argument("--text", type=Path, default=HERE / "data" / "text.txt")
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--window", type=int, default=512, help="tokens per window")
    parser.add_argument("--json", type=Path, help="also write the figures there")
    options = parser.parse_args()
    quiet()
    console = Console(highlight=False)

    path = options.model or fetched("smollm2")
    model, tokenizer = load(path, getattr(torch, options.reference))
    windows = windows_of(options.text.read_text(), tokenizer, options.tokens, options.window)
    reference = logits(model, windows)
    costs: list[Cost] = []
    patched_costs: list[Cost] = []
    peer_costs: list[Cost] = []
    bad = []
    for scheme in options.scheme or ["w8a8"]:
        with console.status(scheme):
            grid = None
            if scheme in GRIDS:
                faked = fake_quantised(model, *GRIDS[scheme])
                grid = cost(f"{scheme} fake-quantised, eager", reference, logits(faked, windows))
                costs.append(grid)
                del faked
            patched = patched_model(path, scheme, getattr(torch, options.dtype), options.calibration)
            costs.append(cost(f"{scheme} patched, {options.dtype}", reference, logits(patched, windows)))
            patched_costs.append(costs[-1])
            same = options.reference == options.dtype  # otherwise the difference of the dtypes is in it
            if grid is not None and same and costs[-1].mean_kl > LIMIT * grid.mean_kl:
                bad.append(scheme)
            del patched
    for bits in options.peer:
        with console.status(f"llama.cpp {bits}"):
            peer_costs.append(cost(f"llama.cpp {bits}", reference, llama_cpp(bits, windows)))
    costs += peer_costs

    what = f"{windows.numel()} tokens in {len(windows)} windows"
    table = Table(title=f"{what}, against the eager {options.reference} model")
    table.add_column("variant")
    for column in ("mean KL", "p99 KL", "greedy tokens changed"):
        table.add_column(column, justify="right")
    for row in costs:
        mean = f"{row.mean_kl:.4f} ± {row.error_of_mean:.4f}"
        table.add_row(row.variant, mean, f"{row.p99_kl:.3f}", f"{100 * row.changed:.1f} %")
    console.print(table)
    for peer in peer_costs:
        for ours in patched_costs:
            mean, error = mean_and_error(ours.kl - peer.kl)
            console.print(f"{ours.variant} less {peer.variant}: {mean:+.5f} ± {error:.5f}")
    if options.json:
        options.json.write_text(json.dumps([row.figures() for row in costs], indent=2) + "\n")
    for scheme in bad:
        console.print(f"{scheme}: the patched model costs more than {LIMIT} times what the scheme costs")
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
