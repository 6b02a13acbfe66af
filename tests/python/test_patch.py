"""What a patched model is for the code around it: the same object, with the same state, in every way that counts."""

from __future__ import annotations

import copy
import io
import pickle
import subprocess
import sys
import textwrap

import peft
import pytest
import torch
import transformers as hf

import tiny
import tle_torch
from tle_torch import layers, threads
from tle_torch.attention import tle_attention


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


@pytest.fixture
def patched():
    """A tiny Llama under w8a8 whose originals were freed."""
    model = tiny.build("llama_biases", torch.bfloat16)
    tle_torch.patch_model(model)
    return model


IDS = tiny.tokens(2, 11)


# ---- class swap ----


def test_modules_stay_what_they_were(patched):
    linear = patched.model.layers[0].self_attn.q_proj
    assert isinstance(patched, hf.LlamaForCausalLM) and isinstance(linear, torch.nn.Linear)
    assert type(patched).__name__ == "LlamaForCausalLM" and type(linear).__name__ == "Linear"
    assert type(patched).__module__ == "tle_torch.layers"
    assert type(patched) is layers.patched_class(layers.PatchedPreTrainedModel, hf.LlamaForCausalLM)
    assert "tle=w8a8" in repr(linear)


def test_other_models_of_the_class_are_not_touched(patched):
    other = tiny.build("llama_biases")
    assert type(other) is hf.LlamaForCausalLM
    assert type(other.model.layers[0].mlp.up_proj) is torch.nn.Linear
    assert other.config._attn_implementation == "eager"


def test_type_of_a_patched_model_loads_and_builds_originals(patched, tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    loaded = type(patched).from_pretrained(tmp_path)
    assert type(loaded) is hf.LlamaForCausalLM
    assert type(type(patched.model.layers[0].mlp.up_proj)(4, 5)) is torch.nn.Linear


def test_one_config_object_two_models_one_patched():
    config = hf.LlamaConfig(**tiny.COMMON)
    a, b = tiny.from_config(config), tiny.from_config(config)
    assert a.config is b.config
    expected = logits(b, IDS)
    tle_torch.patch_model(a, "bf16")
    assert b.config is config and b.config._attn_implementation == "eager"
    assert a.config is not config and a.config._attn_implementation == "tle"
    assert a.model.layers[0].self_attn.config is a.config and a.model.config is a.config
    assert torch.equal(logits(b, IDS), expected)
    tle_torch.unpatch_model(a)
    assert a.config is config and a.model.layers[2].self_attn.config is config


# ---- copies ----


@pytest.mark.parametrize("scheme", ["w8a8", "bf16"])
def test_deepcopy_is_an_independent_patched_model(scheme):
    model = tiny.build("qwen3", torch.bfloat16)
    tle_torch.patch_model(model, scheme)
    expected = logits(model, IDS)
    twin = copy.deepcopy(model)
    assert tiny.same_bits(logits(twin, IDS), expected)
    assert twin.model.tle_router.refusal(twin.model) is None
    with torch.no_grad():
        twin.model.norm.weight.mul_(2)
    assert tiny.same_bits(logits(model, IDS), expected)
    assert twin.config is not model.config


@pytest.mark.slow
def test_pickle_in_a_fresh_process(patched, tmp_path):
    """The classes are importable, whatever protocol pickles them."""
    expected = logits(patched, IDS)
    for protocol in (2, pickle.HIGHEST_PROTOCOL):
        assert tiny.same_bits(logits(pickle.loads(pickle.dumps(patched, protocol)), IDS), expected)
    torch.save(patched, tmp_path / "model.pt")
    torch.save((IDS, expected), tmp_path / "expected.pt")
    program = """
        import sys, torch
        model = torch.load(sys.argv[1] + "/model.pt", weights_only=False)
        ids, expected = torch.load(sys.argv[1] + "/expected.pt")
        assert torch.get_num_threads() == 1
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)
        assert model.model.tle_router.refusal(model.model) is None
        print("equal")
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)], capture_output=True, text=True, timeout=600
    )
    assert run.stdout.strip() == "equal", run.stderr


# ---- state_dict ----


def test_state_dict_round_trip(patched, tmp_path):
    """Packed weights go through torch.save (weights_only, mmap) and back."""
    expected = logits(patched, IDS)
    state = patched.state_dict()
    name = "model.layers.0.self_attn.q_proj"
    assert state[f"{name}.packed"].dtype == torch.uint8 and f"{name}.weight" not in state
    torch.save(state, tmp_path / "state.pt")
    other = tiny.build("llama_biases", torch.bfloat16)
    tiny.randomize(other, seed=5)
    tle_torch.patch_model(other)
    assert not torch.equal(logits(other, IDS), expected)
    for mmap in (False, True):
        other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, mmap=mmap))
        assert tiny.same_bits(logits(other, IDS), expected)
    other.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True, mmap=True), assign=True)
    assert tiny.same_bits(logits(other, IDS), expected)


def test_loading_float_weights_packs_them(patched):
    """A stale pack is impossible: new weights after patching are what patching the new weights gives."""
    fresh = tiny.build("llama_biases", torch.bfloat16)
    tiny.randomize(fresh, seed=7)
    patched.load_state_dict(fresh.state_dict())
    tle_torch.patch_model(fresh)
    assert tiny.same_bits(logits(patched, IDS), logits(fresh, IDS))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda t: torch.cat([torch.tensor([0], dtype=torch.uint8), t[1:]]), "magic|packed"),
        (lambda t: t[:-1].clone(), "bytes|size"),
        (lambda t: t.to(torch.int32), "uint8"),
        (lambda t: t.view(1, -1), "1-D"),
    ],
)
def test_loading_a_damaged_pack_is_refused(patched, damage, message):
    state = patched.state_dict()
    name = "model.layers.0.self_attn.q_proj.packed"
    state[name] = damage(state[name])
    expected = logits(patched, IDS)
    with pytest.raises(RuntimeError, match=message):
        patched.load_state_dict(state)
    assert tiny.same_bits(logits(patched, IDS), expected)


def test_loading_a_pack_of_another_size_is_refused(patched):
    state = patched.state_dict()
    state["model.layers.0.self_attn.k_proj.packed"] = state["model.layers.0.self_attn.q_proj.packed"]
    with pytest.raises(RuntimeError, match="64 x 64.*32 x 64"):
        patched.load_state_dict(state)


@pytest.mark.parametrize("scheme", tle_torch.schemes())
def test_every_scheme_patches_copies_loads_and_unpatches(scheme):
    """Sizes that no group divides among them: K = 60 and 83."""
    model = tiny.build("llama_odd_sizes", torch.bfloat16)
    reference = copy.deepcopy(model)
    report = tle_torch.patch_model(model, scheme, keep_original=True, quantize_head=True)
    assert report.whole_step == {"model": None} and report.left_alone == []
    got, wanted = logits(model, IDS).float(), logits(reference, IDS).float()
    bound = {"w8": 0.05, "w4": 0.5, "bf": 0.02}[scheme[:2]]
    assert (got - wanted).abs().mean() < bound * wanted.abs().mean()
    model.model.tle_router.disabled = "by a test"
    assert tiny.same_bits(logits(model, IDS).float(), got)
    model.model.tle_router.disabled = None
    twin = copy.deepcopy(model)
    tiny.randomize(reference, seed=4)
    twin.load_state_dict(reference.state_dict())
    assert not torch.equal(logits(twin, IDS).float(), got)
    twin.load_state_dict(model.state_dict())
    assert tiny.same_bits(logits(twin, IDS).float(), got)
    tle_torch.unpatch_model(model)
    assert tiny.same_bits(logits(model, IDS).float(), wanted)


# ---- the weight attribute ----


def test_weight_is_a_lazy_read_only_view(patched):
    original = tiny.build("llama_biases", torch.bfloat16)
    linear, dense = patched.model.layers[0].mlp.up_proj, original.model.layers[0].mlp.up_proj
    weight = linear.weight
    assert (weight.dtype, weight.shape, weight.device.type) == (torch.bfloat16, dense.weight.shape, "cpu")
    assert not weight.requires_grad
    error = (weight.float() - dense.weight.float()).abs().max(dim=1).values
    # Half a step of the row's scale, and the rounding of the product to bf16.
    assert (error <= dense.weight.abs().amax(1).float() * (0.5 / 127 + 2**-8)).all()
    for write in (
        lambda: weight.data.add_(1),
        lambda: weight.mul_(2),
        lambda: weight.__setitem__(0, 1.0),
        lambda: setattr(weight, "data", torch.zeros_like(dense.weight)),
        lambda: weight.copy_(dense.weight),
    ):
        with pytest.raises(RuntimeError, match="read-only view"):
            write()
    assert torch.equal(weight.float(), linear.weight.float())
    assert torch.nn.functional.linear(torch.ones(1, 64).bfloat16(), weight).shape == (1, 96)
    assert weight.tolist() == weight.clone().tolist()
    assert copy.deepcopy(weight).shape == weight.shape


def test_assigning_a_weight_packs_it(patched):
    linear = patched.model.layers[0].mlp.up_proj
    linear.weight = torch.nn.Parameter(torch.eye(96, 64))
    assert torch.equal(linear.weight.float(), torch.eye(96, 64))
    with pytest.raises(ValueError, match=r"\[96, 64\].*\[64, 96\]"):
        linear.weight = torch.nn.Parameter(torch.zeros(64, 96))


def test_to_another_dtype(patched):
    patched.float()
    assert patched.model.layers[0].mlp.up_proj.weight.dtype == torch.float32
    assert logits(patched, IDS).dtype == torch.float32


# ---- heads and embeddings ----


@pytest.mark.parametrize("quantize_head", [False, True])
def test_tied_head(quantize_head, tmp_path):
    model = tiny.build("llama_tied", torch.bfloat16)
    embedding = model.model.embed_tokens.weight.detach().clone()
    report = tle_torch.patch_model(model, quantize_head=quantize_head)
    head = next(r for r in report.replaced if r.name == "lm_head")
    assert head.scheme == (report.scheme if quantize_head else "bfloat16, in place")
    assert tiny.same_bits(model.model.embed_tokens.weight, embedding)
    if not quantize_head:
        assert model.lm_head.weight is model.model.embed_tokens.weight
    with pytest.warns(UserWarning, match="de-quantised"):
        model.save_pretrained(tmp_path)
    reloaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert type(reloaded) is hf.LlamaForCausalLM and reloaded.config.architectures == ["LlamaForCausalLM"]
    assert reloaded.lm_head.weight is reloaded.model.embed_tokens.weight
    assert tiny.same_bits(reloaded.model.embed_tokens.weight, embedding)
    q = "model.layers.1.self_attn.q_proj"
    assert tiny.same_bits(reloaded.get_submodule(q).weight, model.get_submodule(q).dequantized())


@pytest.mark.parametrize("quantize_head", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama_tied"])
def test_resize_token_embeddings(name, quantize_head):
    model = tiny.build(name, torch.bfloat16)
    tle_torch.patch_model(model, quantize_head=quantize_head)
    before = logits(model, IDS)
    model.resize_token_embeddings(168)
    after = logits(model, IDS)
    assert after.shape[-1] == 168 and isinstance(model.lm_head, layers.DenseLinear)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "llama_tied")
    assert (after[..., :160].float() - before.float()).abs().max() <= 0.05 * before.float().abs().max()
    assert not any(p.requires_grad for p in model.parameters())


def test_save_pretrained_writes_kept_originals_without_a_warning(tmp_path, recwarn):
    model = tiny.build("qwen2", torch.bfloat16)
    state = {k: v.clone() for k, v in model.state_dict().items()}
    tle_torch.patch_model(model, keep_original=True)
    model.save_pretrained(tmp_path)
    assert not [w for w in recwarn if "de-quantised" in str(w.message)]
    reloaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert all(tiny.same_bits(reloaded.state_dict()[k], v) for k, v in state.items())
    assert "tle" not in (tmp_path / "config.json").read_text()


# ---- patching twice, unpatching ----


def test_patching_twice_changes_nothing_and_says_so(patched):
    expected = logits(patched, IDS)
    state = {k: v.clone() for k, v in patched.state_dict().items()}
    again = tle_torch.patch_model(patched, "w8a8")
    assert again.replaced == [] and "patched before" in str(again)
    other = tle_torch.patch_model(patched, "bf16")
    assert other.replaced == [] and "patched before" in str(other)
    assert all(torch.equal(v, state[k]) for k, v in patched.state_dict().items())
    assert tiny.same_bits(logits(patched, IDS), expected)
    assert threads.pinned_models() >= 1


@pytest.mark.parametrize("scheme", ["w8a8", "bf16"])
@pytest.mark.parametrize("name", ["llama_biases", "llama_tied"])
def test_unpatch_gives_the_exact_model_back(name, scheme):
    model = tiny.build(name, torch.bfloat16)
    model.lm_head.requires_grad_(False)
    reference = copy.deepcopy(model)
    keys, classes = list(model.state_dict()), [type(m) for m in model.modules()]
    attributes = {n: set(m.__dict__) for n, m in model.named_modules()}
    tle_torch.patch_model(model, scheme, keep_original=True, quantize_head=True)
    model.generate(IDS, max_new_tokens=3, do_sample=False)
    tle_torch.unpatch_model(model)
    assert list(model.state_dict()) == keys
    assert [type(m) for m in model.modules()] == classes
    assert {n: set(m.__dict__) for n, m in model.named_modules()} == attributes
    assert all(tiny.same_bits(a, b) for a, b in zip(model.state_dict().values(), reference.state_dict().values()))
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == (name == "llama_tied")
    assert [p.requires_grad for p in model.parameters()] == [p.requires_grad for p in reference.parameters()]
    assert model.config._attn_implementation == "eager"
    assert tiny.same_bits(logits(model, IDS), logits(reference, IDS))
    model(IDS).logits.sum().backward()
    assert model.model.layers[0].mlp.up_proj.weight.grad is not None
    tle_torch.patch_model(model, scheme)  # and again


def test_unpatch_without_originals_says_what_is_possible(patched):
    expected = logits(patched, IDS)
    with pytest.raises(RuntimeError, match="load the checkpoint again.*dequantize=True"):
        tle_torch.unpatch_model(patched)
    with pytest.raises(RuntimeError, match="keep_original=True"):
        with tle_torch.disabled(patched):
            pass
    assert tiny.same_bits(logits(patched, IDS), expected)
    packed = patched.model.layers[0].mlp.up_proj.dequantized()
    tle_torch.unpatch_model(patched, dequantize=True)
    assert type(patched) is hf.LlamaForCausalLM
    assert tiny.same_bits(patched.model.layers[0].mlp.up_proj.weight, packed)
    assert (logits(patched, IDS).float() - expected.float()).abs().max() < 0.1 * expected.float().abs().max()


def test_unpatch_keeps_a_config_that_was_changed():
    model = tiny.build("llama")
    tle_torch.patch_model(model, "bf16")
    model.config.pad_token_id = 7
    tle_torch.unpatch_model(model)
    assert model.config.pad_token_id == 7 and model.config._attn_implementation == "eager"


def test_disabled_is_the_original_and_comes_back():
    model = tiny.build("llama_biases", torch.bfloat16)
    reference = copy.deepcopy(model)
    tle_torch.patch_model(model, keep_original=True)
    expected = logits(model, IDS)
    with pytest.raises(KeyError):
        with tle_torch.disabled(model) as original:
            assert original is model and type(model) is hf.LlamaForCausalLM
            assert tiny.same_bits(logits(model, IDS), logits(reference, IDS))
            assert "packed" not in " ".join(model.state_dict())
            raise KeyError
    assert tiny.same_bits(logits(model, IDS), expected)
    assert model.model.tle_router.refusal(model.model) is None
    result = tle_torch.verify(model, {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)})
    assert result.positions == IDS.numel() and 0 < result.mean_kl < 0.05 and "mean KL" in str(result)


def test_what_disabled_allows_inside():
    model = tiny.build("llama", torch.bfloat16)
    reference = logits(model, IDS)
    tle_torch.patch_model(model, keep_original=True)
    expected, pinned = logits(model, IDS), threads.pinned_models()
    with tle_torch.disabled(model):
        with tle_torch.disabled(model):
            assert tiny.same_bits(logits(model, IDS), reference)
        assert tiny.same_bits(logits(model, IDS), reference)
        for refused in (tle_torch.patch_model, tle_torch.unpatch_model, lambda m: tle_torch.verify(m, IDS)):
            with pytest.raises(ValueError, match="inside `with disabled"):
                refused(model)
        twin = copy.deepcopy(model)
    assert tiny.same_bits(logits(model, IDS), expected) and threads.pinned_models() == pinned
    with pytest.raises(ValueError, match="is not patched$"):
        tle_torch.unpatch_model(twin)
    tle_torch.patch_model(twin)
    assert tiny.same_bits(logits(twin, IDS), expected)
    with pytest.raises(ValueError, match="a part of a model that is"):
        tle_torch.unpatch_model(model.model)


def test_attention_that_the_user_chose_later_stays():
    model = tiny.build("llama")
    tle_torch.patch_model(model, "bf16")
    model.set_attn_implementation("sdpa")
    with tle_torch.disabled(model):
        assert model.config._attn_implementation == "sdpa"
    assert model.config._attn_implementation == "sdpa"
    tle_torch.unpatch_model(model)
    assert model.config._attn_implementation == "sdpa"


def test_verify_of_an_unquantised_model_needs_no_kept_weights():
    model = tiny.build("llama")
    tle_torch.patch_model(model, "bf16")
    assert tle_torch.verify(model, IDS).max_abs_error < 1e-4
    with pytest.raises(TypeError, match="token ids"):
        tle_torch.verify(model, "Hello")


# ---- threads and gradients ----


def test_torch_threads_are_pinned_while_a_patched_model_exists():
    import gc

    gc.collect()
    assert threads.pinned_models() == 0
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        a, b = tiny.build("llama"), tiny.build("llama")
        tle_torch.patch_model(a, "bf16")
        tle_torch.patch_model(b, "bf16")
        assert torch.get_num_threads() == 1 and threads.pinned_models() == 2
        c = copy.deepcopy(a)
        assert threads.pinned_models() == 3
        tle_torch.unpatch_model(a)
        tle_torch.unpatch_model(c)
        assert torch.get_num_threads() == 1
        del b
        gc.collect()
        assert torch.get_num_threads() == 3 and threads.pinned_models() == 0
    finally:
        torch.set_num_threads(before)


def test_plain_call_needs_no_no_grad_and_wanted_gradients_are_refused(patched):
    assert not patched(IDS).logits.requires_grad
    embeddings = patched.get_input_embeddings()(IDS).requires_grad_(True)
    with pytest.raises(RuntimeError, match="(?i)gradient|derivative|autograd"):
        patched(inputs_embeds=embeddings)
    with torch.no_grad():
        assert tiny.same_bits(patched(inputs_embeds=embeddings).logits, patched(IDS).logits)
    with torch.inference_mode():
        assert tiny.same_bits(patched(IDS).logits.clone(), logits(patched, IDS))


# ---- hooks and outputs ----


@pytest.mark.parametrize("part", ["self_attn", "mlp", "input_layernorm", "mlp.down_proj", ""])
def test_hooks_fire_with_the_right_tensors_and_the_same_bits(patched, part):
    expected = logits(patched, IDS)
    layer = patched.model.layers[1]
    seen = []
    handle = (layer.get_submodule(part) if part else layer).register_forward_hook(
        lambda module, args, output: seen.append(output[0] if isinstance(output, tuple) else output)
    )
    got = logits(patched, IDS)
    assert len(seen) == 1 and seen[0].shape[:2] == IDS.shape
    assert tiny.same_bits(got, expected)
    changing = layer.get_submodule("mlp.up_proj").register_forward_hook(lambda m, a, output: output * 0)
    assert not torch.equal(logits(patched, IDS), expected)
    changing.remove()
    handle.remove()
    assert patched.model.tle_router.refusal(patched.model) is None
    assert tiny.same_bits(logits(patched, IDS), expected)


def test_an_activation_that_is_watched_or_replaced_is_called(patched):
    expected = logits(patched, IDS)
    mlp, seen = patched.model.layers[1].mlp, []
    handle = mlp.act_fn.register_forward_hook(lambda module, args, output: seen.append(output.shape))
    assert (logits(patched, IDS) - expected).abs().max() < 0.1 and seen == [(*IDS.shape, 96)]
    handle.remove()
    assert tiny.same_bits(logits(patched, IDS), expected)
    known, mlp.act_fn = mlp.act_fn, torch.nn.Threshold(torch.inf, 0.0)
    silent = logits(patched, IDS)
    mlp.act_fn = known
    handle = mlp.down_proj.register_forward_hook(lambda module, args, output: module.bias.expand_as(output))
    assert torch.equal(silent, logits(patched, IDS)) and not torch.equal(silent, expected)
    handle.remove()
    assert tiny.same_bits(logits(copy.deepcopy(patched), IDS), expected)


def test_pre_hooks_global_hooks_and_instance_forwards_stop_the_fusion(patched):
    expected = logits(patched, IDS)
    calls = []
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: calls.append(type(m).__name__))
    assert tiny.same_bits(logits(patched, IDS), expected)
    handle.remove()
    assert calls.count("LlamaMLP") == 3 and calls.count("Linear") == 3 * 7 + 1
    attention = patched.model.layers[0].self_attn
    forward = attention.forward
    attention.forward = lambda *args, **kwargs: calls.append("own") or forward(*args, **kwargs)
    assert tiny.same_bits(logits(patched, IDS), expected) and calls[-1] == "own"
    del attention.forward
    handle = patched.model.layers[0].register_forward_pre_hook(lambda m, args: calls.append("pre"))
    logits(patched, IDS)
    assert calls[-1] == "pre"
    handle.remove()


def test_hidden_states_and_attentions_are_real():
    model = tiny.build("llama_biases")
    patched = copy.deepcopy(model)
    tle_torch.patch_model(patched, "bf16")
    plain = logits(patched, IDS)
    with torch.no_grad():
        expected = model(IDS, output_hidden_states=True, output_attentions=True)
        got = patched(IDS, output_hidden_states=True, output_attentions=True)
    assert len(got.hidden_states) == 4 and len(got.attentions) == 3
    for ours, theirs in zip(got.hidden_states + got.attentions, expected.hidden_states + expected.attentions):
        assert torch.allclose(ours, theirs, atol=1e-4)
    # The capture hooks that transformers left behind are asleep: the step is one call again.
    assert patched.model.layers[0]._forward_hooks
    assert patched.model.tle_router.refusal(patched.model) is None
    assert tiny.same_bits(logits(patched, IDS), plain)
    # A user's hook beside them counts.
    seen = []
    handle = patched.model.layers[0].register_forward_hook(lambda *args: seen.append(1))
    logits(patched, IDS)
    handle.remove()
    assert seen == [1]


def test_padding_reaches_recorded_attentions():
    model = tiny.build("llama")
    patched = copy.deepcopy(model)
    tle_torch.patch_model(patched, "bf16")
    mask = torch.ones_like(IDS)
    mask[1, :4] = 0
    with torch.no_grad():
        expected = model(IDS, attention_mask=mask, output_attentions=True).attentions
        got = patched(IDS, attention_mask=mask, output_attentions=True).attentions
    for ours, theirs in zip(got, expected):
        assert torch.allclose(ours[0], theirs[0], atol=1e-5)
        assert torch.allclose(ours[1, :, 4:], theirs[1, :, 4:], atol=1e-5)
        assert not ours[1, :, :4].any()  # a padded query attends to nothing


# ---- adapters ----


def lora(**settings):
    return peft.LoraConfig(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "up_proj"], **settings)


def set_adapter_weights(model):
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_" in name:
                p.copy_(torch.randn(p.shape, generator=generator) * 0.2)


def test_lora_on_a_patched_model_and_patching_a_lora_model_agree():
    """Base + delta either way, adapters are not quantised, toggles work."""
    first = tiny.build("llama")
    reference = peft.get_peft_model(copy.deepcopy(first), lora()).eval()
    set_adapter_weights(reference)
    second = copy.deepcopy(reference)
    tle_torch.patch_model(first, "bf16")
    wrapped = peft.get_peft_model(first, lora()).eval()
    set_adapter_weights(wrapped)
    report = tle_torch.patch_model(second, "bf16")
    assert {e.reason for e in report.left_alone} == {"part of an adapter"}
    assert "lora.Linear" in str(report) or "Linear that is not patched" in report.whole_step["base_model.model.model"]
    assert any(p.requires_grad for n, p in second.named_parameters() if "lora_" in n)
    assert not any(p.requires_grad for n, p in second.named_parameters() if "lora_" not in n)
    expected = logits(reference, IDS)
    for model in (wrapped, second):
        assert torch.allclose(logits(model, IDS), expected, atol=1e-4)
        with model.disable_adapter(), reference.disable_adapter():
            base = logits(model, IDS)
            assert torch.allclose(base, logits(reference, IDS), atol=1e-4)
        assert not torch.allclose(base, expected, atol=1e-3)
    assert wrapped.generate(input_ids=IDS, max_new_tokens=4, do_sample=False).shape == (2, 15)
    for model in (wrapped, second):
        tle_torch.unpatch_model(model)
        assert torch.allclose(logits(model, IDS), expected, atol=1e-6)


def test_lora_on_a_quantised_model_and_merging_it():
    model = tiny.build("llama")
    tle_torch.patch_model(model)
    base = logits(model, IDS)
    wrapped = peft.get_peft_model(model, lora()).eval()
    assert tiny.same_bits(logits(wrapped, IDS), base)  # B = 0
    set_adapter_weights(wrapped)
    q = wrapped.base_model.model.model.layers[0].self_attn.q_proj
    x = torch.randn(2, 64)
    with torch.no_grad():
        delta = q.lora_B["default"](q.lora_A["default"](x)) * q.scaling["default"]
        assert torch.allclose(q(x), q.base_layer(x) + delta, atol=1e-6)
    assert isinstance(q.base_layer, layers.QuantizedLinear)
    with pytest.raises(RuntimeError, match="merging an adapter needs that too"):
        wrapped.merge_and_unload()
    wrapped.set_adapter("default")
    with wrapped.disable_adapter():
        assert tiny.same_bits(logits(wrapped, IDS), base)


def test_wanting_gradients_of_an_adapter_is_refused():
    model = tiny.build("llama")
    tle_torch.patch_model(model)
    wrapped = peft.get_peft_model(model, lora())
    with pytest.raises(RuntimeError, match="(?i)gradient|derivative|autograd"):
        wrapped(IDS)


# ---- what is not the model's ----


@pytest.mark.parametrize("exclude", ["", "*.q_proj", "*.k_proj", "*.v_proj", "*.gate_proj", "*.down_proj"])
def test_autocast_leaves_patched_modules_as_they_are(exclude):
    """Where a module that was left alone answers in bf16 among fp32 ones, both go on as fp32."""
    model = tiny.build("llama")
    tle_torch.patch_model(model, exclude=[exclude] * bool(exclude))
    expected = logits(model, IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = logits(model, IDS)
        out = model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert got.dtype == torch.float32 and out.shape[1] == IDS.shape[1] + 3
    if exclude:
        assert (got - expected).abs().max() < 0.05 * expected.abs().max()
    else:
        assert torch.equal(got, expected)


@pytest.mark.parametrize("scheme", ["bf16", "w8a8-a32"])
def test_autocast_around_attention_of_transformers(scheme):
    """Of a family that is not known: attention answers in bf16, and its projection is patched."""
    config = hf.GemmaConfig(**tiny.COMMON, head_dim=16)
    model = tiny.from_config(config)
    report = tle_torch.patch_model(model, scheme)
    assert not report.whole_step
    expected = logits(model, IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = logits(model, IDS)
    assert (got - expected).abs().max() < 0.05 * expected.abs().max()


def test_mixed_dtypes_without_autocast_are_an_error():
    attention = tiny.build("llama").model.layers[0].self_attn
    q, k = torch.zeros(1, 4, 1, 16), torch.zeros(1, 2, 1, 16)
    with pytest.raises(TypeError, match="v must be Float, got BFloat16"):
        tle_attention(attention, q, k, k.bfloat16(), None)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_the_default_dtype_does_not_matter(dtype):
    model, expected = tiny.build("llama", torch.bfloat16), tiny.build("llama", torch.bfloat16)
    before = [str(entry) for entry in tle_torch.patch_model(expected).replaced]
    torch.set_default_dtype(dtype)
    try:
        report = tle_torch.patch_model(model)
        assert [str(entry) for entry in report.replaced] == before and not report.left_alone
        assert report.whole_step == {"model": None} and tiny.same_bits(logits(model, IDS), logits(expected, IDS))
    finally:
        torch.set_default_dtype(torch.float32)


def test_patching_draws_no_random_numbers():
    model = tiny.build("qwen3")
    state = torch.get_rng_state()
    tle_torch.patch_model(model)
    model.generate(IDS, max_new_tokens=3, do_sample=False)
    assert torch.equal(torch.get_rng_state(), state)


def test_a_model_of_another_dtype_computes_as_before():
    model = tiny.build("llama").double()
    expected = logits(model, IDS)
    report = tle_torch.patch_model(model)
    assert any("float64" in entry.reason for entry in report.left_alone)
    assert torch.allclose(logits(model, IDS), expected, atol=1e-5)  # the rotary frequencies are exact ones now


def test_pruning_and_parametrising_a_dense_layer():
    from torch.nn.utils import parametrizations, prune

    for change in (
        lambda linear: prune.l1_unstructured(linear, "weight", 0.5),
        lambda linear: parametrizations.weight_norm(linear),
    ):
        models = []
        for patched in (True, False):
            model = tiny.build("llama")
            if patched:
                tle_torch.patch_model(model, "bf16")
            change(model.model.layers[1].mlp.up_proj)
            models.append(logits(model, IDS))
        assert (models[0] - models[1]).abs().max() < 1e-4


# ---- bad input ----


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda m: tle_torch.patch_model("model.gguf"), TypeError, "path.*from_gguf"),
        (lambda m: tle_torch.patch_model(3), TypeError, "torch.nn.Module, got int"),
        (lambda m: tle_torch.patch_model(m, "w3a3"), ValueError, "unknown scheme 'w3a3'.*w8a8"),
        (lambda m: tle_torch.patch_model(m, 8), TypeError, "scheme must be a string"),
        (lambda m: tle_torch.patch_model(m, progress="yes"), TypeError, "progress"),
        (lambda m: tle_torch.patch_model(m, exclude="lm_head"), TypeError, "sequence of patterns"),
        (lambda m: tle_torch.patch_model(torch.nn.Embedding(4, 4)), ValueError, "nothing to patch in this Embedding"),
        (lambda m: tle_torch.patch_model(torch.nn.Linear(4, 4, dtype=torch.float64)), ValueError, "float64"),
        (lambda m: tle_torch.unpatch_model(m), ValueError, "LlamaForCausalLM is not patched"),
        (lambda m: tle_torch.unpatch_model(None), TypeError, "torch.nn.Module"),
        (lambda m: tle_torch.verify(m, IDS), ValueError, "is not patched"),
        (lambda m: tle_torch.disabled(m).__enter__(), ValueError, "is not patched"),
        (lambda m: tle_torch.set_num_threads(0), ValueError, "at least 1"),
        (lambda m: tle_torch.set_num_threads(1.5), TypeError, "int"),
        (lambda m: tle_torch.from_gguf("/nowhere.gguf"), FileNotFoundError, "no file"),
        (lambda m: tle_torch.from_gguf(__file__), ValueError, "no GGUF file"),
        (lambda m: tle_torch.from_gguf(__file__, scheme="w3a3"), ValueError, "unknown scheme"),
    ],
)
def test_bad_input_is_one_clear_sentence_and_changes_nothing(call, error, message):
    model = tiny.build("llama")
    expected = logits(model, IDS)
    before, count = threads.pinned_models(), torch.get_num_threads()
    with pytest.raises(error, match=message) as caught:
        call(model)
    assert "\n" not in str(caught.value)
    assert type(model) is hf.LlamaForCausalLM and tiny.same_bits(logits(model, IDS), expected)
    assert (threads.pinned_models(), torch.get_num_threads()) == (before, count)


def test_weights_elsewhere_are_refused_before_anything_changes():
    model = tiny.build("llama")
    model.lm_head.to("meta")
    with pytest.raises(ValueError, match="lm_head.weight has no data .* meta"):
        tle_torch.patch_model(model)
    assert type(model.model.layers[0].mlp.up_proj) is torch.nn.Linear and model.config._attn_implementation == "eager"


# ---- report and progress ----


def test_report():
    model = tiny.build("llama", torch.bfloat16)
    size = sum(p.numel() * 2 for p in model.parameters())
    report = tle_torch.patch_model(model)
    text = str(report)
    assert "model.layers.*.mlp.gate_proj" in text and "w8a8" in text and "one call" in text
    assert max(map(len, text.splitlines())) <= 120
    values = report.to_dict()
    assert pickle.loads(pickle.dumps(values)) == values
    assert len(values["replaced"]) == len(report.replaced) == 3 * (7 + 2 + 1 + 1) + 3
    assert abs(report.bytes_before - size) < 4096 and report.bytes_after < report.bytes_before
    assert report.isa in tle_torch.cpu_info()["isas"] and report.threads == tle_torch.get_num_threads()
    assert repr(report).startswith("<Report: 36 modules replaced")


def test_progress_calls_and_bar(capsys):
    seen = []
    tle_torch.patch_model(tiny.build("llama"), progress=lambda done, total, name: seen.append((done, total, name)))
    assert [s[0] for s in seen] == list(range(len(seen))) and {s[1] for s in seen} == {len(seen)}
    tle_torch.patch_model(tiny.build("llama"), progress=True)
    assert "patching" in capsys.readouterr().err
    tle_torch.patch_model(tiny.build("llama"))
    assert capsys.readouterr().err == ""


# ---- other models and whole pipelines ----


def test_plain_torch_module():
    model = torch.nn.Sequential(torch.nn.Linear(32, 48), torch.nn.ReLU(), torch.nn.Linear(48, 8))
    expected = model(torch.ones(3, 32)).detach()
    report = tle_torch.patch_model(model, keep_original=True)
    assert len(report.replaced) == 2 and report.whole_step == {}
    got = model(torch.ones(3, 32))
    assert torch.allclose(got, expected, atol=0.02) and not got.requires_grad
    twin = pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(torch.ones(3, 32)), got)
    tle_torch.unpatch_model(model)
    assert torch.equal(model(torch.ones(3, 32)), expected)


def test_base_model_and_classifier():
    base = tiny.build("llama").model
    reference = copy.deepcopy(base)
    tle_torch.patch_model(base, "bf16")
    with torch.no_grad():
        assert torch.allclose(base(IDS).last_hidden_state, reference(IDS).last_hidden_state, atol=1e-4)
    classifier = hf.LlamaForSequenceClassification(hf.LlamaConfig(**tiny.COMMON, num_labels=3)).eval()
    tiny.randomize(classifier)
    reference = copy.deepcopy(classifier)
    report = tle_torch.patch_model(classifier)
    assert next(r for r in report.replaced if r.name == "score").scheme == "float32, in place"
    assert torch.allclose(logits(classifier, IDS), logits(reference, IDS), atol=0.1)


def test_pipeline(tmp_path):
    tokenizer, model = tiny.tokenizer(), tiny.build("llama")

    def answer():
        pipeline = hf.pipeline("text-generation", model=model, tokenizer=tokenizer)
        return pipeline("w5 w6 w7", max_new_tokens=6, do_sample=False)

    expected = answer()
    tle_torch.patch_model(model, "bf16")
    assert answer() == expected
    buffer = io.StringIO()

    class Streamer(hf.TextStreamer):
        def on_finalized_text(self, text, stream_end=False):
            buffer.write(text)

    inputs = tokenizer("w5 w6 w7", return_tensors="pt")
    model.generate(**inputs, max_new_tokens=6, do_sample=False, streamer=Streamer(tokenizer))
    assert "".join(buffer.getvalue().split()) == "".join(expected[0]["generated_text"].split())
