"""Operators on rows: rms_norm, add_rms_norm, swiglu, quantize_rows, rotary tables and rotary embedding."""

import math

import pytest
import torch
from checks import assert_same_bits, same_everywhere, ulp
from known_answers import RMS_NORM_W, RMS_NORM_X

tle = torch.ops.tle
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (3, 17), (2, 5, 64), (1, 576), (4, 1000), (0, 8), (2, 0, 8)]


def exact_rms_norm(x, weight, eps, kind):
    """In float64 up to the roundings that the kind asks for."""
    normed = x.double() * torch.rsqrt(x.double().square().mean(-1, keepdim=True) + eps)
    if kind == "llama":
        normed = normed.to(x.dtype).double()
    return normed * (1 + weight.double() if kind == "gemma" else weight.double())


# ---- rms_norm ----


def test_rms_norm_known_answer():
    """bf16, D = 128: truncating to bf16 is off by 0.0143, rounding by at most half a unit in the last place."""
    x = torch.tensor(RMS_NORM_X, dtype=torch.int16).view(torch.bfloat16)
    w = torch.tensor(RMS_NORM_W, dtype=torch.int16).view(torch.bfloat16)
    want = exact_rms_norm(x, w, 1e-6, "fp32")
    truncated = (want.float().view(torch.int32) & -65536).view(torch.float32)
    assert (truncated.double() - want).abs().max().item() == pytest.approx(0.0143, abs=1e-4)
    error = (tle.rms_norm(x, w, 1e-6).double() - want).abs().max().item()
    print(f"rms_norm known answer: largest error {error:.6f} (truncating: 0.0143)")
    assert error <= 0.0073


@pytest.mark.parametrize("kind", ["fp32", "llama", "gemma"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_rms_norm(shape, dtype, kind):
    x, w = (torch.randn(shape) * 3).to(dtype), torch.randn(shape[-1]).to(dtype)
    got = same_everywhere(lambda: tle.rms_norm(x, w, 1e-6, kind))
    want = exact_rms_norm(x, w, 1e-6, kind)
    # One rounding to dtype is half a unit; the fp32 inside adds D/16 + 8 roundings of 2^-24 to the sum (half of them
    # reach its root) and four more. The llama kind may round the normalised value to the other neighbour: one unit of
    # it times w.
    inside = (shape[-1] / 32 + 8) * 2.0**-24 * want.abs()
    rounded = 0.5 * ulp(want.to(dtype)) + (torch.finfo(dtype).eps * want.abs() if kind == "llama" else 0)
    assert ((got.double() - want).abs() <= rounded + inside + 1e-30).all()


@pytest.mark.parametrize("name, kind", [("llama.modeling_llama.LlamaRMSNorm", "llama"),
                                        ("qwen3.modeling_qwen3.Qwen3RMSNorm", "llama"),
                                        ("mistral.modeling_mistral.MistralRMSNorm", "llama"),
                                        ("gemma.modeling_gemma.GemmaRMSNorm", "gemma"),
                                        ("olmo2.modeling_olmo2.Olmo2RMSNorm", "fp32")])
def test_rms_norm_equals_hugging_face(name, kind):
    """At most one unit in the last place from the module's own result, in fewer than 1e-4 of the elements."""
    import importlib

    module, _, cls = name.rpartition(".")
    norm = getattr(importlib.import_module(f"transformers.models.{module}"), cls)(2048, eps=1e-6).bfloat16()
    norm.weight.data.normal_()
    x = torch.randn(100, 2048).bfloat16()
    with torch.no_grad():
        want, got = norm(x), tle.rms_norm(x, norm.weight, 1e-6, kind)
    differ = got != want
    # llama rounds twice, so one unit of the normalised value can become two of the product.
    units = 2 if kind == "llama" else 1
    assert differ.float().mean() < 1e-4 * units
    assert ((got.double() - want.double()).abs() <= units * ulp(want)).all()


def test_gemma_with_zero_weight_is_the_normalised_input():
    x = torch.randn(3, 64)
    got = tle.rms_norm(x, torch.zeros(64), 1e-6, "gemma")
    torch.testing.assert_close(got, torch.nn.functional.rms_norm(x, (64,), eps=1e-6))


@pytest.mark.parametrize("value", [1000.0, 300.0, 60000.0])
def test_rms_norm_fp16_does_not_overflow(value):
    x = torch.full((4, 4096), value, dtype=torch.float16) * torch.where(torch.rand(4, 4096) < 0.5, -1, 1)
    assert torch.equal(tle.rms_norm(x, torch.ones(4096, dtype=torch.float16), 1e-6), x.sign())


def test_rms_norm_strides():
    """Row pitches, transposes, slices: equal to the contiguous tensor bit for bit, and the input stays as it was."""
    qkv = torch.randn(2, 3, 4096)
    buffer = torch.randn(6, 8, 64)
    for x in (qkv[..., :2048].view(2, 3, 16, 128), torch.randn(32, 48).t(), torch.randn(5, 128)[:, ::2], buffer[:, 1:3],
              torch.randn(7).expand(3, 7), torch.as_strided(torch.randn(128), (1, 128), (2**31, 1)),
              torch.as_strided(torch.randn(40), (40, 1), (1, 7))):
        w, kept = torch.randn(x.shape[-1]), x.clone()
        assert_same_bits(tle.rms_norm(x, w, 1e-5), tle.rms_norm(x.contiguous(), w, 1e-5))
        assert_same_bits(x.contiguous(), kept.contiguous())


@pytest.mark.parametrize("dtype", DTYPES)
def test_add_rms_norm_equals_its_parts(dtype):
    x, r, w = torch.randn(5, 100).to(dtype), torch.randn(5, 100).to(dtype), torch.randn(100).to(dtype)
    kept = x.clone(), r.clone()
    normed, total = same_everywhere(lambda: tle.add_rms_norm(x, r, w, 1e-6, "llama"))
    assert_same_bits(total, x + r)
    assert_same_bits(normed, tle.rms_norm(x + r, w, 1e-6, "llama"))
    assert_same_bits((x, r), kept)


def test_nan_is_stored_as_one_pattern():
    """x86 makes negative NaNs, Arm positive ones: what is stored is 0x7FC0."""
    for dtype, bits, view in ((torch.bfloat16, 0x7FC0, torch.int16), (torch.float16, 0x7E00, torch.int16),
                              (torch.float32, 0x7FC00000, torch.int32)):
        x = torch.randn(3, 40).to(dtype)
        x[1, 7] = float("nan")
        got = tle.rms_norm(x, torch.ones(40, dtype=dtype), 1e-6)
        assert (got[1].view(view) == bits).all()
        assert got[[0, 2]].isfinite().all()


# ---- swiglu ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*SHAPES, (2, 9000)])
def test_swiglu(shape, dtype):
    gate, up = (torch.randn(shape) * 4).to(dtype), torch.randn(shape).to(dtype)
    got = same_everywhere(lambda: tle.swiglu(gate, up))
    want = torch.nn.functional.silu(gate.double()) * up.double()
    # exp is within 2 units of 2^-24 (tests/cpp/test_exp.cc), then an addition, a division and a product: 2 + 3
    # roundings; and one to dtype.
    assert ((got.double() - want).abs() <= 0.5 * ulp(want.to(dtype)) + 5 * 2.0**-24 * want.abs() + 1e-38).all()


def test_swiglu_extremes():
    gate = torch.tensor([-200.0, -89.0, -0.0, 0.0, 89.0, 200.0, torch.inf, -torch.inf, torch.nan])
    got, want = tle.swiglu(gate, torch.ones(9)), torch.nn.functional.silu(gate)
    assert torch.equal(got.isnan(), want.isnan())
    torch.testing.assert_close(got, want, equal_nan=True, rtol=1e-6, atol=1e-36)


# ---- quantize_rows ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_quantize_rows(dtype):
    x = torch.randn(6, 100).to(dtype)
    x[1] = 0
    codes, scales = same_everywhere(lambda: tle.quantize_rows(x))
    amax = x.float().abs().amax(-1)
    assert_same_bits(scales, amax / 127)
    inverse = torch.where(amax > 0, 127 / amax, torch.zeros(()))
    assert_same_bits(codes, torch.round(x.float() * inverse[:, None]).to(torch.int8))
    assert codes[1].eq(0).all() and scales[1] == 0


def test_quantize_rows_tiny_and_non_finite():
    x = torch.randn(7, 64)
    x[0] = torch.tensor([1e-39, 0.0, -1e-39, 1e-40]).repeat(16)  # 127 / amax is infinite
    for row, (index, value) in enumerate([(0, torch.nan), (37, torch.nan), (63, torch.nan), (5, torch.inf),
                                          (6, -torch.inf)], 1):
        x[row, index] = value
    codes, scales = same_everywhere(lambda: tle.quantize_rows(x))
    assert codes[:6].eq(0).all()
    assert scales[0].isfinite() and scales[1:6].isnan().all()
    clean_codes, clean_scale = tle.quantize_rows(x[6:])
    assert_same_bits((codes[6:], scales[6:]), (clean_codes, clean_scale))


# ---- rotary ----


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_tables_equal_hugging_face(dtype):
    """The angle rounds as Hugging Face rounds it; cos and sin are the nearest fp32 values, torch's within one unit."""
    from transformers.models.llama.modeling_llama import LlamaConfig, LlamaRotaryEmbedding

    rotary = LlamaRotaryEmbedding(LlamaConfig(hidden_size=256, num_attention_heads=4))
    positions = torch.cat([torch.arange(300), torch.arange(8000, 8200), torch.arange(131000, 131072)])[None]
    want = rotary(torch.zeros(1, dtype=dtype), positions)
    got = tle.rotary_tables(positions, rotary.inv_freq, 1.0, dtype)
    exact_angle = (positions[..., None].float() * rotary.inv_freq).double()
    for g, w, function in zip(got, want, (torch.cos, torch.sin)):
        exact = function(torch.cat([exact_angle, exact_angle], -1))
        assert_same_bits(g, exact.float().to(dtype))
        assert (g.double() - w.double()).abs().max() <= torch.finfo(dtype).eps


def test_rotary_tables_scaling():
    positions, inv_freq = torch.arange(5)[None], torch.tensor([1.0, 0.5, 0.1])
    cos, sin = tle.rotary_tables(positions, inv_freq, 1.5, torch.float32)
    plain, _ = tle.rotary_tables(positions, inv_freq, 1.0, torch.float32)
    assert cos.shape == sin.shape == (1, 5, 6)
    assert_same_bits(cos, plain * 1.5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim, rotary_dim", [(64, 64), (128, 128), (80, 80), (64, 32), (96, 24), (40, 38)])
def test_rotary_embedding_equals_hugging_face(head_dim, rotary_dim, dtype):
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

    # as the projections give it: [B, heads, Q, D], strided
    q = torch.randn(2, 7, 6, head_dim).to(dtype).transpose(1, 2)
    k = torch.randn(2, 7, 2, head_dim).to(dtype).transpose(1, 2)
    cos, sin = tle.rotary_tables(torch.randint(0, 4000, (2, 7)), torch.rand(rotary_dim // 2), 1.0, dtype)
    got = same_everywhere(lambda: tle.rotary_embedding(q, k, cos, sin))
    turned = apply_rotary_pos_emb(q[..., :rotary_dim], k[..., :rotary_dim], cos, sin)
    want = [torch.cat([t, x[..., rotary_dim:]], -1) for t, x in zip(turned, (q, k))]
    assert_same_bits(got, want)


# ---- bad input: one clear sentence, the argument named ----


@pytest.mark.parametrize("call, error, words", [
    (lambda: tle.rms_norm(torch.ones(2, 4, dtype=torch.int32), torch.ones(4), 1e-6), TypeError, "x must be bfloat16"),
    (lambda: tle.rms_norm(torch.ones(2, 4, dtype=torch.float64), torch.ones(4), 1e-6), TypeError, "got Double"),
    (lambda: tle.rms_norm(torch.ones(2, 4), torch.ones(5), 1e-6), ValueError, "weight must have size 4"),
    (lambda: tle.rms_norm(torch.ones(2, 4), torch.ones(1, 4), 1e-6), ValueError, "weight must have 1 dim"),
    (lambda: tle.rms_norm(torch.ones(2, 4), torch.ones(4), 1e-6, "rms"), ValueError, "kind must be"),
    (lambda: tle.rms_norm(torch.tensor(1.0), torch.ones(1), 1e-6), ValueError, "at least one dimension"),
    (lambda: tle.rms_norm(torch.ones(2, 4).bfloat16(), torch.ones(4).half(), 1e-6), TypeError,
     "weight must be BFloat16"),
    (lambda: tle.add_rms_norm(torch.ones(2, 4), torch.ones(4), torch.ones(4), 1e-6), ValueError,
     "residual must have x's shape"),
    (lambda: tle.swiglu(torch.ones(2, 4), torch.ones(2, 3)), ValueError, "up must have gate's shape"),
    (lambda: tle.swiglu(torch.ones(2, 4), torch.ones(2, 4).half()), TypeError, "up must be Float"),
    (lambda: tle.quantize_rows(torch.ones(3).long()), TypeError, "x must be bfloat16"),
    (lambda: tle.rotary_tables(torch.ones(1, 3), torch.ones(4), 1.0, torch.float32), TypeError,
     "position_ids must be Long"),
    (lambda: tle.rotary_embedding(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 8), torch.ones(1, 3, 4),
                                  torch.ones(1, 3, 4)),
     ValueError, "q and k must agree"),
    (lambda: tle.rotary_embedding(torch.ones(1, 2, 3, 4), torch.ones(1, 2, 3, 4), torch.ones(1, 3, 6),
                                  torch.ones(1, 3, 6)),
     ValueError, "at most the head size"),
])
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


# ---- torch integration ----


def samples():
    x = torch.randn(5, 48).bfloat16()
    yield tle.rms_norm.default, (x, torch.ones(48).bfloat16(), 1e-6), {}
    yield tle.rms_norm.default, (torch.randn(3, 96)[:, ::2], torch.ones(48), 1e-6, "gemma"), {}
    yield tle.rms_norm.default, (torch.randn(0, 48), torch.ones(48), 1e-6), {}
    yield tle.add_rms_norm.default, (x, x.clone(), torch.ones(48).bfloat16(), 1e-6), {}
    yield tle.swiglu.default, (x, x.clone()), {}
    yield tle.swiglu.default, (torch.randn(48, 4).t(), torch.randn(4, 48)), {}
    yield tle.quantize_rows.default, (x,), {}
    yield tle.quantize_rows.default, (torch.randn(0, 5),), {}
    yield tle.rotary_tables.default, (torch.arange(4)[None], torch.rand(8), 1.0, torch.bfloat16), {}
    q = torch.randn(2, 3, 4, 16).transpose(1, 2)
    yield tle.rotary_embedding.default, (q, q.clone(), torch.rand(1, 3, 16), torch.rand(1, 3, 16)), {}


@pytest.mark.parametrize("index", range(len(list(samples()))))
def test_opcheck(index):
    op, args, kwargs = list(samples())[index]
    torch.library.opcheck(op, args, kwargs)


def test_wanting_a_gradient_is_an_error():
    x = torch.randn(2, 8, requires_grad=True)
    with pytest.raises(RuntimeError, match="argument 'x' requires a gradient"):
        tle.rms_norm(x, torch.ones(8), 1e-6)
    with torch.no_grad():
        assert not tle.rms_norm(x, torch.ones(8), 1e-6).requires_grad
    with torch.inference_mode():
        tle.swiglu(x, x)


def test_compile_and_export():
    def block(x, r, w):
        normed, total = tle.add_rms_norm(x, r, w, 1e-6, "llama")
        return tle.swiglu(normed, total)

    class Block(torch.nn.Module):
        def forward(self, x, r, w):
            return block(x, r, w)

    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (1, 3, 6):
        args = torch.randn(rows, 32), torch.randn(rows, 32), torch.randn(32)
        assert_same_bits(compiled(*args), block(*args))
    exported = torch.export.export(Block(), args).module()
    assert_same_bits(exported(*args), block(*args))


# ---- argmax ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [1, 2, 255, 256, 257, 4099])
def test_argmax(dtype, size):
    x = torch.randn(3, 2, size).to(dtype)
    assert torch.equal(torch.ops.tle.argmax(x), x.argmax(-1))
    assert torch.equal(torch.ops.tle.argmax(-x.abs()), (-x.abs()).argmax(-1))
    wide = torch.randn(5, 2 * size).to(dtype)[:, :size]
    assert torch.equal(torch.ops.tle.argmax(wide), wide.argmax(-1))
    few = torch.randint(-1, 2, (4, size)).to(dtype)  # ties: the first
    assert torch.equal(torch.ops.tle.argmax(few), few.float().argmax(-1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_argmax_of_special_values(dtype):
    inf, nan = math.inf, math.nan
    zeros = ([0.0, -0.0], [-0.0, 0.0], [-1.0, -0.0, 0.0])
    for row in (*zeros, [-inf, -inf], [inf, nan, inf], [nan, inf], [-nan, 1.0], [-inf, 1e-7, 0.0]):
        x = torch.tensor(row, dtype=dtype)
        assert int(torch.ops.tle.argmax(x)) == int(x.float().argmax()), row


def test_argmax_of_bad_input():
    with pytest.raises(ValueError, match="last dimension"):
        torch.ops.tle.argmax(torch.empty(3, 0))
    with pytest.raises(TypeError, match="bfloat16"):
        torch.ops.tle.argmax(torch.zeros(3, dtype=torch.int32))
    assert torch.ops.tle.argmax(torch.empty(0, 3)).shape == (0,)
    torch.library.opcheck(torch.ops.tle.argmax.default, (torch.randn(2, 7),))
