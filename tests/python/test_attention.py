"""attention and flash_attn_decode: against float64, PyTorch and Hugging Face, and bit for bit against themselves."""

import ctypes
import mmap
import time

import pytest
import torch
from checks import assert_same_bits, same_everywhere, ulp

import tle_torch

tle = torch.ops.tle
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
EPS = 2.0**-24
HEAD_SIZES = [1, 8, 46, 64, 72, 80, 96, 112, 120, 128, 192, 256, 512]


def allowed_keys(queries, keys, batch=1, causal=False, window=0, starts=None):
    """bool [batch, 1, queries, keys]: what causality (aligned to the last key), window and starts leave."""
    last = torch.arange(queries).view(1, 1, -1, 1) + keys - queries if causal else torch.tensor(keys - 1)
    key = torch.arange(keys).view(1, 1, 1, -1)
    allowed = (key <= last) & (key >= 0)
    if window:
        allowed = allowed & (key > last - window)
    if starts is not None:
        allowed = allowed & (key >= starts.view(-1, 1, 1, 1))
    return allowed.expand(batch, 1, queries, keys)


def exact(q, k, v, scale, mask=None, causal=False, window=0, softcap=0.0, sinks=None, starts=None):
    """In float64, and a bound for the error of fp32 arithmetic that rounds once to q's dtype at the end."""
    group = q.shape[1] // k.shape[1]
    qd, kd, vd = q.double(), k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = qd @ kd.transpose(2, 3) * scale
    # A lane adds D / 16 products, the tree four sums; then the scale and the mask. tanh's error is that of exp and a
    # division.
    error = (q.shape[3] / 16 + 7) * EPS * (qd.abs() @ kd.abs().transpose(2, 3) * abs(scale))
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
        error = error + 8 * EPS * softcap
    allowed = allowed_keys(*scores.shape[2:], q.shape[0], causal, window, starts)
    if mask is not None and mask.dtype == torch.bool:
        allowed = allowed & mask
    elif mask is not None:
        scores = scores + mask.double()
        error = error + EPS * scores.abs().nan_to_num(posinf=0)
        allowed = allowed & (mask != float("-inf"))
    scores = scores.masked_fill(~allowed, float("-inf"))
    highest = scores.amax(-1, keepdim=True) if scores.shape[-1] else scores.new_zeros(*scores.shape[:-1], 1)
    if sinks is not None:
        highest = torch.maximum(highest, sinks.double().view(1, -1, 1, 1))
    highest = highest.masked_fill(~allowed.any(-1, keepdim=True), 0.0)
    weights = torch.exp(scores - highest)
    total = weights.sum(-1, keepdim=True)
    if sinks is not None:
        total = total + torch.exp(sinks.double().view(1, -1, 1, 1) - highest)
    weights = (weights / total).nan_to_num(0.0)
    out = weights @ vd
    # The error of a score, and of the subtraction of the maximum, is the relative error of its weight, which stands
    # above and below the fraction's bar. A block's chain has 256 roundings; exp is good to 1.08 units of 2^-23; each
    # further block rescales twice.
    spread = (highest - scores).masked_fill(~allowed, 0.0).nan_to_num(0.0)
    relative = torch.where(allowed, error + EPS * spread, 0.0).amax(-1, keepdim=True) if scores.shape[-1] else 0.0
    roundings = 256 + 8 + 4 * (scores.shape[-1] / 256 + 1)
    bound = (2 * relative + roundings * EPS) * (weights @ vd.abs()) + 0.5 * ulp(out.to(q.dtype)) + 1e-38
    return out, bound


def assert_close(got, q, k, v, scale, **options):
    want, bound = exact(q, k, v, scale, **options)
    assert got.shape == want.shape
    excess = (got.double() - want).abs() - bound
    assert (excess <= 0).all(), f"{excess.max().item()} above the bound"


def operands(batch, heads, kv_heads, queries, keys, d, dv=None, dtype=torch.float32):
    return (torch.randn(batch, heads, queries, d).to(dtype), torch.randn(batch, kv_heads, keys, d).to(dtype),
            torch.randn(batch, kv_heads, keys, dv or d).to(dtype))


# ---- values ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", HEAD_SIZES)
@pytest.mark.parametrize("keys", [1, 65])
def test_every_head_size(d, keys, dtype):
    q, k, v = operands(1, 2, 1, 1, keys, d, dtype=dtype)
    got = same_everywhere(lambda: tle.attention(q, k, v, d**-0.5))
    assert_close(got, q, k, v, d**-0.5)
    assert_same_bits(tle.flash_attn_decode(q[0, :, 0], k[0], v[0], d**-0.5), got[0, :, 0])


def test_keys_and_values_of_different_sizes():
    q, k, v = operands(1, 4, 2, 3, 65, 192, 128, torch.bfloat16)
    got = same_everywhere(lambda: tle.attention(q, k, v, 0.1, causal=True))
    assert_close(got, q, k, v, 0.1, causal=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("queries, keys", [(1, 1), (1, 600), (5, 5), (70, 70), (33, 300), (3, 2), (300, 300)])
@pytest.mark.parametrize("window", [0, 1, 40, 256])
def test_causal(queries, keys, window, dtype):
    batch = 1 if queries == 300 else 2
    q, k, v = operands(batch, 6, 2, queries, keys, 32, dtype=dtype)
    got = same_everywhere(lambda: tle.attention(q, k, v, 0.2, causal=True, window=window))
    assert_close(got, q, k, v, 0.2, causal=True, window=window)


def test_causal_is_aligned_to_the_last_key():
    """Three new queries at the end of eight keys: query i averages the first 6 + i."""
    v = torch.eye(8).view(1, 1, 8, 8)
    got = tle.attention(torch.zeros(1, 1, 3, 4), torch.randn(1, 1, 8, 4), v, 1.0, causal=True)
    for i in range(3):
        want = torch.zeros(8)
        want[: 6 + i] = torch.tensor(1.0) / (6 + i)
        assert_same_bits(got[0, 0, i], want)


@pytest.mark.parametrize("heads, kv_heads", [(14, 2), (28, 4), (9, 3), (24, 8), (15, 5), (8, 1), (6, 6), (71, 1)])
def test_a_query_head_reads_its_groups_keys(heads, kv_heads):
    q, k, _ = operands(1, heads, kv_heads, 2, 65, 16)
    v = torch.arange(kv_heads, dtype=torch.float32).view(1, -1, 1, 1).expand(1, kv_heads, 65, 16)
    want = (torch.arange(heads) // (heads // kv_heads)).float().view(1, -1, 1, 1).expand(1, heads, 2, 16)
    torch.testing.assert_close(tle.attention(q, k, v, 0.3), want, rtol=1e-6, atol=0)
    torch.testing.assert_close(tle.flash_attn_decode(q[0, :, 0], k[0], v[0], 0.3), want[0, :, 0], rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", DTYPES)
def test_against_scaled_dot_product_attention(dtype):
    q, k, v = operands(2, 8, 8, 64, 64, 64, dtype=dtype)
    mask = torch.rand(2, 1, 64, 64) < 0.7
    mask[..., 0] = True
    for options in ({"is_causal": True}, {"attn_mask": mask}):
        want = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double(), **options)
        got = tle.attention(q, k, v, 0.125, options.get("attn_mask"), "is_causal" in options)
        eps = torch.finfo(dtype).eps
        torch.testing.assert_close(got, want.to(dtype), rtol=2 * eps, atol=4 * eps)


@pytest.mark.parametrize("keys", [63, 64, 65, 127, 129])
def test_softcap_is_applied_before_masking(keys):
    """Equal scores of 0 under a cap of 1: the mean of the values, whatever a kernel pads its tiles with."""
    q, k, v = torch.zeros(1, 1, 1, 8), torch.randn(1, 1, keys, 8), torch.ones(1, 1, keys, 8)
    got = tle.attention(q, k, v, 1.0, softcap=1.0)
    assert (got == 1.0).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("softcap", [1.0, 50.0])
def test_softcap(softcap, dtype):
    q, k, v = operands(1, 4, 2, 5, 300, 64, dtype=dtype)
    got = same_everywhere(lambda: tle.attention(q * 3, k, v, 1.0, causal=True, softcap=softcap))
    assert_close(got, q * 3, k, v, 1.0, causal=True, softcap=softcap)


def test_a_sink_takes_its_share_of_the_denominator():
    q, k, v = torch.zeros(1, 1, 1, 8), torch.randn(1, 1, 3, 8), torch.ones(1, 1, 3, 8)
    got = tle.attention(q, k, v, 1.0, sinks=torch.zeros(1))
    assert (got == 0.75).all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sinks_in_fp32", [False, True])
def test_sinks(sinks_in_fp32, dtype):
    q, k, v = operands(2, 4, 2, 3, 520, 64, dtype=dtype)
    sinks = torch.tensor([0.5, -8.0, 6.0, float("-inf")], dtype=torch.float32 if sinks_in_fp32 else dtype)
    got = same_everywhere(lambda: tle.attention(q, k, v, 0.125, causal=True, sinks=sinks))
    assert_close(got, q, k, v, 0.125, causal=True, sinks=sinks)


class HuggingFaceModule(torch.nn.Module):
    """What Hugging Face's eager functions read of the attention module."""

    def __init__(self, groups, sinks=None):
        super().__init__()
        self.num_key_value_groups, self.sinks = groups, sinks
        self.head_dim, self.scaling = 64, 0.125


@pytest.mark.parametrize("family, option", [("llama", {}), ("gemma2", {"softcap": 50.0}), ("gpt_oss", {"sinks": True})])
def test_against_hugging_face_eager(family, option):
    import importlib

    eager = importlib.import_module(f"transformers.models.{family}.modeling_{family}").eager_attention_forward
    q, k, v = operands(2, 6, 2, 9, 40, 64)
    sinks = torch.randn(6) if "sinks" in option else None
    allowed = allowed_keys(9, 40, 2, causal=True, starts=torch.tensor([0, 17]))
    mask = torch.zeros(2, 1, 9, 40).masked_fill(~allowed, torch.finfo(torch.float32).min)
    extra = {"softcap": option["softcap"]} if "softcap" in option else {}
    want, _ = eager(HuggingFaceModule(3, sinks).eval(), q, k, v, mask, scaling=0.125, dropout=0.0, **extra)
    ours = {"softcap": option.get("softcap", 0.0), "sinks": sinks}
    for got in (tle.attention(q, k, v, 0.125, mask, **ours),
                tle.attention(q, k, v, 0.125, allowed, **ours),
                tle.attention(q, k, v, 0.125, causal=True, starts=torch.tensor([0, 17]), **ours)):
        torch.testing.assert_close(got.transpose(1, 2), want, rtol=1e-5, atol=2e-6)


def test_magnitudes_do_not_overflow():
    q, k, v = operands(1, 2, 1, 2, 300, 64)
    for scale in (1e-20, 1.0, 1e4):
        got = same_everywhere(lambda: tle.attention(q, k, v, scale, causal=True))  # noqa: B023
        assert got.isfinite().all()
        assert_close(got, q, k, v, scale, causal=True)


# ---- masks ----


@pytest.mark.parametrize("dtype", [torch.bool, *DTYPES])
@pytest.mark.parametrize("shape", [(2, 6, 7, 300), (2, 1, 7, 300), (1, 1, 7, 300), (7, 300), (1, 300), (2, 1, 1, 300),
                                   (6, 7, 1), (1,)])
def test_masks_broadcast(shape, dtype):
    q, k, v = operands(2, 6, 3, 7, 300, 32)
    mask = torch.rand(shape) < 0.6
    if dtype != torch.bool:
        mask = torch.where(mask, torch.randn(shape), float("-inf")).to(dtype)
    for causal in (False, True):
        got = same_everywhere(lambda: tle.attention(q, k, v, 0.2, mask, causal))  # noqa: B023
        assert_close(got, q, k, v, 0.2, mask=mask, causal=causal)


def test_mask_strides():
    q, k, v = operands(2, 4, 2, 5, 70, 16)
    mask = torch.rand(2, 4, 5, 70) < 0.6
    want = tle.attention(q, k, v, 0.2, mask)
    wide = torch.zeros(2, 4, 5, 140, dtype=torch.bool)
    wide[..., ::2] = mask
    assert_same_bits(tle.attention(q, k, v, 0.2, wide[..., ::2]), want)
    assert_same_bits(tle.attention(q, k, v, 0.2, mask.transpose(2, 3).contiguous().transpose(2, 3)), want)
    additive = torch.zeros(2, 4, 70, 5).masked_fill(~mask.transpose(2, 3), float("-inf")).transpose(2, 3)
    assert_same_bits(tle.attention(q, k, v, 0.2, additive), want)


def no_key_masks():
    """Row 1 may attend to nothing, said in three ways."""
    allowed = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    allowed[1] = False
    zeros = torch.zeros(2, 1, 1, 20)
    return {"bool": allowed, "-inf": zeros.masked_fill(~allowed, float("-inf")),
            "finfo.min": zeros.masked_fill(~allowed, torch.finfo(torch.float32).min)}


@pytest.mark.parametrize("kind", ["bool", "-inf", "finfo.min"])
def test_a_row_without_any_key(kind):
    q, k, v = operands(2, 4, 2, 1, 20, 16)
    got = same_everywhere(lambda: tle.attention(q, k, v, 0.25, no_key_masks()[kind]))
    if kind == "finfo.min":  # a finite number: all keys are equally bad, as in Hugging Face's eager attention
        want = v[1].mean(1, keepdim=True).repeat_interleave(2, 0)
        torch.testing.assert_close(got[1], want, rtol=1e-6, atol=1e-6)
    else:
        assert_same_bits(got[1], torch.zeros(4, 1, 16))
    assert_same_bits(got[0], tle.attention(q[:1], k[:1], v[:1], 0.25)[0])


def test_no_keys_at_all():
    for dtype in DTYPES:
        q, k, v = operands(2, 4, 2, 3, 0, 16, dtype=dtype)
        for options in ({}, {"causal": True}, {"sinks": torch.ones(4)}, {"mask": torch.ones(3, 0, dtype=torch.bool)}):
            assert_same_bits(tle.attention(q, k, v, 0.25, **options), torch.zeros(2, 4, 3, 16, dtype=dtype))
        assert_same_bits(tle.flash_attn_decode(q[:, :, 0], k, v, 0.25), torch.zeros(2, 4, 16, dtype=dtype))
        _, k, v = operands(2, 4, 2, 3, 9, 16, dtype=dtype)
        assert_same_bits(tle.flash_attn_decode(q[:, :, 0], k, v, 0.25, 0), torch.zeros(2, 4, 16, dtype=dtype))


@pytest.mark.parametrize("first", [600, 2038, 2047])
def test_whole_blocks_of_keys_masked(first):
    q, k, v = operands(1, 2, 1, 1, 2048, 64)
    mask = torch.zeros(1, 1, 1, 2048)
    mask[..., :first] = float("-inf")
    got = same_everywhere(lambda: tle.attention(q, k, v, 0.125, mask))
    assert got.isfinite().all()
    assert_close(got, q, k, v, 0.125, mask=mask)
    # Blocks count from the first allowed key: the same bits as without the masked ones.
    assert_same_bits(got, tle.attention(q, k[:, :, first:], v[:, :, first:], 0.125))
    assert_same_bits(got, tle.attention(q, k, v, 0.125, starts=torch.tensor([first])))


def test_what_a_masked_slot_holds_does_not_leak():
    q, k, v = operands(2, 4, 2, 6, 400, 32)
    mask = torch.rand(2, 1, 1, 400) < 0.5
    starts = torch.tensor([7, 300])
    options = [{"mask": mask}, {"causal": True, "starts": starts}, {"causal": True, "window": 50},
               {"mask": mask, "causal": True, "starts": starts, "window": 350, "softcap": 5.0, "sinks": torch.ones(4)}]
    for option in options:
        want = tle.attention(q, k, v, 0.2, **option)
        allowed = allowed_keys(6, 400, 2, option.get("causal", False), option.get("window", 0), option.get("starts"))
        used = (allowed & option.get("mask", torch.tensor(True))).any(2)[:, 0].view(2, 1, 400, 1)
        bad_k, bad_v = k.masked_fill(~used, float("nan")), v.masked_fill(~used, float("nan"))
        got = same_everywhere(lambda: tle.attention(q, bad_k, bad_v, 0.2, **option))  # noqa: B023
        assert_same_bits(got, want)
    k[:, :, 350:], v[:, :, 350:] = float("nan"), float("nan")
    got = tle.flash_attn_decode(q[:, :, 0], k, v, 0.2, 350)
    assert_same_bits(got, tle.flash_attn_decode(q[:, :, 0], k[:, :, :350], v[:, :, :350], 0.2))


def test_nan_and_infinity_stay_in_their_row():
    for bad in (float("nan"), float("inf"), float("-inf")):
        q, k, v = operands(2, 2, 1, 3, 40, 16)
        clean = tle.attention(q, k, v, 0.25, causal=True)
        q[0, 0, 1, 3] = bad
        got = same_everywhere(lambda: tle.attention(q, k, v, 0.25, causal=True))  # noqa: B023
        assert got[0, 0, 1].isnan().all()
        got[0, 0, 1] = clean[0, 0, 1]
        assert_same_bits(got, clean)


# ---- the same bits ----


def test_thread_counts():
    q, k, v = operands(1, 4, 2, 1, 5000, 64, dtype=torch.bfloat16)
    before = tle_torch.get_num_threads()
    try:
        tle_torch.set_num_threads(1)
        want = tle.flash_attn_decode(q[0, :, 0], k[0], v[0], 0.125)
        for count in (2, 3, 5, 6, 7, 16):
            tle_torch.set_num_threads(count)
            assert_same_bits(tle.flash_attn_decode(q[0, :, 0], k[0], v[0], 0.125), want, f"{count} threads")
    finally:
        tle_torch.set_num_threads(before)


@pytest.mark.parametrize("window", [0, 100])
def test_chunked_prefill_and_decode_equal_one_prefill(window):
    q, k, v = operands(1, 6, 2, 400, 400, 48, dtype=torch.bfloat16)
    want = tle.attention(q, k, v, 0.15, causal=True, window=window)
    for chunk in (1, 3, 64, 129):
        for end in (chunk, 257 + chunk, 400):
            part = slice(end - chunk, end)
            got = tle.attention(q[:, :, part], k[:, :, :end], v[:, :, :end], 0.15, causal=True, window=window)
            assert_same_bits(got, want[:, :, part])


def test_a_padded_batch_equals_its_rows_alone():
    lengths = [3, 12, 300, 513]
    longest = max(lengths)
    q, k, v = operands(4, 6, 2, 3, longest, 40, dtype=torch.bfloat16)
    starts = torch.tensor([longest - n for n in lengths])
    batch = tle.attention(q, k, v, 0.15, causal=True, starts=starts)
    mask = allowed_keys(3, longest, 4, starts=starts)
    assert_same_bits(tle.attention(q, k, v, 0.15, mask, causal=True), batch)
    for b, n in enumerate(lengths):
        row = slice(b, b + 1)
        assert_same_bits(batch[row], tle.attention(q[row], k[row, :, -n:], v[row, :, -n:], 0.15, causal=True))


# ---- memory ----


def test_strides():
    q, k, v = operands(2, 4, 2, 3, 33, 32, dtype=torch.bfloat16)
    want = tle.attention(q, k, v, 0.2, causal=True)

    def wider(t, dim):  # the same values, every second place of a buffer
        sizes = list(t.shape)
        sizes[dim] *= 2
        buffer = torch.full(sizes, float("nan"), dtype=t.dtype)
        view = buffer[(slice(None),) * dim + (slice(None, None, 2),)]
        view.copy_(t)
        return view

    for dim in range(4):
        for which in ([0], [1], [2], [0, 1, 2]):
            args = [wider(t, dim) if i in which else t for i, t in enumerate((q, k, v))]
            assert_same_bits(tle.attention(*args, 0.2, causal=True), want, f"dimension {dim} of {which}")
    tokens_first = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in (q, k, v)]
    assert_same_bits(tle.attention(*tokens_first, 0.2, causal=True), want)
    fused = torch.cat([t.transpose(1, 2).flatten(2) for t in (q, k[:, :, :3], v[:, :, :3])], -1)
    views = [x.unflatten(2, (-1, 32)).transpose(1, 2) for x in fused.split([128, 64, 64], -1)]
    assert_same_bits(tle.attention(*views, 0.2), tle.attention(q, k[:, :, :3], v[:, :, :3], 0.2))


def test_sizes_of_one_with_any_stride():
    q, k, v = operands(1, 1, 1, 1, 9, 16)
    want = tle.attention(q, k, v, 0.25)
    assert_same_bits(tle.attention(q.as_strided((1, 1, 1, 16), (2**31, 0, 7, 1)), k, v, 0.25), want)
    one = torch.randn(1, 1, 9, 1)
    assert_same_bits(tle.attention(q[..., :1], one.as_strided((1, 1, 9, 1), (9, 9, 1, 2**31)), v, 0.25),
                     tle.attention(q[..., :1].contiguous(), one, v, 0.25))


def test_expanded_keys():
    q, k, v = operands(3, 4, 1, 2, 20, 16)
    k, v = k[:1].expand(3, 2, 20, 16), v[:1].expand(3, 2, 20, 16)
    assert_same_bits(tle.attention(q, k, v, 0.25), tle.attention(q, k.contiguous(), v.contiguous(), 0.25))


def at_the_end_of_memory(t):
    """A copy of t that ends where an unreadable page begins. Its memory is kept for the process's life."""
    size, page = t.numel() * t.element_size(), mmap.PAGESIZE
    length = (size + page - 1) // page * page + page
    memory = mmap.mmap(-1, length)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None, use_errno=True).mprotect(ctypes.c_void_p(address + length - page), page, 0) == 0
    copy = torch.frombuffer(memory, dtype=t.dtype, count=t.numel(), offset=length - page - size).view(t.shape)
    return copy.copy_(t)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [17, 80])
def test_nothing_is_read_past_the_end(d, dtype):
    q, k, v = operands(1, 3, 1, 1, 65, d, dtype=dtype)
    mask = torch.ones(1, 65, dtype=torch.bool)
    want = tle.attention(q, k, v, 0.2, mask)
    q, k, v, mask = (at_the_end_of_memory(t) for t in (q, k, v, mask))
    assert_same_bits(same_everywhere(lambda: tle.attention(q, k, v, 0.2, mask)), want)


def test_inputs_are_not_changed():
    tensors = [*operands(2, 4, 2, 3, 50, 16), torch.randn(2, 1, 3, 50), torch.randn(4), torch.tensor([0, 4])]
    copies = [t.clone() for t in tensors]
    q, k, v, mask, sinks, starts = tensors
    tle.attention(q, k, v, 0.25, mask, causal=True, window=30, softcap=4.0, sinks=sinks, starts=starts)
    assert_same_bits(tensors, copies)


def test_subnormal_values_cost_no_more():
    """Sums of subnormal numbers take the slow path of some CPUs: less than three times as long as ordinary ones, or, on
    a CPU whose every multiplication by such a number is slow (Intel's), no more than half again what ATen pays."""
    q, k, _ = operands(1, 8, 8, 1, 4096, 64)
    values = {value: torch.full((1, 8, 4096, 64), value) for value in (1.0, 1e-41)}
    for v in values.values():
        assert (tle.attention(q, k, v, 0.125) > 0).all()  # kept, not flushed to zero
    of = {"ours": lambda v: tle.attention(q, k, v, 0.125),
          "ATen": lambda v: torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.125)}
    runs = {(who, value): [] for who in of for value in values}
    for _ in range(40):  # in turn, so that what else the machine does meets all of them
        for who, value in runs:
            start = time.perf_counter()
            of[who](values[value])
            runs[who, value].append(time.perf_counter() - start)
    ratio = {who: min(runs[who, 1e-41]) / min(runs[who, 1.0]) for who in of}
    print(f"attention over V = 1e-41 takes {ratio['ours']:.2f} times as long as over V = 1, ATen's {ratio['ATen']:.2f}")
    assert ratio["ours"] < max(3, 1.5 * ratio["ATen"])


# ---- errors ----


def raises(error, message, *args, **kwargs):
    with pytest.raises(error, match=message):
        tle.attention(*args, **kwargs)


def test_bad_shapes():
    q, k, v = operands(2, 4, 2, 3, 9, 16)
    raises(ValueError, "q must have 4 dimensions", q[0], k, v, 0.25)
    raises(ValueError, "k must have 4 dimensions", q, k[0], v, 0.25)
    raises(ValueError, "v must have 4 dimensions", q, k, v[0], 0.25)
    raises(ValueError, r"v must have size 9 in dimension 2 \(that of k\)", q, k, v[:, :, :8], 0.25)
    raises(ValueError, "v must have size 2 in dimension 1", q, k, v[:, :1], 0.25)
    raises(ValueError, "v must have size 2 in dimension 0", q, k, v[:1], 0.25)
    raises(ValueError, r"k must have size 16 in dimension -1 \(the head size of q\)", q, k[..., :15], v, 0.25)
    raises(ValueError, r"k must have size 2 in dimension 0 \(the batch of q\)", q, k[:1], v[:1], 0.25)
    for heads in (3, 9, 33):
        raises(ValueError, f"multiple of the key/value heads, got {heads} and 2", *operands(1, heads, 2, 1, 5, 8), 0.25)
    raises(ValueError, "multiple of the key/value heads, got 4 and 0", q, k[:, :0], v[:, :0], 0.25)
    raises(ValueError, "head size of q must be in 1 .. 512", *operands(1, 1, 1, 1, 2, 513), 0.25)
    raises(ValueError, "head size of v must be in 1 .. 512", *operands(1, 1, 1, 1, 2, 8, 513), 0.25)
    raises(ValueError, "head size of q must be in 1 .. 512", *operands(1, 1, 1, 1, 2, 0, 8), 0.25)


def test_bad_types():
    q, k, v = operands(2, 4, 2, 3, 9, 16)
    raises(TypeError, "q must be bfloat16, float16 or float32", q.double(), k, v, 0.25)
    raises(TypeError, "k must be Float", q, k.half(), v, 0.25)
    raises(TypeError, "v must be Float", q, k, v.bfloat16(), 0.25)
    raises(TypeError, "mask must be bool", q, k, v, 0.25, torch.zeros(9, dtype=torch.int64))
    sinks = torch.zeros(4)
    raises(TypeError, "sinks must be bfloat16, float16 or float32", q, k, v, 0.25, sinks=sinks.double())
    raises(TypeError, "sinks must be Float or float32, got Half", q, k, v, 0.25, sinks=sinks.half())
    raises(TypeError, "starts must be Long", q, k, v, 0.25, starts=torch.zeros(2, dtype=torch.int32))
    raises(RuntimeError, "requires a gradient", q.requires_grad_(), k, v, 0.25)


def test_bad_options():
    q, k, v = operands(2, 4, 2, 3, 9, 16)
    for shape in ((8,), (2, 9), (3, 4, 3, 9), (1, 2, 4, 3, 9)):
        raises(ValueError, "mask must be broadcastable", q, k, v, 0.25, torch.ones(shape))
    raises(ValueError, "window must be 0", q, k, v, 0.25, causal=True, window=-1)
    raises(ValueError, "causal must be True", q, k, v, 0.25, window=4)
    for softcap in (-1.0, float("nan"), float("inf")):
        raises(ValueError, "softcap must be 0", q, k, v, 0.25, softcap=softcap)
    raises(ValueError, "sinks must have size 4", q, k, v, 0.25, sinks=torch.zeros(3))
    raises(ValueError, "sinks must have 1 dimensions", q, k, v, 0.25, sinks=torch.zeros(4, 1))
    raises(ValueError, "starts must have size 2", q, k, v, 0.25, starts=torch.zeros(3, dtype=torch.int64))
    for bad in (-1, 10):
        starts = torch.tensor([0, bad])
        raises(ValueError, f"starts must be in 0 .. 9 .*got {bad} for row 1", q, k, v, 0.25, starts=starts)


def test_bad_input_of_flash_attn_decode():
    q, k, v = torch.randn(4, 16), torch.randn(2, 6, 16), torch.randn(2, 6, 16)
    for args, message in [
        ((q[0], k, v, 0.25), r"q must be \[Hq, D\] or \[batch, Hq, D\]"),
        ((q, k[None], v, 0.25), "k must have 3 dimensions"),
        ((q[None], k, v, 0.25), "k must have 4 dimensions"),
        ((q, k[:, :5], v, 0.25), "v must have size 5 in dimension 1"),
        ((q, k[..., :8], v, 0.25), "k must have size 16 in dimension -1"),
        ((q[:3], k, v, 0.25), "multiple of the key/value heads, got 3 and 2"),
        ((q[None], k.expand(2, 2, 6, 16), v.expand(2, 2, 6, 16), 0.25), "k must have size 1 in dimension 0"),
        ((q, k, v, 0.25, 7), "seq_len must be in 0 .. 6"),
        ((q, k, v, 0.25, -1), "seq_len must be in 0 .. 6"),
    ]:
        with pytest.raises(ValueError, match=message):
            tle.flash_attn_decode(*args)
    with pytest.raises(TypeError, match="k must be Float"):
        tle.flash_attn_decode(q, k.half(), v.half(), 0.25)


# ---- torch ----


@pytest.mark.parametrize("case", ["plain", "bf16 causal", "everything", "no queries", "no keys", "strided"])
def test_opcheck_attention(case):
    q, k, v = operands(2, 4, 2, 3, 9, 16, 8, torch.bfloat16 if "bf16" in case else torch.float32)
    options = {}
    if case == "bf16 causal":
        options = {"causal": True, "window": 5}
    elif case == "everything":
        options = {"mask": torch.randn(2, 1, 3, 9), "causal": True, "window": 4, "softcap": 3.0,
                   "sinks": torch.randn(4), "starts": torch.tensor([0, 2])}
    elif case == "no queries":
        q = q[:, :, :0]
    elif case == "no keys":
        k, v = k[:, :, :0], v[:, :, :0]
    elif case == "strided":
        q, k, v = (t.transpose(1, 2).contiguous().transpose(1, 2)[..., ::2] for t in (q, k, v))
    torch.library.opcheck(tle.attention.default, (q, k, v, 0.25), options)


@pytest.mark.parametrize("batch", [(), (3,)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opcheck_flash_attn_decode(batch, dtype):
    q, k, v = (torch.randn(*batch, *shape).to(dtype) for shape in ((4, 16), (2, 6, 16), (2, 6, 8)))
    for seq_len in (None, 0, 5):
        torch.library.opcheck(tle.flash_attn_decode.default, (q, k, v, 0.25, seq_len))


def test_compiled():
    @torch.compile(fullgraph=True, dynamic=True, backend="aot_eager")
    def step(q, k, v):
        return tle.attention(q, k, v, 0.25, causal=True).transpose(1, 2).flatten(2)

    for keys in (5, 9):
        q, k, v = operands(1, 4, 2, 3, keys, 16)
        assert_same_bits(step(q, k, v), tle.attention(q, k, v, 0.25, causal=True).transpose(1, 2).flatten(2))
