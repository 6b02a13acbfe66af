"""patch_model(calibration=...): the float model stays what it is, the quantised one gets better, on every machine the
same."""

from __future__ import annotations

import copy
import math

import golden_cases as golden
import gguf
import peft
import pytest
import torch
import transformers as hf
from checks import same_everywhere
from test_gguf_models import packed_linear

import tiny
import tle_torch
from tle_torch import equalize, weights
from tle_torch.layers import QuantizedLinear

IDS = tiny.tokens(16, 8, seed=5)
SEEN = tiny.tokens(4, 12, seed=6)
DIGEST = "094e7730025654eee8e02660e27de45ab873c0d19f63d5da82bdaef7aeee1b5d"


def logits(model, ids=SEEN):
    with torch.no_grad():
        return model(ids).logits.float()


def with_outliers(name: str, dtype: torch.dtype = torch.float32, **settings):
    """A tiny model with channels of very unequal size, as large models have them."""
    model = tiny.build(name, dtype, **settings)
    with torch.no_grad():
        for layer in model.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight[3] *= 40
                norm.weight[7::9] /= 30
    return model


def divergence(model, reference: torch.Tensor) -> float:
    p, q = reference.log_softmax(-1), logits(model).log_softmax(-1)
    return float((p.exp() * (p - q)).sum(-1).mean())


def assert_same_state(model, state: dict[str, torch.Tensor]) -> None:
    now = model.state_dict()
    assert now.keys() == state.keys()
    for name, value in state.items():
        assert tiny.same_bits(now[name], value), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", tiny.KNOWN)
def test_float_model_keeps_its_bits(name, dtype):
    model = with_outliers(name, dtype)
    state, types = copy.deepcopy(model.state_dict()), [type(m) for m in model.modules()]
    tle_torch.patch_model(model, "bf16")
    want = logits(model)
    tle_torch.unpatch_model(model)
    report = tle_torch.patch_model(model, calibration=IDS, keep_original=True)
    assert model.tle_patch.equalised
    assert report.calibration_tokens == IDS.numel() and "Equalised by 128 calibration tokens" in str(report)
    # The kept originals are the equalised floats, which compute the same.
    with tle_torch.disabled(model):
        twin = copy.deepcopy(model)
    assert any(not torch.equal(value, state[key]) for key, value in twin.state_dict().items())
    tle_torch.patch_model(twin, "bf16")
    assert tiny.same_bits(logits(twin), want)
    tle_torch.unpatch_model(model)
    assert_same_state(model, state)
    assert [type(m) for m in model.modules()] == types


@pytest.mark.parametrize("scheme", ["w8a8", "w8a8-a32", "w8a8-g32"])
@pytest.mark.parametrize("name", ["llama_biases", "llama_odd_sizes", "qwen2", "qwen3"])
def test_it_pays(name, scheme):
    model = with_outliers(name)
    reference = logits(model)
    plain, calibrated = copy.deepcopy(model), model
    tle_torch.patch_model(plain, scheme)
    report = tle_torch.patch_model(calibrated, scheme, calibration=IDS)
    assert report.whole_step == {"model": None}
    assert divergence(calibrated, reference) < 0.8 * divergence(plain, reference)


def test_scales_are_the_formula():
    """Against transformers' own forward and a logarithm."""
    model = with_outliers("llama")
    seen: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith("layernorm"):
            module.register_forward_hook(lambda _, x, y, name=name: seen.update({name: y.double()}))
    logits(model, IDS)
    original = {name: m.weight.detach().clone() for name, m in model.named_modules() if isinstance(m, torch.nn.Linear)}
    for module in model.modules():
        module._forward_hooks.clear()
    tle_torch.patch_model(model, calibration=IDS)
    names = {module: name for name, module in model.named_modules()}
    entries = {names[entry.norm]: entry for entry in model.tle_patch.equalised}
    assert len(entries) == 6
    for name, entry in entries.items():
        squares = seen[name].square().mean((0, 1))
        sizes = torch.cat([original[names[reader]] for reader in entry.linears]).double().abs().amax(0)
        wanted = (squares / squares.median()).log2() / 4 - (sizes / sizes.median()).log2() / 2
        sure = (wanted - wanted.floor() - 0.5).abs() > 1e-3
        assert torch.equal(entry.scales.double().log2()[sure], wanted.round()[sure])


def test_same_codes_everywhere():
    def packed():
        model = with_outliers("llama_biases", torch.bfloat16)
        tle_torch.patch_model(model, calibration=IDS)
        return tuple(tensor for _, tensor in sorted(model.state_dict().items()))

    same_everywhere(packed)


def test_same_codes_as_ever():
    """A digest of weights that depend on calibration, the same on every machine."""
    config = hf.LlamaConfig(**{**tiny.COMMON, "num_hidden_layers": 2})
    model = hf.LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for seed, (name, p) in enumerate(sorted(model.named_parameters())):
            norm = p.dim() == 1
            p.copy_(golden.values(*p.shape, seed=200 + seed, exponent=-2 if norm else -3, shift=float(norm)))
            if norm:
                p[::13] *= 32
    ids = golden.integers(16, 8, seed=250, low=0, high=tiny.COMMON["vocab_size"] - 1)
    report = tle_torch.patch_model(model, calibration=ids)
    assert len(model.tle_patch.equalised) == 4, report.notes
    assert golden.digest(tuple(tensor for _, tensor in sorted(model.state_dict().items()))) == DIGEST


def test_without_originals():
    """De-quantised and saved weights mean what the patched ones do."""
    model = with_outliers("qwen2")
    reference = logits(model)
    tle_torch.patch_model(model, calibration=IDS)
    cost = divergence(model, reference)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    again = tle_torch.patch_model(tiny.build("qwen2"))
    other = tiny.build("qwen2")
    tle_torch.patch_model(other)
    other.load_state_dict(state)
    assert tiny.same_bits(logits(other), logits(model)) and again.calibration_tokens == 0
    tle_torch.unpatch_model(model, dequantize=True)
    assert divergence(model, reference) < 2 * cost + 1e-6
    # In the checkpoint's coordinates again.
    original = with_outliers("qwen2").state_dict()
    for name, value in model.state_dict().items():
        assert (value - original[name]).norm() <= 0.05 * original[name].norm(), name


def test_saved_checkpoint(tmp_path):
    model = with_outliers("llama")
    reference = logits(model)
    tle_torch.patch_model(model, calibration=IDS, keep_original=True)
    model.save_pretrained(tmp_path)
    loaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager").eval()
    torch.testing.assert_close(logits(loaded), reference, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("ids, error, message", [
    ([[1, 2]], TypeError, r"takes a tensor of token ids \[B, T\], got list"),
    (torch.ones(2, 3), TypeError, "int64 or int32, got torch.float32"),
    (torch.ones(3, dtype=torch.int64), ValueError, r"B and T at least 1, got \[3\]"),
    (torch.ones(2, 0, dtype=torch.int64), ValueError, r"B and T at least 1, got \[2, 0\]"),
    (torch.tensor([[1, -1]]), ValueError, r"ids -1 \.\. 1, the embedding has 0 \.\. 159"),
    (torch.tensor([[1, 160]]), ValueError, r"ids 1 \.\. 160, the embedding has 0 \.\. 159"),
])
def test_bad_ids(ids, error, message):
    model = with_outliers("llama")
    state = copy.deepcopy(model.state_dict())
    with pytest.raises(error, match=message):
        tle_torch.patch_model(model, calibration=ids)
    assert_same_state(model, state)
    assert type(model) is hf.LlamaForCausalLM and "tle_patch" not in model.__dict__


def test_values_that_are_not_finite():
    model = with_outliers("llama").train()
    with torch.no_grad():
        model.model.embed_tokens.weight[IDS[0, 0]] = torch.inf
    state, threads = copy.deepcopy(model.state_dict()), torch.get_num_threads()
    with pytest.raises(ValueError, match="values that are not finite"):
        tle_torch.patch_model(model, calibration=IDS)
    assert_same_state(model, state)
    assert type(model) is hf.LlamaForCausalLM and "tle_patch" not in model.__dict__
    assert model.training and all(module.training for module in model.modules())
    assert not any(module._forward_pre_hooks for module in model.modules())
    assert torch.get_num_threads() == threads


def test_where_it_cannot_help():
    with pytest.raises(ValueError, match="the scheme 'bf16' quantises nothing"):
        tle_torch.patch_model(tiny.build("llama"), "bf16", calibration=IDS)
    with pytest.raises(ValueError, match="cannot help this Sequential"):
        tle_torch.patch_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), calibration=IDS)
    for exclude in ([], ["*.up_proj"]):
        model = tiny.build("llama")
        tle_torch.patch_model(model, exclude=exclude)
        with pytest.raises(ValueError, match="unpatch_model first"):
            tle_torch.patch_model(model, calibration=IDS)


def test_excluded_modules_stay():
    model = with_outliers("llama")
    before = {name: p.clone() for name, p in model.named_parameters()}
    tle_torch.patch_model(model, calibration=IDS, exclude=["*.k_proj", "*.layers.1.mlp.up_proj"])
    for i, layer in enumerate(model.model.layers):
        # k would read the wrong channels.
        assert torch.equal(layer.input_layernorm.weight, before[f"model.layers.{i}.input_layernorm.weight"])
        same = torch.equal(layer.post_attention_layernorm.weight,
                           before[f"model.layers.{i}.post_attention_layernorm.weight"])
        assert same == (i == 1)


def steer(model):
    """What a norm gives is shifted."""
    model.model.layers[0].input_layernorm.register_forward_hook(lambda module, inputs, output: output + 1.0)


def bypass(model):
    """Another Linear beside the query's, as adapters by hand are made."""
    other = torch.nn.Linear(64, 64)
    model.model.layers[0].self_attn.q_proj.register_forward_hook(lambda module, x, y: y + other(x[0]))


def see_inside(model):
    def prepare(module, args, kwargs):
        return args, {**kwargs, "hidden_states": kwargs["hidden_states"].clamp(-1, 1)}

    model.model.layers[0].self_attn.register_forward_pre_hook(prepare, with_kwargs=True)


def own_attention(model):
    attention = model.model.layers[0].self_attn
    theirs = attention.forward

    def forward(hidden_states, *args, **kwargs):
        result, weights = theirs(hidden_states, *args, **kwargs)
        return result + hidden_states, weights

    attention.forward = forward


def own_layer(model):
    layer = model.model.layers[0]
    theirs = layer.forward
    layer.forward = lambda hidden_states, *args, **kwargs: (
        theirs(hidden_states, *args, **kwargs) + layer.input_layernorm(hidden_states)
    )


@pytest.mark.parametrize("change, norms", [
    (steer, 5), (bypass, 5), (see_inside, 5), (own_attention, 5), (own_layer, 4),
])
def test_what_hooks_and_forwards_of_instances_see_stays(change, norms):
    model = with_outliers("llama")
    change(model)
    reference = logits(model)
    tle_torch.patch_model(model, calibration=IDS, keep_original=True)
    assert len(model.tle_patch.equalised) == norms
    with tle_torch.disabled(model):
        torch.testing.assert_close(logits(model), reference, rtol=1e-4, atol=1e-4)


def test_layers_that_the_config_leaves_out_stay():
    model = with_outliers("llama")
    model.config.num_hidden_layers = 2
    last = model.model.layers[2].input_layernorm.weight
    tle_torch.patch_model(model, calibration=IDS)
    assert len(model.tle_patch.equalised) == 4 and model.model.layers[2].input_layernorm.weight is last


class Skip(torch.nn.Module):
    """In the place of a layer."""

    def forward(self, hidden_states, **kwargs):
        return hidden_states


def test_layers_of_another_kind():
    model = with_outliers("llama")
    model.model.layers[1] = Skip()
    tle_torch.patch_model(model, calibration=IDS)
    assert len(model.tle_patch.equalised) == 4


def test_embedding_with_an_adapter():
    model = peft.get_peft_model(with_outliers("llama"), peft.LoraConfig(r=4, target_modules=["embed_tokens"]))
    assert tle_torch.patch_model(model, calibration=IDS).calibration_tokens == IDS.numel()
    tle_torch.unpatch_model(model, dequantize=True)
    with pytest.raises(ValueError, match=r"the embedding has 0 \.\. 159"):
        tle_torch.patch_model(model, calibration=IDS + 160)


def test_other_weights_are_blocks_of_a_file():
    """Which are packed whatever the scheme is."""
    def with_blocks():
        model = with_outliers("llama")
        for layer in model.model.layers:
            layer.mlp.down_proj = packed_linear(64, 96, gguf.GGMLQuantizationType.Q8_0)[0]
        return model

    report = tle_torch.patch_model(with_blocks(), calibration=IDS)
    assert report.calibration_tokens == IDS.numel()
    assert sum("Q8_0 blocks" in entry.scheme for entry in report.replaced) == 3
    model = with_blocks()
    state = copy.deepcopy(model.state_dict())
    tle_torch.patch_model(model, calibration=IDS, keep_original=True)
    tle_torch.unpatch_model(model)
    assert_same_state(model, state)


@pytest.mark.parametrize("default", [torch.float64, torch.bfloat16])
def test_default_dtype_of_the_user(default):
    model, twin = with_outliers("llama"), with_outliers("llama")
    tle_torch.patch_model(twin, calibration=IDS)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        tle_torch.patch_model(model, calibration=IDS)
    finally:
        torch.set_default_dtype(before)
    assert_same_state(model, twin.state_dict())


@pytest.mark.parametrize("call", [0, 3])
def test_interrupted(monkeypatch, call):
    model = with_outliers("llama")
    state = copy.deepcopy(model.state_dict())
    calls = iter(range(call + 1))
    equalise = equalize.equalise

    def interrupted(*arguments):
        if next(calls) == call:
            raise KeyboardInterrupt
        return equalise(*arguments)

    monkeypatch.setattr("tle_torch.patcher.equalise", interrupted)
    with pytest.raises(KeyboardInterrupt):
        tle_torch.patch_model(model, calibration=IDS)
    assert_same_state(model, state)
    assert type(model) is hf.LlamaForCausalLM and "tle_patch" not in model.__dict__


def test_unpatch_after_modules_were_replaced():
    """A layer that was taken out, and a Linear that reads the equalised channels as its predecessor did."""
    model = with_outliers("llama")
    state = copy.deepcopy(model.state_dict())
    tle_torch.patch_model(model, calibration=IDS, keep_original=True)
    del model.model.layers[2]
    model.config.num_hidden_layers = 2
    attention = model.model.layers[0].self_attn
    with tle_torch.disabled(model):
        attention.q_proj = copy.deepcopy(attention.q_proj)
        reference = logits(model)
    threads = torch.get_num_threads()
    tle_torch.unpatch_model(model)
    assert not hasattr(model, "tle_patch") and torch.get_num_threads() >= threads
    torch.testing.assert_close(logits(model), reference, rtol=1e-4, atol=1e-4)
    for name, value in model.state_dict().items():
        equalised = name.startswith(("model.layers.0.self_attn.q", "model.layers.0.self_attn.k",
                                     "model.layers.0.self_attn.v", "model.layers.0.input_layernorm"))
        assert torch.equal(value, state[name]) != equalised, name


def reading(dtype: torch.dtype = torch.float32) -> equalize.Reading:
    norm = torch.nn.RMSNorm(40, dtype=dtype)
    return equalize.Reading(torch.nn.Identity(), norm, [torch.nn.Linear(40, n, dtype=dtype) for n in (24, 9)])


UNEQUAL = torch.logspace(-4, 4, 40)


def test_error_falls():
    """Of a Linear whose inputs and weights are quantised, against its exact result."""
    entry = reading()
    x = torch.randn(500, 40)
    x[:, [3, 20]] *= 100
    weight = entry.linears[0].weight.detach().clone()
    exact = x.double() @ weight.double().T

    def error(weight: torch.Tensor, x: torch.Tensor) -> float:
        got = torch.ops.tle.linear(x, weights.quantize(weight, "w8a8-a32"), len(weight))
        return float((got - exact).square().mean())

    before = error(weight, x)
    done = equalize.equalise(entry, x.square().mean(0))
    assert done is not None and error(entry.linears[0].weight.detach(), x / done.scales) < 0.5 * before
    assert all(math.frexp(scale)[0] == 0.5 for scale in done.scales.tolist())
    assert torch.equal(entry.norm.weight, 1 / done.scales)


def test_dead_and_equal_channels_stay():
    entry = reading()
    weight = entry.linears[0].weight
    with torch.no_grad():
        for linear in entry.linears:
            linear.weight.copy_(torch.where(linear.weight < 0, -0.1, 0.1))
            linear.weight[:, 39] = 0
    squares = torch.zeros(40)
    assert equalize.equalise(entry, squares) is None
    assert equalize.equalise(entry, torch.ones(40)) is None
    assert entry.linears[0].weight is weight
    squares[:20] = UNEQUAL[::2]
    squares[39] = 3.0
    done = equalize.equalise(entry, squares)
    assert done is not None and (done.scales[20:] == 1).all() and done.scales[0] < 1 < done.scales[19]


@pytest.mark.parametrize("value", [3e38, 1.5e-38])
def test_no_product_leaves_the_dtype(value):
    """Weights whose product with a scale would be infinite or lose bits are left alone."""
    entry = reading()
    with torch.no_grad():
        entry.norm.weight[:1] = entry.norm.weight[39:] = value * 0.987654321
    before = [p.detach().clone() for module in (entry.norm, *entry.linears) for p in module.parameters()]
    assert equalize.equalise(entry, UNEQUAL) is None
    after = [p for module in (entry.norm, *entry.linears) for p in module.parameters()]
    assert all(map(torch.equal, after, before))


def test_a_copy_is_restored_by_itself():
    model = with_outliers("llama")
    state = copy.deepcopy(model.state_dict())
    tle_torch.patch_model(model, calibration=IDS, keep_original=True)
    twin = copy.deepcopy(model)
    tle_torch.unpatch_model(twin)
    assert_same_state(twin, state)
    assert any(isinstance(module, QuantizedLinear) for module in model.modules())
    tle_torch.unpatch_model(model)
    assert_same_state(model, state)
