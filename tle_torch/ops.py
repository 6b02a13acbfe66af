"""The operators `torch.ops.tle.*`: loads the C++ library and gives every operator its fake (meta) kernel.

The schemas, with shapes and meaning, stand in csrc/torch/schemas.cc. A fake kernel computes the output's shape, dtype
and strides only; it is what `torch.compile`, `torch.export` and the meta device use. Errors about values stay with the
CPU kernels.
"""

from __future__ import annotations

import torch


def _load():
    """Imports the compiled module; a torch that it was not built for is named instead of a missing symbol."""
    try:
        from tle_torch import _build_info  # written by setup.py
    except ImportError:
        _build_info = None
    if _build_info is not None:
        built, here = _build_info.TORCH_VERSION, torch.__version__
        if built.split(".")[:2] != here.split(".")[:2]:
            raise ImportError(
                f"tle_torch was built for torch {built}, and torch {here} is installed: torch's C++ interface changes "
                "between minor versions. Install a matching tle_torch, or build it against this torch: "
                "pip install --no-build-isolation ."
            )
    from tle_torch import _C

    return _C


_C = _load()


def _fake(name: str):
    return torch.library.register_fake(f"tle::{name}")


def _with_last(x: torch.Tensor, last: int) -> torch.Tensor:
    return x.new_empty([*x.shape[:-1], last])


# ---- linear ----


@_fake("linear")
def _(x, weight, out_features, bias=None):
    return _with_last(x, out_features)


@_fake("empty_cache_slots")
def _(size, dtype):
    return torch.empty(size, dtype=dtype, device="cpu")


@_fake("advise_huge_pages")
def _(tensor):
    return None


@_fake("quantize_linear_weight")
def _(weight, scheme, group_size=0):
    n, k = weight.shape
    return weight.new_empty([_C.packed_bytes(scheme, n, k, group_size)], dtype=torch.uint8)


@_fake("pack_linear_weight")
def _(codes, scales, scheme, minima=None):
    n, k = codes.shape
    return codes.new_empty([_C.packed_bytes(scheme, n, k, wide=scales.dtype == torch.float32)], dtype=torch.uint8)


@_fake("pack_gguf_weight")
def _(blocks, type, in_features, rows=None, groups=None):
    return blocks.new_empty([_C.gguf_packed_bytes(type, blocks.shape[0], in_features)], dtype=torch.uint8)


@_fake("packed_embedding")
def _(ids, packed, out_features, in_features, dtype):
    return ids.new_empty([*ids.shape, in_features], dtype=dtype)


@_fake("dequantize_linear_weight")
def _(packed, out_features, in_features, dtype=torch.float32):
    return packed.new_empty([out_features, in_features], dtype=dtype)


@_fake("quantize_rows")
def _(x, group_size=0):
    groups = [-(-x.shape[-1] // group_size)] if group_size else []
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty([*x.shape[:-1], *groups], dtype=torch.float32)


@_fake("fused_mlp")
def _(x, gate, up, down, intermediate_size, gate_bias=None, up_bias=None, down_bias=None):
    return x.new_empty(x.shape)


# ---- the documented int8 operators ----


@_fake("sdot_pack_weights")
def _(weight):
    k, n = weight.shape
    return weight.new_empty([k // 4, n // 4, 4, 4])


@_fake("sdot_gemv")
def _(a, packed):
    return a.new_empty([4 * packed.shape[1]], dtype=torch.int32)


@_fake("sdot_gemv_fused_bf16")
def _(x, packed, w_scale):
    return _with_last(x, 4 * packed.shape[1])


@_fake("neon_sdot")
def _(acc, a, b):
    return acc.new_empty([4])


# ---- rows ----


@_fake("rms_norm")
def _(x, weight, eps, kind="fp32"):
    return x.new_empty(x.shape)


@_fake("add_rms_norm")
def _(x, residual, weight, eps, kind="fp32"):
    return x.new_empty(x.shape), x.new_empty(x.shape)


@_fake("swiglu")
def _(gate, up):
    return gate.new_empty(gate.shape)


@_fake("argmax")
def _(x):
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


# ---- choosing tokens ----


@_fake("top_k_logits")
def _(scores, k, filter_value):
    return scores.new_empty(scores.shape)


@_fake("top_p_logits")
def _(scores, top_p, filter_value, min_tokens_to_keep=1):
    return scores.new_empty(scores.shape)


@_fake("multinomial")
def _(probabilities, *, generator=None):
    return probabilities.new_empty([probabilities.shape[0], 1], dtype=torch.int64)


# ---- rotary position embedding ----


@_fake("rotary_tables")
def _(position_ids, inv_freq, attention_scaling, dtype):
    shape = [*position_ids.shape, 2 * inv_freq.shape[0]]
    return position_ids.new_empty(shape, dtype=dtype), position_ids.new_empty(shape, dtype=dtype)


@_fake("rotary_embedding")
def _(q, k, cos, sin):
    return q.new_empty(q.shape), k.new_empty(k.shape)


# ---- attention ----


def _value_size(v: torch.Tensor) -> int:
    return v.shape[-1] - 4 if v.dtype == torch.int8 else v.shape[-1]  # int8: codes and the bytes of a scale


@_fake("attention")
def _(q, k, v, sm_scale, mask=None, causal=False, window=0, softcap=0.0, sinks=None, starts=None):
    batch, heads, queries, _ = q.shape
    return q.new_empty([batch, queries, heads, _value_size(v)]).transpose(1, 2)


@_fake("flash_attn_decode")
def _(q, k, v, sm_scale, seq_len=None):
    return _with_last(q, _value_size(v))


# ---- whole layers ----


@_fake("fused_transformer_layer")
def _(hidden, weights, k_cache, v_cache, cache_len, cos, sin, num_heads, num_kv_heads, head_dim, intermediate_size, eps,
      sm_scale, norm_kind="llama", window=0, starts=None):
    return hidden.new_empty(hidden.shape)


@_fake("fused_decode_step")
def _(hidden, weights, k_cache, v_cache, cache_len, cos, sin, num_heads, num_kv_heads, head_dim, intermediate_size, eps,
      sm_scale, norm_kind="llama", rope=(), windows=(), starts=None):
    return hidden.new_empty(hidden.shape)
