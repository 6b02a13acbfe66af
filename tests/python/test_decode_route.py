"""Whole steps in one call: when they are, when not, and that it makes no difference to the bits."""

from __future__ import annotations

import contextlib
import copy
import weakref

import pytest
import torch
from transformers import DynamicCache

import tiny
import tle_torch
from tle_torch import decode
from tle_torch.cache import CacheLayer
from tle_torch.families import family_of


@contextlib.contextmanager
def counting():
    """Counts the steps that run as one call: [B, tokens] of each."""
    calls = []
    step, logits, greedy = decode._step, decode._logits, decode._greedy_steps

    def counted_step(*args):
        calls.append(args[0].shape[:2])
        return step(*args)

    def counted_logits(*args):
        calls.append((len(args[0]), 1))
        return logits(*args)

    def counted_greedy(*args):
        tokens = greedy(*args)
        calls.extend([(1, 1)] * len(tokens))
        return tokens

    decode._step, decode._logits, decode._greedy_steps = counted_step, counted_logits, counted_greedy
    try:
        yield calls
    finally:
        decode._step, decode._logits, decode._greedy_steps = step, logits, greedy


@pytest.fixture
def two_threads():
    """One thread alone opens no region."""
    before = tle_torch.get_num_threads()
    tle_torch.set_num_threads(2)
    yield
    tle_torch.set_num_threads(before)


@contextlib.contextmanager
def module_by_module(model):
    model.model.tle_router.disabled = "by a test"
    try:
        yield
    finally:
        model.model.tle_router.disabled = None


def run(model, *parts, cache=None, **kwargs):
    """Logits of token blocks through one cache."""
    cache = tle_torch.Cache(model.config) if cache is None else cache
    with torch.no_grad():
        return torch.cat([model(part, past_key_values=cache, **kwargs).logits for part in parts], 1)


def patched(name, scheme="w8a8", dtype=torch.bfloat16, **settings):
    model = tiny.build(name, dtype, **settings)
    tle_torch.patch_model(model, scheme)
    return model


# ---- the same bits ----


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scheme", ["w8a8", "bf16"])
@pytest.mark.parametrize("name", tiny.KNOWN)
def test_one_call_equals_module_by_module(name, scheme, dtype):
    model = patched(name, scheme, dtype)
    ids = tiny.tokens(2, 21)
    parts = ids.split([11, 1, 1, 5, 1, 2], dim=1)
    with counting() as calls:
        fused = run(model, *parts)
    assert len(calls) == len(parts)
    with module_by_module(model), counting() as calls:
        separate = run(model, *parts)
    assert calls == []
    assert tiny.same_bits(fused, separate)


@pytest.mark.parametrize("name", ["llama", "qwen3", "mistral_window", "smollm3"])
def test_token_by_token_equals_prefill(name):
    model = patched(name)
    ids = tiny.tokens(1, 40)
    assert tiny.same_bits(run(model, ids), run(model, *ids.split(1, 1)))


def test_steps_across_the_growth_of_the_cache():
    """Slots come in steps of 256: tokens before and after a growth are the same as in one prefill."""
    model = patched("mistral_window", sliding_window=40)
    ids = tiny.tokens(2, 275)
    cache = tle_torch.Cache(model.config)
    parts = ids.split([250, *[1] * 10, 15], dim=1)
    assert tiny.same_bits(run(model, *parts, cache=cache), run(model, ids))
    assert cache.layers[0].capacity > 256


@pytest.mark.parametrize("route", [True, False])
@pytest.mark.parametrize("name", ["llama", "qwen2", "mistral_window", "smollm3"])
def test_a_row_of_a_batch_equals_the_row_alone(name, route):
    """Bit for bit: left padding of any length, in either path."""
    model = patched(name)
    lengths = [5, 18, 12]
    rows = [tiny.tokens(1, n, seed=n) for n in lengths]
    ids = torch.zeros(3, 18, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for i, row in enumerate(rows):
        ids[i, -row.shape[1] :], mask[i, -row.shape[1] :] = row, 1
    positions = (mask.cumsum(-1) - 1).clamp_(min=0)
    with contextlib.nullcontext() if route else module_by_module(model), counting() as calls:
        cache = tle_torch.Cache(model.config)
        batch = run(model, ids, cache=cache, attention_mask=mask, position_ids=positions)
        nexts = tiny.tokens(3, 1, seed=9)
        longer = torch.cat([mask, torch.ones(3, 1, dtype=torch.long)], 1)
        batch = torch.cat(
            [batch, run(model, nexts, cache=cache, attention_mask=longer, position_ids=positions[:, -1:] + 1)], 1
        )
    assert len(calls) == (2 if route else 0)
    for i, row in enumerate(rows):
        alone = run(model, row, nexts[i : i + 1])
        assert tiny.same_bits(batch[i, -alone.shape[1] :], alone[0])


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
def test_thread_count_changes_nothing(threads):
    model = patched("qwen3")
    ids = tiny.tokens(2, 19)
    before = tle_torch.get_num_threads()
    try:
        tle_torch.set_num_threads(1)
        expected = run(model, *ids.split([16, 1, 2], 1))
        tle_torch.set_num_threads(threads)
        assert tiny.same_bits(run(model, *ids.split([16, 1, 2], 1)), expected)
    finally:
        tle_torch.set_num_threads(before)


def test_every_isa_level_gives_the_same_bits():
    from tle_torch.ops import _C

    model = patched("qwen2")
    ids = tiny.tokens(2, 19)
    best = _C.isa()
    outputs = {}
    try:
        for isa in _C.isas():
            _C.set_isa(isa)
            outputs[isa] = run(model, *ids.split([16, 1, 2], 1))
    finally:
        _C.set_isa(best)
    assert all(tiny.same_bits(o, outputs["ref"]) for o in outputs.values()), list(outputs)


# ---- when it is one call ----


def test_generate_runs_one_call_a_token():
    model = patched("llama")
    model.generate(tiny.tokens(1, 9), max_new_tokens=2)  # the first call proves its loop
    with counting() as calls:
        model.generate(tiny.tokens(1, 9), max_new_tokens=6, min_new_tokens=6, do_sample=False)
    assert [shape[1] for shape in calls] == [9, 1, 1, 1, 1, 1]
    with counting() as calls:
        model.generate(tiny.tokens(1, 9), max_new_tokens=6, min_new_tokens=6, num_beams=2)
    assert len(calls) >= 6
    with counting() as calls:
        model(tiny.tokens(1, 4))
        model(inputs_embeds=torch.zeros(1, 4, 64).bfloat16())
        model(tiny.tokens(2, 4), attention_mask=torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1]]))
        model(tiny.tokens(2, 4), attention_mask=torch.ones(2, 4), logits_to_keep=1)
    assert len(calls) == 4


CALLS = {
    "use_cache=False": lambda m, ids: m(ids, use_cache=False),
    "foreign cache": lambda m, ids: m(ids, past_key_values=DynamicCache(config=m.config)),
    "output_attentions": lambda m, ids: m(ids, output_attentions=True),
    "output_hidden_states": lambda m, ids: m(ids, output_hidden_states=True),
    "right padding": lambda m, ids: m(ids, attention_mask=torch.tensor([[1] * 6 + [0] * 2, [1] * 8])),
    "hole in the mask": lambda m, ids: m(ids, attention_mask=torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1], [1] * 8])),
    "row without a token": lambda m, ids: m(ids, attention_mask=torch.tensor([[0] * 8, [1] * 8])),
    "4-D mask": lambda m, ids: m(ids, attention_mask=torch.ones(2, 1, 8, 8).tril().bool()),
    "additive mask": lambda m, ids: m(ids, attention_mask=torch.zeros(2, 1, 8, 8)),
    "return_dict=False": lambda m, ids: m(ids, return_dict=False),
}


@pytest.mark.parametrize("why", CALLS)
def test_what_is_not_one_call_is_right(why):
    model = tiny.build("llama")
    twin = copy.deepcopy(model)
    tle_torch.patch_model(twin, "bf16")
    if why == "4-D mask":
        model.set_attn_implementation("sdpa")  # eager adds a boolean mask to the scores
    ids = tiny.tokens(2, 8)
    with torch.no_grad():
        expected = CALLS[why](model, ids)[0]
        with counting() as calls:
            got = CALLS[why](twin, ids)[0]
    assert calls == [] or why == "return_dict=False"
    real = slice(1, 2) if why == "row without a token" else slice(None)
    assert torch.allclose(got[real], expected[real], atol=1e-4)
    assert got.isfinite().all()


def test_switches_that_stop_it_and_their_end():
    model = patched("llama", "bf16", torch.float32)
    ids = tiny.tokens(1, 8)
    expected = run(model, ids)

    def steps():
        with counting() as calls:
            got = run(model, ids)
        assert torch.allclose(got, expected, atol=1e-5)
        return len(calls)

    assert steps() == 1
    model.set_attn_implementation("sdpa")
    assert steps() == 0
    model.set_attn_implementation("tle")
    assert steps() == 1
    model.config.output_hidden_states = True
    assert steps() == 0
    model.config.output_hidden_states = False
    assert steps() == 1
    with pytest.raises(ValueError, match="eager"):
        model.config.output_attentions = True
    layer = model.model.layers[1]
    norm, layer.input_layernorm = layer.input_layernorm, torch.nn.RMSNorm(64, 1e-6)
    with torch.no_grad():
        layer.input_layernorm.weight.copy_(norm.weight)
    assert steps() == 0
    assert "not patched" in model.model.tle_router.refusal(model.model)
    layer.input_layernorm = norm
    assert steps() == 1
    forward = type(layer).forward
    type(layer).forward = lambda self, *args, **kwargs: forward(self, *args, **kwargs)
    assert steps() == 0
    type(layer).forward = forward
    assert steps() == 1


def test_replaced_weights_are_used():
    model = patched("llama")
    ids = tiny.tokens(1, 8)
    before = run(model, ids)
    projection = model.model.layers[2].mlp.down_proj
    projection.weight = torch.nn.Parameter(torch.zeros(64, 96))
    after = run(model, ids)
    assert not torch.equal(after, before)
    with module_by_module(model):
        assert tiny.same_bits(run(model, ids), after)
    model.model.norm.weight = torch.nn.Parameter(torch.full((64,), 2.0).bfloat16(), requires_grad=False)
    with module_by_module(model):
        expected = run(model, ids)
    assert tiny.same_bits(run(model, ids), expected)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama", lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.5)),
        ("llama", lambda m: setattr(m.model.layers[1].input_layernorm, "variance_epsilon", 0.5)),
        ("llama", lambda m: setattr(m.model.norm, "variance_epsilon", 0.5)),
        ("smollm3", lambda m: setattr(m.model.layers[0].self_attn, "use_rope", 0)),
        ("qwen2_window", lambda m: setattr(m.config, "sliding_window", 3)),
    ],
)
def test_settings_that_change_later_are_seen(name, change):
    model = patched(name, "bf16", torch.float32)
    ids = tiny.tokens(1, 14)
    before = run(model, ids)
    change(model)
    after = run(model, ids)
    assert not torch.allclose(after, before, atol=1e-4)
    with module_by_module(model):
        assert tiny.same_bits(run(model, ids), after)


def test_fewer_layers_than_built():
    """config.num_hidden_layers decides how many layers run, as in transformers."""
    model = patched("llama")
    ids = tiny.tokens(1, 8)
    expected = run(model, ids)
    model.config.num_hidden_layers = 2
    with counting() as calls:
        shorter = run(model, ids)
    assert calls == [] and not torch.equal(shorter, expected)


# ---- failures ----


@pytest.mark.parametrize("hooked", [False, True])
def test_a_failed_step_leaves_the_cache_as_it_was(hooked):
    model = patched("llama")
    ids = tiny.tokens(1, 12)
    cache = tle_torch.Cache(model.config)
    run(model, ids[:, :8], cache=cache)
    kept = [(layer.keys.clone(), layer.values.clone()) for layer in cache.layers]

    def fail(*args):
        raise RuntimeError("in the middle")

    if hooked:
        handle = model.model.layers[1].register_forward_hook(fail)
        with pytest.raises(RuntimeError, match="in the middle"):
            run(model, ids[:, 8:], cache=cache)
        handle.remove()
    else:
        original, decode._step = decode._step, fail
        try:
            with pytest.raises(RuntimeError, match="in the middle"):
                run(model, ids[:, 8:], cache=cache)
        finally:
            decode._step = original
    assert cache.lengths() == [8, 8, 8]
    assert all(torch.equal(l.keys, k) and torch.equal(l.values, v) for l, (k, v) in zip(cache.layers, kept))
    assert tiny.same_bits(run(model, ids[:, 8:], cache=cache), run(model, ids)[:, 8:])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: run(m, tiny.tokens(2, 3), cache=run_cache(m, batch=1)), "do not continue"),
        (lambda m: run(m, tiny.tokens(1, 3), cache=uneven(m)), r"\[3, 4\] tokens"),
    ],
)
def test_a_cache_that_does_not_fit_is_a_clear_error(make, message):
    with pytest.raises(ValueError, match=message):
        make(patched("llama"))


def run_cache(model, batch):
    cache = tle_torch.Cache(model.config)
    run(model, tiny.tokens(batch, 4), cache=cache)
    return cache


def uneven(model):
    cache = run_cache(model, 1)
    cache.layers[1].crop(-1)
    return cache


def test_self_check_finds_a_difference():
    """A decoder whose one call computes something else runs module by module, and the report says so."""
    model = tiny.build("llama")
    original = decode._step
    decode._step = lambda *args: original(*args) + 1e-6
    try:
        report = tle_torch.patch_model(model, "bf16")
    finally:
        decode._step = original
    assert "differ" in report.whole_step["model"] and "module by module" in str(report)
    with counting() as calls:
        run(model, tiny.tokens(1, 4))
    assert calls == []
    twin = copy.deepcopy(model)
    assert "differ" in twin.model.tle_router.refusal(twin.model)


# ---- cost ----


def test_one_parallel_region_per_step_and_no_growth(two_threads):
    from tle_torch.ops import _C

    model = patched("llama")
    cache = tle_torch.Cache(model.config, max_cache_len=64)
    run(model, tiny.tokens(1, 8), cache=cache)
    one = tiny.tokens(1, 1)
    plan = model.model.tle_router.plan(model.model)
    keys, values, used = cache.prepare_step(3, 1, 2, 1, 16, torch.bfloat16)
    hidden = model.model.embed_tokens(one)
    cos, sin = model.model.rotary_emb(hidden, torch.tensor([[used]]))
    before = _C.parallel_regions()
    planned = decode._step(hidden, plan._native, keys, values, used, cos, sin, None)
    assert _C.parallel_regions() - before == 1
    listed = torch.ops.tle.fused_decode_step(hidden, plan.weights, keys, values, used, cos, sin, *plan.arguments, None)
    assert torch.equal(planned.view(torch.int16), listed.view(torch.int16))


@pytest.mark.parametrize("scheme", ["w8a8", "w4a8-g32", "bf16"])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_whole_tokens_have_the_bits_of_the_modules(name, scheme):
    model = tiny.build(name)
    tle_torch.patch_model(model, scheme, quantize_head=scheme != "bf16")
    plan = model.model.tle_router.plan(model.model).token_plan(model)
    ids = tiny.tokens(2, 6)
    caches = [tle_torch.Cache(model.config) for _ in range(2)]
    starts = torch.tensor([2, 0])
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :2] = 0
    with torch.no_grad():
        for cache in caches:
            model(ids, past_key_values=cache, attention_mask=mask[:, :6])
        stretch = plan.stretch(2, torch.tensor([[4], [6]]), caches[0], starts, 3)
        for i in range(3):
            token, position = tiny.tokens(2, 1, seed=i), torch.tensor([[4 + i], [6 + i]])
            got = stretch.logits(token[:, 0])
            with module_by_module(model):
                inputs = {"attention_mask": mask[:, : 7 + i], "position_ids": position}
                wanted = model(token, past_key_values=caches[1], **inputs).logits
            assert tiny.same_bits(got, wanted[:, -1])
    assert all(tiny.same_bits(a.keys, b.keys) for a, b in zip(caches[0].layers, caches[1].layers))


def test_greedy_stretches_stop_where_they_should(two_threads):
    from tle_torch.ops import _C

    model = patched("qwen3")
    plan = model.model.tle_router.plan(model.model).token_plan(model)
    ids = tiny.tokens(1, 5)

    def stretch(count, ends=None):
        cache = tle_torch.Cache(model.config)
        found = ids[0, 4:]
        with torch.no_grad():
            model(ids[:, :4], past_key_values=cache)
            before = _C.parallel_regions()
            steps = plan.stretch(1, torch.tensor([[4]]), cache, None, count)
            while len(found) <= count and (ends is None or found[-1] not in ends):
                # A slow machine does not reach `count` in the time that one call takes at most.
                found = torch.cat([found, steps.greedy(found[-1:], count + 1 - len(found), ends)])
        found = found[1:]
        assert cache.get_seq_length() == 4 + len(found)
        assert _C.parallel_regions() - before == len(found), "layers and head of a token are one parallel region"
        return found

    tokens = stretch(20)
    assert len(tokens) == 20
    with module_by_module(model):
        wanted = model.generate(ids, max_new_tokens=20, min_new_tokens=20, do_sample=False)[0, 5:]
    assert torch.equal(tokens, wanted)
    end = tokens[6]
    first = int((tokens == end).nonzero()[0])
    assert torch.equal(stretch(20, torch.tensor([999_999, int(end)])), tokens[: first + 1])
    assert torch.equal(stretch(1), tokens[:1])


@pytest.mark.parametrize(
    "name, settings",
    [("qwen3", {}), ("mistral_window", {"sliding_window": 510}), ("mistral_window", {"sliding_window": 40})],
    ids=["all keys", "window 510", "window 40"],
)
def test_greedy_stretches_across_a_block_of_keys(name, settings, two_threads):
    """A stretch keeps its program, whose attention is divided by blocks of 256 keys: 506 keys and 16 tokens."""
    model = patched(name, max_position_embeddings=1024, **settings)
    plan = model.model.tle_router.plan(model.model).token_plan(model)
    ids = tiny.tokens(1, 506)
    cache, found = tle_torch.Cache(model.config), ids[0, -1:]
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=cache)
        steps = plan.stretch(1, torch.tensor([[505]]), cache, None, 16)
        while len(found) < 17:  # a call ends when its time is over
            found = torch.cat([found, steps.greedy(found[-1:], 17 - len(found), None)])
    with module_by_module(model):
        wanted = model.generate(ids, max_new_tokens=16, min_new_tokens=16, do_sample=False)[0, 506:]
        cache2 = tle_torch.Cache(model.config)
        run(model, ids, *found[1:16, None, None].unbind(0), cache=cache2)
    assert torch.equal(found[1:], wanted)
    assert all(tiny.same_bits(a.keys, b.keys) for a, b in zip(cache.layers, cache2.layers))


def test_bad_input_to_whole_tokens_leaves_the_cache():
    model = patched("llama")
    plan = model.model.tle_router.plan(model.model).token_plan(model)
    cache = tle_torch.Cache(model.config)
    run(model, tiny.tokens(1, 4), cache=cache)
    token, position = torch.tensor([1]), torch.tensor([[4]])
    steps = plan.stretch(1, position, cache, None, 1)
    keys, values, used = cache.prepare_step(3, 1, 2, 1, 16, torch.bfloat16)
    stretch = torch.classes.tle.TokenStretch
    for message, call in {
        "token 1000000 is not in": lambda: steps.logits(torch.tensor([10**6])),
        "token -1 is not in": lambda: steps.greedy(torch.tensor([-1]), 1, None),
        "tokens must be Long": lambda: steps.logits(torch.tensor([1.0])),
        "tokens must be .1.": lambda: steps.greedy(torch.tensor([1, 2]), 1, None),
        "count must be positive": lambda: steps.greedy(token, 0, None),
        "at least 100004 slots": lambda: steps.greedy(token, 100_000, None),
        "ends must be Long": lambda: steps.greedy(token, 1, torch.tensor([1.5])),
        "position_ids must be": lambda: plan.stretch(1, torch.tensor([4]), cache, None, 1),
        "starts must be in 0 .. 5": lambda: plan.stretch(1, position, cache, torch.tensor([6]), 1),
        "k_cache has 256 slots": lambda: stretch(plan._native, keys, values, 256, position, None),
        "one entry per layer": lambda: stretch(plan._native, keys, values[:2], used, position, None),
        "must have .B, heads, slots": lambda: stretch(plan._native, [], [], used, position, None),
    }.items():
        with torch.no_grad(), pytest.raises((RuntimeError, ValueError, TypeError, IndexError), match=message):
            call()
        assert cache.get_seq_length() == 4
    with torch.no_grad():
        got = steps.logits(token)
    assert tiny.same_bits(got, run(model, tiny.tokens(1, 4), token[None])[:, -1])


def test_growing_holds_one_layer_twice_and_not_the_cache(monkeypatch):
    """A layer's old slots are gone when the next layer grows, whoever looked at them for the steps before."""
    model = patched("llama")
    layers = model.config.num_hidden_layers
    seen: list[weakref.ref] = []
    alive_at_growth = []
    allocate = CacheLayer._allocate

    def counting_allocate(layer, *args):
        alive_at_growth.append(sum(slots() is not None for slots in seen))
        allocate(layer, *args)
        seen.append(weakref.ref(layer.key_slots))

    model.generate(tiny.tokens(1, 4), max_new_tokens=4, do_sample=False)  # what is proven once, with caches of its own
    monkeypatch.setattr(CacheLayer, "_allocate", counting_allocate)
    cache = tle_torch.Cache(model.config)  # knows nothing of the tokens to come
    model.generate(tiny.tokens(1, 250), past_key_values=cache, max_new_tokens=40, min_new_tokens=40, do_sample=False)
    assert len(alive_at_growth) == 2 * layers > 2, "the cache grew once"
    assert max(alive_at_growth[layers:]) == layers


def test_a_stretch_allocates_nothing_once_it_runs():
    from tle_torch.ops import _C

    model = patched("llama")
    plan = model.model.tle_router.plan(model.model).token_plan(model)
    cache = tle_torch.Cache(model.config)
    run(model, tiny.tokens(1, 4), cache=cache)
    with torch.no_grad():
        steps = plan.stretch(1, torch.tensor([[4]]), cache, None, 64)
        steps.logits(torch.tensor([1]))
        before = _C.scratch_allocations()
        for token in range(20):
            steps.logits(torch.tensor([token]))
        steps.greedy(torch.tensor([1]), 20, None)
    assert _C.scratch_allocations() == before


@pytest.mark.parametrize(
    "change",
    [
        lambda m: m.model.embed_tokens.register_forward_hook(lambda *args: None),
        lambda m: m.lm_head.register_forward_pre_hook(lambda *args: None),
        lambda m: m.model.rotary_emb.register_forward_hook(lambda *args: None),
        lambda m: setattr(m.model.embed_tokens, "max_norm", 1.0),
        lambda m: setattr(m.model.embed_tokens, "forward", m.model.embed_tokens.forward),
        lambda m: setattr(m.model.rotary_emb, "rope_type", "dynamic"),
        lambda m: m.model.embed_tokens.to(torch.float32),
    ],
    ids=["embedding hook", "head hook", "rotary hook", "max_norm", "forward", "dynamic", "dtype"],
)
def test_what_whole_tokens_do_not_do(change):
    model = patched("qwen3", tie_word_embeddings=False)
    router = model.model.tle_router
    assert router.plan(model.model).token_plan(model) is not None
    change(model)
    assert router.plan(model.model).token_plan(model) is None


def test_a_planned_step_refuses_gradients():
    model = patched("llama")
    cache = tle_torch.Cache(model.config)
    keys, values, used = cache.prepare_step(3, 1, 2, 1, 16, torch.bfloat16)
    hidden = model.model.embed_tokens(tiny.tokens(1, 1))
    tables = model.model.rotary_emb(hidden, torch.tensor([[0]]))
    model.model.norm.weight.requires_grad_(True)
    plan = decode.StepPlan(model.model, family_of(model.model), {})
    with pytest.raises(RuntimeError, match="requires a gradient"):
        decode._step(hidden, plan._native, keys, values, used, *tables, None)
    with torch.no_grad():
        decode._step(hidden, plan._native, keys, values, used, *tables, None)


def test_the_plan_is_kept_between_steps():
    model = patched("llama")
    plan = model.model.tle_router.plan(model.model)
    run(model, *tiny.tokens(1, 8).split(2, 1))
    assert model.model.tle_router.plan(model.model) is plan
