"""tle_torch.Cache as a drop-in for transformers' caches."""

from __future__ import annotations

import copy
import gc
import pickle
import re

import pytest
import torch
from transformers import DynamicCache

import tiny
import tle_torch
from tle_torch.cache import Int8CacheLayer


def states(batch=2, heads=2, tokens=3, size=4, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(batch, heads, tokens, size, generator=generator).to(dtype) for _ in range(2))


def filled(*lengths, layers=2, dtype=None):
    """The same tokens in a tle_torch.Cache (of that dtype) and in a DynamicCache."""
    ours, theirs = tle_torch.Cache(dtype=dtype), DynamicCache()
    for step, tokens in enumerate(lengths):
        for layer in range(layers):
            update(ours, theirs, *states(tokens=tokens, seed=10 * step + layer), layer)
    return ours, theirs


def update(ours, theirs, k, v, layer):
    """Into both; int8 codes stand for values that DynamicCache is given as they are."""
    ours.update(k, v, layer)
    if type(ours.layers[layer]) is Int8CacheLayer:
        k, v = ((codes * scales.unsqueeze(-1)) for codes, scales in map(torch.ops.tle.quantize_rows, (k, v)))
    theirs.update(k, v, layer)


def assert_equal(ours, theirs):
    assert len(ours) == len(theirs)
    for index, (a, b) in enumerate(zip(ours.layers, theirs.layers)):
        assert torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values)
        assert ours.get_seq_length(index) == theirs.get_seq_length(index)
        assert ours.get_mask_sizes(3, index) == theirs.get_mask_sizes(3, index)
    assert ours.get_max_length() == theirs.get_max_length() == -1
    assert ours.is_compileable is False and ours.is_croppable is True


def test_update_returns_everything_and_writes_in_place():
    ours, theirs = filled(5, 1, 1)
    assert_equal(ours, theirs)
    memory = ours.layers[0].key_slots.data_ptr()
    k, v = states(tokens=1, seed=99)
    keys, values = ours.update(k, v, 0)
    assert keys.data_ptr() == memory and values.shape == (2, 2, 8, 4)
    assert torch.equal(keys[:, :, -1:], k) and torch.equal(values[:, :, -1:], v)


@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_growth_keeps_the_tokens_and_is_rare(dtype):
    ours, theirs = tle_torch.Cache(dtype=dtype), DynamicCache()
    places = set()
    for step in range(700):
        update(ours, theirs, *states(tokens=1, seed=step), 0)
        places.add(ours.layers[0].key_slots.data_ptr())
    assert_equal(ours, theirs)
    assert len(places) <= 3 and ours.layers[0].capacity >= 700


def test_reservation_is_a_hint():
    ours = tle_torch.Cache(max_cache_len=1000)
    ours.update(*states(tokens=2), 0)
    assert 1000 <= ours.layers[0].capacity <= 1256
    huge = tle_torch.Cache(max_cache_len=10**9)
    huge.update(*states(tokens=2), 0)
    assert huge.layers[0].capacity <= 8192
    small = tle_torch.Cache(max_cache_len=3)
    for step in range(4):
        small.update(*states(tokens=100, seed=step), 0)
    assert small.get_seq_length() == 400


@pytest.mark.parametrize(
    "change",
    [
        lambda c: c.reorder_cache(torch.tensor([1, 1])),
        lambda c: (c.reorder_cache(torch.tensor([1, 0])), c.reorder_cache(torch.tensor([1, 1]))),
        lambda c: c.batch_repeat_interleave(3),
        lambda c: c.batch_select_indices(torch.tensor([1])),
        lambda c: c.batch_select_indices(torch.tensor([False, True])),
        lambda c: c.crop(-2),
        lambda c: c.crop(0),
        lambda c: c.crop(-2) or c.crop(-1),
    ],
)
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_changes_equal_dynamic_cache(change, dtype):
    ours, theirs = filled(5, 2, dtype=dtype)
    change(ours)
    change(theirs)
    assert_equal(ours, theirs)
    batch = ours.layers[0].keys.shape[0]
    for layer in range(2):
        update(ours, theirs, *states(batch=batch, tokens=2, seed=50 + layer), layer)
    assert_equal(ours, theirs)


def test_reset_keeps_the_memory_and_takes_another_batch():
    ours, _ = filled(5)
    memory = ours.layers[0].key_slots.data_ptr()
    ours.reset()
    assert ours.get_seq_length() == 0
    ours.update(*states(tokens=4), 0)
    assert ours.layers[0].key_slots.data_ptr() == memory
    ours.reset()
    keys, _ = ours.update(*states(batch=5, tokens=4, dtype=torch.bfloat16), 0)
    assert keys.shape == (5, 2, 4, 4) and keys.dtype == torch.bfloat16


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda c: pickle.loads(pickle.dumps(c))])
@pytest.mark.parametrize("dtype", [None, torch.int8])
def test_copies_are_independent(twin_of, dtype):
    ours, theirs = filled(5, 2, dtype=dtype)
    ours.reorder_cache(torch.tensor([1, 0]))
    theirs.reorder_cache(torch.tensor([1, 0]))
    twin = twin_of(ours)
    assert_equal(twin, theirs)
    twin.update(*states(tokens=1, seed=77), 0)
    ours.layers[1].key_slots.zero_()
    assert torch.equal(twin.layers[1].keys, theirs.layers[1].keys)
    assert ours.get_seq_length(0) == 7 and twin.get_seq_length(0) == 8


def test_early_initialization_and_batch_size():
    ours = tle_torch.Cache(tiny.build("llama").config)
    assert ours.batch_size == -1 and not ours.is_initialized
    ours.early_initialization(batch_size=3, num_heads=2, head_dim=16, dtype=torch.bfloat16, device=torch.device("cpu"))
    assert ours.is_initialized and ours.batch_size == 3 and ours.get_seq_length() == 0
    assert ours.layers[0].key_slots.shape[:2] == (3, 2)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda c: c.update(*states(batch=3), 0), ValueError, r"\[2, 2, 5, 4\].*\[3, 2, 3, 4\]"),
        (lambda c: c.update(*states(heads=1), 0), ValueError, "do not continue"),
        (lambda c: c.update(*states(size=8), 0), ValueError, "do not continue"),
        (lambda c: c.update(*states(dtype=torch.bfloat16), 0), ValueError, "bfloat16"),
        (lambda c: c.update(states(tokens=3)[0], states(tokens=2)[1], 0), ValueError, "do not continue"),
        (lambda c: c.crop(3), ValueError, "minus the number"),
        (lambda c: tle_torch.Cache(offloading=True), ValueError, "does not offload"),
        (lambda c: c.layers[0].offload(), NotImplementedError, "does not offload"),
        (lambda c: c.layers[0].prefetch(), NotImplementedError, "does not offload"),
        (lambda c: tle_torch.Cache(max_cache_len="long"), TypeError, "must be an int"),
        (lambda c: tle_torch.Cache(window=3), TypeError, "window"),
        (lambda c: tle_torch.Cache().update(*(s.to("meta") for s in states()), 0), ValueError, "on meta"),
    ],
)
def test_bad_input_leaves_the_cache_as_it_was(call, error, message):
    ours, theirs = filled(5)
    with pytest.raises(error, match=message):
        call(ours)
    assert_equal(ours, theirs)


def test_a_config_with_other_layers_is_refused():
    from transformers import MambaConfig, Qwen3NextConfig

    with pytest.raises(ValueError, match="qwen3_next has other layers"):
        tle_torch.Cache(Qwen3NextConfig(num_hidden_layers=4))
    with pytest.raises(ValueError, match="has other layers"):
        tle_torch.Cache(MambaConfig(num_hidden_layers=2))


def test_unused_slots_do_not_leak():
    """NaN beyond the used slots reaches nothing: neither attention path reads them."""
    model = tiny.build("llama")
    tle_torch.patch_model(model, "bf16")
    ids = tiny.tokens(1, 9)
    for hooked in (False, True):
        outputs = []
        for poison in (0.0, float("nan")):
            handle = model.model.layers[0].register_forward_hook(lambda *a: None) if hooked else None
            cache = tle_torch.Cache(model.config)
            cache.early_initialization(1, 2, 16, torch.float32, torch.device("cpu"))
            for layer in cache.layers:
                layer.key_slots.fill_(poison)
                layer.value_slots.fill_(poison)
            outputs.append(torch.cat([model(part, past_key_values=cache).logits for part in ids.split(4, 1)], 1))
            if handle:
                handle.remove()
        assert tiny.same_bits(*outputs) and outputs[0].isfinite().all()


def test_a_cache_outlives_inference_mode():
    model = tiny.build("llama")
    tle_torch.patch_model(model)
    ids = tiny.tokens(1, 9)
    for hooked in (False, True):
        handle = model.model.layers[0].register_forward_hook(lambda *a: None) if hooked else None
        cache = tle_torch.Cache(model.config)
        with torch.inference_mode():
            model(ids[:, :5], past_key_values=cache)
        got = model(ids[:, 5:], past_key_values=cache).logits
        cache.reorder_cache(torch.tensor([0, 0]))
        if handle:
            handle.remove()
        assert tiny.same_bits(got, model(ids).logits[:, 5:])


def test_a_patched_model_uses_it_by_default_and_only_then():
    model = tiny.build("llama")
    ids = tiny.tokens(1, 5)
    assert type(model(ids).past_key_values) is DynamicCache
    tle_torch.patch_model(model, "bf16")
    assert type(model(ids).past_key_values) is tle_torch.Cache
    assert model(ids, use_cache=False).past_key_values is None
    mine = DynamicCache(config=model.config)
    assert model(ids, past_key_values=mine).past_key_values is mine

    def cache_of(**kwargs):
        output = model.generate(ids, max_new_tokens=3, do_sample=False, return_dict_in_generate=True, **kwargs)
        return type(output.past_key_values).__name__

    assert cache_of() == "Cache"
    assert cache_of(cache_implementation="dynamic") == "DynamicCache"
    assert cache_of(cache_implementation="static") == "StaticCache"
    assert cache_of(use_cache=False) == "NoneType"
    assert cache_of(past_key_values=DynamicCache(config=model.config)) == "DynamicCache"
    with pytest.raises(ValueError, match="Passing both"):
        cache_of(past_key_values=tle_torch.Cache(model.config), cache_implementation="static")
    tle_torch.unpatch_model(model)
    assert type(model(ids).past_key_values) is DynamicCache


# ---- memory ----


def test_slots_are_tensors_like_any_other():
    slots = torch.ops.tle.empty_cache_slots([2, 3, 1000, 64], torch.bfloat16)
    assert slots.shape == (2, 3, 1000, 64) and slots.dtype == torch.bfloat16 and slots.is_contiguous()
    slots.fill_(2)
    copies = [copy.deepcopy(slots), pickle.loads(pickle.dumps(slots)), slots.clone()]
    view = slots[1, :, 5:7]
    del slots  # the view keeps the memory
    gc.collect()
    assert all(bool((t == 2).all()) for t in [view, *copies])
    assert torch.ops.tle.empty_cache_slots([0, 4], torch.float32).numel() == 0
    with pytest.raises(ValueError, match="must not be negative"):
        torch.ops.tle.empty_cache_slots([2, -1], torch.float32)
    operator = torch.ops.tle.empty_cache_slots.default
    torch.library.opcheck(operator, ([2, 3], torch.float16), test_utils="test_faketensor")


def test_advice_does_not_change_a_tensor():
    dense = torch.randn(1500, 1000)
    before = dense.clone()
    torch.ops.tle.advise_huge_pages(dense)
    torch.ops.tle.advise_huge_pages(dense.t())
    torch.ops.tle.advise_huge_pages(dense[:, ::2])
    torch.ops.tle.advise_huge_pages(torch.empty(0))
    assert torch.equal(dense, before)
    torch.library.opcheck(torch.ops.tle.advise_huge_pages.default, (dense,))


def resident() -> int:
    """Bytes of memory that the process has."""
    with open("/proc/self/status") as status:
        return int(re.search(r"VmRSS:\s+(\d+)", status.read())[1]) * 1024


def test_memory_goes_back_with_its_tensors():
    before = resident()
    # Blocks that share regions, and some with regions of their own.
    blocks = [torch.ops.tle.empty_cache_slots([size << 20], torch.uint8).fill_(1) for size in [5] * 20 + [40]]
    assert resident() - before > 130 << 20
    keep = blocks[3]
    del blocks
    gc.collect()
    assert resident() - before < 40 << 20, "freed blocks stay resident"
    assert bool((keep == 1).all())


def test_memory_goes_back_beside_what_stays():
    before = resident()
    keep = []
    for _ in range(12):
        passing = [torch.ops.tle.empty_cache_slots([1 << 20], torch.uint8).fill_(1) for _ in range(15)]
        keep.append(torch.ops.tle.empty_cache_slots([1 << 20], torch.uint8).fill_(2))
        del passing
    # One huge page each at most.
    assert resident() - before < 40 << 20, "blocks that stay keep their freed neighbours resident"
    assert all(bool((block == 2).all()) for block in keep)


def test_a_tensor_that_finds_no_memory_is_an_error():
    with pytest.raises(RuntimeError, match=f"cannot allocate {1 << 52} bytes"):
        torch.ops.tle.empty_cache_slots([1 << 52], torch.uint8)  # more than there are addresses
    with pytest.raises(RuntimeError, match="overflow"):
        torch.ops.tle.empty_cache_slots([(1 << 32) + 1, 1 << 32], torch.uint8)
