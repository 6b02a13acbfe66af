"""fused_transformer_layer and fused_decode_step: the bits of their operators, and Hugging Face's values."""

import pytest
import torch
from checks import assert_same_bits, int8_slots, same_everywhere
from transformers import DynamicCache, LlamaConfig, Qwen3Config
from transformers.models.llama.modeling_llama import LlamaModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

tle = torch.ops.tle

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, EPS = 96, 104, 6, 2, 32, 1e-6


def make_layer(scheme, dtype=torch.bfloat16, bias=True, head_norms=True):
    """18 weights in the operator's order; dense when scheme is None."""
    def linear(n, k):
        w = (torch.randn(n, k) * k**-0.5).to(dtype)
        return w if scheme is None else tle.quantize_linear_weight(w, scheme)

    def vector(n, mean=0.0):
        return (torch.randn(n) * 0.3 + mean).to(dtype)

    b = (lambda n: vector(n)) if bias else (lambda n: None)
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    norm = vector(HEAD_DIM, 1.0) if head_norms else None
    attention = [linear(q, HIDDEN), b(q), linear(kv, HIDDEN), b(kv), linear(kv, HIDDEN), b(kv), norm, norm,
                 linear(HIDDEN, q), b(HIDDEN)]
    mlp = [linear(INNER, HIDDEN), b(INNER), linear(INNER, HIDDEN), b(INNER), linear(HIDDEN, INNER), b(HIDDEN)]
    return [vector(HIDDEN, 1.0), *attention, vector(HIDDEN, 1.0), *mlp]


def one_by_one(hidden, w, k_cache, v_cache, used, cos, sin, window=0, starts=None):
    """The layer out of separate operators and exact ATen ones (addition, copies); writes the cache as it does."""
    batch, tokens, _ = hidden.shape

    def heads(x, n, norm):
        x = x.view(batch, tokens, n, HEAD_DIM)
        return (x if norm is None else tle.rms_norm(x, norm, EPS, "llama")).transpose(1, 2)

    x = tle.rms_norm(hidden, w[0], EPS, "llama")
    q = heads(tle.linear(x, w[1], HEADS * HEAD_DIM, w[2]), HEADS, w[7])
    k = heads(tle.linear(x, w[3], KV_HEADS * HEAD_DIM, w[4]), KV_HEADS, w[8])
    v = heads(tle.linear(x, w[5], KV_HEADS * HEAD_DIM, w[6]), KV_HEADS, None)
    if cos is not None:
        q, k = tle.rotary_embedding(q, k, cos, sin)
    coded = k_cache.dtype == torch.int8
    k_cache[:, :, used : used + tokens] = int8_slots(k)[0] if coded else k
    v_cache[:, :, used : used + tokens] = int8_slots(v)[0] if coded else v
    keys, values = k_cache[:, :, : used + tokens], v_cache[:, :, : used + tokens]
    a = tle.attention(q, keys, values, HEAD_DIM**-0.5, None, True, window, 0.0, None, starts)
    a = a.transpose(1, 2).reshape(batch, tokens, HEADS * HEAD_DIM)
    hidden = hidden + tle.linear(a, w[9], HIDDEN, w[10])
    x = tle.rms_norm(hidden, w[11], EPS, "llama")
    return hidden + tle.fused_mlp(x, w[12], w[14], w[16], INNER, w[13], w[15], w[17])


def caches(batch, slots, dtype=torch.bfloat16, count=2):
    """NaN in every slot (int8: in its scale): what is not written must not be read."""
    if dtype == torch.int8:
        return [torch.full((batch, KV_HEADS, slots, HEAD_DIM + 4), -1, dtype=dtype) for _ in range(count)]
    return [torch.full((batch, KV_HEADS, slots, HEAD_DIM), float("nan"), dtype=dtype) for _ in range(count)]


def tables(batch, first, tokens, dtype=torch.bfloat16, rotary_dim=HEAD_DIM):
    positions = torch.arange(first, first + tokens).expand(batch, tokens)
    return tle.rotary_tables(positions, 10000.0 ** -(torch.arange(0, rotary_dim, 2) / rotary_dim), 1.0, dtype)


SHAPE = (HEADS, KV_HEADS, HEAD_DIM, INNER, EPS, HEAD_DIM**-0.5)


@pytest.mark.parametrize("scheme", [None, "w8a8", "w8a8-g32", "w4a8-g32-asym"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "variant", ["plain", "bias and norms", "partial rotary", "no rotary", "window", "padding", "int8 cache"]
)
def test_layer_equals_its_operators(variant, dtype, scheme):
    layer = make_layer(scheme, dtype, bias=variant == "bias and norms", head_norms=variant == "bias and norms")
    window = 5 if variant == "window" else 0
    starts = torch.tensor([0, 3]) if variant == "padding" else None
    for used, tokens in ((0, 7), (7, 1), (8, 3)):
        hidden = torch.randn(2, tokens, HIDDEN).to(dtype)
        cos, sin = tables(2, used, tokens, dtype, 12 if variant == "partial rotary" else HEAD_DIM)
        if variant == "no rotary":
            cos = sin = None
        if used == 0:
            k, v = caches(2, 16, torch.int8 if variant == "int8 cache" else dtype)
        kept = hidden.clone()

        def run():
            kk, vv = k.clone(), v.clone()
            out = tle.fused_transformer_layer(hidden, layer, kk, vv, used, cos, sin, *SHAPE, "llama", window, starts)
            return out, kk, vv

        got = same_everywhere(run)
        want = one_by_one(hidden, layer, k, v, used, cos, sin, window, starts)
        assert_same_bits(got, (want, k, v))
        assert_same_bits(hidden, kept)


@pytest.mark.parametrize("scheme", [None, "w8a8", "w4a8-g32"])
def test_step_equals_its_layers(scheme):
    layers = [make_layer(scheme, bias=i == 1) for i in range(3)]
    final = torch.randn(HIDDEN).bfloat16()
    flat = [w for layer in layers for w in layer] + [final]
    rope, windows = [1, 0, 1], [0, 4, 0]
    hidden = torch.randn(2, 5, HIDDEN).bfloat16()
    cos, sin = tables(2, 0, 5)
    ks, vs = caches(2, 8, count=3), caches(2, 8, count=3)
    got = tle.fused_decode_step(hidden, flat, ks, vs, 0, cos, sin, *SHAPE, "llama", rope, windows, None)
    x = hidden
    for i, layer in enumerate(layers):
        k, v = caches(2, 8)
        tables_of = (cos, sin) if rope[i] else (None, None)
        x = tle.fused_transformer_layer(x, layer, k, v, 0, *tables_of, *SHAPE, "llama", windows[i])
        assert_same_bits((ks[i], vs[i]), (k, v))
    assert_same_bits(got, tle.rms_norm(x, final, EPS, "llama"))


@pytest.mark.parametrize("scheme", [None, "w8a8", "w8a8-a32", "w4a8-g32-asym"])
def test_prefill_equals_token_by_token(scheme):
    """Also for more tokens than go through the layers at once (512), and for a padded batch against its rows alone."""
    tokens, pad = 530, 9
    calls = [slice(t, t + 1) for t in range(40)] + [slice(40, 500)] + [slice(t, t + 1) for t in range(500, tokens)]
    layer = make_layer(scheme)
    hidden = torch.randn(1, tokens, HIDDEN).bfloat16()
    cos, sin = tables(1, 0, tokens)
    k, v = caches(1, tokens)
    got = tle.fused_transformer_layer(hidden, layer, k, v, 0, cos, sin, *SHAPE)
    k1, v1 = caches(1, tokens)
    for part in calls:
        out = tle.fused_transformer_layer(hidden[:, part], layer, k1, v1, part.start, cos[:, part], sin[:, part], *SHAPE)
        assert_same_bits(out, got[:, part], str(part))
    assert_same_bits((k1, v1), (k, v))

    # The same sequence as the second row of a batch, with padding (NaN) before it; the first row fills the length.
    both = torch.full((2, tokens + pad, HIDDEN), float("nan"), dtype=torch.bfloat16)
    both[0] = torch.randn(tokens + pad, HIDDEN)
    both[1, pad:] = hidden[0]
    positions = torch.stack([torch.arange(tokens + pad), (torch.arange(tokens + pad) - pad).clamp(min=0)])
    inv_freq = 10000.0 ** -(torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    cos, sin = tle.rotary_tables(positions, inv_freq, 1.0, torch.bfloat16)
    k2, v2 = caches(2, tokens + pad)
    padded = tle.fused_transformer_layer(both, layer, k2, v2, 0, cos, sin, *SHAPE, "llama", 0, torch.tensor([0, pad]))
    assert_same_bits(padded[1:, pad:], got)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_step_equals_hugging_face(family):
    """fp32 and unquantised: the whole model within 1e-4 of Hugging Face eager, prefill and decode."""
    config_class, model_class = {"llama": (LlamaConfig, LlamaModel), "qwen3": (Qwen3Config, Qwen3Model)}[family]
    config = config_class(vocab_size=50, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=2,
                          num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, head_dim=HEAD_DIM, rms_norm_eps=EPS,
                          attention_bias=True)
    model = model_class(config).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.2)
    flat = []
    for layer in model.layers:
        a, m = layer.self_attn, layer.mlp
        norms = [getattr(a, n).weight if hasattr(a, n) else None for n in ("q_norm", "k_norm")]
        flat += [layer.input_layernorm.weight, a.q_proj.weight, a.q_proj.bias, a.k_proj.weight, a.k_proj.bias,
                 a.v_proj.weight, a.v_proj.bias, *norms, a.o_proj.weight, a.o_proj.bias,
                 layer.post_attention_layernorm.weight, m.gate_proj.weight, None, m.up_proj.weight, None,
                 m.down_proj.weight, None]
    flat.append(model.norm.weight)
    ks, vs = caches(2, 12, torch.float32, 2), caches(2, 12, torch.float32, 2)
    cache = DynamicCache(config=config)
    ids = torch.randint(0, 50, (2, 11))
    for first, tokens in ((0, 8), (8, 1), (9, 2)):
        step = ids[:, first : first + tokens]
        want = model(step, past_key_values=cache, use_cache=True).last_hidden_state
        positions = torch.arange(first, first + tokens)[None]
        cos, sin = tle.rotary_tables(positions, model.rotary_emb.inv_freq, 1.0, torch.float32)
        got = tle.fused_decode_step(model.embed_tokens(step), flat, ks, vs, first, cos, sin, *SHAPE)
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_a_failed_call_leaves_the_cache():
    layer = make_layer("w8a8")
    k, v = (torch.randn_like(c) for c in caches(1, 4))
    kept = k.clone(), v.clone()
    hidden = torch.randn(1, 2, HIDDEN).bfloat16()
    cos, sin = tables(1, 3, 2)

    def call(hidden=hidden, layer=layer, k=k, v=v, used=0, cos=cos, sin=sin, shape=SHAPE, kind="llama", window=0,
             starts=None):
        tle.fused_transformer_layer(hidden, layer, k, v, used, cos, sin, *shape, kind, window, starts)

    without = list(layer)
    without[16] = None
    swapped = list(layer)
    swapped[9] = layer[16]
    for change, error, words in (
        (dict(used=3), ValueError, "k_cache has 4 slots, and 3 used ones and 2 new tokens need 5"),
        (dict(used=-1), ValueError, "cache_len must not be negative"),
        (dict(layer=layer[:17]), ValueError, "weights must have 18 entries, got 17"),
        (dict(layer=without), ValueError, r"weights\[16\] \(down\) is missing"),
        (dict(layer=swapped), ValueError, "o has 104 in features"),
        (dict(k=k.float()), TypeError, "k_cache must be BFloat16 or int8 codes with their scales, got Float"),
        (dict(v=v.char()), TypeError, "v_cache must be BFloat16, got Char"),
        (dict(k=k.char(), v=v.char()), ValueError, r"k_cache must be \[1, 2, slots, 36\]"),
        (dict(v=v[:, :1]), ValueError, "v_cache must be"),
        (dict(k=k.transpose(2, 3).contiguous().transpose(2, 3)), ValueError, "last dimension of k_cache must be dense"),
        (dict(hidden=hidden[0]), ValueError, "hidden must have 3 dimensions"),
        (dict(hidden=hidden.int()), TypeError, "hidden must be bfloat16"),
        (dict(cos=cos[:, :1]), ValueError, "cos must have size 2"),
        (dict(sin=None), ValueError, "cos and sin must come together"),
        (dict(cos=cos.float(), sin=sin.float()), TypeError, "cos must have hidden's dtype"),
        (dict(shape=(5, 2, *SHAPE[2:])), ValueError, "multiple of num_kv_heads"),
        (dict(shape=(6, 2, 513, *SHAPE[3:])), ValueError, "head_dim must be in 1 .. 512"),
        (dict(kind="bert"), ValueError, "kind must be"),
        (dict(window=-1), ValueError, "window must not be negative"),
        (dict(starts=torch.zeros(2, dtype=torch.long)), ValueError, "starts must have size 1"),
        (dict(starts=torch.zeros(1)), TypeError, "starts must be Long"),
        (dict(starts=torch.tensor([-1])), ValueError, "starts must be in 0 .. 2"),
        (dict(starts=torch.tensor([3])), ValueError, "starts must be in 0 .. 2"),
    ):
        with pytest.raises(error, match=words):
            call(**change)
        assert_same_bits((k, v), kept)
    call()


def test_opcheck():
    layer = make_layer("w8a8")
    hidden = torch.randn(2, 3, HIDDEN).bfloat16()
    cos, sin = tables(2, 0, 3)
    k, v = (torch.zeros_like(c) for c in caches(2, 8))
    torch.library.opcheck(tle.fused_transformer_layer.default, (hidden, layer, k, v, 0, cos, sin, *SHAPE))
    torch.library.opcheck(tle.fused_transformer_layer.default,
                          (hidden, make_layer(None), k, v, 2, None, None, *SHAPE, "llama", 3, torch.tensor([0, 1])))
    torch.library.opcheck(tle.fused_decode_step.default,
                          (hidden, [*layer, *layer, torch.ones(HIDDEN)], [k, k.clone()], [v, v.clone()], 0, cos, sin,
                           *SHAPE))


def test_steady_state_allocates_nothing_and_is_one_region():
    import tle_torch
    from tle_torch.ops import _C

    tle_torch.set_num_threads(2)
    layers = [make_layer("w8a8") for _ in range(4)]
    flat = [w for layer in layers for w in layer] + [torch.ones(HIDDEN).bfloat16()]
    ks, vs = caches(1, 64, count=4), caches(1, 64, count=4)

    def step(used):
        cos, sin = tables(1, used, 1)
        tle.fused_decode_step(torch.randn(1, 1, HIDDEN).bfloat16(), flat, ks, vs, used, cos, sin, *SHAPE)

    for used in range(4):
        step(used)
    blocks, regions = _C.scratch_allocations(), _C.parallel_regions()
    for used in range(4, 64):
        step(used)
    assert _C.scratch_allocations() == blocks
    assert _C.parallel_regions() - regions == 60
