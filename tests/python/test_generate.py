"""generate() on a patched model: every decoding strategy and cache, against the unpatched model."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, StaticCache, TextIteratorStreamer, set_seed

import tiny
import tle_torch

FAMILIES = ["llama", "qwen2", "qwen3", "smollm3", "mistral_window", "qwen2_window"]


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request):
    """An fp32 model and its unquantised patched copy: the same tokens are expected of both."""
    model = tiny.build(request.param)
    patched = copy.deepcopy(model)
    tle_torch.patch_model(patched, "bf16")
    return model, patched


def generate(model, ids, **kwargs):
    set_seed(0)
    return model.generate(ids, **{"max_new_tokens": 12, "do_sample": False, **kwargs})


def padded(lengths=(3, 12), seed=2):
    """Left-padded ids and mask, of a seed whose beams are not so nearly tied that rounding would choose."""
    ids = torch.zeros(len(lengths), max(lengths), dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, -length:] = tiny.tokens(1, length, seed=seed + row)
        mask[row, -length:] = 1
    return ids, mask


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"num_beams": 4},
        {"num_beams": 3, "num_return_sequences": 2},
        {"do_sample": True, "top_k": 8},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"use_cache": False},
        {"prefill_chunk_size": 5},
        {"repetition_penalty": 1.3, "no_repeat_ngram_size": 2},
        {"min_new_tokens": 12},
    ],
    ids=lambda o: ",".join(f"{k}={v}" for k, v in o.items()) or "greedy",
)
def test_same_tokens_as_unpatched(pair, options):
    """The window models generate past their window of 8."""
    model, patched = pair
    ids = tiny.tokens(1, 11)
    assert torch.equal(generate(patched, ids, **options), generate(model, ids, **options))


@pytest.mark.parametrize("options", [{}, {"num_beams": 4}, {"cache_implementation": "static"}], ids=str)
def test_left_padded_batch(pair, options):
    model, patched = pair
    ids, mask = padded()
    assert torch.equal(
        generate(patched, ids, attention_mask=mask, **options), generate(model, ids, attention_mask=mask, **options)
    )


def test_assisted_decoding(pair):
    """Draft tokens are verified in small blocks and rolled back with crop."""
    model, patched = pair
    ids = tiny.tokens(1, 7)
    assistant = tiny.build("llama", num_hidden_layers=1)
    expected = generate(model, ids)
    assert torch.equal(generate(patched, ids, assistant_model=assistant), expected)
    quick = copy.deepcopy(assistant)
    tle_torch.patch_model(quick, "bf16")
    assert torch.equal(generate(patched, ids, assistant_model=quick), expected)
    # A perfect assistant: everything is accepted.
    assert torch.equal(generate(patched, ids, assistant_model=patched), expected)


def test_continuing_from_a_cache(pair):
    """A chat's second turn reuses the first one's cache."""
    model, patched = pair
    first, more = tiny.tokens(1, 9), tiny.tokens(1, 4, seed=8)
    sequences = []
    for m, cache in ((model, DynamicCache(config=model.config)), (patched, tle_torch.Cache(patched.config))):
        ids = generate(m, first, past_key_values=cache, max_new_tokens=5)
        sequences.append(generate(m, torch.cat([ids, more], 1), past_key_values=cache, max_new_tokens=5))
    assert torch.equal(*sequences)


def test_user_caches(pair):
    model, patched = pair
    ids = tiny.tokens(2, 9)
    for make in (
        lambda m: DynamicCache(config=m.config),
        lambda m: StaticCache(config=m.config, max_cache_len=64),
    ):
        assert torch.equal(
            generate(patched, ids, past_key_values=make(patched)), generate(model, ids, past_key_values=make(model))
        )


def test_scores_hidden_states_and_attentions(pair):
    model, patched = pair
    ids = tiny.tokens(1, 9)
    options = {
        "return_dict_in_generate": True,
        "output_scores": True,
        "output_hidden_states": True,
        "output_attentions": True,
        "max_new_tokens": 4,
    }
    ours, theirs = generate(patched, ids, **options), generate(model, ids, **options)
    for a, b in zip(ours.scores, theirs.scores):
        assert torch.allclose(a, b, atol=1e-3)
    for a, b in zip(ours.hidden_states, theirs.hidden_states):
        assert all(torch.allclose(x, y, atol=1e-3) for x, y in zip(a, b))
    # A sliding DynamicCache drops what the window hides, so the recorded matrices differ in width there.
    for a, b in zip(ours.attentions, theirs.attentions):
        for x, y in zip(a, b):
            assert torch.allclose(x[..., -y.shape[-1] :], y, atol=1e-4) and not x[..., : -y.shape[-1]].any()


def test_inputs_embeds_and_streaming(pair):
    model, patched = pair
    ids = tiny.tokens(1, 6)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
    assert torch.equal(generate(patched, None, inputs_embeds=embeds), generate(model, None, inputs_embeds=embeds))

    class Tokens:
        def decode(self, ids, **kwargs):
            return "".join(f"<{int(i)}>" for i in ids)

    streamer = TextIteratorStreamer(Tokens(), skip_prompt=True)
    expected = generate(model, ids)
    generate(patched, ids, streamer=streamer)
    assert "".join(streamer) == "".join(f"<{int(i)}>" for i in expected[0, 6:])


def test_a_window_of_one_token():
    """Each token sees itself alone, as without a cache. transformers' own cache keeps everything for this window: it
    slices `[-window + 1:]`, which is `[0:]`, so the unpatched model's cached tokens are no reference."""
    model = tiny.build("mistral_window", sliding_window=1)
    ids = tiny.tokens(1, 9)
    expected = generate(model, ids, use_cache=False)
    tle_torch.patch_model(model, "bf16")
    assert torch.equal(generate(model, ids), expected)
    assert torch.equal(generate(model, ids, use_cache=False), expected)
