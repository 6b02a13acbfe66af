"""The documented int8 operators: sdot_pack_weights, sdot_gemv, sdot_gemv_fused_bf16, neon_sdot."""

import pytest
import torch
from checks import assert_same_bits, same_everywhere

tle = torch.ops.tle


def codes(*shape, limit=128):
    """Random int8 from -limit to 127."""
    return torch.randint(-limit, 128, shape, dtype=torch.int8)


def product(a, weight):
    """a [..., K] times weight [K, N] in int64: the scalar definition of what the operators sum up."""
    return a.to(torch.int64) @ weight.to(torch.int64)


def quantized(x):
    """Codes and scales of bf16 rows, from the definition: 127 / amax in fp32, round half to even, 0 and NaN as
    documented."""
    x = x.float()
    amax = x.abs().amax(-1, keepdim=True)
    finite = torch.isfinite(x).all(-1, keepdim=True)
    inv = torch.full_like(amax, 127) / amax  # `127 / amax` would be 127 times the rounded reciprocal
    inv = torch.where(finite & torch.isfinite(inv), inv, torch.zeros_like(inv))
    q = torch.where(finite, torch.round(torch.nan_to_num(x, 0, 0, 0) * inv), torch.zeros_like(x)).to(torch.int8)
    return q, torch.where(finite, amax / 127, torch.full_like(amax, torch.nan))


def fused(x, weight, w_scale):
    q, scale = quantized(x)
    return (product(q, weight).float() * scale * w_scale).bfloat16()


# ---- sdot_pack_weights ----


@pytest.mark.parametrize("k, n", [(4, 4), (8, 12), (64, 100), (0, 8), (8, 0)])
def test_pack_puts_four_k_of_four_channels_together(k, n):
    weight = codes(k, n)
    packed = tle.sdot_pack_weights(weight)
    assert packed.shape == (k // 4, n // 4, 4, 4) and packed.is_contiguous()
    kb, nb, channel, inner = torch.meshgrid(*(torch.arange(s) for s in packed.shape), indexing="ij")
    assert torch.equal(packed, weight[4 * kb + inner, 4 * nb + channel])


def test_pack_takes_any_strides():
    weight = codes(24, 16)
    assert torch.equal(tle.sdot_pack_weights(weight.t().contiguous().t()), tle.sdot_pack_weights(weight))
    wide = codes(24, 32)
    assert torch.equal(tle.sdot_pack_weights(wide[:, ::2]), tle.sdot_pack_weights(wide[:, ::2].contiguous()))


@pytest.mark.parametrize("weight, error, message", [
    (torch.zeros(6, 4, dtype=torch.int8), ValueError, r"weight must have sizes .* multiples of 4, got \[6, 4\]"),
    (torch.zeros(4, 7, dtype=torch.int8), ValueError, r"weight must have sizes .* multiples of 4, got \[4, 7\]"),
    (torch.zeros(4, dtype=torch.int8), ValueError, r"weight must have 2 dimensions, got \[4\]"),
    (torch.zeros(4, 4), TypeError, "weight must be Char, got Float"),
    (torch.zeros(4, 4, dtype=torch.uint8), TypeError, "weight must be Char, got Byte"),
])
def test_pack_refuses(weight, error, message):
    with pytest.raises(error, match="sdot_pack_weights: " + message):
        tle.sdot_pack_weights(weight)


# ---- sdot_gemv ----


@pytest.mark.parametrize("k", [4, 16, 48, 100, 1040])
@pytest.mark.parametrize("n", [4, 8, 16, 28, 64, 96, 2560])
def test_gemv_is_exact(k, n):
    a, weight = codes(k), codes(k, n)
    packed = tle.sdot_pack_weights(weight)
    got = same_everywhere(lambda: tle.sdot_gemv(a, packed))
    assert got.dtype == torch.int32
    assert torch.equal(got.long(), product(a, weight))


@pytest.mark.parametrize("a_code", [127, -127, -128])
@pytest.mark.parametrize("w_code", [127, -127, -128])
def test_gemv_does_not_saturate_or_wrap(a_code, w_code):
    a, weight = torch.full((64,), a_code, dtype=torch.int8), torch.full((64, 8), w_code, dtype=torch.int8)
    got = same_everywhere(lambda: tle.sdot_gemv(a, tle.sdot_pack_weights(weight)))
    assert got.tolist() == [64 * a_code * w_code] * 8


def test_gemv_takes_any_strides():
    a, packed = codes(64), tle.sdot_pack_weights(codes(64, 24))
    want = tle.sdot_gemv(a, packed)
    assert_same_bits(tle.sdot_gemv(torch.stack([a, a], 1)[:, 0], packed), want)
    assert_same_bits(tle.sdot_gemv(a, torch.stack([packed, packed], -1)[..., 0]), want)


def test_gemv_sizes_without_elements():
    assert tle.sdot_gemv(codes(0), tle.sdot_pack_weights(codes(0, 8))).tolist() == [0] * 8
    assert tle.sdot_gemv(codes(8), tle.sdot_pack_weights(codes(8, 0))).shape == (0,)


def test_gemv_largest_k():
    """Up to the length at which no int32 sum can overflow, which is shorter when -128 occurs on both sides."""
    for code, k in [(127, 133_144), (-128, 131_068)]:
        a, packed = torch.full((k,), code, dtype=torch.int8), torch.full((k // 4, 1, 4, 4), code, dtype=torch.int8)
        assert tle.sdot_gemv(a, packed).tolist() == [code * code * k] * 4
    for code, k in [(127, 133_148), (-128, 131_072), (-128, 133_144)]:
        a, packed = torch.full((k,), code, dtype=torch.int8), torch.full((k // 4, 1, 4, 4), code, dtype=torch.int8)
        with pytest.raises(ValueError, match=f"K = {k} .* could overflow an int32 sum; the limit is"):
            tle.sdot_gemv(a, packed)


@pytest.mark.parametrize("a, packed, error, message", [
    (torch.zeros(8), torch.zeros(2, 1, 4, 4, dtype=torch.int8), TypeError, "a must be Char, got Float"),
    (codes(1, 8), torch.zeros(2, 1, 4, 4, dtype=torch.int8), ValueError, r"a must have 1 dimensions, got \[1, 8\]"),
    (codes(8), torch.zeros(8, 4, dtype=torch.int8), ValueError, r"packed must have 4 dimensions, got \[8, 4\]"),
    (codes(8), torch.zeros(2, 1, 4, 8, dtype=torch.int8), ValueError, "packed must have size 4 in dimension 3"),
    (codes(8), torch.zeros(3, 1, 4, 4, dtype=torch.int8), ValueError, "packed is for K = 12 .* the input has 8"),
    (codes(8), torch.zeros(2, 1, 4, 4, dtype=torch.int32), TypeError, "packed must be Char, got Int"),
])
def test_gemv_refuses(a, packed, error, message):
    with pytest.raises(error, match="sdot_gemv: " + message):
        tle.sdot_gemv(a, packed)


# ---- sdot_gemv_fused_bf16 ----


@pytest.mark.parametrize("shape", [(64,), (1, 64), (5, 64), (2, 3, 48), (1, 5, 1040), (33, 100)])
@pytest.mark.parametrize("n", [4, 12, 96])
def test_fused_equals_its_definition(shape, n):
    x, weight, w_scale = torch.randn(shape).bfloat16(), codes(shape[-1], n), torch.rand(n) * 0.01
    got = same_everywhere(lambda: tle.sdot_gemv_fused_bf16(x, tle.sdot_pack_weights(weight), w_scale))
    assert_same_bits(got, fused(x, weight, w_scale))


@pytest.mark.parametrize("n", [12, 2560])
def test_fused_rows_do_not_depend_on_their_neighbours(n):
    x, packed, w_scale = torch.randn(9, 256).bfloat16(), tle.sdot_pack_weights(codes(256, n)), torch.rand(n)
    x[1] *= 1e4  # a scale for each row: the outlier must stay in its own
    got = tle.sdot_gemv_fused_bf16(x, packed, w_scale)
    for row in range(9):
        assert_same_bits(tle.sdot_gemv_fused_bf16(x[row], packed, w_scale), got[row])


def test_fused_zero_and_tiny_rows():
    weight, w_scale = codes(64, 8), torch.rand(8)
    x = torch.zeros(4, 64).bfloat16()
    x[1] = torch.randn(64)
    x[2, ::2] = 1e-39  # 127 / amax is infinite
    x[3, 0] = -1e-39
    got = same_everywhere(lambda: tle.sdot_gemv_fused_bf16(x, tle.sdot_pack_weights(weight), w_scale))
    assert_same_bits(got, fused(x, weight, w_scale))
    assert (got[[0, 2, 3]] == 0).all() and torch.isfinite(got).all()


@pytest.mark.parametrize("index", [0, 37, 63])
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_fused_non_finite_rows_are_nan_and_touch_no_other(index, value):
    x, weight, w_scale = torch.randn(4, 64).bfloat16(), codes(64, 20), torch.rand(20)
    packed = tle.sdot_pack_weights(weight)
    clean = tle.sdot_gemv_fused_bf16(x, packed, w_scale)
    x[2, index] = value
    got = same_everywhere(lambda: tle.sdot_gemv_fused_bf16(x, packed, w_scale))
    assert_same_bits(got[[0, 1, 3]], clean[[0, 1, 3]])
    assert (got[2].view(torch.int16) == 0x7FC0).all()


def test_fused_takes_any_strides():
    packed, w_scale = tle.sdot_pack_weights(codes(128, 12)), torch.rand(12)
    buffer = torch.randn(2, 3, 400).bfloat16()
    for x in (
        torch.randn(1, 128).bfloat16().expand(4, 128),
        torch.randn(128).bfloat16().as_strided((1, 128), (2**31, 1)),
        buffer[..., 7:135],
        buffer[:, 1:, :256:2],
        buffer.transpose(0, 1)[..., :128],
        torch.randn(128, 5).bfloat16().t(),
    ):
        assert_same_bits(tle.sdot_gemv_fused_bf16(x, packed, w_scale),
                         tle.sdot_gemv_fused_bf16(x.contiguous(), packed, w_scale))
    column = torch.randn(12, 2)[:, 0]
    x = torch.randn(3, 128).bfloat16()
    assert_same_bits(tle.sdot_gemv_fused_bf16(x, packed, column),
                     tle.sdot_gemv_fused_bf16(x, packed, column.contiguous()))


@pytest.mark.parametrize("shape, n", [((0, 8), 4), ((2, 0, 8), 4), ((3, 8), 0), ((3, 0), 8)])
def test_fused_sizes_without_elements(shape, n):
    x, packed = torch.randn(shape).bfloat16(), tle.sdot_pack_weights(codes(shape[-1], n))
    got = tle.sdot_gemv_fused_bf16(x, packed, torch.rand(n))
    assert got.shape == (*shape[:-1], n) and (got == 0).all()


def test_fused_largest_k():
    x = torch.ones(132_104 + 4).bfloat16()
    packed = torch.full((x.shape[0] // 4, 1, 4, 4), -128, dtype=torch.int8)
    with pytest.raises(ValueError, match="K = 132108 .* could overflow an int32 sum; the limit is 132104"):
        tle.sdot_gemv_fused_bf16(x, packed, torch.ones(4))
    got = tle.sdot_gemv_fused_bf16(x[:-4], packed[:-1], torch.ones(4))
    assert_same_bits(got, torch.full((4,), -128.0 * 132_104, dtype=torch.bfloat16))


@pytest.mark.parametrize("change, error, message", [
    ({"x": torch.randn(2, 8)}, TypeError, "x must be BFloat16, got Float"),
    ({"x": torch.tensor(1.0).bfloat16()}, ValueError, "x must have at least one dimension"),
    ({"x": torch.randn(2, 12).bfloat16()}, ValueError, "packed is for K = 8 .* the input has 12"),
    ({"w_scale": torch.ones(8)}, ValueError, r"w_scale must have size 4 in dimension 0 .* got \[8\]"),
    ({"w_scale": torch.ones(4, 1)}, ValueError, "w_scale must have 1 dimensions"),
    ({"w_scale": torch.ones(4).bfloat16()}, TypeError, "w_scale must be Float, got BFloat16"),
    ({"packed": torch.zeros(2, 1, 4, 3, dtype=torch.int8)}, ValueError, "packed must have size 4 in dimension 3"),
])
def test_fused_refuses(change, error, message):
    arguments = {"x": torch.randn(2, 8).bfloat16(), "packed": tle.sdot_pack_weights(codes(8, 4)),
                 "w_scale": torch.ones(4)}
    with pytest.raises(error, match="sdot_gemv_fused_bf16: " + message):
        tle.sdot_gemv_fused_bf16(**{**arguments, **change})


def test_fused_wants_no_gradient():
    x = torch.randn(2, 8).bfloat16().requires_grad_()
    with pytest.raises(RuntimeError, match="'x' requires a gradient"):
        tle.sdot_gemv_fused_bf16(x, tle.sdot_pack_weights(codes(8, 4)), torch.ones(4))


# ---- neon_sdot ----


def test_neon_sdot():
    acc, a, b = torch.randint(-1000, 1000, (4,), dtype=torch.int32), codes(16), codes(16)
    want = acc + (a.int() * b.int()).view(4, 4).sum(1)
    assert_same_bits(tle.neon_sdot(acc, a, b), want.int())
    assert_same_bits(tle.neon_sdot(acc, torch.stack([a, a], 1)[:, 1], b), want.int())


def test_neon_sdot_wraps_as_the_instruction_does():
    ones = torch.full((16,), 127, dtype=torch.int8)
    got = tle.neon_sdot(torch.full((4,), 2**31 - 1, dtype=torch.int32), ones, ones)
    assert got.tolist() == [2**31 - 1 + 4 * 127 * 127 - 2**32] * 4


@pytest.mark.parametrize("change, error, message", [
    ({"acc": torch.zeros(4)}, TypeError, "acc must be Int, got Float"),
    ({"acc": torch.zeros(5, dtype=torch.int32)}, ValueError, "acc must have size 4 in dimension 0"),
    ({"a": torch.zeros(16, dtype=torch.int32)}, TypeError, "a must be Char, got Int"),
    ({"b": torch.zeros(12, dtype=torch.int8)}, ValueError, "b must have size 16 in dimension 0"),
    ({"b": torch.zeros(4, 4, dtype=torch.int8)}, ValueError, "b must have 1 dimensions"),
])
def test_neon_sdot_refuses(change, error, message):
    arguments = {"acc": torch.zeros(4, dtype=torch.int32), "a": codes(16), "b": codes(16)}
    with pytest.raises(error, match="neon_sdot: " + message):
        tle.neon_sdot(**{**arguments, **change})


# ---- the dispatcher's view ----


@pytest.mark.parametrize("name, arguments", [
    ("sdot_pack_weights", lambda: (codes(8, 12),)),
    ("sdot_pack_weights", lambda: (codes(12, 8).t(),)),
    ("sdot_gemv", lambda: (codes(8), tle.sdot_pack_weights(codes(8, 12)))),
    ("sdot_gemv_fused_bf16",
     lambda: (torch.randn(5, 8).bfloat16(), tle.sdot_pack_weights(codes(8, 12)), torch.rand(12))),
    ("sdot_gemv_fused_bf16",
     lambda: (torch.randn(8, 5).bfloat16().t(), tle.sdot_pack_weights(codes(8, 12)), torch.rand(12))),
    ("sdot_gemv_fused_bf16",
     lambda: (torch.randn(0, 8).bfloat16(), tle.sdot_pack_weights(codes(8, 12)), torch.rand(12))),
    ("neon_sdot", lambda: (torch.zeros(4, dtype=torch.int32), codes(16), codes(16))),
])
def test_opcheck(name, arguments):
    torch.library.opcheck(getattr(tle, name).default, arguments())
