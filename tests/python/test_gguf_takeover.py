"""from_gguf without a scheme: the file's own codes, never de-quantised."""

import copy
import pickle

import gguf
import pytest
import torch
import transformers as hf
from test_gguf_models import IDS, load, logits, write_gguf
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

import tle_torch
from tle_torch.layers import PackedEmbedding, QuantizedLinear

SCHEMES = {"Q4_0": "w4a8-g32", "Q4_1": "w4a8-g32-asym", "Q5_0": "w8a8-g32", "Q8_0": "w8a8-g32", "Q4_K": "w4a8-g32-asym"}


@pytest.mark.parametrize("quantization", SCHEMES)
def test_every_weight_is_the_file_s(tmp_path, quantization):
    if quantization == "Q4_K":  # the gguf package has no quantiser for it
        path = write_k_quants(tmp_path / "model.gguf", quantization)
    else:
        path = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType[quantization])
    model, tokenizer = tle_torch.from_gguf(path, dtype=torch.float32)
    reference = load(path)  # Q5_0 only through the gguf package, not in transformers' own reader
    assert model.config.to_dict() | _NAMES == reference.config.to_dict() | _NAMES
    linears = 0
    for name, module in model.named_modules():
        if isinstance(module, (QuantizedLinear, PackedEmbedding)):
            wanted, got = reference.get_submodule(name).weight, module.float_weight()
            # With a minimum, transformers rounds twice where fma rounds once.
            assert (got - wanted).abs().max() <= 2.0**-22 * wanted.abs().max()
            assert module.tle_scheme == SCHEMES[quantization]
            linears += 1
        elif "weight" in module._parameters:
            assert torch.equal(module.weight, reference.get_submodule(name).weight)
    assert linears == 2 * 7 + 2
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    assert embedding.packed is head.packed  # tied: one table
    assert (logits(model) - logits(reference)).abs().max() < 0.05 * logits(reference).abs().max()
    report = model.tle_patch.report
    assert report.whole_step == {"model": None} and not report.left_alone
    assert any(f"{quantization} of the file" in r.scheme for r in report.replaced)
    out = model.generate(IDS, max_new_tokens=5, do_sample=False)
    assert out.shape[1] == IDS.shape[1] + 5


_NAMES = {
    "_name_or_path": None,
    "_model_name_or_path": None,
    "architectures": None,
    "quantization_config": None,
    "dtype": None,
}


def write_k_quants(path, kind):
    """A Llama whose blocks are random bytes with sensible scales: every code and every inner scale occurs."""
    import numpy as np

    type_ = gguf.GGMLQuantizationType[kind]

    def blocks(weight, _):
        rows, k = weight.shape
        raw = np.random.default_rng(0).integers(
            0, 256, (rows, k // 256, gguf.GGML_QUANT_SIZES[type_][1]), dtype=np.uint8
        )
        halves = {"Q4_K": slice(0, 4)}.get(kind, slice(-2, None))
        count = 2 if kind == "Q4_K" else 1
        scales = (np.random.default_rng(1).standard_normal((rows, k // 256, count)) * 1e-4).astype(np.float16)
        raw[..., halves] = scales.view(np.uint8).reshape(rows, k // 256, 2 * count)
        return raw.reshape(rows, -1)

    original = gguf.quants.quantize
    try:
        gguf.quants.quantize = blocks
        return write_gguf(path, type_, hidden=256, inner=512)
    finally:
        gguf.quants.quantize = original


def test_a_life_of_its_own(tmp_path):
    """deepcopy, pickle, state_dict, saving as floats, and back to ordinary modules."""
    path = write_gguf(tmp_path / "model.gguf")
    model, _ = tle_torch.from_gguf(path, dtype=torch.float32)
    expected = logits(model)
    assert torch.equal(logits(copy.deepcopy(model)), expected)
    assert torch.equal(logits(pickle.loads(pickle.dumps(model))), expected)
    other, _ = tle_torch.from_gguf(path, dtype=torch.float32)
    other.load_state_dict(model.state_dict())
    assert torch.equal(logits(other), expected)

    with pytest.warns(UserWarning, match="de-quantised"):
        model.save_pretrained(tmp_path / "saved")
    reloaded = hf.AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=torch.float32)
    assert torch.allclose(logits(reloaded), logits(load(path)), atol=1e-4)
    with pytest.raises(RuntimeError, match="read-only view"):
        model.resize_token_embeddings(200)
    with pytest.raises(RuntimeError, match="was freed"):
        tle_torch.unpatch_model(model)
    tle_torch.unpatch_model(model, dequantize=True)
    assert type(model.model.embed_tokens) is torch.nn.Embedding and type(model) is hf.LlamaForCausalLM
    assert torch.allclose(logits(model), logits(load(path)), atol=1e-4)


@pytest.mark.parametrize("kind", ["Q6_K", "Q3_K"])  # in the operator, and through the gguf package's de-quantisation
def test_other_types_are_requantised_and_named(tmp_path, kind):
    path = write_k_quants(tmp_path / "model.gguf", kind)
    model, _ = tle_torch.from_gguf(path, dtype=torch.float32)
    assert any("Re-quantised to w8a8-g32" in note and kind in note for note in model.tle_patch.report.notes)
    assert {m.tle_scheme for m in model.modules() if isinstance(m, QuantizedLinear)} == {"w8a8-g32"}
    # Activations are int8 too; random inner scales let that weigh more than with real weights.
    assert (logits(model) - logits(load(path))).abs().max() < 0.1 * logits(load(path)).abs().max()


def test_what_cannot_be_taken_over_goes_through_transformers(tmp_path):
    """A scheme's name asks for it; rotary frequencies of their own need it, and the report says so."""
    path = write_gguf(tmp_path / "model.gguf")
    reference = logits(load(path))
    model, _ = tle_torch.from_gguf(path, "w8a8", dtype=torch.float32)
    assert model.tle_patch.report.scheme == "w8a8" and not any(
        "not kept" in note for note in model.tle_patch.report.notes
    )
    assert (logits(model) - reference).abs().max() < 0.1 * reference.abs().max()

    path = write_gguf(tmp_path / "scaled.gguf", change=lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR))
    model, _ = tle_torch.from_gguf(path, dtype=torch.float32)
    assert model.tle_patch.report.scheme == "w8a8-a32" and any(
        "codes were not kept" in note for note in model.tle_patch.report.notes
    )


def test_float_files_stay_floats(tmp_path):
    path = write_gguf(tmp_path / "model.gguf", gguf.GGMLQuantizationType.F16)
    model, _ = tle_torch.from_gguf(path, dtype=torch.float32)
    assert torch.allclose(logits(model), logits(load(path)), atol=1e-4)
    assert not any(isinstance(m, QuantizedLinear) for m in model.modules())


def test_rotary_frequencies_of_llama_3(tmp_path):
    """A file has them as what the plain ones are divided by; transformers' conversion would leave them out."""
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64}
    config = hf.LlamaConfig(
        hidden_size=64,
        num_attention_heads=4,
        max_position_embeddings=256,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, **rope},
    )
    wanted = LlamaRotaryEmbedding(config).inv_freq
    divisors = (10000.0 ** -(torch.arange(0, 16, 2) / 16) / wanted).numpy()
    assert divisors.max() > 7.9
    path = write_gguf(tmp_path / "model.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", divisors))
    model, _ = tle_torch.from_gguf(path, dtype=torch.float32)
    assert torch.allclose(model.model.rotary_emb.inv_freq, wanted, rtol=1e-6)
    report = model.tle_patch.report
    assert report.whole_step == {"model": None} and report.scheme == "as the file has them"
    # The plain model with these frequencies, over more positions than the formula's original length.
    ids = torch.randint(3, 120, (1, 100))
    reference = load(write_gguf(tmp_path / "plain.gguf"))
    reference.model.rotary_emb.inv_freq = wanted
    expected = logits(reference, ids)
    assert (logits(model, ids) - expected).abs().max() < 0.05 * expected.abs().max()

    path = write_gguf(
        tmp_path / "wrong.gguf", change=lambda writer: writer.add_tensor("rope_freqs.weight", divisors[:4])
    )
    with pytest.raises(ValueError, match="rope_freqs.weight has the shape .4., and a head 8 pairs"):
        tle_torch.from_gguf(path)
