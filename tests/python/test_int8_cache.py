"""Keys and values as int8: what attention makes of the slots, what the cache and the fused step put into them, and the
life of a model whose caches hold them. The C++ tests compare the variants of attention, test_cache.py the cache's
changes with DynamicCache's, test_decoder.py the fused layer with its operators."""

from __future__ import annotations

import contextlib
import copy
import pickle

import pytest
import torch
from checks import assert_same_bits, int8_slots, same_everywhere
from test_attention import HEAD_SIZES, assert_close, operands
from test_decode_route import counting, module_by_module, run
from transformers import DynamicCache, set_seed

import tiny
import tle_torch
from tle_torch.cache import Int8CacheLayer

tle = torch.ops.tle
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def patched(name="llama", scheme="w8a8-a32", dtype=torch.bfloat16, **settings):
    model = tiny.build(name, dtype, **settings)
    tle_torch.patch_model(model, scheme, kv_dtype=torch.int8)
    return model


def int8_cache(model):
    return tle_torch.Cache(model.config, dtype=torch.int8)


# ---- attention ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_attention_of_codes_is_that_of_codes_times_scales(d, dtype):
    for heads, queries, keys, options in (
        (4, 1, 70, {}),
        (6, 5, 300, {"causal": True}),
        (2, 20, 45, {"causal": True, "window": 7, "softcap": 20.0}),
        (2, 3, 40, {"causal": True, "starts": torch.tensor([0, 17])}),
    ):
        q, k, v = operands(2, heads, 2, queries, keys, d, dtype=dtype)
        (k, exact_k), (v, exact_v) = int8_slots(k), int8_slots(v)
        got = same_everywhere(lambda: tle.attention(q, k, v, d**-0.5, **options))
        assert_close(got, q, exact_k, exact_v, d**-0.5, **options)


def test_values_of_another_size_and_masks():
    q, k, v = operands(2, 4, 2, 3, 90, 24, 40, torch.bfloat16)
    (k, exact_k), (v, exact_v) = int8_slots(k), int8_slots(v)
    mask = torch.rand(2, 1, 3, 90) < 0.7
    got = same_everywhere(lambda: tle.attention(q, k, v, 0.2, mask))
    assert_close(got, q, exact_k, exact_v, 0.2, mask=mask)


def test_flash_attn_decode_is_attention():
    q, k, v = operands(2, 6, 2, 1, 300, 46, dtype=torch.bfloat16)
    k, v = int8_slots(k)[0], int8_slots(v)[0]
    got = same_everywhere(lambda: tle.flash_attn_decode(q[:, :, 0], k, v, 0.2, 280))
    assert_same_bits(got, tle.attention(q, k[:, :, :280], v[:, :, :280], 0.2)[:, :, 0].contiguous())


def test_slots_that_no_query_sees_may_hold_anything():
    q, k, v = operands(2, 4, 2, 3, 60, 32, dtype=torch.bfloat16)
    k, v = int8_slots(k)[0], int8_slots(v)[0]
    starts = torch.tensor([0, 12])
    mask = torch.ones(2, 1, 3, 60, dtype=torch.bool)
    mask[1, :, :, :12] = False

    def by_starts():
        return tle.attention(q, k, v, 0.2, None, True, 0, 0.0, None, starts)

    def by_mask():
        return tle.attention(q, k, v, 0.2, mask)

    want = by_starts(), by_mask()
    for slots in (k, v):
        slots[1, :, :12] = -1  # codes -1 and a scale that is NaN
    assert_same_bits(same_everywhere(lambda: (by_starts(), by_mask())), want)
    assert tle.attention(q, k, v, 0.2)[1].isnan().all()


def test_bad_slots_are_errors():
    q, k, v = operands(2, 4, 2, 3, 9, 16)
    codes_k, codes_v = int8_slots(k)[0], int8_slots(v)[0]
    for keys, values, error, words in (
        (codes_k, v, TypeError, "v must be Char, got Float"),
        (k, codes_v, TypeError, "v must be Float, got Char"),
        (codes_k[..., :16], codes_v, ValueError, "k must have size 20 in dimension -1 .the head size of q and"),
        (codes_k, codes_v[..., :4], ValueError, "head size of v must be in 1 .. 512"),
        (codes_k.byte(), codes_v, TypeError, "k must be Float or int8 codes with their scales, got Byte"),
    ):
        with pytest.raises(error, match=words):
            tle.attention(q, keys, values, 0.25)
        with pytest.raises(error, match=words):
            tle.flash_attn_decode(q[:, :, 0], keys, values, 0.25)


def test_opcheck():
    q, k, v = operands(2, 4, 2, 3, 9, 16, 8, torch.bfloat16)
    k, v = int8_slots(k)[0], int8_slots(v)[0]
    torch.library.opcheck(tle.attention.default, (q, k, v, 0.25, None, True))
    torch.library.opcheck(tle.flash_attn_decode.default, (q[:, :, 0], k, v, 0.25))


# ---- whole steps ----


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", tiny.KNOWN)
def test_one_call_equals_module_by_module_and_token_by_token(name, dtype):
    model = patched(name, dtype=dtype)
    ids = tiny.tokens(2, 21)
    parts = ids.split([11, 1, 1, 5, 1, 2], dim=1)
    with counting() as calls:
        fused_cache, cache = int8_cache(model), int8_cache(model)
        fused = run(model, *parts, cache=fused_cache)
        assert len(calls) == len(parts)
    with module_by_module(model):
        separate = run(model, *parts, cache=cache)
    assert tiny.same_bits(fused, separate)
    if name != "llama_dynamic":  # its frequencies depend on how long the sequence is when a token is read
        assert tiny.same_bits(fused, run(model, ids, cache=int8_cache(model)))
        assert tiny.same_bits(fused, run(model, *ids.split(1, 1), cache=int8_cache(model)))
    for a, b in zip(fused_cache.layers, cache.layers):
        for mine, other in ((a.key_slots, b.key_slots), (a.value_slots, b.value_slots)):
            assert mine.dtype == torch.int8 and torch.equal(mine[:, :, :21], other[:, :, :21])


def test_levels_and_threads_over_several_blocks_of_keys():
    model = patched("qwen3")
    ids = tiny.tokens(1, 530)
    with torch.no_grad():
        logits = same_everywhere(lambda: run(model, *ids.split([527, 1, 2], 1), cache=int8_cache(model)))
    steps = run(model, *ids.split([500, *[1] * 30], 1), cache=int8_cache(model))
    assert tiny.same_bits(logits, steps)


@pytest.mark.parametrize("route", [True, False])
@pytest.mark.parametrize("name", ["llama", "mistral_window"])
def test_a_padded_row_equals_the_row_alone(name, route):
    model = patched(name)
    lengths = [5, 18]
    rows = [tiny.tokens(1, n, seed=n) for n in lengths]
    ids = torch.zeros(2, 18, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row, 1
    positions = (mask.cumsum(-1) - 1).clamp_(min=0)
    with contextlib.nullcontext() if route else module_by_module(model):
        cache = int8_cache(model)
        batch = run(model, ids, cache=cache, attention_mask=mask, position_ids=positions)
    for i, row in enumerate(rows):
        alone = run(model, row, cache=int8_cache(model))
        assert tiny.same_bits(batch[i, -alone.shape[1] :], alone[0])


def test_the_step_is_close_to_that_with_a_plain_cache():
    model = patched("llama", "bf16", torch.float32)
    ids = tiny.tokens(2, 40)
    exact = run(model, *ids.split([20, *[1] * 20], 1), cache=tle_torch.Cache(model.config)).log_softmax(-1)
    coded = run(model, *ids.split([20, *[1] * 20], 1), cache=int8_cache(model)).log_softmax(-1)
    kl = (exact.exp() * (exact - coded)).sum(-1)
    assert 0 < kl.mean() < 1e-3


@pytest.mark.parametrize("route", [True, False])
def test_unused_slots_do_not_leak(route):
    model = patched()
    ids = tiny.tokens(1, 9)
    outputs = []
    for poison in (0, -1):  # -1: every scale is NaN
        cache = int8_cache(model)
        cache.early_initialization(1, 2, 16, torch.bfloat16, torch.device("cpu"))
        for layer in cache.layers:
            layer.key_slots.fill_(poison)
            layer.value_slots.fill_(poison)
        with contextlib.nullcontext() if route else module_by_module(model):
            outputs.append(run(model, *ids.split(4, 1), cache=cache))
    assert tiny.same_bits(*outputs) and outputs[0].isfinite().all()


@pytest.mark.parametrize("hooked", [False, True])
def test_a_failed_step_leaves_the_cache_as_it_was(hooked, monkeypatch):
    model = patched()
    ids = tiny.tokens(1, 12)
    cache = int8_cache(model)
    run(model, ids[:, :8], cache=cache)
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

    def fail(*args):
        raise RuntimeError("in the middle")

    with monkeypatch.context() as patch:
        if hooked:
            handle = model.model.layers[1].register_forward_hook(fail)
        else:
            patch.setattr(tle_torch.decode, "_step", fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            run(model, ids[:, 8:], cache=cache)
        if hooked:
            handle.remove()
    assert cache.lengths() == [8, 8, 8]
    assert all(torch.equal(l.keys, k) and torch.equal(l.values, v) for l, (k, v) in zip(cache.layers, kept))
    assert tiny.same_bits(run(model, ids[:, 8:], cache=cache), run(model, ids, cache=int8_cache(model))[:, 8:])


# ---- generate ----


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 8},
        {"prompt_lookup_num_tokens": 3},
        {"prefill_chunk_size": 5},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "greedy",
)
def test_generate_says_the_same_in_one_call_and_module_by_module(options):
    model = patched("llama", dtype=torch.float32)
    ids = tiny.tokens(2, 12) if "prompt_lookup_num_tokens" not in options else tiny.tokens(1, 12)

    def generate(**more):
        set_seed(0)
        return model.generate(ids, **{"max_new_tokens": 16, "do_sample": False, **options, **more})

    fused = generate()
    assert torch.equal(fused, generate(past_key_values=int8_cache(model)))
    with module_by_module(model):
        assert torch.equal(fused, generate())


def test_assisted_decoding_crops():
    model, assistant = patched(dtype=torch.float32), patched(dtype=torch.float32, num_hidden_layers=1)
    ids = tiny.tokens(1, 7)
    plain = model.generate(ids, max_new_tokens=20, do_sample=False)
    assert torch.equal(model.generate(ids, max_new_tokens=20, do_sample=False, assistant_model=assistant), plain)


# ---- the model's own caches ----


def test_a_patched_model_makes_them_where_nobody_brings_another():
    model = patched()
    ids = tiny.tokens(1, 5)
    text = str(model.tle_patch.report)
    assert "int8 codes" in text and "one call" in text
    assert model.tle_patch.report.whole_step == {"model": None}

    def layer_of(output):
        return type(output.past_key_values.layers[0])

    assert layer_of(model(ids)) is Int8CacheLayer
    kept = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True)
    assert layer_of(kept) is Int8CacheLayer
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert layer_of(twin(ids)) is Int8CacheLayer
    plain = tle_torch.Cache(model.config)
    assert model(ids, past_key_values=plain).past_key_values is plain and plain.layers[0].keys.dtype == torch.bfloat16
    theirs = DynamicCache(config=model.config)
    assert model(ids, past_key_values=theirs).past_key_values is theirs
    assert tiny.same_bits(model(ids, past_key_values=DynamicCache(config=model.config)).logits,
                          model(ids, past_key_values=tle_torch.Cache(model.config)).logits)
    tle_torch.unpatch_model(model, dequantize=True)
    assert "tle_kv_dtype" not in vars(model) and layer_of(model(ids)) is not Int8CacheLayer


def test_another_attention_reads_the_dequantised_states():
    model = patched("llama", "bf16", torch.float32)
    ids = tiny.tokens(1, 30)
    want = model(ids)
    for name in ("eager", "sdpa"):
        model.set_attn_implementation(name)
        got = model(ids, past_key_values=int8_cache(model)).logits
        torch.testing.assert_close(got, want.logits, rtol=1e-4, atol=1e-4)
    model.set_attn_implementation("tle")
    recorded = model(ids, output_attentions=True)
    assert tiny.same_bits(recorded.logits, want.logits)
    assert recorded.attentions[0].shape == (1, 4, 30, 30)
    assert torch.allclose(recorded.attentions[0].sum(-1), torch.ones(1, 4, 30))


def test_compiled():
    model = patched()
    ids = tiny.tokens(1, 9)
    compiled = torch.compile(model, backend="aot_eager")
    assert tiny.same_bits(compiled(ids).logits, model(ids).logits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: tle_torch.Cache(m.config, dtype=torch.float16), "dtype must be None .* got torch.float16"),
        (lambda m: tle_torch.Cache(dtype="int8"), "dtype must be None .* or torch.int8, got int8"),
        (lambda m: tle_torch.patch_model(m, kv_dtype=torch.uint8), "kv_dtype must be None .* got torch.uint8"),
        (lambda m: tle_torch.patch_model(m.lm_head, kv_dtype=torch.int8), "Linear has no decoder of a known family"),
    ],
)
def test_bad_input_is_a_clear_error_and_changes_nothing(call, message):
    model = tiny.build("llama")
    with pytest.raises(ValueError, match=message):
        call(model)
    assert type(model.lm_head) is torch.nn.Linear


def test_states_of_another_dtype_are_refused():
    cache = tle_torch.Cache(dtype=torch.int8)
    k = torch.randn(1, 2, 3, 16)
    cache.update(k.bfloat16(), k.bfloat16(), 0)
    with pytest.raises(ValueError, match=r"holds keys \[1, 2, 3, 16\] bfloat16 .* float32 do not continue"):
        cache.update(k, k, 0)
    with pytest.raises(ValueError, match="do not continue"):
        cache.update(k.bfloat16(), k, 0)
    with pytest.raises(RuntimeError, match="may be read, not written"):
        cache.layers[0].keys.zero_()
    assert cache.get_seq_length() == 3
