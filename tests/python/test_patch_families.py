"""patch_model against the Hugging Face model itself: every family, and models that must partly be left alone."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers as hf

import tiny
import tle_torch
from tle_torch import layers


def logits(model, ids, **kwargs):
    with torch.no_grad():
        return model(ids, **kwargs).logits


@pytest.mark.parametrize("name", tiny.KNOWN)
def test_unquantised_logits_equal_eager(name):
    """Cases 50 and 28: biases, head sizes, q/k norms, NoPE layers and windows all reach the kernels."""
    model = tiny.build(name)
    patched = copy.deepcopy(model)
    report = tle_torch.patch_model(patched, "bf16")
    assert report.whole_step == {"model": None}, report.whole_step
    assert report.left_alone == []
    ids = tiny.tokens(2, 29)
    expected = logits(model, ids)
    assert (logits(patched, ids) - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3", "smollm3"])
def test_half_precision_logits_are_close_to_eager(name, dtype):
    model = tiny.build(name, dtype)
    exact = tiny.build(name)
    patched = copy.deepcopy(model)
    tle_torch.patch_model(patched, "bf16")
    ids = tiny.tokens(2, 17)
    expected = logits(exact, ids)
    theirs = (logits(model, ids).float() - expected).abs().mean()
    ours = (logits(patched, ids).float() - expected).abs().mean()
    assert ours <= 1.25 * theirs + 1e-3


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
@pytest.mark.parametrize("name", ["llama", "llama_dynamic"])
def test_positions_of_another_dtype(name, dtype):
    model = tiny.build(name)
    ids = tiny.tokens(1, 20)
    positions = torch.arange(1, 21).unsqueeze(0)
    with torch.no_grad():
        expected = model(ids, position_ids=positions.to(dtype)).logits
        tle_torch.patch_model(model, "bf16")
        got, usual = model(ids, position_ids=positions.to(dtype)).logits, model(ids, position_ids=positions).logits
    assert (got - expected).abs().max() < 1e-4
    assert dtype.is_floating_point or tiny.same_bits(got, usual)


@pytest.mark.parametrize("name", tiny.KNOWN)
def test_w8a8_equals_fake_quantised_eager(name):
    """The scheme costs what the scheme costs: eager with fake-quantised weights and activations gives the same."""
    model = tiny.build(name)
    patched = copy.deepcopy(model)
    report = tle_torch.patch_model(patched, "w8a8")
    assert report.whole_step == {"model": None}, report.whole_step

    def quantised(t):
        scale = t.abs().amax(-1, keepdim=True) / 127
        return torch.where(scale > 0, (t / scale).round().clamp(-127, 127) * scale, torch.zeros_like(t))

    for module in model.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.data = quantised(module.weight.data)
            module.register_forward_pre_hook(lambda m, args: (quantised(args[0]),))
    ids = tiny.tokens(2, 13)
    expected, got = logits(model, ids), logits(patched, ids)
    # An activation code that lies on a rounding edge may flip with the last bit of what is before it.
    assert (got - expected).abs().mean() < 0.01 * expected.abs().mean()


def test_window_layers_of_the_tiny_models_have_windows():
    """Guards the two tests above: a config that drops its window would make them pass without one."""
    for name, wanted in {"mistral_window": [8, 8, 8], "qwen2_window": [0, 8, 8]}.items():
        patched = tiny.build(name)
        tle_torch.patch_model(patched, "bf16")
        plan = patched.model.tle_router.plan(patched.model)
        assert plan.arguments[-1] == wanted
        # ... and it changes the result.
        ids = tiny.tokens(1, 20)
        windowless = tiny.build(name, sliding_window=None) if name.startswith("mistral") else tiny.build("qwen2")
        assert not torch.allclose(logits(patched, ids), logits(windowless, ids), atol=1e-3)


# ---- models that must partly be left alone ----


def gemma2():
    return tiny.from_config(
        hf.Gemma2Config(
            **{**tiny.COMMON, "head_dim": 16, "sliding_window": 8, "query_pre_attn_scalar": 16},
            attn_logit_softcapping=2.0,
            final_logit_softcapping=5.0,
        )
    )


def gpt_oss():
    return tiny.from_config(
        hf.GptOssConfig(
            **{**tiny.COMMON, "head_dim": 16, "sliding_window": 8},
            num_local_experts=4,
            num_experts_per_tok=2,
        )
    )


def glm():
    return tiny.from_config(hf.GlmConfig(**{**tiny.COMMON, "head_dim": 16, "partial_rotary_factor": 0.5}))


def phi():
    return tiny.from_config(hf.PhiConfig(**{**tiny.COMMON, "partial_rotary_factor": 0.5}))


def gemma():
    return tiny.from_config(hf.GemmaConfig(**{**tiny.COMMON, "head_dim": 16}))


def granite():
    return tiny.from_config(
        hf.GraniteConfig(
            **tiny.COMMON,
            residual_multiplier=0.3,
            embedding_multiplier=2.0,
            attention_multiplier=0.2,
            logits_scaling=3.0,
        )
    )


def olmo2():
    return tiny.from_config(hf.Olmo2Config(**tiny.COMMON))


UNKNOWN = {f.__name__: f for f in (gemma2, gpt_oss, glm, phi, gemma, granite, olmo2)}


@pytest.mark.parametrize("name", UNKNOWN)
def test_unknown_families_stay_right(name):
    """Cases 28 and 50: softcaps, sinks, partial rotary, GeLU, multipliers: left alone, said so, and equal to eager."""
    model = UNKNOWN[name]()
    patched = copy.deepcopy(model)
    report = tle_torch.patch_model(patched, "bf16")
    assert any(r.kind == "Linear" for r in report.replaced)
    assert report.whole_step == {}
    assert "no known family" in str(report)
    ids = tiny.tokens(2, 21)
    expected = logits(model, ids)
    assert (logits(patched, ids) - expected).abs().max() < 1e-4 * max(1.0, float(expected.abs().max()))


def test_gelu_mlp_is_left_alone_with_its_linears_patched():
    report = tle_torch.patch_model(gemma(), "bf16")
    mlps = [entry for entry in report.left_alone if entry.original == "GemmaMLP"]
    assert len(mlps) == 3 and all("silu" in entry.reason for entry in mlps)
    assert sum(r.name.endswith("gate_proj") for r in report.replaced) == 3


def test_llama_with_another_activation_is_not_fused():
    """The activation is a setting of the class: found by the probe, not by the name."""
    model = tiny.build("llama", hidden_act="gelu")
    patched = copy.deepcopy(model)
    report = tle_torch.patch_model(patched, "bf16")
    assert "MLP of layer 0 is not patched" in report.whole_step["model"]
    ids = tiny.tokens(1, 9)
    assert torch.allclose(logits(patched, ids), logits(model, ids), atol=1e-4)


def test_subclass_with_its_own_forward_is_not_taken_for_the_family():
    class Louder(hf.models.llama.modeling_llama.LlamaDecoderLayer):
        def forward(self, hidden_states, **kwargs):
            return super().forward(hidden_states, **kwargs) * 1.5

    model = tiny.build("llama")
    model.model.layers[1].__class__ = Louder
    patched = copy.deepcopy(model)
    report = tle_torch.patch_model(patched, "bf16")
    assert "layer 1 is a Louder" in report.whole_step["model"]
    ids = tiny.tokens(1, 9)
    assert torch.allclose(logits(patched, ids), logits(model, ids), atol=1e-4)


def test_a_language_model_inside_a_vision_language_model():
    """The decoder is found wherever it is; the vision tower keeps its own attention and config."""
    vision = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 16,
    }
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**tiny.COMMON).to_dict(),
        vision_config=hf.CLIPVisionConfig(**vision).to_dict(),
        image_token_index=5,
    )
    model = hf.LlavaForConditionalGeneration(config).eval()
    tiny.randomize(model)
    patched = copy.deepcopy(model)
    report = tle_torch.patch_model(patched, "bf16")
    assert report.whole_step == {"model.language_model": None}
    assert "LayerNorm" in {entry.original for entry in report.left_alone}
    assert patched.config.text_config._attn_implementation == "tle"
    assert patched.config.vision_config._attn_implementation == model.config.vision_config._attn_implementation
    inputs = {"input_ids": torch.tensor([[1, 5, 5, 5, 5, 7, 8, 9]]), "pixel_values": torch.randn(1, 3, 32, 32)}
    with torch.no_grad():
        assert torch.allclose(patched(**inputs).logits, model(**inputs).logits, atol=1e-4)
    options = {"max_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True}
    ours, theirs = patched.generate(**inputs, **options), model.generate(**inputs, **options)
    assert torch.equal(ours.sequences, theirs.sequences) and type(ours.past_key_values) is tle_torch.Cache


# ---- norms ----


@pytest.mark.parametrize(
    ("norm", "kind"),
    [
        (hf.models.llama.modeling_llama.LlamaRMSNorm, "llama"),
        (hf.models.gemma.modeling_gemma.GemmaRMSNorm, "gemma"),
        (hf.models.olmo2.modeling_olmo2.Olmo2RMSNorm, "fp32"),
    ],
)
def test_norm_kind_is_found_by_the_probe(norm, kind):
    """At most one bf16 ulp from the class and nearly everywhere equal."""
    module = norm(2048, eps=1e-6).bfloat16()
    with torch.no_grad():
        module.weight.copy_(torch.randn(2048, generator=torch.Generator().manual_seed(1)))
    model = torch.nn.Sequential(copy.deepcopy(module))
    tle_torch.patch_model(model)
    assert isinstance(model[0], layers.PatchedNorm) and model[0].tle_kind == kind
    x = torch.randn(64, 2048, generator=torch.Generator().manual_seed(2)).bfloat16()
    expected, got = module(x), model[0](x)
    differing = expected != got
    assert differing.float().mean() < 1e-4
    assert ((expected.float() - got.float()).abs() <= expected.float().abs() * 2**-7).all()
    untouched = x.clone()
    model[0](x)
    assert torch.equal(x, untouched)


def test_gemma_norm_with_zero_weight_is_the_plain_normalised_input():
    norm = hf.models.gemma.modeling_gemma.GemmaRMSNorm(64)
    model = torch.nn.Sequential(norm)
    tle_torch.patch_model(model)
    x = torch.randn(3, 64)
    assert torch.allclose(model(x), x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + norm.eps), atol=1e-6)


def test_a_norm_in_name_only_is_left_alone():
    class CleverRMSNorm(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.eps = torch.nn.Parameter(torch.ones(32)), 1e-6

        def forward(self, x):
            return x / (x.abs().mean(-1, keepdim=True) + self.eps) * self.weight

    model = torch.nn.Sequential(CleverRMSNorm(), torch.nn.Linear(32, 32))
    report = tle_torch.patch_model(model)
    assert [(e.original, "known RMSNorm" in e.reason) for e in report.left_alone] == [("CleverRMSNorm", True)]


def test_norm_of_another_dtype_than_its_input_keeps_torchs_promotion():
    model = torch.nn.Sequential(hf.models.llama.modeling_llama.LlamaRMSNorm(32))
    x = torch.randn(2, 32).bfloat16()
    expected = model(x)
    tle_torch.patch_model(model)
    got = model(x)
    assert got.dtype == torch.float32 and torch.equal(got, expected)


# ---- linears ----


@pytest.mark.parametrize("scheme", [name for name in tle_torch.schemes() if name != "bf16"])
def test_k_that_no_group_divides_is_packed_right(scheme):
    """K = 4304 and 40, which leave a short last group: with inputs in its columns alone nothing else hides it."""
    limit = 0.3 if scheme.startswith("w4") else 0.05
    for k in (4304, 40):
        model = torch.nn.Sequential(torch.nn.Linear(k, 64, bias=False))
        expected = copy.deepcopy(model)
        tle_torch.patch_model(model, scheme)
        for rows in (1, 8):
            x = torch.randn(rows, k)
            for columns in (k, 8):
                x[:, : k - columns] = 0
                assert (model(x) - expected(x)).abs().max() < limit * expected(x).abs().max()


def test_weights_that_are_not_finite_are_left_alone():
    model = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, 32))
    with torch.no_grad():
        model[1].weight[3, 5] = float("nan")
    report = tle_torch.patch_model(model)
    assert [(e.name, "not finite" in e.reason) for e in report.left_alone] == [("1", True)]
    assert type(model[1]) is torch.nn.Linear


def test_module_kinds_that_look_like_linear_are_left_alone():
    class Scaled(torch.nn.Linear):
        def forward(self, x):
            return super().forward(x) * 2

    model = torch.nn.ModuleDict(
        {
            "a": torch.nn.Linear(8, 8),
            "scaled": Scaled(8, 8),
            "wide": torch.nn.Linear(8, 8, dtype=torch.float64),
            "attention": torch.nn.MultiheadAttention(8, 2),
            "conv": torch.nn.Conv1d(8, 8, 1),
        }
    )
    report = tle_torch.patch_model(model)
    assert [r.name for r in report.replaced] == ["a"]
    reasons = {e.name: e.reason for e in report.left_alone}
    assert "Scaled" in reasons["scaled"] and "float64" in reasons["wide"]
    assert "NonDynamicallyQuantizableLinear" in reasons["attention.out_proj"]
    assert "no kernel" in reasons["conv"] and "no kernel" in reasons["attention"]


def test_exclude():
    patched = tiny.build("llama")
    report = tle_torch.patch_model(patched, exclude=["model.layers.1.mlp.*", "model.layers.1.mlp"])
    assert type(patched.model.layers[1].mlp.up_proj) is torch.nn.Linear
    assert {e.name for e in report.left_alone} >= {"model.layers.1.mlp.up_proj", "model.layers.1.mlp"}
    assert "layer 1" in report.whole_step["model"]
    assert logits(patched, tiny.tokens(1, 5)).isfinite().all()
