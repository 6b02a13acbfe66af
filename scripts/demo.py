#!/usr/bin/env python3
"""SmolLM2-135M-Instruct answers a question as Hugging Face runs it, as tle_torch.patch_model makes it run, and as
tle_torch.from_gguf runs the 4-bit codes of its GGUF file.

    python scripts/demo.py [--tokens 96] [--rounds 3] [--scheme NAME] [QUESTION]

All are warm when they are timed, produce the same number of tokens with the same number of threads, and take turns;
what is printed is each one's median. The rate counts the tokens after the first one: decoding, without the prompt.
scripts/demo.sh sets everything up and calls this.
"""

from __future__ import annotations

import argparse
import copy
import os
import statistics
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("TQDM_DISABLE", "1")  # transformers' bar of de-quantised tensors, read when tqdm is imported

import torch  # noqa: E402
import transformers  # noqa: E402
from fetch import smollm2_gguf  # noqa: E402
from rich.console import Console  # noqa: E402
from rich.panel import Panel  # noqa: E402
from rich.table import Table  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402
from transformers.generation.streamers import BaseStreamer  # noqa: E402

import tle_torch  # noqa: E402

QUESTION = "Why is the sky blue? Explain it in three sentences."


class Clock(BaseStreamer):
    """Notes when each token arrives; `generate` first hands over the prompt, then one token at a time."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        pass

    @property
    def first_token_ms(self) -> float:
        return (self.times[1] - self.times[0]) * 1e3

    @property
    def tokens_per_second(self) -> float:
        return (len(self.times) - 2) / (self.times[-1] - self.times[1])


def timed_answer(model, prompt: dict[str, torch.Tensor], tokens: int, torch_threads: int) -> Clock:
    """Greedy decoding of exactly `tokens` tokens. torch's thread count is global, so each model gets its own before it
    runs."""
    if torch.get_num_threads() != torch_threads:
        torch.set_num_threads(torch_threads)
    clock = Clock()
    model.generate(**prompt, max_new_tokens=tokens, min_new_tokens=tokens, do_sample=False, streamer=clock)
    return clock


def load(path: Path):
    """The tokenizer and the model, de-quantised by transformers from the GGUF file and rounded to bf16."""
    tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16).eval()
    return tokenizer, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", default=QUESTION)
    parser.add_argument("--tokens", type=int, default=96, help="tokens of each answer (default 96)")
    parser.add_argument("--rounds", type=int, default=3, help="timed answers of each model (default 3)")
    parser.add_argument("--scheme", help="quantisation scheme (default: tle_torch's)")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    console = Console(highlight=False, width=None if sys.stdout.isatty() else 110)

    path = smollm2_gguf()
    with console.status("reading SmolLM2-135M-Instruct (GGUF, Q4_1) into bf16"):
        tokenizer, stock = load(path)
    patched = copy.deepcopy(stock)
    stock_threads = torch.get_num_threads()
    report = tle_torch.patch_model(patched, **({"scheme": options.scheme} if options.scheme else {}))
    tle_torch.set_num_threads(stock_threads)
    from_file, _ = tle_torch.from_gguf(path)
    console.print(report)

    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": options.question}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    models = {
        "Hugging Face, bf16": (stock, stock_threads),
        f"patch_model, {report.scheme}": (patched, 1),
        "from_gguf, the file's 4-bit codes": (from_file, 1),
    }
    answers: dict[str, list[Clock]] = {name: [] for name in models}
    for model, threads in models.values():
        timed_answer(model, prompt, 8, threads)  # warm: pages, code paths, thread teams
    with console.status("answering") as status:
        for turn in range(options.rounds):
            for name, (model, threads) in models.items():
                status.update(f"answering, round {turn + 1} of {options.rounds}: {name}")
                answers[name].append(timed_answer(model, prompt, options.tokens, threads))

    console.print(Panel(options.question, title="question", title_align="left"))
    prompt_tokens = prompt["input_ids"].shape[1]
    for name, clocks in answers.items():
        text = tokenizer.decode(clocks[0].tokens[prompt_tokens:], skip_special_tokens=True)
        console.print(Panel(text.strip(), title=name, title_align="left"))

    table = Table(title=f"{stock_threads} threads each, median of {options.rounds} answers of {options.tokens} tokens")
    table.add_column("")
    for column in ("decoding, tok/s", "ratio", f"prompt of {prompt_tokens}, ms"):
        table.add_column(column, justify="right")
    rates = {name: statistics.median(clock.tokens_per_second for clock in clocks) for name, clocks in answers.items()}
    base = next(iter(rates.values()))
    for name, clocks in answers.items():
        first = statistics.median(clock.first_token_ms for clock in clocks)
        table.add_row(name, f"{rates[name]:.1f}", f"{rates[name] / base:.2f}x", f"{first:.0f}")
    console.print(table)


if __name__ == "__main__":
    main()
