"""The command line: python -m tle_torch, or tle-torch.

    tle-torch info                     what this CPU gets
    tle-torch generate MODEL PROMPT    one answer
    tle-torch chat MODEL               a conversation

MODEL is a folder with a Hugging Face model, the name of one in the local cache, or a GGUF file.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import tle_torch
from tle_torch import weights
from tle_torch.ops import _C
from tle_torch.weights import check_scheme

_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command; returns the process's exit code. What the user got wrong is one line on stderr and code 2."""
    options = _parser().parse_args(arguments)
    console = Console(highlight=False)
    try:
        if options.threads is not None:
            tle_torch.set_num_threads(options.threads)
        return options.run(options, console)
    except (OSError, TypeError, ValueError) as error:
        print("tle-torch:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tle-torch", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--threads", type=int, help="threads of the kernels (default: the performance cores)")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    info = commands.add_parser("info", help="CPU features, threads, and the kernel variant of every operator")
    info.set_defaults(run=_info)
    for name, run, summary in (("generate", _generate, "one answer"), ("chat", _chat, "a conversation")):
        command = commands.add_parser(name, help=summary)
        command.add_argument("model", help="a model folder, the name of a model in the local cache, or a GGUF file")
        if name == "generate":
            command.add_argument("prompt", help="what to answer; `-` reads it from standard input")
            command.add_argument("--raw", action="store_true", help="continue the text instead of answering in a chat")
        command.add_argument(
            "--scheme",
            help=f"one of {', '.join(tle_torch.schemes())} (default: {weights.DEFAULT_SCHEME}, "
            f"or what a GGUF file has)",
        )
        command.add_argument("--quantize-head", action="store_true", help="also pack the language-model head")
        command.add_argument("--dtype", choices=_DTYPES, default="bfloat16", help="of activations (default bfloat16)")
        command.add_argument("--kv-dtype", choices=["int8"], help="of the cache (default: that of activations)")
        command.add_argument("--calibration", type=Path, metavar="FILE",
                             help="a text that says how to quantise the model with less error (no GGUF files)")
        command.add_argument("--max-new-tokens", type=_positive, default=512)
        command.add_argument("--sample", action="store_true",
                             help="sample, with the model's own settings (default: greedy)")
        command.add_argument("--report", action="store_true", help="print what was patched")
        command.set_defaults(run=run)
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def _info(options: argparse.Namespace, console: Console) -> int:
    for key, value in tle_torch.cpu_info().items():
        console.print(f"{key}: {', '.join(map(str, value)) if isinstance(value, list) else value}")
    console.print(f"torch: {torch.__version__}, {torch.get_num_threads()} threads")
    table = Table("operator", "variant in use", "others that this CPU can run", box=None)
    for operator, rows in sorted(_C.variants().items()):
        chosen = [row["name"] for row in rows if row["chosen"]]
        others = [row["name"] for row in rows if row["supported"] and not row["chosen"]]
        table.add_row(operator, ", ".join(chosen), ", ".join(others))
    console.print(table)
    return 0


def _kv_dtype(options: argparse.Namespace) -> torch.dtype | None:
    return None if options.kv_dtype is None else getattr(torch, options.kv_dtype)


def _load(options: argparse.Namespace, console: Console):
    """The patched model and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    if options.scheme is not None:
        check_scheme(options.scheme)  # before minutes of loading
    path = Path(options.model)
    # transformers takes every other text for the name of a model, and says what is wrong with the name.
    if not path.exists() and (path.is_absolute() or path.suffix == ".gguf" or options.model.startswith(".")):
        raise FileNotFoundError(f"there is no file or folder {options.model}")
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    dtype = _DTYPES[options.dtype]
    patch = {"quantize_head": options.quantize_head, "kv_dtype": _kv_dtype(options)}
    begin = time.perf_counter()
    with console.status(f"loading {options.model}"):
        if path.is_file():
            if options.calibration is not None:
                raise ValueError(f"--calibration: {options.model} is quantised already")
            model, tokenizer = tle_torch.from_gguf(options.model, options.scheme, dtype=dtype, progress=False, **patch)
        else:
            tokenizer = AutoTokenizer.from_pretrained(options.model)
            model = AutoModelForCausalLM.from_pretrained(options.model, dtype=dtype).eval()
            if options.calibration is not None:
                patch["calibration"] = _calibration_ids(options.calibration, tokenizer)
            tle_torch.patch_model(model, options.scheme or weights.DEFAULT_SCHEME, progress=False, **patch)
    report = model.tle_patch.report
    if options.report:
        console.print(report)
    console.print(
        f"{options.model}: {report.scheme}, {report.bytes_after / 2**20:.0f} MiB, {report.threads} threads, "
        f"{report.isa}; ready in {time.perf_counter() - begin:.1f} s",
        style="dim",
    )
    return model, tokenizer


def _calibration_ids(path: Path, tokenizer) -> torch.Tensor:
    """The first 2,048 tokens of a text, or as many as it has, in rows of 32 (see patch_model)."""
    ids = tokenizer(path.read_text(encoding="utf-8"), return_tensors="pt")["input_ids"][0, :2048]
    if len(ids) < 32:
        raise ValueError(f"{path} has {len(ids)} tokens, calibration needs at least 32")
    return ids[: len(ids) // 32 * 32].view(-1, 32)


def _answer(model, tokenizer, inputs, options: argparse.Namespace, console: Console, **kwargs) -> torch.Tensor:
    """Streams one answer to standard output; returns its token ids."""
    from transformers import TextStreamer

    sampling = {} if options.sample else {"do_sample": False, "temperature": None, "top_p": None, "top_k": None}
    begin = time.perf_counter()
    output = model.generate(
        **inputs,
        max_new_tokens=options.max_new_tokens,
        streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
        **sampling,
        **kwargs,
    )
    seconds = time.perf_counter() - begin
    answer = output[0, inputs["input_ids"].shape[1] :]
    console.print(f"{len(answer)} tokens in {seconds:.1f} s, {len(answer) / seconds:.1f} tok/s", style="dim")
    return answer


def _generate(options: argparse.Namespace, console: Console) -> int:
    prompt = sys.stdin.read() if options.prompt == "-" else options.prompt
    model, tokenizer = _load(options, console)
    if options.raw or tokenizer.chat_template is None:
        inputs = tokenizer(prompt, return_tensors="pt")
    else:
        inputs = _chat_inputs(tokenizer, [{"role": "user", "content": prompt}])
    if inputs["input_ids"].shape[1] == 0:
        raise ValueError("the prompt is empty")
    _answer(model, tokenizer, inputs, options, console)
    return 0


def _chat(options: argparse.Namespace, console: Console) -> int:
    model, tokenizer = _load(options, console)
    if tokenizer.chat_template is None:
        raise ValueError(f"{options.model} has no chat template: use `tle-torch generate --raw`")
    console.print("An empty line ends the conversation.", style="dim")
    messages: list[dict[str, str]] = []
    cache, cached = tle_torch.Cache(model.config, dtype=_kv_dtype(options)), torch.empty(0, dtype=torch.long)
    while text := _read_line(console):
        messages.append({"role": "user", "content": text})
        inputs = _chat_inputs(tokenizer, messages)
        # The cache holds the conversation so far. A template may render that differently this time: keep what is the
        # same, and leave the model at least one token to read.
        keep = _common_prefix(cached, inputs["input_ids"][0, :-1])
        cache.crop(keep - cache.get_seq_length())
        answer = _answer(model, tokenizer, inputs, options, console, past_key_values=cache)
        messages.append({"role": "assistant", "content": tokenizer.decode(answer, skip_special_tokens=True)})
        cached = torch.cat([inputs["input_ids"][0], answer])[: cache.get_seq_length()]
    return 0


def _chat_inputs(tokenizer, messages: list[dict[str, str]]):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)


def _common_prefix(a: torch.Tensor, b: torch.Tensor) -> int:
    """How many tokens two sequences share from their beginning."""
    length = min(len(a), len(b))
    differing = (a[:length] != b[:length]).nonzero()
    return int(differing[0]) if len(differing) else length


def _read_line(console: Console) -> str:
    try:
        return console.input("[bold]> [/]").strip()
    except EOFError:
        return ""
