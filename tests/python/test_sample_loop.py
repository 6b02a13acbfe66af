"""The lean sampling loop: when it runs, and that every option means the same as in transformers' own loop."""

from __future__ import annotations

import copy
import functools
import types

import pytest
import torch
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    LlamaForCausalLM,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteria,
    StoppingCriteriaList,
    set_seed,
)
from transformers.generation.streamers import BaseStreamer, TextStreamer

import tiny
import tle_torch
from tle_torch import generation


@pytest.fixture(scope="module")
def model():
    patched = tiny.build("qwen3")
    tle_torch.patch_model(patched)
    patched.generate(tiny.tokens(1, 3), max_new_tokens=2)
    return patched


@pytest.fixture
def runs(monkeypatch):
    """Counts the calls that the lean loop took."""
    seen = []
    original = generation.SampleLoop.run
    monkeypatch.setattr(generation.SampleLoop, "run", lambda self: seen.append(1) or original(self))
    return seen


def both(model, *args, monkeypatch, **kwargs):
    """generate() by the lean loop and by transformers' own, from the same random state to the same one. Arguments may
    be functions that make them, for objects that generate() changes."""

    def call():
        set_seed(7)
        made = {k: v() if callable(v) and not isinstance(v, type) else v for k, v in kwargs.items()}
        return model.generate(*args, **made)

    lean, state = call(), torch.get_rng_state()
    with monkeypatch.context() as patch:
        patch.setattr(generation.SampleLoop, "of", classmethod(lambda cls, *args: None))
        own = call()
    assert torch.equal(state, torch.get_rng_state())
    return lean, own


class Shift(LogitsProcessor):
    """Depends on the whole sequence and writes in place."""

    def __call__(self, input_ids, scores):
        scores[:, input_ids.sum(-1) % scores.shape[-1]] += 5
        return scores


class Repeats(StoppingCriteria):
    """Stops a row whose last two tokens have the same parity."""

    def __call__(self, input_ids, scores, **kwargs):
        return (input_ids[:, -1] + input_ids[:, -2]) % 2 == 0


PAIRS = {
    "greedy": {"max_new_tokens": 30},
    "greedy, several stretches": {"max_new_tokens": 100},
    "eos": {"max_new_tokens": 60, "eos_token_id": list(range(40, 60))},
    "min_new_tokens": {"max_new_tokens": 30, "min_new_tokens": 20, "eos_token_id": list(range(40, 90))},
    "min_length": {"max_length": 40, "min_length": 25, "eos_token_id": list(range(40, 90))},
    "sampling": {"max_new_tokens": 20, "do_sample": True, "top_k": 20, "top_p": 0.9, "temperature": 1.3},
    "Qwen3's defaults": {"max_new_tokens": 40, "do_sample": True, "top_k": 20, "top_p": 0.95, "temperature": 0.6},
    "all tokens": {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "top_p": 1.0},
    "top_p alone": {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "top_p": 0.8},
    "min_p": {"max_new_tokens": 40, "do_sample": True, "top_k": 0, "min_p": 0.1},
    "penalties": {"max_new_tokens": 20, "repetition_penalty": 1.4, "no_repeat_ngram_size": 2},
    "bad words": {"max_new_tokens": 20, "bad_words_ids": [[5], [7, 8]], "suppress_tokens": [9, 10]},
    "processor": {"max_new_tokens": 20, "logits_processor": lambda: LogitsProcessorList([Shift()])},
    "criterion": {"max_new_tokens": 20, "stopping_criteria": lambda: StoppingCriteriaList([Repeats()])},
    "max_time": {"max_new_tokens": 20, "max_time": 100.0},
    "chunked prefill": {"max_new_tokens": 20, "prefill_chunk_size": 3},
    "dict": {"max_new_tokens": 20, "return_dict_in_generate": True},
    "forced eos": {"max_new_tokens": 9, "forced_eos_token_id": 4},
    "several sequences": {"max_new_tokens": 20, "do_sample": True, "num_return_sequences": 3},
    "config": {"generation_config": lambda: GenerationConfig(max_new_tokens=12, pad_token_id=0)},
}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("name", PAIRS)
def test_same_result_as_transformers_own_loop(model, runs, monkeypatch, name, batch):
    ids = tiny.tokens(batch, 8)
    lean, own = both(model, ids, monkeypatch=monkeypatch, **PAIRS[name])
    assert runs == [1], "the lean loop did not run"
    if name == "dict":
        assert type(lean) is type(own) and lean.keys() == own.keys()
        assert lean.past_key_values.get_seq_length() == own.past_key_values.get_seq_length()
        lean, own = lean.sequences, own.sequences
    assert torch.equal(lean, own)
    assert lean.is_contiguous() and lean.untyped_storage().nbytes() == lean.nbytes


@pytest.mark.parametrize("name", ["Qwen3's defaults", "all tokens", "top_p alone", "min_p"])
def test_sampling_of_equal_scores(runs, monkeypatch, name):
    """A larger vocabulary in bf16, where scores at every edge are equal; the tokens come out of our operators."""
    model = tiny.build("qwen3", torch.bfloat16, vocab_size=3000)
    tle_torch.patch_model(model)
    options = {**PAIRS[name], "num_return_sequences": 4, "eos_token_id": None}
    lean, own = both(model, tiny.tokens(1, 8), monkeypatch=monkeypatch, **options)
    assert runs == [1] and torch.equal(lean, own)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        model.generate(tiny.tokens(1, 8), **options)
    called = {event.key for event in profile.key_averages()}
    assert {"tle::multinomial", "tle::planned_logits"} <= called
    assert ("tle::top_k_logits" in called) == (options.get("top_k") == 20)
    assert ("tle::top_p_logits" in called) == (options.get("top_p", 1.0) < 1)
    assert called.isdisjoint({"aten::multinomial", "aten::topk", "aten::sort"})


def test_the_reminder_of_the_models_longest_text_comes(runs, monkeypatch):
    model = tiny.build("llama", max_position_embeddings=40)
    tle_torch.patch_model(model)
    lean, own = both(model, tiny.tokens(1, 8), max_new_tokens=60, do_sample=False, monkeypatch=monkeypatch)
    assert runs == [1] and torch.equal(lean, own)


def test_left_padded_batch(model, runs, monkeypatch):
    ids, mask = tiny.tokens(3, 9), torch.ones(3, 9, dtype=torch.long)
    mask[0, :6], mask[2, :1] = 0, 0
    lean, own = both(model, ids, attention_mask=mask, max_new_tokens=15, do_sample=False, monkeypatch=monkeypatch)
    assert runs == [1] and torch.equal(lean, own)
    # A row of the batch is the row alone.
    alone = model.generate(ids[:1, 6:], max_new_tokens=15, do_sample=False)
    assert torch.equal(lean[:1, 9:], alone[:, 3:])


def test_embeddings_and_a_second_turn(model, runs, monkeypatch):
    embeds = model.get_input_embeddings()(tiny.tokens(1, 6))
    lean, own = both(model, inputs_embeds=embeds, max_new_tokens=10, do_sample=False, monkeypatch=monkeypatch)
    assert torch.equal(lean, own)

    def conversation():
        cache = tle_torch.Cache(model.config)
        first = model.generate(tiny.tokens(1, 6), past_key_values=cache, max_new_tokens=5, do_sample=False)
        longer = torch.cat([first, tiny.tokens(1, 3, seed=5)], 1)
        return model.generate(longer, past_key_values=cache, max_new_tokens=5, do_sample=False)

    lean = conversation()
    assert len(runs) == 3
    monkeypatch.setattr(generation.SampleLoop, "of", classmethod(lambda cls, *args: None))
    assert torch.equal(lean, conversation())


def test_streamer_sees_the_same_calls(model, runs, monkeypatch):
    class Record(BaseStreamer):
        def __init__(self):
            self.calls = []

        def put(self, value):
            self.calls.append(value.tolist())

        def end(self):
            self.calls.append("end")

    records = []

    def make():
        records.append(Record())
        return records[-1]

    both(model, tiny.tokens(1, 5), streamer=make, max_new_tokens=6, do_sample=False, monkeypatch=monkeypatch)
    assert runs == [1] and records[0].calls == records[1].calls and records[0].calls[-1] == "end"


def test_a_text_streamer_gets_its_text_token_by_token(model, runs, monkeypatch, capsys):
    class Letters:
        """Every token a letter and a space."""

        def decode(self, tokens, **kwargs):
            return "".join(chr(97 + int(token) % 26) + " " for token in tokens)

    arguments = {"streamer": lambda: TextStreamer(Letters()), "max_new_tokens": 12, "do_sample": False}
    texts = []
    for _ in range(2):
        both(model, tiny.tokens(1, 5), monkeypatch=monkeypatch, **arguments)
        texts.append(capsys.readouterr().out)
    # The lean loop's lines and transformers' own.
    lean, own = texts[0].splitlines()
    assert lean == own and len(lean.split()) == 17 and texts[0] == texts[1] and len(runs) == 2


@pytest.mark.parametrize(
    "options",
    [
        {"output_scores": True, "return_dict_in_generate": True},
        {"output_logits": True, "return_dict_in_generate": True},
        {"output_attentions": True, "return_dict_in_generate": True},
        {"output_hidden_states": True, "return_dict_in_generate": True},
        {"use_cache": False},
        {"cache_implementation": "static"},
        {"cache_implementation": "dynamic"},
        {"num_beams": 2},
        {"prompt_lookup_num_tokens": 2},
        {"attention_mask": torch.tensor([[1, 1, 0, 1, 1]])},
    ],
    ids=lambda o: next(iter(o)),
)
def test_what_it_does_not_understand_takes_transformers_own(model, runs, options):
    model.generate(tiny.tokens(1, 5), max_new_tokens=4, do_sample=False, **options)
    assert runs == []


def test_foreign_caches_and_overridden_methods_take_transformers_own(runs):
    model = tiny.build("llama")
    tle_torch.patch_model(model)
    ids = tiny.tokens(1, 5)
    model.generate(ids, max_new_tokens=3, past_key_values=DynamicCache(config=model.config))
    assert runs == []

    class Own(type(tiny.build("llama"))):
        def prepare_inputs_for_generation(self, *args, **kwargs):
            return super().prepare_inputs_for_generation(*args, **kwargs)

    other = tiny.build("llama")
    other.__class__ = Own
    tle_torch.patch_model(other)
    other.generate(ids, max_new_tokens=3)
    assert runs == []
    model.generate(ids, max_new_tokens=3)
    assert runs == [1]


@pytest.mark.parametrize("part", ["_sample", "__call__", "forward", "_update_model_kwargs_for_generation"])
def test_what_a_class_or_a_model_overrides_is_called(runs, part):
    calls = []
    original = getattr(LlamaForCausalLM, part)

    @functools.wraps(original)
    def own(self, *args, **kwargs):
        calls.append(1)
        return original(self, *args, **kwargs)

    own.__module__ = __name__
    ids, options = tiny.tokens(1, 5), {"max_new_tokens": 4, "do_sample": False}
    of_class, of_model = tiny.build("llama"), tiny.build("llama")
    of_class.__class__ = type("Own", (LlamaForCausalLM,), {part: own})
    setattr(of_model, part, types.MethodType(own, of_model))
    # These are looked up on the class alone.
    for model in [of_class, of_model][: 1 if part in ("_sample", "__call__") else 2]:
        calls.clear()
        model.generate(ids, **options)
        wanted = len(calls)
        tle_torch.patch_model(model, "bf16")
        model.generate(ids, **options)
        calls.clear()
        model.generate(ids, **options)
        assert len(calls) == wanted > 0 and runs == []


def test_ids_and_positions_of_32_bits(model, runs, monkeypatch):
    ids = tiny.tokens(1, 5)
    options = {"max_new_tokens": 4, "do_sample": False}
    got, wanted = both(model, ids.int(), monkeypatch=monkeypatch, **options)
    assert got.dtype == wanted.dtype and torch.equal(got, wanted)
    positions = torch.arange(5, dtype=torch.int32).unsqueeze(0)
    got, wanted = both(model, ids, position_ids=positions, monkeypatch=monkeypatch, **options)
    assert torch.equal(got, wanted) and runs == [1, 1]


@pytest.mark.parametrize("home", [__name__, "transformers.models.llama.modeling_llama"])
def test_logits_that_are_more_than_the_head_are_found_out(runs, home):
    class Capped(type(tiny.build("llama"))):
        def forward(self, *args, **kwargs):
            output = super().forward(*args, **kwargs)
            output.logits = 3 * torch.tanh(output.logits / 3)
            return output

    Capped.forward.__module__ = home  # a user's, or as if it were transformers' own
    model = tiny.build("llama")
    model.__class__ = Capped
    reference = copy.deepcopy(model)
    tle_torch.patch_model(model, "bf16")
    ids = tiny.tokens(1, 5)
    options = {"max_new_tokens": 6, "do_sample": True}
    set_seed(1)
    got = model.generate(ids, **options)
    set_seed(1)
    assert runs == [] and torch.equal(got, reference.generate(ids, **options))


def test_hooks_on_the_model_or_put_on_in_mid_air(model, runs, monkeypatch):
    calls = []
    handle = model.register_forward_hook(lambda *args: calls.append(1))
    expected = model.generate(tiny.tokens(1, 5), max_new_tokens=6, do_sample=False)
    assert runs == [] and len(calls) == 6
    handle.remove()
    calls.clear()

    class Hooking(BaseStreamer):
        """Puts a hook on after the third token."""

        handle = None
        seen = 0

        def put(self, value):
            self.seen += 1
            if self.seen == 4:
                self.handle = model.model.layers[1].register_forward_hook(lambda *args: calls.append(1))

        def end(self):
            self.handle.remove()

    got = model.generate(tiny.tokens(1, 5), max_new_tokens=6, do_sample=False, streamer=Hooking())
    assert runs == [1] and len(calls) == 3
    assert torch.equal(got, expected)


class Changing(BaseStreamer):
    """Changes the model between tokens, until it is the original one with other weights."""

    def __init__(self, model):
        generator = torch.Generator().manual_seed(1)
        head, gate = torch.nn.Linear(64, 160, bias=False).requires_grad_(False), torch.empty(96, 64)
        for weight in (head.weight, gate):
            weight.normal_(0, 0.2, generator=generator)
        norm = torch.nn.Parameter(torch.linspace(0.2, 3, 64), requires_grad=False)
        self.changes = {
            4: lambda: setattr(model.model.norm, "weight", norm),
            7: lambda: model.set_output_embeddings(head),
            10: lambda: setattr(model.model.layers[0].mlp.gate_proj, "weight", gate),
            13: lambda: tle_torch.unpatch_model(model),
        }
        self.seen = 0

    def put(self, value):
        self.seen += 1
        self.changes.get(self.seen, lambda: None)()

    def end(self):
        assert self.seen > max(self.changes)


def test_a_model_that_is_changed_in_mid_air(runs, monkeypatch):
    answers = []
    for lean in (True, False):
        model = tiny.build("llama")
        tle_torch.patch_model(model, keep_original=True)
        with monkeypatch.context() as patch:
            if not lean:
                patch.setattr(generation.SampleLoop, "of", classmethod(lambda cls, *args: None))
            # The penalty keeps it from saying one word for ever.
            options = {"max_new_tokens": 20, "do_sample": False, "repetition_penalty": 3.0, "eos_token_id": None}
            answers.append(model.generate(tiny.tokens(1, 5), streamer=Changing(model), **options))
    assert torch.equal(*answers) and runs == [1]


def test_a_hook_on_the_head_sees_every_token(model, runs):
    calls = []
    handle = model.lm_head.register_forward_hook(lambda m, a, output: calls.append(output.shape))
    model.generate(tiny.tokens(1, 5), max_new_tokens=6, do_sample=False)
    handle.remove()
    assert runs == [1] and len(calls) == 6


@pytest.mark.parametrize("part", ["lm_head", "model.embed_tokens"])
def test_hooks_see_the_first_call_of_generate_as_any_other(part):
    model = tiny.build("llama")
    tle_torch.patch_model(model, "bf16")
    calls = []
    model.get_submodule(part).register_forward_hook(lambda *args: calls.append(1))
    model.generate(tiny.tokens(1, 5), max_new_tokens=6, do_sample=False, eos_token_id=None)
    assert len(calls) == 6


def test_the_loop_is_found_on_the_class(model):
    assert type(model)._sample is not GenerationMixin._sample
    twin = copy.deepcopy(model)
    tle_torch.unpatch_model(twin, dequantize=True)
    assert type(twin)._sample is GenerationMixin._sample
