"""linear, the packed weights of every scheme, and fused_mlp, against float64 on the same codes."""

import copy
import pickle

import pytest
import torch
from checks import assert_same_bits, same_everywhere, ulp

import tle_torch
from tle_torch.ops import _C

tle = torch.ops.tle
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
SCHEMES = _C.schemes()
# Sizes with tails in every direction: K not a multiple of a line, a group or 16; N not a multiple of a panel.
SIZES = [(1, 1), (3, 4), (16, 15), (17, 33), (33, 100), (96, 63), (70, 1040), (5, 576)]


def group_of(scheme: str) -> tuple[int, int]:
    """(weight group, activation group) of a scheme; 0: one scale a channel or row."""
    for part in scheme.split("-")[1:]:
        if part[0] == "g":
            return int(part[1:]), int(part[1:])
        if part[0] == "a" and part[1:].isdigit():
            return 0, int(part[1:])
    return 0, 0


def activations(x, scheme):
    """x as the scheme's kernels see it, in float64: codes times scales."""
    group = group_of(scheme)[1]
    codes, scales = tle.quantize_rows(x, group)
    if group == 0:
        return codes.double() * scales.double()[..., None]
    return codes.double() * scales.double().repeat_interleave(group, -1)[..., : x.shape[-1]]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("n, k", SIZES)
def test_quantised_linear(n, k, scheme, dtype):
    weight, bias = torch.randn(n, k), torch.randn(n).to(dtype)
    packed = tle.quantize_linear_weight(weight, scheme)
    values = tle.dequantize_linear_weight(packed, n, k, torch.float32).double()
    for rows in (1, 3, 9, 17):
        x = torch.randn(rows, k).to(dtype)
        got = same_everywhere(lambda: tle.linear(x, packed, n, bias))
        seen = activations(x, scheme)
        want = seen @ values.T + bias.double()
        # Integer sums are exact. Per group: the product of two scales, the conversion of the sum, an fma (two with
        # minima); then bias and the output's rounding. Each is 2^-24 of the magnitudes that are added.
        groups = -(-k // (group_of(scheme)[1] or k))
        magnitude = seen.abs() @ values.abs().T + bias.double().abs()
        # scale * q and min cancel: their own sizes count, at most 15 scales and the minimum
        if scheme.endswith("asym"):
            magnitude = magnitude + 2 * seen.abs().sum(-1, keepdim=True) * weight.abs().max()
        tolerance = (2 * groups + 4) * 2.0**-24 * magnitude + 0.5 * ulp(want.to(dtype))
        assert ((got.double() - want).abs() <= tolerance).all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packing_error_is_half_a_step(scheme):
    weight = torch.randn(48, 200) * 0.05
    packed = tle.quantize_linear_weight(weight, scheme)
    values = tle.dequantize_linear_weight(packed, 48, 200, torch.float32)
    group = group_of(scheme)[0] or 200
    for first in range(0, 200, group):
        w, v = weight[:, first : first + group], values[:, first : first + group]
        if scheme.endswith("asym"):
            step = (w.amax(-1) - w.amin(-1)) / 15
        elif scheme.startswith("w4"):
            step = w.abs().amax(-1) / 8
        else:
            step = w.abs().amax(-1) / 127
        # Half a step, a whole one where the largest value of the other sign of Q4_0 has no code, and the scale's 16-bit
        # rounding (2^-9).
        steps = 1.0 if scheme.startswith("w4") and not scheme.endswith("asym") else 0.5
        limit = step * steps * 1.01 + 16 * step * 2**-9
        assert ((w - v).abs() <= limit[:, None]).all()


@pytest.mark.parametrize("scheme", ["w4a8-g32", "w8a8-g32"])
def test_symmetric_groups_are_llama_cpp_s(scheme):
    """Q4_0 and Q8_0 of the gguf package: the same codes and fp16 scales wherever its own rounding of ties agrees."""
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(32, 256)
    kind = gguf.GGMLQuantizationType.Q4_0 if scheme.startswith("w4") else gguf.GGMLQuantizationType.Q8_0
    want = torch.from_numpy(gguf.quants.dequantize(gguf.quants.quantize(weight.numpy(), kind), kind))
    got = tle.dequantize_linear_weight(tle.quantize_linear_weight(weight, scheme), 32, 256, torch.float32)
    assert (got != want).float().mean() < 0.01


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n, k", SIZES)
def test_dense_linear(n, k, dtype):
    """Unquantised weights, in place: within the rounding of a sum in 16 lanes."""
    weight, bias = torch.randn(n, k).to(dtype), torch.randn(n).to(dtype)
    for rows in (1, 5, 17):
        x = torch.randn(rows, k).to(dtype)
        got = same_everywhere(lambda: tle.linear(x, weight, n, bias))
        want = x.double() @ weight.double().T + bias.double()
        magnitude = x.double().abs() @ weight.double().abs().T + bias.double().abs()
        tolerance = (k / 16 + 6) * 2.0**-24 * magnitude + 0.5 * ulp(want.to(dtype))
        assert ((got.double() - want).abs() <= tolerance).all()


@pytest.mark.parametrize("scheme", [*SCHEMES, "bf16"])
def test_a_row_does_not_depend_on_its_neighbours(scheme):
    weight = torch.randn(70, 256).bfloat16()
    packed = weight if scheme == "bf16" else tle.quantize_linear_weight(weight, scheme)
    x = torch.randn(33, 256).bfloat16()
    x[1, 5] = 1e4
    x[2, 6] = float("nan")
    x[3, 7], x[4, 200] = float("inf"), float("-inf")
    x[5] = 0
    got = tle.linear(x, packed, 70)
    for row in range(33):
        assert_same_bits(got[row : row + 1], tle.linear(x[row : row + 1], packed, 70), f"row {row}")
    assert not got[2:5].isfinite().any() if scheme != "bf16" else got[2].isnan().all()
    assert got[5].eq(0).all()
    # Five tokens of one sequence, and the same through a strided view.
    assert_same_bits(tle.linear(x[None, :5], packed, 70)[0], got[:5])
    wide = torch.zeros(33, 512, dtype=torch.bfloat16)
    wide[:, 100:356] = x
    assert_same_bits(tle.linear(wide[:, 100:356], packed, 70), got)
    assert_same_bits(tle.linear(x.t().contiguous().t(), packed, 70), got)


@pytest.mark.parametrize("scheme", [*SCHEMES, "bf16"])
def test_zero_and_tiny_rows(scheme):
    weight, bias = torch.randn(8, 64), torch.randn(8)
    packed = weight if scheme == "bf16" else tle.quantize_linear_weight(weight, scheme)
    x = torch.zeros(3, 64)
    x[1] = torch.randn(64)
    got = tle.linear(x, packed, 8, bias)
    assert_same_bits(got[0], bias)
    assert_same_bits(got[2], bias)
    assert_same_bits(got[1:2], tle.linear(x[1:2], packed, 8, bias))
    tiny = torch.tensor([1e-39, 0.0, -1e-39, 1e-40]).repeat(16)[None]
    assert tle.linear(tiny, packed, 8).abs().max() < 1e-30
    half = torch.full((1, 64), 6e-8, dtype=torch.float16)
    half[0, 3] = 0
    assert tle.linear(half, packed if scheme != "bf16" else weight.half(), 8).isfinite().all()


@pytest.mark.parametrize("scheme", SCHEMES)
def test_powers_of_two_are_exact(scheme):
    """f(x 2^-k) = f(x) 2^-k bit for bit: no product of scales vanishes, no sum overflows. fp32 in and out."""
    weight = torch.randn(40, 4096) * 1e-3
    packed = tle.quantize_linear_weight(weight, scheme)
    x = torch.randn(1, 4096)
    base = tle.linear(x, packed, 40)
    for exponent in range(-14, 31):
        assert_same_bits(tle.linear(x * 2.0**-exponent, packed, 40), base * 2.0**-exponent, f"2^-{exponent}")
    large = tle.linear(torch.full((1, 4096), 3e4), packed, 40)
    assert large.isfinite().all() and large.abs().max() > 0


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("kind", ["w4a8", "w4a8-asym"])
@pytest.mark.parametrize("k", [512, 40, 4304])
def test_every_group_uses_its_own_scale(kind, group, k):
    """Scale of group i is i + 1, x is non-zero in one group at a time; a last, short group counts too."""
    groups = -(-k // group)
    codes = torch.randint(0, 16, (20, k), dtype=torch.int8)
    scales = torch.arange(1.0, groups + 1).expand(20, groups).contiguous()
    minima = -8 * scales if kind.endswith("asym") else None
    scheme = kind.replace("w4a8", f"w4a8-g{group}")
    packed = tle.pack_linear_weight(codes, scales, scheme, minima)
    values = (codes.double() - 8) * scales.double().repeat_interleave(group, 1)[:, :k]
    assert torch.equal(tle.dequantize_linear_weight(packed, 20, k, torch.float32).double(), values)
    for rows in (1, 2):
        for g in range(groups):
            x = torch.zeros(rows, k)
            x[:, g * group : (g + 1) * group] = 1.0
            got = tle.linear(x, packed, 20)
            want = x.double() @ values.T
            assert (got.double() - want).abs().max() <= 1e-5 * want.abs().max() + 1e-30


def test_saturation_and_the_code_minus_128():
    """u8 x s8 pair sums saturate at 16 bits on x86 without care; the sign trick wraps at -128."""
    for sign in (1, -1):
        packed = tle.quantize_linear_weight(torch.full((2, 64), float(sign)), "w8a8")
        for rows in (1, 32):
            got = same_everywhere(lambda: tle.linear(torch.ones(rows, 64), packed, 2))
            assert torch.equal(got, torch.full((rows, 2), 64.0 * sign))
    for scheme, scales in (("w8a8", torch.ones(3)), ("w8a8-g32", torch.ones(3, 2))):
        packed = tle.pack_linear_weight(torch.full((3, 64), -128, dtype=torch.int8), scales, scheme)
        got = same_everywhere(lambda: tle.linear(torch.full((1, 64), -127.0), packed, 3))
        assert torch.equal(got, torch.full((1, 3), 1040384.0))


@pytest.mark.parametrize("scheme", [*SCHEMES, "bf16"])
def test_linear_empty(scheme):
    make = (lambda w: w) if scheme == "bf16" else (lambda w: tle.quantize_linear_weight(w, scheme))
    assert tle.linear(torch.randn(0, 32), make(torch.randn(8, 32)), 8).shape == (0, 8)
    assert tle.linear(torch.randn(2, 0, 32), make(torch.randn(8, 32)), 8).shape == (2, 0, 8)
    assert tle.linear(torch.randn(3, 32), make(torch.randn(0, 32)), 0).shape == (3, 0)
    bias = torch.randn(8)
    assert_same_bits(tle.linear(torch.randn(3, 0), make(torch.randn(8, 0)), 8, bias), bias.expand(3, 8).contiguous())


@pytest.mark.parametrize("scheme", [*SCHEMES, "bf16"])
def test_fused_mlp_equals_its_parts(scheme):
    make = (lambda w: w) if scheme == "bf16" else (lambda w: tle.quantize_linear_weight(w, scheme))
    gate, up, down = (make(torch.randn(*s).bfloat16() / 10) for s in ((150, 96), (150, 96), (96, 150)))
    biases = [torch.randn(n).bfloat16() for n in (150, 150, 96)]
    for rows in (1, 5, 70):
        x = torch.randn(2, rows, 96).bfloat16()
        got = same_everywhere(lambda: tle.fused_mlp(x, gate, up, down, 150, *biases))
        inner = tle.swiglu(tle.linear(x, gate, 150, biases[0]), tle.linear(x, up, 150, biases[1]))
        assert_same_bits(got, tle.linear(inner, down, 96, biases[2]))


@pytest.mark.parametrize("rows", [2, 20])
def test_fused_mlp_of_weights_that_want_different_activations(rows):
    x = torch.randn(rows, 96)
    gate, up, down = (
        tle.quantize_linear_weight(torch.randn(*shape), scheme)
        for shape, scheme in (((150, 96), "w8a8"), ((150, 96), "w8a8-g32"), ((96, 150), "w4a8-g128"))
    )
    got = same_everywhere(lambda: tle.fused_mlp(x, gate, up, down, 150))
    inner = tle.swiglu(tle.linear(x, gate, 150), tle.linear(x, up, 150))
    assert_same_bits(got, tle.linear(inner, down, 96))


# ---- the packed tensor as a tensor ----


@pytest.mark.parametrize("scheme", SCHEMES)
def test_packed_weight_is_a_plain_tensor(scheme, tmp_path):
    from safetensors.torch import load_file, save_file

    packed = tle.quantize_linear_weight(torch.randn(20, 100), scheme)
    x = torch.randn(2, 100)
    want = tle.linear(x, packed, 20)
    torch.save(packed, tmp_path / "p.pt")
    save_file({"w": packed}, tmp_path / "p.safetensors")
    shifted = torch.empty(packed.numel() + 8, dtype=torch.uint8)[8:].copy_(packed)  # only 8-byte aligned
    for other in (copy.deepcopy(packed), pickle.loads(pickle.dumps(packed)), torch.load(tmp_path / "p.pt", mmap=True),
                  load_file(tmp_path / "p.safetensors")["w"], shifted):
        assert_same_bits(tle.linear(x, other, 20), want)
    info = _C.packed_info(bytes(packed[:64].tolist()), packed.numel())
    assert info["scheme"] == scheme and info["out_features"] == 20 and info["in_features"] == 100


def test_a_reader_refuses_what_it_does_not_know():
    packed = tle.quantize_linear_weight(torch.randn(20, 100), "w8a8")
    x = torch.randn(2, 100)
    for at, value, words in ((0, 0, "magic"), (4, 9, "version 9"), (6, 77, "scheme 77"), (8, 33, "needs"),
                             (36, 9, "code bits"),
                             (60, 1, "reserved field")):
        broken = packed.clone()
        broken[at] = value
        with pytest.raises(ValueError, match=words):
            tle.linear(x, broken, 20)
    with pytest.raises(ValueError, match="no header"):
        tle.linear(x, packed[:10], 20)
    with pytest.raises(ValueError, match="8-byte aligned"):
        tle.linear(x, torch.empty(packed.numel() + 1, dtype=torch.uint8)[1:].copy_(packed), 20)


W = torch.ones(8, 64)


@pytest.mark.parametrize("call, error, words", [
    (lambda: tle.linear(torch.ones(2, 64), tle.quantize_linear_weight(W, "w8a8"), 9), ValueError,
     "has 8 out features, expected 9"),
    (lambda: tle.linear(torch.ones(2, 63), tle.quantize_linear_weight(W, "w8a8"), 8), ValueError,
     "has 64 in features, the input has 63"),
    (lambda: tle.linear(torch.ones(2, 64).bfloat16(), W, 8), TypeError, "weight must have the input's dtype"),
    (lambda: tle.linear(torch.ones(2, 64), W, 8, torch.ones(7)), ValueError, "bias must have size 8"),
    (lambda: tle.linear(torch.ones(2, 64), W, 8, torch.ones(8).half()), TypeError, "bias must be Float"),
    (lambda: tle.linear(torch.ones(2, 64).int(), W, 8), TypeError, "x must be bfloat16"),
    (lambda: tle.linear(torch.tensor(1.0), W, 8), ValueError, "at least one dimension"),
    (lambda: tle.linear(torch.ones(2, 64), W.to_sparse(), 8), RuntimeError, "strided|sparse|Sparse"),
    (lambda: tle.quantize_linear_weight(W, "w2a8"), ValueError, "unknown scheme 'w2a8'; known are w8a8"),
    (lambda: tle.quantize_linear_weight(W, "w4a8", 16), ValueError, "group_size must be 32, 64 or 128, got 16"),
    (lambda: tle.quantize_linear_weight(W, "w8a8", 32), ValueError, "group_size"),
    (lambda: tle.quantize_linear_weight(W[0], "w8a8"), ValueError, "weight must have 2 dimensions"),
    (lambda: tle.quantize_linear_weight(torch.ones(2, 133145), "w8a8"), ValueError, "could overflow"),
    (lambda: tle.pack_linear_weight(torch.full((1, 132105), -128, dtype=torch.int8), torch.ones(1), "w8a8"), ValueError,
     "-128"),
    (lambda: tle.pack_linear_weight(torch.full((1, 64), 16, dtype=torch.int8), torch.ones(1, 2), "w4a8-g32"),
     ValueError, "0 .. 15"),
    (lambda: tle.pack_linear_weight(torch.ones(1, 64, dtype=torch.int8), torch.ones(1, 3), "w4a8-g32"), ValueError,
     "one per group"),
    (lambda: tle.pack_linear_weight(torch.ones(1, 64, dtype=torch.int8), torch.ones(1, 2), "w4a8-g32-asym"), ValueError,
     "needs minima"),
    (lambda: tle.dequantize_linear_weight(tle.quantize_linear_weight(W, "w8a8"), 9, 64), ValueError, "expected"),
    (lambda: tle.fused_mlp(torch.ones(2, 64), W, W, W, 8), ValueError, "down has 8 out features, expected 64"),
    (lambda: tle.quantize_rows(torch.ones(2, 64), 7), ValueError, "group_size"),
])
def test_bad_input(call, error, words):
    with pytest.raises(error, match=words):
        call()


def samples():
    x, w = torch.randn(5, 100).bfloat16(), torch.randn(20, 100).bfloat16()
    for scheme in SCHEMES:
        packed = tle.quantize_linear_weight(w, scheme)
        yield tle.quantize_linear_weight.default, (w, scheme)
        yield tle.linear.default, (x, packed, 20)
        yield tle.dequantize_linear_weight.default, (packed, 20, 100, torch.bfloat16)
    yield tle.linear.default, (x, w, 20, torch.randn(20))
    yield tle.linear.default, (torch.randn(0, 100), torch.randn(20, 100), 20)
    yield tle.linear.default, (torch.randn(100, 5).t(), torch.randn(20, 100), 20)
    yield tle.pack_linear_weight.default, (torch.ones(4, 64, dtype=torch.int8), torch.ones(4), "w8a8")
    yield tle.pack_linear_weight.default, (torch.ones(4, 64, dtype=torch.int8), torch.ones(4, 2), "w4a8-g32")
    yield tle.pack_linear_weight.default, (torch.ones(4, 64, dtype=torch.int8), torch.ones(4, 2).half(),
                                           "w4a8-g32-asym",
                                           torch.ones(4, 2).half())
    yield tle.quantize_rows.default, (x, 32)
    square = torch.randn(64, 64)
    yield tle.fused_mlp.default, (torch.randn(2, 3, 64), square, square, square, 64)


@pytest.mark.parametrize("index", range(len(list(samples()))))
def test_opcheck(index):
    op, args = list(samples())[index]
    torch.library.opcheck(op, args)


def test_threads_do_not_change_bits():
    """Row counts and sizes that do not divide by the number of threads."""
    packed = [tle.quantize_linear_weight(torch.randn(n, 512), "w8a8") for n in (10, 2560)]
    x = torch.randn(3, 512).bfloat16()
    tle_torch.set_num_threads(1)
    want = [tle.linear(x, p, n) for p, n in zip(packed, (10, 2560))]
    try:
        for threads in (2, 3, 5, 6, 7, 16):
            tle_torch.set_num_threads(threads)
            assert_same_bits([tle.linear(x, p, n) for p, n in zip(packed, (10, 2560))], want, f"{threads} threads")
    finally:
        tle_torch.set_num_threads(2)
