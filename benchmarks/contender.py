"""One contender of benchmarks/speed.py: a process that loads a model once and then runs what it is told to.

Reads a JSON object a line from standard input, answers with one a line; between commands it sleeps, so that contenders take turns on
an otherwise idle machine.

    {"do": "load", "model": ..., "threads": N}          -> {"load_s": ..., "bytes": what decode reads per token}
    {"do": "decode", "context": C, "tokens": T}         -> {"tok_s": ...}
    {"do": "prefill", "tokens": T}                      -> {"tok_s": ...}
    {"do": "memory"}                                    -> {"peak_mb": ...}
    {"do": "bandwidth"}                                 -> {"gb_s": ...}      (tle only)
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))


class Transformers:
    """Hugging Face eager with torch's threads, in bf16 or fp32."""

    def __init__(self, dtype: str):
        import torch

        self.torch = torch
        self.dtype = getattr(torch, dtype)

    def load(self, model: str, threads: int) -> dict:
        import models
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
        start = time.perf_counter()
        self.torch.set_num_threads(threads)
        self.model = models.load(model, self.dtype)
        self.prepare(threads)
        self.bytes = self.bytes_per_token()
        return {"load_s": time.perf_counter() - start, "bytes": self.bytes}

    def prepare(self, threads: int) -> None:
        pass

    def bytes_per_token(self) -> int:
        # The embedding table is read by rows, unless it is also the head.
        head = self.model.get_output_embeddings().weight.data_ptr()
        table = self.model.get_input_embeddings().weight
        skipped = table.nbytes if table.data_ptr() != head else 0
        return sum(p.nbytes for p in self.model.parameters()) - skipped

    def prompt(self, length: int):
        generator = self.torch.Generator().manual_seed(length)
        return self.torch.randint(100, 40000, (1, length), generator=generator)

    def decode(self, context: int, tokens: int) -> dict:
        """Tokens per second of model.generate behind a prompt of `context` tokens: the time of tokens + 1 less that of one."""
        prompt = self.prompt(context)
        mask = self.torch.ones_like(prompt)

        def run(count: int) -> float:
            start = time.perf_counter()
            out = self.model.generate(prompt, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False,
                                      pad_token_id=0)
            assert out.shape[1] == context + count
            return time.perf_counter() - start

        one = run(1)
        return {"tok_s": tokens / (run(tokens + 1) - one)}

    def prefill(self, tokens: int) -> dict:
        prompt = self.prompt(tokens)
        with self.torch.inference_mode():
            start = time.perf_counter()
            self.model(prompt, use_cache=True, logits_to_keep=1)
            return {"tok_s": tokens / (time.perf_counter() - start)}


class Tle(Transformers):
    """The same model patched; TLE's threads, torch's pinned to 1."""

    def __init__(self, scheme: str, head: str = "plain"):
        super().__init__("bfloat16")
        self.scheme, self.head = scheme, head

    def prepare(self, threads: int) -> None:
        import tle_torch

        tle_torch.set_num_threads(threads)
        tle_torch.patch_model(self.model, self.scheme, quantize_head=self.head == "head", progress=False)

    def bytes_per_token(self) -> int:
        seen, total = set(), 0
        head = self.model.get_output_embeddings()
        tensors = [*self.model.named_buffers(), *self.model.named_parameters()]
        table = self.model.get_input_embeddings().weight
        for name, tensor in tensors:
            packed_head = any(b is not table for b in head.buffers())
            if tensor.data_ptr() in seen or (tensor is table and packed_head):
                continue
            seen.add(tensor.data_ptr())
            total += tensor.nbytes
        return total

    def bandwidth(self) -> dict:
        from tle_torch.ops import _C

        return {"gb_s": _C.read_bandwidth(1 << 30, 3) / 1e9}


def contender(name: str):
    kind, _, rest = name.partition(":")
    if kind == "transformers":
        return Transformers(rest or "bfloat16")
    if kind == "tle":
        return Tle(*(rest or "w8a8").split("+"))
    raise SystemExit(f"unknown contender {name!r}: transformers:DTYPE or tle:SCHEME[+head]")


def main() -> None:
    me = contender(sys.argv[1])
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        if do == "memory":
            answer = {"peak_mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}
        else:
            answer = getattr(me, do)(**command)
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
