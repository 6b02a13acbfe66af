"""One contender of benchmarks/speed.py: a process that loads a model once and then runs what it is told to.

Reads a JSON object a line from standard input, answers with one a line; between commands it sleeps, so that contenders
take turns on an otherwise idle machine.

    {"do": "load", "model": ..., "threads": N}          -> {"load_s": ..., "bytes": of weights that a token reads,
                                                            "kv_bytes": of keys and values, per token of context}
    {"do": "decode", "context": C, "tokens": T}         -> {"tok_s": ...}      behind C tokens that are in the cache;
                                                                               "sample": true draws (not llama, ort)
    {"do": "prefill", "tokens": T}                      -> {"tok_s": ...}
    {"do": "logits", "windows": FILE, "target": FILE}   -> {}                  int32 [count, length] of tokens to fp32
                                                                               [positions, vocabulary], both .npy
    {"do": "memory"}                                    -> {"peak_mb": ...}
    {"do": "bandwidth"}                                 -> {"gb_s": [each of three passes]}   (bandwidth only)
    {"do": "step", "context": C, "tokens": T, "together": B} -> {"tok_s": ...} the decode operators alone (tle only)

"load_s" counts reading the weights and whatever makes the model ready, patching for instance; random weights are not
read: then it is "patch_s" alone that counts. What cannot be done is answered with {"error": one line}, and the process
goes on.

    transformers:DTYPE            Hugging Face, eager, DynamicCache
    transformers-gguf:DTYPE       the same, loaded from the GGUF file, which it de-quantises
    transformers-packed:TYPE      the same in bf16, its Linears as transformers' modules that keep GGUF blocks
    tle:SCHEME[+head][+kv8]       patch_model; +head: with a quantised head; +kv8: with int8 keys and values
    tle-gguf                      tle_torch.from_gguf: the file's own codes
    torchao:int8                  torchao's int8 weights and dynamic int8 activations, eager
    llama:Q4_0|Q4_1|Q8_0, ort:int4   the peers of benchmarks/peers.py
    bandwidth                     no model: the machine's read bandwidth
"""

from __future__ import annotations

import json
import os
import statistics
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

        models.quiet()
        if os.environ.get("TLE_BENCHMARK_NO_ONEDNN"):
            self.torch.backends.mkldnn.enabled = False
        self.torch.set_num_threads(threads)
        start = time.perf_counter()
        self.model = self.read(model, threads)
        loaded = time.perf_counter()
        self.prepare(threads)
        patch_s = time.perf_counter() - loaded
        config = self.model.config
        self.layers, self.kv_heads = config.num_hidden_layers, config.num_key_value_heads
        self.head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.caches = {}
        return {"load_s": loaded - start + patch_s if model in models.REAL else None, "patch_s": patch_s,
                "bytes": self.bytes_per_token(),
                "kv_bytes": 2 * self.layers * self.kv_heads * self.slot_bytes()}

    def read(self, model: str, threads: int):
        import models

        return models.load(model, self.dtype)

    def prepare(self, threads: int) -> None:
        """What is done to the model once it is there."""

    def new_cache(self):
        from transformers import DynamicCache

        return DynamicCache(config=self.model.config)

    def slot_bytes(self) -> int:
        """Of a key, or of a value, of one head."""
        return self.head_dim * self.dtype.itemsize

    def bytes_per_token(self) -> int:
        # The embedding table is read by rows, unless it is also the head.
        head = self.model.get_output_embeddings().weight.data_ptr()
        table = self.model.get_input_embeddings().weight
        skipped = table.nbytes if table.data_ptr() != head else 0
        return sum(p.nbytes for p in self.model.parameters()) - skipped

    def prompt(self, length: int):
        generator = self.torch.Generator().manual_seed(length)
        return self.torch.randint(100, 40000, (1, length), generator=generator)

    def cache_of(self, context: int):
        """A cache that holds `context` tokens. Their keys and values are random: how long a token takes does not depend
        on them, and reading 8,192 tokens first would take longer than all the rest."""
        if context not in self.caches:
            self.caches.clear()  # one at a time: memory
            cache = self.new_cache()
            shape = (1, self.kv_heads, context, self.head_dim)
            for layer in range(self.layers):
                key, value = (self.torch.randn(shape, dtype=self.dtype) for _ in range(2))
                cache.update(key, value, layer)
            self.caches[context] = cache
        cache = self.caches[context]
        more = cache.get_seq_length() - context
        if more:
            cache.crop(-more)
        return cache

    def decode(self, context: int, tokens: int, sample: bool = False) -> dict:
        """Tokens per second of model.generate behind `context` tokens: the time of tokens + 1 less that of one. Greedy
        search, or sampling as Qwen3's generation_config.json asks for."""
        prompt = self.prompt(context + 1)
        mask = self.torch.ones_like(prompt)
        how = {"do_sample": sample, **({"temperature": 0.6, "top_k": 20, "top_p": 0.95} if sample else {})}

        def run(count: int) -> float:
            cache = self.cache_of(context)
            start = time.perf_counter()
            out = self.model.generate(prompt, attention_mask=mask, past_key_values=cache, max_new_tokens=count,
                                      eos_token_id=None, pad_token_id=0, **how)
            assert out.shape[1] == context + 1 + count
            return time.perf_counter() - start

        # While the others had their turns, threads went to sleep and caches were emptied. A slow run of one token would
        # be subtracted from a warm run of many, and the speed come out too high: a run that does not count, and the
        # median.
        run(1)
        one = statistics.median(run(1) for _ in range(3))
        return {"tok_s": tokens / (run(tokens + 1) - one)}

    def prefill(self, tokens: int) -> dict:
        prompt = self.prompt(tokens)
        with self.torch.inference_mode():
            start = time.perf_counter()
            self.model(prompt, use_cache=True, logits_to_keep=1)
            return {"tok_s": tokens / (time.perf_counter() - start)}

    def logits(self, windows: str, target: str) -> dict:
        import divergence
        import numpy

        rows = self.torch.from_numpy(numpy.load(windows)).long()
        numpy.save(target, divergence.logits(self.model, rows).numpy())
        return {}


class Tle(Transformers):
    """The same model patched; TLE's threads, torch's pinned to 1."""

    def __init__(self, scheme: str, *more: str):
        super().__init__("bfloat16")
        self.scheme, self.head = scheme, "head" in more
        self.kv_dtype = self.torch.int8 if "kv8" in more else None

    def prepare(self, threads: int) -> None:
        import tle_torch

        tle_torch.set_num_threads(threads)
        tle_torch.patch_model(self.model, self.scheme, quantize_head=self.head, kv_dtype=self.kv_dtype, progress=False)

    def slot_bytes(self) -> int:
        return self.head_dim + 4 if self.kv_dtype else super().slot_bytes()

    def bytes_per_token(self) -> int:
        def sizes(module) -> dict[int, int]:
            return {t.data_ptr(): t.nbytes for t in [*module.parameters(), *module.buffers()]}

        # As above, packed weights included.
        head = sizes(self.model.get_output_embeddings())
        rows = sizes(self.model.get_input_embeddings()).keys() - head.keys()
        return sum(size for pointer, size in sizes(self.model).items() if pointer not in rows)

    def new_cache(self):
        import tle_torch

        return tle_torch.Cache(config=self.model.config, dtype=self.kv_dtype)

    def step(self, context: int, tokens: int, together: bool) -> dict:
        """The decode-step operators by themselves: ids to logits, a call for each token, or greedy search, as many
        tokens `together` in a call as it makes. A first token, which grows the scratch, is not counted."""
        plan = self.model.base_model.tle_router.plan(self.model.base_model).token_plan(self.model)
        logits, greedy = self.torch.ops.tle.planned_logits.default, self.torch.ops.tle.planned_greedy_steps.default
        seconds = 0.0
        with self.torch.inference_mode():
            position = self.torch.tensor([[context]])
            stretch = plan.stretch(1, position, self.cache_of(context), None, tokens + 1)._native
            prompt = self.prompt(tokens + 1)[0]
            logits(prompt[:1], stretch)
            done = 0
            while done < tokens:
                start = time.perf_counter()
                if together:
                    out = greedy(prompt[done : done + 1], stretch, tokens - done)
                else:
                    out = logits(prompt[done : done + 1], stretch)
                seconds += time.perf_counter() - start
                done += len(out)
        return {"tok_s": tokens / seconds}


class Bandwidth:
    """No model: what a loop that only reads reads. A process of its own, so that nobody's memory counts its buffer."""

    def load(self, model: str, threads: int) -> dict:
        import tle_torch

        tle_torch.set_num_threads(threads)
        return {}

    def bandwidth(self, size: int) -> dict:
        """GB/s of passes over `size` bytes, 1 GiB in all and at least 3: what finds room in a last-level cache is read
        from there by a model as well."""
        from tle_torch.ops import _C

        return {"gb_s": [found / 1e9 for found in _C.read_bandwidth(size, max(3, (1 << 30) // size))]}


def gguf_file(model: str) -> Path:
    import models

    if model not in models.REAL:
        raise ValueError(f"there is no GGUF file of {model} with a tokenizer")
    return models.fetched(model)


class TransformersGguf(Transformers):
    """The GGUF file read by transformers, which de-quantises it: dense weights from then on."""

    def read(self, model: str, threads: int):
        from transformers import AutoModelForCausalLM

        path = gguf_file(model)
        return AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=self.dtype).eval()


class TransformersPacked(Transformers):
    """transformers' modules that keep GGUF blocks. Its loader makes them for a few architectures, and only with a
    kernel, of which none is published for CPUs; here they take the place of every Linear, and unpack their blocks at
    each call."""

    def __init__(self, bits: str):
        super().__init__("bfloat16")
        self.bits = bits

    def prepare(self, threads: int) -> None:
        import gguf
        from transformers.integrations.gguf import utils

        utils.MAX_GEMV_ROWS = 0  # single rows too go the way that needs no kernel
        kind = gguf.GGMLQuantizationType[self.bits]
        for name, linear in list(self.model.named_modules()):
            if type(linear) is self.torch.nn.Linear:
                packed = utils.GgufLinear(linear.in_features, linear.out_features, int(kind), linear.bias is not None)
                blocks = gguf.quants.quantize(linear.weight.detach().float().numpy(), kind)
                packed.weight.data, packed.bias = self.torch.from_numpy(blocks), linear.bias
                self.model.set_submodule(name, packed)

    def bytes_per_token(self) -> int:
        table = self.model.get_input_embeddings().weight
        return sum(p.nbytes for p in self.model.parameters()) - table.nbytes  # read by rows: the head has blocks


class TleGguf(Tle):
    """The GGUF file's codes as they are."""

    def __init__(self):
        super().__init__("file")

    def read(self, model: str, threads: int):
        import tle_torch

        tle_torch.set_num_threads(threads)
        return tle_torch.from_gguf(gguf_file(model), dtype=self.dtype, progress=False)[0]

    def prepare(self, threads: int) -> None:
        """Nothing: it came packed."""


class TorchAO(Transformers):
    """torchao's int8 weights per channel and int8 activations per token."""

    def __init__(self):
        super().__init__("float32")

    def prepare(self, threads: int) -> None:
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

        quantize_(self.model, Int8DynamicActivationInt8WeightConfig())

    def bytes_per_token(self) -> int:
        head = self.model.get_output_embeddings().weight
        return sum(p.numel() for p in self.model.model.layers.parameters()) + 4 * head.numel()


def contender(name: str):
    """The object that a contender's name stands for."""
    kind, _, rest = name.partition(":")
    if kind in ("llama", "ort"):
        import peers

        return peers.LlamaCpp(rest) if kind == "llama" else peers.OnnxRuntimeGenAI()
    kinds = {"transformers": lambda: Transformers(rest or "bfloat16"),
             "transformers-gguf": lambda: TransformersGguf(rest or "bfloat16"),
             "transformers-packed": lambda: TransformersPacked(rest or "Q8_0"),
             "tle": lambda: Tle(*(rest or "w8a8").split("+")), "tle-gguf": TleGguf,
             "torchao": TorchAO, "bandwidth": Bandwidth}
    if kind not in kinds:
        raise ValueError(f"unknown contender {name!r}: {', '.join([*kinds, 'llama', 'ort'])}")
    return kinds[kind]()


def main() -> None:
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    me = None
    for line in sys.stdin:
        command = json.loads(line)
        do = command.pop("do")
        try:
            me = me or contender(sys.argv[1])
            if do == "memory":
                # Not getrusage: there a child begins with its parent's peak.
                status = Path("/proc/self/status").read_text()
                answer = {"peak_mb": int(status.split("VmHWM:")[1].split()[0]) / 1024}
            elif hasattr(me, do):
                answer = getattr(me, do)(**command)
            else:
                raise NotImplementedError(f"{do} is not measured")
        except Exception as error:
            # Another project's failure is a result, and the others' figures go on.
            answer = {"error": " ".join(f"{type(error).__name__}: {error}".split())[:300]}
        print(json.dumps(answer), file=replies, flush=True)


if __name__ == "__main__":
    main()
