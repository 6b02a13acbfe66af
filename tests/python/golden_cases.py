"""What the golden digests are digests of: every operator over a sweep of shapes, and SmolLM2 answering.

A digest is the SHA-256 of a result's dtype, shape and bytes. The committed ones (golden/*.json) are what every CPU has
to give, at every level; scripts/update_golden.py writes them. Nothing here may depend on the machine: inputs come out
of an integer hash, and what is done with them outside the operators (integer arithmetic, casts, copies) is exact.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from tle_torch.ops import _C

tle = torch.ops.tle
FOLDER = Path(__file__).parent / "golden"
OPERATORS, SMOLLM2 = FOLDER / "operators.json", FOLDER / "smollm2.json"

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Packed schemes; "bf16" stands for a dense weight of the input's dtype.
SCHEMES = [scheme for scheme in _C.schemes() if scheme != "bf16"]


# ---- inputs ----


def hashed(count: int, seed: int) -> np.ndarray:
    """uint32 [count]: the SplitMix64 sequence that starts at `seed`, upper halves. Integers only."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed * 0x100000001B3)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return ((z ^ (z >> np.uint64(31))) >> np.uint64(32)).astype(np.uint32)


def values(*shape: int, seed: int, dtype: torch.dtype = torch.float32, exponent: int = 0,
           shift: float = 0.0) -> torch.Tensor:
    """Bell-shaped values of standard deviation 1.15 * 2^exponent around `shift`.

    The sum of four 16-bit numbers is an integer of 18 bits: exact in fp32, and the rounding to `dtype` is IEEE's.
    """
    words = hashed(2 * int(np.prod(shape)), seed).reshape(-1, 2).astype(np.int64)
    total = (words & 0xFFFF).sum(1) + (words >> 16).sum(1) - 2 * 0xFFFF
    x = torch.from_numpy(total.astype(np.float32)) * 2.0 ** (exponent - 15) + shift
    return x.reshape(shape).to(dtype)


def integers(*shape: int, seed: int, low: int, high: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Integers from `low` to `high`, both included."""
    drawn = hashed(int(np.prod(shape)), seed).astype(np.int64) % (high - low + 1) + low
    return torch.from_numpy(drawn).reshape(shape).to(dtype)


def frequencies(count: int) -> torch.Tensor:
    """fp32 [count] like a rotary embedding's, from 1 down: quotients of integers."""
    return torch.tensor([16 / (16 + 37 * i * i) for i in range(count)], dtype=torch.float32)


def digest(result: torch.Tensor | tuple[torch.Tensor, ...]) -> str:
    """SHA-256, in hexadecimal, of the dtypes, shapes and bytes of one or several tensors."""
    state = hashlib.sha256()
    for tensor in (result,) if isinstance(result, torch.Tensor) else result:
        state.update(f"{tensor.dtype} {list(tensor.shape)} ".encode())
        state.update(tensor.contiguous().flatten().view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


# ---- operators ----

Case = tuple[str, Callable[[], torch.Tensor | tuple[torch.Tensor, ...]]]


def strided(x: torch.Tensor) -> torch.Tensor:
    """The same values with every second element of the last dimension's memory unused."""
    return torch.stack([x, x], -1)[..., 0]


def rows_cases() -> Iterator[Case]:
    """rms_norm, add_rms_norm, swiglu, quantize_rows, argmax."""
    for name, dtype in DTYPES.items():
        for shape in ((1, 1), (3, 17), (2, 5, 64), (1, 576), (4, 1001)):
            size = "x".join(map(str, shape))
            x, y = values(*shape, seed=1, dtype=dtype), values(*shape, seed=2, dtype=dtype, exponent=2)
            weight = values(shape[-1], seed=3, dtype=dtype, exponent=-2, shift=1.0)
            for kind in ("fp32", "llama", "gemma"):
                yield f"rms_norm/{kind}/{name} {size}", functools.partial(tle.rms_norm, x, weight, 1e-6, kind)
                yield (f"add_rms_norm/{kind}/{name} {size}",
                       functools.partial(tle.add_rms_norm, x, y, weight, 1e-5, kind))
            yield f"swiglu/{name} {size}", functools.partial(tle.swiglu, y, x)
            for group in (0, 32, 64, 128):
                yield f"quantize_rows/{group}/{name} {size}", functools.partial(tle.quantize_rows, x, group)
            yield f"argmax/{name} {size}", functools.partial(tle.argmax, x)
        x, weight = values(5, 130, seed=4, dtype=dtype), values(130, seed=5, dtype=dtype)
        yield f"rms_norm/llama/{name} strided", functools.partial(tle.rms_norm, strided(x), weight, 1e-6, "llama")
        yield f"swiglu/{name} strided", functools.partial(tle.swiglu, strided(x), x)
        yield f"quantize_rows/0/{name} strided", functools.partial(tle.quantize_rows, strided(x))
        special = values(8, 130, seed=6, dtype=dtype)
        limits = torch.finfo(dtype)
        for row, value in enumerate((0.0, -0.0, torch.inf, -torch.inf, torch.nan, limits.tiny / 4, limits.max)):
            special[row, 7 * row :: 11] = value
        yield f"rms_norm/llama/{name} special", functools.partial(tle.rms_norm, special, weight, 1e-6, "llama")
        yield f"swiglu/{name} special", functools.partial(tle.swiglu, special, x[:1].expand(8, 130))
        for group in (0, 32):
            yield f"quantize_rows/{group}/{name} special", functools.partial(tle.quantize_rows, special, group)
        yield f"argmax/{name} special", functools.partial(tle.argmax, special)


def rotary_cases() -> Iterator[Case]:
    """rotary_tables, rotary_embedding."""
    far = integers(9, seed=10, low=0, high=131071)
    positions = torch.cat([torch.arange(9), torch.arange(4090, 4100), far]).view(2, 14)
    for name, dtype in DTYPES.items():
        for half in (1, 19, 32, 64):
            tables = functools.partial(tle.rotary_tables, positions, frequencies(half), 1.25, dtype)
            yield f"rotary_tables/{name} {half}", tables
            for head_dim in (2 * half, 2 * half + 6):
                q = values(2, 14, 3, head_dim, seed=11, dtype=dtype).transpose(1, 2)
                k = values(2, 14, 1, head_dim, seed=12, dtype=dtype).transpose(1, 2)
                # Any cos and sin do; these are no operator's result.
                cos, sin = values(2, 14, 2 * half, seed=13, dtype=dtype), values(1, 14, 2 * half, seed=14, dtype=dtype)
                sin = sin.expand_as(cos)
                yield (f"rotary_embedding/{name} {2 * half} of {head_dim}",
                       functools.partial(tle.rotary_embedding, q, k, cos, sin))


def sdot_cases() -> Iterator[Case]:
    """sdot_pack_weights, sdot_gemv, sdot_gemv_fused_bf16, neon_sdot."""
    for k, n in ((4, 4), (16, 28), (100, 96), (1040, 64)):
        weight = integers(k, n, seed=20, low=-128, high=127, dtype=torch.int8)
        yield f"sdot_pack_weights {k}x{n}", functools.partial(tle.sdot_pack_weights, weight)
        yield (f"sdot_pack_weights strided {k}x{n}",
               functools.partial(tle.sdot_pack_weights, weight.t().contiguous().t()))
        packed = weight.view(k // 4, 4, n // 4, 4).permute(0, 2, 3, 1).contiguous()
        a = integers(k, seed=21, low=-128, high=127, dtype=torch.int8)
        yield f"sdot_gemv {k}x{n}", functools.partial(tle.sdot_gemv, a, packed)
        scale = integers(n, seed=22, low=1, high=255).float() * 2.0**-15
        for rows in (1, 5, 17):
            x = values(rows, k, seed=23, dtype=torch.bfloat16)
            yield f"sdot_gemv_fused_bf16 {rows} {k}x{n}", functools.partial(tle.sdot_gemv_fused_bf16, x, packed, scale)
    acc = integers(4, seed=24, low=-(2**31), high=2**31 - 1, dtype=torch.int32)
    a, b = (integers(16, seed=seed, low=-128, high=127, dtype=torch.int8) for seed in (25, 26))
    yield "neon_sdot", functools.partial(tle.neon_sdot, acc, a, b)


def group_size(scheme: str) -> int:
    """The weights of a scheme that share a scale; 0: a whole output channel."""
    return next((int(part[1:]) for part in scheme.split("-")[1:] if part[0] == "g"), 0)


def coded_weight(n: int, k: int, scheme: str, seed: int) -> tuple[torch.Tensor, torch.Tensor, str, torch.Tensor | None]:
    """Arguments of pack_linear_weight: codes, scales and minima that no quantiser made, so that a product is pinned by
    itself. Scales and minima are bf16 numbers, which every scheme stores exactly."""
    low, high = (0, 15) if scheme.startswith("w4") else (-127, 127)
    groups = -(-k // group_size(scheme)) if group_size(scheme) else None
    shape = (n,) if groups is None else (n, groups)
    codes = integers(n, k, seed=seed, low=low, high=high, dtype=torch.int8)
    scales = integers(*shape, seed=seed + 1, low=64, high=127).float() * 2.0 ** (-10 if high == 15 else -13)
    minima = integers(*shape, seed=seed + 2, low=-127, high=-64).float() * 2.0**-7 if scheme.endswith("asym") else None
    return codes, scales, scheme, minima


SIZES = ((1, 1), (3, 4), (17, 33), (70, 1040), (5, 576))


def linear_cases() -> Iterator[Case]:
    """quantize_, pack_ and dequantize_linear_weight, packed_embedding, linear, of every scheme."""
    for scheme in SCHEMES:
        for n, k in SIZES:
            for name, dtype in DTYPES.items():
                weight = values(n, k, seed=30, dtype=dtype, exponent=-4)
                yield (f"quantize_linear_weight/{scheme}/{name} {n}x{k}",
                       functools.partial(tle.quantize_linear_weight, weight, scheme))
            arguments = coded_weight(n, k, scheme, seed=31)
            yield f"pack_linear_weight/{scheme} {n}x{k}", functools.partial(tle.pack_linear_weight, *arguments)
            packed = tle.pack_linear_weight(*arguments)
            for name, dtype in DTYPES.items():
                yield (f"dequantize_linear_weight/{scheme}/{name} {n}x{k}",
                       functools.partial(tle.dequantize_linear_weight, packed, n, k, dtype))
                ids = integers(2, 3, seed=34, low=0, high=n - 1)
                yield (f"packed_embedding/{scheme}/{name} {n}x{k}",
                       functools.partial(tle.packed_embedding, ids, packed, n, k, dtype))
                yield from linear_rows(f"{scheme}/{name} {n}x{k}", packed, n, k, dtype)
    for name, dtype in DTYPES.items():
        for n, k in SIZES:
            weight = values(n, k, seed=35, dtype=dtype, exponent=-4)
            yield from linear_rows(f"dense/{name} {n}x{k}", weight, n, k, dtype)


def linear_rows(name: str, weight: torch.Tensor, n: int, k: int, dtype: torch.dtype) -> Iterator[Case]:
    bias = values(n, seed=36, dtype=dtype)
    for rows in (1, 2, 9, 17):
        x = values(rows, k, seed=37, dtype=dtype)
        x[rows // 2, k // 2 :] *= 16  # powers of two: exact
        yield f"linear/{name} {rows}", functools.partial(tle.linear, x, weight, n, bias if rows % 2 else None)
    yield (f"linear/{name} strided",
           functools.partial(tle.linear, strided(values(3, k, seed=38, dtype=dtype)), weight, n))


# GGUF type -> weights and bytes of a block, its fp16 numbers and the byte where they begin.
GGUF_TYPES = {
    "Q4_0": (32, 18, 1, 0),
    "Q4_1": (32, 20, 2, 0),
    "Q5_0": (32, 22, 1, 0),
    "Q5_1": (32, 24, 2, 0),
    "Q8_0": (32, 34, 1, 0),
    "IQ4_NL": (32, 18, 1, 0),
    "Q4_K": (256, 144, 2, 0),
    "Q5_K": (256, 176, 2, 0),
    "Q6_K": (256, 210, 1, 208),
    "IQ4_XS": (256, 136, 1, 0),
}


def gguf_cases() -> Iterator[Case]:
    """pack_gguf_weight."""
    for kind, (weights, size, halves, first) in GGUF_TYPES.items():
        for n, k in ((1, 256), (35, 512)):
            blocks = integers(n, k // weights, size, seed=40, low=0, high=255, dtype=torch.uint8)
            scales = values(n, k // weights, halves, seed=41, dtype=torch.float16, exponent=-6)
            blocks[..., first : first + 2 * halves] = scales.view(torch.uint8)
            blocks = blocks.view(n, -1)
            yield f"pack_gguf_weight/{kind} {n}x{k}", functools.partial(tle.pack_gguf_weight, blocks, kind, k)
            reverse = torch.arange(n - 1, -1, -1)
            yield (f"pack_gguf_weight/{kind} {n}x{k} rows",
                   functools.partial(tle.pack_gguf_weight, blocks, kind, k, reverse))
            packed = tle.pack_gguf_weight(blocks, kind, k)
            for rows in (1, 9):
                x = values(rows, k, seed=42, dtype=torch.bfloat16)
                yield f"linear/{kind} {n}x{k} {rows}", functools.partial(tle.linear, x, packed, n)


def attention_cases() -> Iterator[Case]:
    """attention, flash_attn_decode."""
    for name, dtype in DTYPES.items():
        for d in (1, 8, 46, 64, 80, 128, 256):
            for queries, keys in ((1, 1), (1, 65), (1, 600), (5, 70)):
                q, k, v = operands(1, 4, 2, queries, keys, d, dtype)
                yield (f"attention/{name} {d} {queries} of {keys}",
                       functools.partial(tle.attention, q, k, v, d**-0.5, causal=queries > 1))
            q, k, v = operands(1, 6, 3, 1, 130, d, dtype)
            yield (f"flash_attn_decode/{name} {d}",
                   functools.partial(tle.flash_attn_decode, q[0, :, 0], k[0], v[0], 0.125))
            yield (f"flash_attn_decode/{name} {d} seq_len",
                   functools.partial(tle.flash_attn_decode, q[0, :, 0], k[0], v[0], 0.125, 99))
        q, k, v = operands(2, 6, 2, 33, 300, 32, dtype)
        sees = integers(2, 1, 33, 300, seed=53, low=0, high=2).bool()
        added = values(1, 6, 33, 300, seed=54, dtype=dtype).masked_fill(~sees[:1], -torch.inf)
        options = {
            "everything": {},
            "causal": {"causal": True},
            "window": {"causal": True, "window": 40},
            "bool mask": {"mask": sees},
            "added mask": {"mask": added},
            "softcap": {"causal": True, "softcap": 20.0},
            "sinks": {"causal": True, "sinks": values(6, seed=55, dtype=dtype)},
            "starts": {"causal": True, "starts": torch.tensor([0, 17])},
        }
        for option, arguments in options.items():
            yield f"attention/{name} {option}", functools.partial(tle.attention, q, k, v, 0.2, **arguments)
        # Keys as a cache has them: heads apart by more than their slots, and as a projection gives them.
        wide = values(2, 2, 400, 32, seed=56, dtype=dtype)[:, :, :300]
        yield f"attention/{name} cache", functools.partial(tle.attention, q, wide, v, 0.2, causal=True)
        projected = values(2, 300, 2, 32, seed=57, dtype=dtype).transpose(1, 2)
        yield f"attention/{name} projected", functools.partial(tle.attention, q, projected, projected, 0.2, causal=True)
        q, k, v = operands(1, 4, 2, 3, 65, 192, dtype)
        yield (f"attention/{name} values of another size",
               functools.partial(tle.attention, q, k, v[..., :128], 0.1, causal=True))

    for name, dtype in DTYPES.items():
        for d, keys, queries in ((1, 65, 1), (46, 600, 1), (64, 300, 33), (128, 70, 12), (256, 70, 1)):
            q, k, v = operands(2, 6, 2, queries, keys, d, dtype)
            k, v = int8_slots(k), int8_slots(v)
            yield (f"attention/{name}-int8 {d} {queries} of {keys}",
                   functools.partial(tle.attention, q, k, v, d**-0.5, causal=queries > 1, window=40 * (queries > 1)))


def int8_slots(x: torch.Tensor) -> torch.Tensor:
    """Keys or values as an int8 cache holds them."""
    codes, scales = tle.quantize_rows(x)
    return torch.cat([codes, scales.unsqueeze(-1).view(torch.int8)], dim=-1)


def operands(batch: int, heads: int, kv_heads: int, queries: int, keys: int, d: int, dtype: torch.dtype):
    """q, k, v of an attention."""
    return (values(batch, heads, queries, d, seed=50, dtype=dtype),
            values(batch, kv_heads, keys, d, seed=51, dtype=dtype),
            values(batch, kv_heads, keys, d, seed=52, dtype=dtype))


HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM = 96, 104, 6, 2, 32
LAYER = (HEADS, KV_HEADS, HEAD_DIM, INNER, 1e-6, 0.17578125)


def layer_weights(scheme: str, dtype: torch.dtype, biases: bool, seed: int) -> list[torch.Tensor | None]:
    """The 18 weights of a decoder layer in the operator's order."""
    seeds = iter(range(seed, seed + 18))

    def linear(n: int, k: int) -> list[torch.Tensor | None]:
        weight = values(n, k, seed=next(seeds), dtype=dtype, exponent=-3)
        bias = values(n, seed=next(seeds), dtype=dtype, exponent=-2) if biases else None
        return [weight if scheme == "dense" else tle.quantize_linear_weight(weight, scheme), bias]

    def norm(n: int) -> torch.Tensor:
        return values(n, seed=next(seeds), dtype=dtype, exponent=-2, shift=1.0)

    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    weights = [norm(HIDDEN), *linear(q, HIDDEN), *linear(kv, HIDDEN), *linear(kv, HIDDEN)]
    weights += [norm(HEAD_DIM), norm(HEAD_DIM)] if biases else [None, None]
    weights += [*linear(HIDDEN, q), norm(HIDDEN)]
    return weights + [*linear(INNER, HIDDEN), *linear(INNER, HIDDEN), *linear(HIDDEN, INNER)]


def decoder_cases() -> Iterator[Case]:
    """fused_mlp, fused_transformer_layer, fused_decode_step (and planned), whole tokens, of every scheme."""
    for scheme in [*SCHEMES, "dense"]:
        for name, dtype in DTYPES.items():
            biases = dtype == torch.bfloat16
            layer = layer_weights(scheme, dtype, biases, seed=60)
            gate, gate_bias, up, up_bias, down, down_bias = layer[12:]
            for rows in (1, 5, 20):
                x = values(rows, HIDDEN, seed=80, dtype=dtype)
                yield (f"fused_mlp/{scheme}/{name} {rows}",
                       functools.partial(tle.fused_mlp, x, gate, up, down, INNER, gate_bias, up_bias, down_bias))
            for used, tokens in ((0, 7), (7, 1)):
                yield f"fused_transformer_layer/{scheme}/{name} {tokens}", layer_case(layer, dtype, used, tokens)
                if scheme == "dense":
                    yield (f"fused_transformer_layer/int8-cache/{name} {tokens}",
                           layer_case(layer, dtype, used, tokens, int8=True))
        layers = [layer_weights(scheme, torch.bfloat16, biases, seed=100 + 20 * biases) for biases in (False, True)]
        for used, tokens in ((0, 7), (7, 1)):
            yield f"fused_decode_step/{scheme} {tokens}", step_case(layers, used, tokens, planned=False)
            yield f"planned_decode_step/{scheme} {tokens}", step_case(layers, used, tokens, planned=True)
        yield f"planned_logits/{scheme} 7", token_case(layers, scheme, 7, greedy=False)
        yield f"planned_greedy_steps/{scheme} 7", token_case(layers, scheme, 7, greedy=True)


def step_inputs(dtype: torch.dtype, used: int, tokens: int, layers: int):
    """Hidden states, full caches, cos and sin; fresh caches for every run, because it writes them."""
    hidden = values(2, tokens, HIDDEN, seed=81, dtype=dtype)
    keys, caches = ([values(2, KV_HEADS, used + tokens, HEAD_DIM, seed=seed + i, dtype=dtype) for i in range(layers)]
                    for seed in (82, 92))
    cos, sin = (values(2, tokens, HEAD_DIM, seed=seed, dtype=dtype, exponent=-1) for seed in (98, 99))
    return hidden, keys, caches, cos, sin


def layer_case(layer: list[torch.Tensor | None], dtype: torch.dtype, used: int, tokens: int, int8: bool = False):
    def run():
        hidden, (k,), (v,), cos, sin = step_inputs(dtype, used, tokens, 1)
        if int8:
            k, v = int8_slots(k), int8_slots(v)
        out = tle.fused_transformer_layer(hidden, layer, k, v, used, cos, sin, *LAYER, "llama", 5, torch.tensor([0, 3]))
        return out, k, v

    return run


def step_case(layers: list[list[torch.Tensor | None]], used: int, tokens: int, planned: bool):
    def run():
        hidden, k, v, cos, sin = step_inputs(torch.bfloat16, used, tokens, len(layers))
        weights = [*layers[0], *layers[1], values(HIDDEN, seed=79, dtype=torch.bfloat16)]
        settings = (*LAYER, "llama", [1, 0], [0, 4])
        if planned:
            plan = torch.classes.tle.DecodePlan(weights, *settings)
            out = tle.planned_decode_step(hidden, plan, k, v, used, cos, sin)
        else:
            out = tle.fused_decode_step(hidden, weights, k, v, used, cos, sin, *settings)
        return out, *k, *v

    return run


def token_case(layers: list[list[torch.Tensor | None]], scheme: str, used: int, greedy: bool):
    def run():
        _, k, v, _, _ = step_inputs(torch.bfloat16, used, 1, len(layers))
        weights = [*layers[0], *layers[1], values(HIDDEN, seed=79, dtype=torch.bfloat16)]
        plan = torch.classes.tle.DecodePlan(weights, *LAYER, "llama", [1, 0], [0, 4])
        table, head = (values(50, HIDDEN, seed=seed, dtype=torch.bfloat16, exponent=-3) for seed in (70, 71))
        if scheme != "dense":
            table, head = (tle.quantize_linear_weight(weight, scheme) for weight in (table, head))
        frequencies = torch.arange(1, 17) / 16  # exact
        tokens = torch.classes.tle.TokenPlan(plan, table, head, None, 50, 50, HIDDEN, frequencies, 1.0)
        if greedy:
            # One step: how many fit into its time depends on the machine.
            k, v = ([t[:1] for t in caches] for caches in (k, v))
            stretch = torch.classes.tle.TokenStretch(tokens, k, v, used, torch.tensor([[used]]), None)
            out = tle.planned_greedy_steps(torch.tensor([3]), stretch, 1)
        else:
            positions, starts = torch.tensor([[used], [5]]), torch.tensor([0, 2])
            stretch = torch.classes.tle.TokenStretch(tokens, k, v, used, positions, starts)
            out = tle.planned_logits(torch.tensor([3, 49]), stretch)
        return out, *k, *v

    return run


CASES = (rows_cases, rotary_cases, sdot_cases, linear_cases, gguf_cases, attention_cases, decoder_cases)


def operator_digests(cases: Callable[[], Iterator[Case]]) -> dict[str, str]:
    """The digests of one of CASES at the level in force. Cases whose names agree up to the first space (operator,
    scheme, dtype) share one: that of their names and digests, in order."""
    groups: dict[str, object] = {}
    for name, run in cases():
        state = groups.setdefault(name.partition(" ")[0], hashlib.sha256())
        state.update(f"{name} {digest(run())}\n".encode())
    return {group: state.hexdigest() for group, state in groups.items()}


# ---- SmolLM2 ----

# "Why is the sky blue?" in the chat template, with its system prompt. Ids, so that no tokenizer is part of what is
# compared.
PROMPT = [1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712, 8182, 2,
          198, 1, 4093, 198, 4898, 314, 260, 6376, 4461, 47, 2, 198, 1, 520, 9531, 198]
NEW_TOKENS = 64
# What from_gguf makes of the file's own codes, beside the schemes of patch_model.
GGUF = "gguf"


def smollm2_model(scheme: str, fetch: Callable[[str], Path]) -> torch.nn.Module:
    """SmolLM2-135M-Instruct in bf16, patched with `scheme` or loaded as the GGUF file has it.

    Args:
        fetch: gives the path of what scripts/fetch.py brings by that name.
    """
    import transformers

    import tle_torch

    if scheme == GGUF:
        return tle_torch.from_gguf(fetch("smollm2"), progress=False)[0]
    model = transformers.AutoModelForCausalLM.from_pretrained(fetch("smollm2-hf"), dtype=torch.bfloat16).eval()
    tle_torch.patch_model(model, scheme, progress=False)
    return model


def smollm2_digests(model: torch.nn.Module, new_tokens: int = NEW_TOKENS) -> dict[str, object]:
    """What a patched SmolLM2-135M-Instruct says at the level in force.

    Returns:
        `logits`: the digest of the prompt's logits [1, T, vocabulary]. `tokens`: the ids of a greedy continuation.
    """
    ids = torch.tensor([PROMPT])
    with torch.inference_mode():
        logits = model(ids).logits
        answer = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new_tokens,
                                min_new_tokens=new_tokens, do_sample=False)
    return {"logits": digest(logits), "tokens": answer[0, len(PROMPT) :].tolist()}


def smollm2_digests_in_one_pass(model: torch.nn.Module, tokens: list[int]) -> dict[str, object]:
    """What smollm2_digests gives if `tokens` is the greedy continuation, without a pass for each token: the prompt and
    all tokens but the last go through the model at once, and each of `tokens` has to be the best after those before it.
    Logits do not depend on how many tokens go through at once (test_decoder.py, test_smollm2.py)."""
    with torch.inference_mode():
        logits = model(torch.tensor([PROMPT + tokens[:-1]])).logits
    after = logits[0, len(PROMPT) - 1 :].clone()
    after[:, model.generation_config.eos_token_id] = -torch.inf  # as min_new_tokens does
    return {"logits": digest(logits[:, : len(PROMPT)]), "tokens": tle.argmax(after).tolist()}


# ---- the committed files ----


def read(path: Path) -> dict:
    """The digests of a file."""
    return json.loads(path.read_text())


def write(path: Path, digests: dict) -> None:
    """One digest a line."""
    lines = [f"  {json.dumps(name)}: {json.dumps(value)}" for name, value in sorted(digests.items())]
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n")
